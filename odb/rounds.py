"""Rounds: fill the window, tell the others, hand out as many groups as they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from orch.comm.gather import RankFailedError
from orch.comm.topology import IntArray
from orch.odb.alignment import RankReport, plan_round
from orch.odb.buffer import SampleBuffer
from orch.odb.errors import SampleFailure
from orch.odb.feed import Entry, SampleError
from orch.odb.peers import Peers
from orch.odb.state import Ranks, RoundRecord
from orch.odb.step_info import GroupCounts
from orch.odb.window import GroupingWindow


class Builder(Protocol):
    """Makes of groups what the training loop gets."""

    def prepare(self, entries: Sequence[Entry], num_samples: IntArray, peers: Peers) -> None:
        """Sees the new samples of a round and how many each rank holds (int64[W]); may communicate."""

    def build(self, group: list[Entry]) -> Any:
        """The batch of a group, [] for IDLE."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroStep:
    """What this rank does in one micro-step.

    Attributes:
        batch: What was made of its samples.
        local: What they hold; nothing for IDLE.
        total: What the groups of all ranks hold.
        record: The round that it belongs to,
        place: and its place there.
    """

    batch: Any
    local: GroupCounts
    total: GroupCounts
    record: RoundRecord
    place: int


class StoppedElsewhereError(RuntimeError):
    """Another rank stopped iterating in the middle of an epoch while this one went on."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundContext:
    """What rounds of every kind need.

    Attributes:
        buffer: This rank's samples.
        peers: The other ranks.
        builder: Makes a batch of a group; runs before the others go on, so that a failure stops all.
        join: Hand out every sample of every rank.
        stop: Set when nobody takes micro-steps any more.
        seeds: Of the order within rounds; the same on all ranks.
        resumed: Where the epoch goes on; None at its start.
    """

    buffer: SampleBuffer
    peers: Peers
    builder: Builder
    join: bool
    stop: threading.Event
    seeds: tuple[int, ...]
    resumed: RoundRecord | None = None

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self.buffer.run.epoch

    def or_tell(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function; if it raises, tells the others at their next gather, and raises naming rank and sample."""
        try:
            return function(*args)
        except RankFailedError:
            raise
        except SampleError as error:
            failure = error.failure
        except Exception as error:
            failure = SampleFailure.of(f"`{getattr(function, '__name__', function)}`", error)
        self.peers.tell_failure(failure.message)
        raise failure.raised_by(self.peers.rank)

    def build(self, groups: Sequence[list[Entry]]) -> list[Any]:
        """The batches of groups."""
        return [self.or_tell(self.builder.build, group) for group in groups]

    def order_of(self, num_steps: int, num_rounds: int) -> list[int]:
        """The drawn order of a round's micro-steps, the same on all ranks."""
        return np.random.default_rng([*self.seeds, num_rounds]).permutation(num_steps).tolist()

    def record(self, groups: Sequence[list[Entry]], num_rounds: int, ranks: Ranks = ()) -> RoundRecord:
        """What is needed to go on within or behind this round."""
        held, unread = self.buffer.entries.values(), self.buffer.unread_again
        return RoundRecord(
            epoch=self.epoch,
            num_consumed=self.buffer.num_consumed,
            num_rounds=num_rounds,
            groups=_indices(groups),
            ranks=ranks,
            held=(*(entry.index for entry in held), *unread),
            rounds_waited=(*(num_rounds - entry.first_round for entry in held), *[0] * len(unread)),
        )

    def micro_steps(
        self,
        groups: Sequence[list[Entry]],
        batches: Sequence[Any],
        totals: Sequence[GroupCounts],
        num_rounds: int,
        ranks: Ranks = (),
    ) -> list[MicroStep]:
        """Puts a round together; `ranks` as in `RoundRecord`."""
        record = self.record(groups, num_rounds, ranks)
        return [MicroStep(batches[i], counts_of(groups[i]), totals[i], record, i) for i in range(len(groups))]

    def resumed_round(self) -> list[MicroStep]:
        """What was left of the round in which the epoch was interrupted: groups that were planned, read again.

        A sample that is skipped this time is no longer part of them.
        """
        if self.resumed is None or not self.resumed.groups:
            return []
        ends = np.cumsum([len(group) for group in self.resumed.groups]).tolist()
        entries = self.or_tell(self.buffer.run.take_below, ends[-1])
        groups = [
            [entry for entry in entries if end - len(group) <= entry.ordinal < end]
            for group, end in zip(self.resumed.groups, ends, strict=True)
        ]
        num_samples = np.array([row[0] for row in self.peers.gather([len(entries)])])
        self.or_tell(self.builder.prepare, entries, num_samples, self.peers)
        batches = self.build(groups)
        local = [counts_of(group) for group in groups]
        totals = gather_totals(self.peers, local)
        record = replace(self.resumed, groups=_indices(groups), ranks=self._resumed_ranks(groups))
        return [MicroStep(batches[i], local[i], totals[i], record, i) for i in range(len(groups))]

    def _resumed_ranks(self, groups: Sequence[list[Entry]]) -> Ranks:
        if self.resumed is None or not self.resumed.ranks:
            return ()
        rank_of_ordinal = [rank for ranks in self.resumed.ranks for rank in ranks]
        return tuple(tuple(rank_of_ordinal[entry.ordinal] for entry in group) for group in groups)


