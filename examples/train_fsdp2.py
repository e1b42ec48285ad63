"""Trains a small vision + audio + text model under FSDP2 (`fully_shard`), every stage balanced.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py --ranks-per-node 2

All but the wrap is in `training.py`, which every engine shares.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.distributed as dist
from engines import Engine, Fsdp2Engine, make_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import main
from transformers.modeling_layers import GradientCheckpointingLayer

ENGINES = ("fsdp2",)


def wrap(model: nn.Module, args: Namespace, units: Sequence[nn.Module] = ()) -> Engine:
    """FSDP2: the blocks of the encoders and of the LLM are gathered one by one, then all that is left.

    A model in bfloat16 is kept in float32 and computes in bfloat16.

    Args:
        model: The model; it is sharded in place.
        args: The options of the run.
        units: What is gathered on its own besides the blocks, such as whole encoders.
    """
    precision = MixedPrecisionPolicy()
    if next(model.parameters()).dtype == torch.bfloat16:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*blocks, *units, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    return Fsdp2Engine(model, make_optimizer(model, args.lr))


if __name__ == "__main__":
    main(wrap, ENGINES, __doc__)
