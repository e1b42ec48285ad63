"""The engines that the examples wrap a model in: DDP, and DeepSpeed ZeRO-2, on GPUs or on CPUs."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.01)


def wrap_ddp(model: nn.Module) -> DistributedDataParallel:
    """DDP, on this process's GPU if there is one."""
    device = next(model.parameters()).device
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def prepare_deepspeed() -> Any:
    """Imports DeepSpeed so that it starts quickly on CPUs: without compiling its shared-memory collectives."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    return deepspeed


def wrap_zero2(model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int, clip: float = 0.0) -> Any:
    """A DeepSpeed ZeRO-2 engine over the default process group."""
    deepspeed = prepare_deepspeed()
    dtype = next(model.parameters()).dtype
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 2, "overlap_comm": torch.cuda.is_available()},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


class DdpEngine:
    """DDP with an optimizer of its own; only the last micro-step of a step reduces gradients."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.module = wrap_ddp(model)
        self._optimizer = make_optimizer(model, lr)

    def forward_backward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        """The loss of one micro-step, its gradients added up."""
        with contextlib.nullcontext() if is_last else self.module.no_sync():
            loss: torch.Tensor = self.module(**batch).loss
            loss.backward()
        return loss

    def step(self) -> None:
        """One optimizer step."""
        self._optimizer.step()
        self._optimizer.zero_grad()


class Zero2Engine:
    """DeepSpeed ZeRO-2, which knows by itself (from orch) when a step ends."""

    def __init__(self, model: nn.Module, lr: float, accumulate: int) -> None:
        self.module = wrap_zero2(model, make_optimizer(model, lr), accumulate)

    def forward_backward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        """The loss of one micro-step, its gradients added up."""
        loss: torch.Tensor = self.module(**batch).loss
        self.module.backward(loss)
        if not is_last:
            self.module.step()  # counts the micro-step
        return loss

    def step(self) -> None:
        """One optimizer step."""
        self.module.step()


def wrap_engine(name: str, model: nn.Module, lr: float, accumulate: int) -> DdpEngine | Zero2Engine:
    """The engine called "ddp" or "zero2" around a model."""
    return DdpEngine(model, lr) if name == "ddp" else Zero2Engine(model, lr, accumulate)