@dataclass(slots=True, eq=False)
class LocalRounds:
    """The rounds of an epoch in which each rank groups its own samples.

    Attributes:
        context: Samples, ranks and what to make of groups.
        window: The numbers of this rank's samples.
        num_rounds: Rounds so far, of the whole epoch.
        num_dropped: Samples not handed out, without `join`.
    """

    context: RoundContext
    window: GroupingWindow
    num_rounds: int = 0
    num_dropped: int = 0
    _has_stopped: bool = False

    def __iter__(self) -> Iterator[list[MicroStep]]:
        """Yields the micro-steps of a round, as many as on every other rank.

        Raises:
            Exception: What the data set, a worker or `collate_fn` raised on this rank, naming the sample.
            RankFailedError: If that happened on another rank.
            StoppedElsewhereError: If another rank stopped iterating.
        """
        context, peers = self.context, self.context.peers
        if left := context.resumed_round():
            yield left
        while True:
            new = self._filled()
            rows = peers.gather(self._report())
            reports = [RankReport.from_array(row[1:]) for row in rows]
            plan = plan_round(reports, join=context.join)
            if plan.ends:
                self.num_dropped = len(self.window)
                return
            raise_if_stopped(peers.rank, [int(row[0]) for row in rows])
            num_samples = np.array([report.num_buffered for report in reports], dtype=np.int64)
            context.or_tell(context.builder.prepare, new, num_samples, peers)
            groups = self._in_drawn_order(self.window.take(plan.num_groups))
            batches = context.build(groups)
            totals = gather_totals(peers, [counts_of(group) for group in groups])
            self.num_rounds += 1
            yield context.micro_steps(groups, batches, totals, self.num_rounds)

    def _filled(self) -> list[Entry]:
        """The new samples; none once nobody takes micro-steps."""
        buffer = self.context.buffer
        self._has_stopped = self.context.stop.is_set()
        new: list[Entry] = [] if self._has_stopped else self.context.or_tell(buffer.fill, self.num_rounds)
        for entry in new:
            self.window.add(entry.ordinal, entry.length, self.num_rounds - entry.first_round)
        self.window.has_ended = buffer.has_ended
        return new

    def _report(self) -> list[int]:
        """Whether this rank has stopped, and its report."""
        if self._has_stopped:
            return [1, *RankReport(0, 0, has_ended=True).to_array()]
        return [0, *self.window.report().to_array()]

    def _in_drawn_order(self, groups: list[list[int]]) -> list[list[Entry]]:
        """Shuffles a round, so that an epoch does not drift through lengths.

        Groups are sorted by what they cost first and all ranks draw the same order, so that equally large groups meet.
        """
        entries = [self.context.buffer.pop(group) for group in groups]
        lengths = [np.array([entry.length for entry in group], dtype=np.int64) for group in entries]
        by_cost = sorted(range(len(groups)), key=lambda i: -self.window.budget.tokens(lengths[i]))
        return [entries[by_cost[i]] for i in self.context.order_of(len(groups), self.num_rounds)]


def raise_if_stopped(rank: int, stopped: Sequence[int]) -> None:
    """Ends the epoch on all ranks alike, once one of them no longer iterates."""
    if any(stopped):
        raise StoppedElsewhereError(
            f"Rank {list(stopped).index(1)} stopped iterating while rank {rank} went on; all ranks must take the same "
            "number of batches."
        )


def _indices(groups: Sequence[list[Entry]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(entry.index for entry in group) for group in groups)


def counts_of(group: Sequence[Entry]) -> GroupCounts:
    """What a group holds."""
    return GroupCounts(len(group), sum(entry.label_tokens for entry in group), sum(entry.length for entry in group))


def gather_totals(peers: Peers, local: Sequence[GroupCounts]) -> list[GroupCounts]:
    """What the groups of all ranks hold in each micro-step of a round."""
    rows: IntArray = np.array(
        [(c.num_samples, c.num_label_tokens, c.num_tokens) for c in local], dtype=np.int64
    ).reshape(len(local), 3)
    totals = sum(values.reshape(len(local), 3) for values in peers.gather(rows.reshape(-1)))
    return [GroupCounts(*row) for row in np.asarray(totals).tolist()]
