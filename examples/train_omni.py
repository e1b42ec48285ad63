"""Trains a small vision + audio + text model on several ranks, every stage balanced, under any engine.

    torchrun --nproc-per-node 4 examples/train_omni.py --ranks-per-node 2

Without `--data` it makes its own data: drawn shapes, tones, and text about them. Each family of engines has a script of
its own, which shows how the engine wraps the model; this one chooses between them.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import train_ddp
import train_deepspeed
import train_fsdp2
from engines import Engine
from torch import nn
from training import main

WRAPS = {name: script.wrap for script in (train_ddp, train_fsdp2, train_deepspeed) for name in script.ENGINES}
ENGINES = tuple(sorted(WRAPS))


def wrap(model: nn.Module, args: Namespace, **options: Any) -> Engine:
    """The engine that `--engine` names; it may have options of its own.

    Raises:
        ValueError: If `--engine-config`, a file of DeepSpeed's configuration, is given for another engine.
    """
    if args.engine_config is not None and args.engine not in train_deepspeed.ENGINES:
        raise ValueError(f"`--engine-config` must be left out for {args.engine}, but is {args.engine_config} instead.")
    return WRAPS[args.engine](model, args, **options)


if __name__ == "__main__":
    main(wrap, ENGINES, __doc__)
