"""What a micro-step holds over all ranks, and the exact loss scale that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

from orch.comm.groups import get_world_size

TOTAL_BATCH_SIZE_KEY = "total_batch_size"
LOCAL_BATCH_SIZE_KEY = "local_batch_size"
TOTAL_TOKENS_KEY = "odb_total_tokens"
LOCAL_TOKENS_KEY = "odb_local_tokens"
ODB_STEP_INFO_KEY = "odb_step_info"
FLAT_KEYS = (TOTAL_BATCH_SIZE_KEY, LOCAL_BATCH_SIZE_KEY, TOTAL_TOKENS_KEY, LOCAL_TOKENS_KEY)

LossScaling = Literal["none", "approx", "exact"]
_ALIASES: dict[Any, LossScaling] = {
    None: "none", False: "none", True: "exact", "none": "none", "no": "none", "off": "none", "false": "none",
    "approx": "approx", "approximate": "approx", "token": "approx", "token_approx": "approx",
    "exact": "exact", "token_exact": "exact", "true": "exact",
}  # fmt: skip
_T = TypeVar("_T")


def resolve_loss_scaling(value: str | bool | None) -> LossScaling:
    """The mode that a word, or a boolean of older scripts, stands for.

    Raises:
        ValueError: If there is no such mode.
    """
    key = value.lower().replace("-", "_") if isinstance(value, str) else value
    if key not in _ALIASES:
        raise ValueError(f"`loss_scaling` must be 'none', 'approx' or 'exact', but is {value!r} instead.")
    return _ALIASES[key]


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """What a group, or the groups of all ranks together, hold.

    Attributes:
        num_samples: Samples; 0 for IDLE.
        num_label_tokens: Tokens that are trained on.
        num_tokens: The sum of the lengths.
    """

    num_samples: int = 0
    num_label_tokens: int = 0
    num_tokens: int = 0

    @classmethod
    def total(cls, counts: Iterable[GroupCounts]) -> GroupCounts:
        """The sum over groups."""
        rows = [(c.num_samples, c.num_label_tokens, c.num_tokens) for c in counts]
        return cls(*map(sum, zip(*rows, strict=True))) if rows else cls()


@dataclass(frozen=True, slots=True)
class ODBStepInfo:
    """What the training loop may want to know of one batch.

    Attributes:
        all_samples_this_step: Samples of this micro-step over all ranks.
        loss_scale: Factor of this rank's mean loss per label token. Where gradients are averaged over ranks (DDP,
            FSDP, DeepSpeed) and added over micro-steps, they are then those of the mean over all label tokens of the
            optimizer step. 0 for an idle batch; 1 without loss scaling.
        num_samples: Samples of this rank's batch that count; 0 for an idle one.
        num_label_tokens: Label tokens of this rank's batch.
        all_label_tokens: Label tokens of the whole optimizer step, over all ranks and micro-steps.
        micro_step: Number of this micro-step within its optimizer step.
        num_micro_steps: Micro-steps of this optimizer step; fewer in a short last one.
        num_ranks: Ranks that share the step.
    """

    all_samples_this_step: int
    loss_scale: float | torch.Tensor = 1.0
    num_samples: int = 0
    num_label_tokens: int = 0
    all_label_tokens: int = 0
    micro_step: int = 0
    num_micro_steps: int = 1
    num_ranks: int = 1

    @property
    def is_idle(self) -> bool:
        """Whether the batch only keeps the ranks together: it does not count, and `loss_scale` is 0."""
        return self.num_samples == 0

    @property
    def is_last_micro_step(self) -> bool:
        """Whether the optimizer steps after this batch."""
        return self.micro_step == self.num_micro_steps - 1

    def scaled_for(self, loss_scaling: LossScaling, num_ranks: int) -> ODBStepInfo:
        """The same with the loss scale of another mode or world size."""
        if loss_scaling == "none":
            return replace(self, loss_scale=0.0 if self.is_idle else 1.0)
        scale = self.num_label_tokens * num_ranks / max(1, self.all_label_tokens)
        return replace(self, loss_scale=scale, num_ranks=num_ranks)


def step_infos(
    local: Sequence[GroupCounts], total: Sequence[GroupCounts], *, loss_scaling: LossScaling, num_ranks: int
) -> list[ODBStepInfo]:
    """The infos of the micro-steps of one optimizer step.

    Args:
        local: This rank's group in each micro-step.
        total: The groups of all ranks in each.
        loss_scaling: "exact" and "approx" both weight by label tokens: the counts are at hand, so nothing is estimated.
        num_ranks: W.
    """
    all_label_tokens = sum(counts.num_label_tokens for counts in total)
    infos = [
        ODBStepInfo(
            all_samples_this_step=total[i].num_samples,
            num_samples=local[i].num_samples,
            num_label_tokens=local[i].num_label_tokens,
            all_label_tokens=all_label_tokens,
            micro_step=i,
            num_micro_steps=len(local),
            num_ranks=num_ranks,
        )
        for i in range(len(local))
    ]
    return [info.scaled_for(loss_scaling, num_ranks) for info in infos]


def in_steps(micro_steps: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Cuts a stream of micro-steps into optimizer steps of `size`; the last one may be short."""
    step: list[_T] = []
    for micro_step in micro_steps:
        step.append(micro_step)
        if len(step) == size:
            yield step
            step = []
    if step:
        yield step


