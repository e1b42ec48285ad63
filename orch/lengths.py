"""What is measured of a step: the lengths of all its samples and items, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from orch.comm.topology import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class ItemLengths:
    """The items of one stage over all ranks, in ascending owner sample.

    Attributes:
        sample: int64[M], the sample that owns each item; nondecreasing.
        length: int64[M], what enters the encoder, in its own unit (patches, frames).
        num_rows: int64[M], rows that leave the encoder for the LLM (tokens).
        num_bytes: int64[M], bytes of the raw item on the wire.

    Raises:
        ValueError: If the arrays are not of integers, differ in length, are negative, or `sample` decreases.
    """

    sample: IntArray
    length: IntArray
    num_rows: IntArray
    num_bytes: IntArray

    def __post_init__(self) -> None:
        _check_vectors(self, len(np.asarray(self.sample)))
        if np.any(np.diff(self.sample) < 0):
            raise ValueError("`sample` must not decrease, but does instead.")

    def __len__(self) -> int:
        return len(self.sample)


@dataclass(frozen=True, slots=True, eq=False)
class StepLengths:
    """The samples of one optimizer step over all ranks and micro-steps.

    Sample ids are positions in these arrays. They ascend by the rank that holds the sample, then by the micro-step it
    was drawn for, then by its place among those that the rank holds for it.

    Attributes:
        home: int64[N], the rank that read each sample and holds it; nondecreasing.
        micro_step: int64[N], the micro-step (0 to K-1) whose group it was drawn into.
        llm_length: int64[N], tokens in the LLM, placeholders of media included.
        num_bytes: int64[N], bytes on the wire of everything of the sample that is not a stage's item.
        num_label_tokens: int64[N], tokens that are trained on.
        num_micro_steps: K.
        stages: The items of each encoder stage by its name, in the order in which stages run.
        group_rank: int64[N], the rank whose group it was drawn into: where it would run unbalanced. By default `home`,
            as where each rank groups its own samples.

    Raises:
        ValueError: If the arrays are not of integers, differ in length, are negative or out of order.
    """

    home: IntArray
    micro_step: IntArray
    llm_length: IntArray
    num_bytes: IntArray
    num_label_tokens: IntArray
    num_micro_steps: int = 1
    stages: Mapping[str, ItemLengths] = field(default_factory=dict)
    group_rank: IntArray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.group_rank is None:
            object.__setattr__(self, "group_rank", self.home)
        _check_vectors(self, len(np.asarray(self.home)))
        if np.any(np.diff(self.home) < 0):
            raise ValueError("`home` must not decrease, but does instead.")
        if self.num_samples and int(self.micro_step.max()) >= self.num_micro_steps:
            raise ValueError(
                f"`micro_step` must be below {self.num_micro_steps}, but reaches {self.micro_step.max()} instead."
            )
        for name, items in self.stages.items():
            if len(items) and int(items.sample[-1]) >= self.num_samples:
                raise ValueError(
                    f"`sample` of stage {name!r} must be below {self.num_samples}, but is {items.sample[-1]} instead."
                )

    @property
    def num_samples(self) -> int:
        """N, over all ranks and micro-steps."""
        return len(self.home)

    @property
    def drawn_bin(self) -> IntArray:
        """The group that each sample was drawn into, numbered `rank * num_micro_steps + micro_step`: int64[N]."""
        return self.group_rank * self.num_micro_steps + self.micro_step


def _check_vectors(record: object, size: int) -> None:
    """Turns every array field into a non-negative int64 vector of `size`, or says which one is not."""
    for spec in fields(record):  # type: ignore[arg-type]
        if spec.type != "IntArray":
            continue
        given = np.asarray(getattr(record, spec.name))
        if given.size and given.dtype.kind not in "iu":
            raise ValueError(f"`{spec.name}` must be integers, but are {given.dtype} instead.")
        values = np.ascontiguousarray(given, dtype=np.int64)
        if values.shape != (size,):
            raise ValueError(f"`{spec.name}` must have shape ({size},), but has {values.shape} instead.")
        if size and values.min() < 0:
            where = int(np.argmin(values))
            raise ValueError(f"`{spec.name}` must not be negative, but is {values[where]} at {where} instead.")
        object.__setattr__(record, spec.name, values)


def pack_lengths(own: StepLengths) -> IntArray:
    """One rank's lengths as one int64 vector, as ranks send them to each other. `home` is not sent."""
    parts = [np.array([own.num_micro_steps, own.num_samples], dtype=np.int64)]
    parts += [own.micro_step, own.llm_length, own.num_bytes, own.num_label_tokens, own.group_rank]
    for items in own.stages.values():
        parts += [np.array([len(items)], dtype=np.int64), items.sample, items.length, items.num_rows, items.num_bytes]
    return np.concatenate(parts)


def merge_lengths(vectors: Sequence[IntArray], stage_names: Sequence[str]) -> StepLengths:
    """The lengths of all ranks, from the vector of each (rank order) and the names of the stages."""
    ranks = [_unpacked(vector, stage_names, rank) for rank, vector in enumerate(vectors)]
    first_sample = np.cumsum([0] + [own.num_samples for own in ranks])
    stages = {}
    for name in stage_names:
        items = [own.stages[name] for own in ranks]
        sample = [part.sample + first for part, first in zip(items, first_sample, strict=False)]
        stages[name] = ItemLengths(
            np.concatenate(sample), *(_joined(items, field) for field in ("length", "num_rows", "num_bytes"))
        )
    return StepLengths(
        home=_joined(ranks, "home"),
        micro_step=_joined(ranks, "micro_step"),
        llm_length=_joined(ranks, "llm_length"),
        num_bytes=_joined(ranks, "num_bytes"),
        num_label_tokens=_joined(ranks, "num_label_tokens"),
        num_micro_steps=max(own.num_micro_steps for own in ranks),
        stages=stages,
        group_rank=_joined(ranks, "group_rank"),
    )


def _unpacked(vector: IntArray, stage_names: Sequence[str], rank: int) -> StepLengths:
    num_micro_steps, num_samples = int(vector[0]), int(vector[1])
    columns, rest = vector[2 : 2 + 5 * num_samples].reshape(5, num_samples), vector[2 + 5 * num_samples :]
    stages = {}
    for name in stage_names:
        num_items = int(rest[0])
        stages[name] = ItemLengths(*rest[1 : 1 + 4 * num_items].reshape(4, num_items))
        rest = rest[1 + 4 * num_items :]
    assert not len(rest), len(rest)
    home = np.full(num_samples, rank, dtype=np.int64)
    micro_step, llm_length, num_bytes, num_label_tokens, group_rank = columns
    return StepLengths(home, micro_step, llm_length, num_bytes, num_label_tokens, num_micro_steps, stages, group_rank)


def _joined(records: Sequence[StepLengths] | Sequence[ItemLengths], field_name: str) -> IntArray:
    return np.concatenate([getattr(record, field_name) for record in records])
