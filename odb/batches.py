"""From groups to what the training loop gets: collated batches with their step info, or the samples alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from orch.comm.topology import IntArray
from orch.odb.errors import SampleFailure
from orch.odb.feed import Entry, SampleError
from orch.odb.packing import pack_samples
from orch.odb.peers import Peers
from orch.odb.rounds import MicroStep
from orch.odb.state import RoundRecord
from orch.odb.step_info import LossScaling, in_steps, put_step_info, step_infos


class Group(list[Any]):
    """The samples that a rank has at hand for one micro-step, some of them for other ranks' groups.

    Attributes:
        ranks: The rank whose group each of them is in.
    """

    def __init__(self, samples: Iterable[Any], ranks: Sequence[int]) -> None:
        super().__init__(samples)
        self.ranks = ranks


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """What the training loop takes, and where the epoch stands then.

    Attributes:
        item: A batch, or the samples of a group.
        record: The round that it belongs to,
        place: and its place there.
    """

    item: Any
    record: RoundRecord
    place: int


@dataclass(slots=True)
class SampleBuilder:
    """Hands out the samples of a group as they are; [] for IDLE."""

    def prepare(self, entries: Sequence[Entry], num_samples: IntArray, peers: Peers) -> None:
        """Nothing to prepare."""

    def build(self, group: list[Entry]) -> list[Any]:
        """The samples."""
        return [entry.sample() for entry in group]

    def deliver(self, rounds: Iterator[list[MicroStep]]) -> Iterator[list[Delivery]]:
        """The micro-steps of each round."""
        for micro_steps in rounds:
            yield [Delivery(_with_ranks(step), step.record, step.place) for step in micro_steps]


def _with_ranks(step: MicroStep) -> list[Any]:
    ranks = step.record.ranks
    return Group(step.batch, ranks[step.place]) if ranks else step.batch


@dataclass(slots=True)
class BatchBuilder:
    """Collates groups; IDLE runs the smallest sample at hand, which does not count.

    Attributes:
        collate_fn: Makes a batch of samples.
        loss_scaling: How losses are weighted.
        accumulation_steps: Micro-steps of an optimizer step.
        num_ranks: Ranks that share a step.
        pins: Pin batches.
        spare: The smallest sample seen, for IDLE; one with labels before one without.
    """

    collate_fn: Callable[[list[Any]], Any]
    loss_scaling: LossScaling
    accumulation_steps: int
    num_ranks: int
    pins: bool = False
    spare: Entry | None = None
    _is_prepared: bool = field(default=False)

    def prepare(self, entries: Sequence[Entry], num_samples: IntArray, peers: Peers) -> None:
        """Notes the smallest sample; in the first round, a rank that will never have one is lent one."""
        self.spare = min([*entries, *([self.spare] if self.spare else [])], key=_spare_order, default=None)
        if not self._is_prepared and not num_samples.all():
            self._lend(int(num_samples.argmax()), peers)
        self._is_prepared = True

    def build(self, group: list[Entry]) -> Any:
        """The batch of a group.

        Raises:
            SampleError: If `collate_fn` fails or returns something that takes no keys; names the samples.
        """
        entries = group or [entry for entry in [self.spare] if entry is not None]
        assert entries
        try:
            batch = self.collate_fn([entry.sample() for entry in entries])
            if not isinstance(batch, MutableMapping):
                raise TypeError(
                    "`collate_fn` must return a dict (or another mutable mapping), "
                    f"but returned {type(batch).__name__} instead."
                )
        except Exception as error:
            indices = [entry.index for entry in entries]
            raise SampleError(SampleFailure.of(f"`collate_fn` of samples {indices}", error)) from error
        return torch.utils.data._utils.pin_memory.pin_memory(batch) if self.pins else batch

    def deliver(self, rounds: Iterator[list[MicroStep]]) -> Iterator[list[Delivery]]:
        """Batches with their info; those of an optimizer step come together, once all of it is known."""
        if self.accumulation_steps == 1:
            for micro_steps in rounds:
                yield [delivery for micro_step in micro_steps for delivery in self._with_infos([micro_step])]
            return
        stream = (micro_step for micro_steps in rounds for micro_step in micro_steps)
        for step in in_steps(stream, self.accumulation_steps):
            yield self._with_infos(step)

    def _with_infos(self, step: list[MicroStep]) -> list[Delivery]:
        infos = step_infos(
            [micro_step.local for micro_step in step],
            [micro_step.total for micro_step in step],
            loss_scaling=self.loss_scaling,
            num_ranks=self.num_ranks,
        )
        for micro_step, info in zip(step, infos, strict=True):
            put_step_info(micro_step.batch, info)
        return [Delivery(micro_step.batch, micro_step.record, micro_step.place) for micro_step in step]

    def _lend(self, lender: int, peers: Peers) -> None:
        """One rank sends its smallest sample to all."""
        words = np.empty(0, dtype=np.int64)
        if peers.rank == lender and self.spare is not None:
            packed, _ = pack_samples([self.spare.sample()])
            words = packed.numpy().view(np.int64)
        received = peers.gather(words)[lender]
        if self.spare is None:
            data = torch.from_numpy(received.view(np.uint8))
            self.spare = Entry(-1, "lent by another rank", 0, 0, data.numel(), data, is_packed=True)


def _spare_order(entry: Entry) -> tuple[bool, int, int]:
    return entry.label_tokens == 0, entry.length, entry.ordinal
