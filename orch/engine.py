"""What orch reads from the engine that trains: the model inside, the world size, and how it divides gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


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


def read_engine(engine: nn.Module) -> EngineInfo:
    """Reads DDP, DeepSpeed, or a plain module (one process, FSDP2's `fully_shard`)."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if isinstance(engine, DistributedDataParallel):
        return EngineInfo(engine.module, engine.process_group, None, 1)
    if hasattr(engine, "gradient_accumulation_steps") and hasattr(engine, "set_gradient_accumulation_boundary"):
        deepspeed: Any = engine
        accumulate = int(deepspeed.gradient_accumulation_steps())
        return EngineInfo(deepspeed.module, world, accumulate, accumulate, deepspeed)
    return EngineInfo(engine, world, None, 1)
