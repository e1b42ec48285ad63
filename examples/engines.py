"""The engines that the examples wrap a model in: DDP, FSDP2, and DeepSpeed ZeRO-1 to ZeRO-3, on GPUs or on CPUs.

All that differs between engines is here; a training loop calls `wrap_engine` and then knows no more which one it has.
"""

from __future__ import annotations

import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.01)


def wrap_ddp(model: nn.Module) -> DistributedDataParallel:
    """DDP, on this process's GPU if there is one."""
    device = next(model.parameters()).device
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def wrap_fsdp2(model: nn.Module, compute_dtype: torch.dtype | None = None, units: Sequence[nn.Module] = ()) -> Any:
    """FSDP2 over the default process group: the blocks of the encoders and of the LLM, then all that is left.

    Args:
        model: The model; it is sharded in place.
        compute_dtype: Of parameters in forward and backward, such as bfloat16; as they are if not given.
        units: What is gathered on its own besides the blocks, such as whole encoders.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*blocks, *units):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


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


def wrap_zero(
    model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int, clip: float = 0.0, **zero: Any
) -> Any:
    """A DeepSpeed ZeRO engine over the default process group.

    Args:
        model: The model.
        optimizer: Over what is trained.
        accumulate: K, micro-steps of an optimizer step.
        clip: The largest norm of a gradient; 0 for any.
        **zero: Options of "zero_optimization" in DeepSpeed's configuration, such as `stage`, which is 2 if not given.
    """
    deepspeed = prepare_deepspeed()
    dtype = next(model.parameters()).dtype
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 2, "overlap_comm": torch.cuda.is_available(), **zero},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


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

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.module = wrap_ddp(model)
        self._optimizer = make_optimizer(model, lr)

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
    """FSDP2 with an optimizer of its own; only the last micro-step of a step reduces gradients.

    A model in bfloat16 is kept in float32 and computes in bfloat16.
    """

    def __init__(self, model: nn.Module, lr: float, units: Sequence[nn.Module] = ()) -> None:
        compute_dtype = next(model.parameters()).dtype
        if compute_dtype == torch.bfloat16:
            for parameter in model.parameters():
                parameter.data = parameter.data.float()
        self.module = wrap_fsdp2(model, compute_dtype if compute_dtype == torch.bfloat16 else None, units)
        self._optimizer = make_optimizer(model, lr)

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

    def __init__(self, model: nn.Module, lr: float, accumulate: int, **zero: Any) -> None:
        self.module = wrap_zero(model, make_optimizer(model, lr), accumulate, **zero)

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


def read_zero_options(path: Path, stage: int) -> dict[str, Any]:
    """What `wrap_zero` takes from a file of DeepSpeed's configuration: "zero_optimization" and "gradient_clipping".

    Raises:
        ValueError: If the file is for another stage.
    """
    config = json.loads(path.read_text())
    zero = dict(config["zero_optimization"])
    if zero.setdefault("stage", stage) != stage:
        raise ValueError(f"`zero_optimization` of {path} must be of stage {stage}, but is of {zero['stage']} instead.")
    del zero["stage"]
    if not torch.cuda.is_available():
        zero["overlap_comm"] = False
    return {"clip": config.get("gradient_clipping", 0.0), **zero}


def wrap_engine(
    name: str, model: nn.Module, lr: float, accumulate: int, config: Path | None = None, **options: Any
) -> Engine:
    """The engine of that name, one of `ENGINES`, around a model; it may have options of its own.

    Raises:
        ValueError: If `config`, a file of DeepSpeed's configuration, is given for another engine or stage.
    """
    if config is not None and not name.startswith("zero"):
        raise ValueError(f"`config` must be None for the engine {name!r}, but is {config} instead.")
    if name == "ddp":
        return DdpEngine(model, lr)
    if name == "fsdp2":
        return Fsdp2Engine(model, lr, **options)
    stage = int(name.removeprefix("zero"))
    return ZeroEngine(
        model, lr, accumulate, stage=stage, **(read_zero_options(config, stage) if config else {}), **options
    )