def put_step_info(batch: Any, info: ODBStepInfo) -> None:
    """Adds the info to a batch, under its own key and under the flat keys of `online-dynamic-batching`.

    Raises:
        TypeError: If the batch is no mapping that takes keys.
    """
    if not isinstance(batch, MutableMapping):
        raise TypeError(
            "`collate_fn` must return a dict (or another mutable mapping), "
            f"but returned {type(batch).__name__} instead."
        )
    batch[ODB_STEP_INFO_KEY] = info
    batch[TOTAL_BATCH_SIZE_KEY] = info.all_samples_this_step
    batch[LOCAL_BATCH_SIZE_KEY] = info.num_samples
    batch[TOTAL_TOKENS_KEY] = info.all_label_tokens
    batch[LOCAL_TOKENS_KEY] = info.num_label_tokens


def pop_step_info(
    batch: MutableMapping[str, Any],
    *,
    loss_scaling: str | bool | None = "auto",
    world_size: int | None = None,
    accumulation_divisor: int = 1,
) -> ODBStepInfo:
    """Takes the step info out of a batch, so that the rest can be given to the model.

    Args:
        batch: A batch of an `ODBDataLoader`.
        loss_scaling: "auto" keeps the loader's mode.
        world_size: Ranks that gradients are averaged over, if others than the loader's.
        accumulation_divisor: What the engine divides each micro-step's loss by (DeepSpeed's `backward`: its
            accumulation steps); the scale makes up for it.

    Raises:
        KeyError: If the batch carries no info, because it comes from elsewhere or its keys were dropped on the way.
            A silent scale of 1 would train on wrong gradients.
    """
    info = batch.pop(ODB_STEP_INFO_KEY, None)
    flat = {key: batch.pop(key) for key in FLAT_KEYS if key in batch}
    if info is None:
        info = _info_of_flat_keys(flat, batch)
    if loss_scaling != "auto" or world_size is not None:
        mode = info_mode(info) if loss_scaling == "auto" else resolve_loss_scaling(loss_scaling)
        info = info.scaled_for(mode, info.num_ranks if world_size is None else world_size)
    return replace(info, loss_scale=info.loss_scale * accumulation_divisor)


def info_mode(info: ODBStepInfo) -> LossScaling:
    """The mode that an info was made with, as far as its scale tells."""
    exact = info.num_label_tokens * info.num_ranks / max(1, info.all_label_tokens)
    return "exact" if float(info.loss_scale) == exact else "none"


def _info_of_flat_keys(flat: dict[str, Any], batch: MutableMapping[str, Any]) -> ODBStepInfo:
    if len(flat) < len(FLAT_KEYS):
        raise KeyError(
            f"`batch` must carry {ODB_STEP_INFO_KEY!r} of an ODBDataLoader, "
            f"but has only {sorted(map(str, batch))} instead."
        )
    numbers = {key: int(torch.as_tensor(value).reshape(-1)[0]) for key, value in flat.items()}
    info = ODBStepInfo(
        all_samples_this_step=numbers[TOTAL_BATCH_SIZE_KEY],
        num_samples=numbers[LOCAL_BATCH_SIZE_KEY],
        num_label_tokens=numbers[LOCAL_TOKENS_KEY],
        all_label_tokens=numbers[TOTAL_TOKENS_KEY],
    )
    return info.scaled_for("exact", get_world_size())


def scale_loss(
    loss: torch.Tensor,
    batch_or_local_bs: MutableMapping[str, Any] | int = 0,
    total_batch_size: int = 0,
    world_size: int = 0,
) -> torch.Tensor:
    """A rank's mean loss, weighted so that averaging over ranks gives the mean over everything.

    Args:
        loss: Mean loss of this rank's batch.
        batch_or_local_bs: The batch (its info stays in it), or this rank's share as a number.
        total_batch_size: With a number: the sum of all ranks' shares.
        world_size: With a number: the ranks; 0 asks `torch.distributed`.

    Raises:
        KeyError: If the batch carries no info.
        ValueError: If a number is given without a positive total.
    """
    if isinstance(batch_or_local_bs, MutableMapping):
        return loss * pop_step_info(dict(batch_or_local_bs)).loss_scale
    if total_batch_size < 1:
        raise ValueError(f"`total_batch_size` must be at least 1, but is {total_batch_size} instead.")
    return loss * (batch_or_local_bs / total_batch_size * (world_size or get_world_size()))
