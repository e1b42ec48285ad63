"""Trains a small vision + audio + text model under DistributedDataParallel, every stage balanced.

    torchrun --nproc-per-node 4 examples/train_ddp.py --ranks-per-node 2

All but the wrap is in `training.py`, which every engine shares.
"""

from __future__ import annotations

from argparse import Namespace

from engines import DdpEngine, Engine, make_optimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import main

ENGINES = ("ddp",)


def wrap(model: nn.Module, args: Namespace) -> Engine:
    """DDP, on this process's GPU if there is one."""
    device = next(model.parameters()).device
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    return DdpEngine(ddp, make_optimizer(model, args.lr))


if __name__ == "__main__":
    main(wrap, ENGINES, __doc__)
