"""What a training loop does with a model that an engine has wrapped: DDP, FSDP2, or DeepSpeed ZeRO-1 to ZeRO-3.

`train_ddp.py`, `train_fsdp2.py` and `train_deepspeed.py` show how each wraps; after that a loop knows no more which
engine it has.
"""

from __future__ import annotations

import json
import os
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.01)


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


def make_zero_config(model: nn.Module, accumulate: int, clip: float = 0.0, **zero: Any) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Args:
        model: The model; computes in bfloat16 if it is in bfloat16.
        accumulate: K, micro-steps of an optimizer step.
        clip: The largest norm of a gradient; 0 for any.
        **zero: Options of "zero_optimization", such as `stage`, which is 2 if not given.
    """
    dtype = next(model.parameters()).dtype
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 2, "overlap_comm": torch.cuda.is_available(), **zero},
        "zero_allow_untested_optimizer": True,
    }


def read_zero_options(path: Path, stage: int) -> dict[str, Any]:
    """What `make_zero_config` takes from a file of DeepSpeed's: "zero_optimization" and "gradient_clipping".

    What is "auto" in "zero_optimization", for Hugging Face's Trainer to choose, is left to DeepSpeed's defaults.

    Raises:
        ValueError: If the file is for another stage, has no "zero_optimization", or names no number to clip at.
    """
    config = json.loads(path.read_text())
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise ValueError(f"{path} must have a section `zero_optimization`, but has none.")
    zero = {name: value for name, value in config["zero_optimization"].items() if value != "auto"}
    if zero.setdefault("stage", stage) != stage:
        raise ValueError(f"`zero_optimization` of {path} must be of stage {stage}, but is of {zero['stage']} instead.")
    del zero["stage"]
    clip = config.get("gradient_clipping", 0.0)
    if not isinstance(clip, (int, float)):
        raise ValueError(f"`gradient_clipping` of {path} must be a number (0: none), but is {clip!r} instead.")
    if not torch.cuda.is_available():
        zero["overlap_comm"] = False
    return {"clip": clip, **zero}


class Engine(ABC):
    """What a training loop asks of an engine.

    Attributes:
        module: The wrapped model: what `orch.orchestrate` is given.
    """

    module: Any

    @abstractmethod
    def forward_backward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        """The loss of one micro-step, its gradients added up; `is_last` if the optimizer steps afterwards."""

    @abstractmethod
    def step(self) -> None:
        """One optimizer step."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Saves model and optimizer; every rank calls it."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Loads what `save` saved; every rank calls it."""


class DdpEngine(Engine):
    """DDP with an optimizer of its own; only the last micro-step of a step reduces gradients."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self.module = ddp
        self._optimizer = optimizer

    def forward_backward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        """The loss of one micro-step, its gradients added up; `is_last` if the optimizer steps afterwards."""
        self.module.require_backward_grad_sync = is_last
        loss: torch.Tensor = self.module(**batch).loss
        loss.backward()
        return loss

    def step(self) -> None:
        """One optimizer step."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        """Saves model and optimizer; every rank calls it."""
        if dist.get_rank() == 0:
            state = {"model": self.module.module.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save(state, folder / "model.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Loads what `save` saved; every rank calls it."""
        state = torch.load(folder / "model.pt", map_location=next(self.module.parameters()).device)
        self.module.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])


class Fsdp2Engine(Engine):
    """FSDP2 with an optimizer of its own; only the last micro-step of a step reduces gradients."""

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self._optimizer = optimizer

    def forward_backward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        """The loss of one micro-step, its gradients added up; `is_last` if the optimizer steps afterwards."""
        self.module.set_requires_gradient_sync(is_last)
        loss: torch.Tensor = self.module(**batch).loss
        loss.backward()
        return loss

    def step(self) -> None:
        """One optimizer step."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        """Saves model and optimizer; every rank calls it."""
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.module, self._optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Loads what `save` saved; every rank calls it."""
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(self.module, self._optimizer)
        checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.module, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)


class ZeroEngine(Engine):
    """DeepSpeed ZeRO, which knows by itself (from orch) when a step ends."""

    def __init__(self, engine: Any) -> None:
        self.module = engine

    def forward_backward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        """The loss of one micro-step, its gradients added up; `is_last` if the optimizer steps afterwards."""
        loss: torch.Tensor = self.module(**batch).loss
        self.module.backward(loss)
        if not is_last:
            self.module.step()  # counts the micro-step
        return loss

    def step(self) -> None:
        """One optimizer step."""
        self.module.step()

    def save(self, folder: Path) -> None:
        """Saves model and optimizer; every rank calls it."""
        self.module.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        """Loads what `save` saved; every rank calls it."""
        path, _ = self.module.load_checkpoint(str(folder))
        if path is None:
            raise ValueError(f"`{folder}` must hold a checkpoint of DeepSpeed, but holds none.")
