"""Trains a small vision + audio + text model under DeepSpeed ZeRO, every stage balanced.

    torchrun --nproc-per-node 4 examples/train_deepspeed.py --ranks-per-node 2

All but the wrap is in `training.py`, which every engine shares. `--engine` chooses the stage of ZeRO.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from engines import Engine, ZeroEngine, make_optimizer, make_zero_config, prepare_deepspeed, read_zero_options
from torch import nn
from training import main

ENGINES = ("zero2", "zero1", "zero3")


def wrap(model: nn.Module, args: Namespace, **zero: Any) -> Engine:
    """DeepSpeed ZeRO over the default process group.

    Args:
        model: The model.
        args: The options of the run.
        **zero: Further options of "zero_optimization" in DeepSpeed's configuration.
    """
    deepspeed = prepare_deepspeed()
    stage = int(args.engine.removeprefix("zero"))
    if args.engine_config is not None:
        zero |= read_zero_options(args.engine_config, stage)
    config = make_zero_config(model, args.accumulate, stage=stage, **zero)
    optimizer = make_optimizer(model, args.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return ZeroEngine(engine)


if __name__ == "__main__":
    main(wrap, ENGINES, __doc__)
