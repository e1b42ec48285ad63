"""What orch reads from the engine that trains: the model inside, the world size, and how it divides gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from orch.comm.groups import get_global_ranks, group_of_axis


@dataclass(frozen=True, slots=True, eq=False)
class EngineInfo:
    """An engine as orch sees it.

    Attributes:
        model: The module whose forward is called, without the engine's wrapper.
        group: The data-parallel process group; None for one process.
        accumulate: K, micro-steps of an optimizer step, as the engine is configured; None if the engine does not know.
        accumulation_divisor: By what the engine's `backward` divides for accumulation.
        deepspeed: The DeepSpeed engine, whose step boundary orch sets so that a short last step closes; else None.
    """

    model: nn.Module
    group: dist.ProcessGroup | None
    accumulate: int | None
    accumulation_divisor: int
    deepspeed: Any = None


def read_engine(engine: nn.Module, group: dist.ProcessGroup | DeviceMesh | None = None) -> EngineInfo:
    """Reads DDP, DeepSpeed, or a plain module (one process, FSDP2's `fully_shard`).

    Args:
        engine: What trains.
        group: The data-parallel group or axis; None for DDP's own, or else the world.

    Raises:
        ValueError: If `group` is a mesh of several axes, or holds other ranks than DDP's group.
    """
    chosen = group_of_axis(group)
    if isinstance(engine, DistributedDataParallel):
        own = engine.process_group
        if chosen is not None and get_global_ranks(chosen) != get_global_ranks(own):
            raise ValueError(
                f"`group` must hold the ranks of the engine's group, {get_global_ranks(own)}, "
                f"but holds {get_global_ranks(chosen)} instead."
            )
        return EngineInfo(engine.module, own, None, 1)
    if chosen is None and dist.is_available() and dist.is_initialized():
        chosen = dist.group.WORLD
    if hasattr(engine, "gradient_accumulation_steps") and hasattr(engine, "set_gradient_accumulation_boundary"):
        deepspeed: Any = engine
        accumulate = int(deepspeed.gradient_accumulation_steps())
        return EngineInfo(deepspeed.module, chosen, accumulate, accumulate, deepspeed)
    return EngineInfo(engine, chosen, None, 1)
