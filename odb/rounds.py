"""Rounds: fill the window, tell the others, hand out as many groups as they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from orch.comm.topology import IntArray
from orch.odb.alignment import RankReport, plan_round
from orch.odb.errors import SampleFailure
from orch.odb.feed import Entry, FeedRun, SampleError
from orch.odb.peers import Peers
from orch.odb.step_info import GroupCounts
from orch.odb.window import GroupingWindow


class Builder(Protocol):
    """Makes of groups what the training loop gets."""

    def prepare(self, entries: Sequence[Entry], reports: Sequence[RankReport], peers: Peers) -> None:
        """Sees the new samples of a round and what all ranks report; may communicate."""

    def build(self, group: list[Entry]) -> Any:
        """The batch of a group, [] for IDLE."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroStep:
    """What this rank does in one micro-step.

    Attributes:
        entries: Its samples; empty for IDLE.
        batch: What was made of them.
        local: What they hold.
        total: What the groups of all ranks hold.
    """

    entries: list[Entry]
    batch: Any
    local: GroupCounts
    total: GroupCounts


class StoppedElsewhereError(RuntimeError):
    """Another rank stopped iterating in the middle of an epoch while this one went on."""


@dataclass(slots=True, eq=False)
class SampleBuffer:
    """The samples of a window, and the window's numbers.

    Attributes:
        run: Where samples come from.
        window: Their numbers.
        max_samples: Samples of a full window.
        max_bytes: Bytes of a full window, whatever its number of samples.
        entries: The samples by ordinal.
        num_over_budget: How many were longer than the budget.
    """

    run: FeedRun
    window: GroupingWindow
    max_samples: int
    max_bytes: int
    entries: dict[int, Entry] = field(default_factory=dict)
    num_over_budget: int = 0

    def fill(self) -> list[Entry]:
        """Takes samples in order until the window is full or the epoch has ended; returns the new ones.

        When it is full depends on the samples alone, never on which have arrived.

        Raises:
            SampleError: If a sample failed.
        """
        num_bytes = sum(entry.num_bytes for entry in self.entries.values())
        new: list[Entry] = []
        while not self.window.has_ended and len(self.entries) < self.max_samples and num_bytes < self.max_bytes:
            entry = next(self.run, None)
            if entry is None:
                self.window.has_ended = True
                break
            self.window.add(entry.ordinal, entry.length)
            self.entries[entry.ordinal] = entry
            self.num_over_budget += entry.length > self.window.budget.max_tokens
            num_bytes += entry.num_bytes
            new.append(entry)
        return new

    def take(self, num_groups: int) -> list[list[Entry]]:
        """Hands out `num_groups` positions; empty ones for IDLE."""
        return [[self.entries.pop(ordinal) for ordinal in group] for group in self.window.take(num_groups)]


@dataclass(slots=True, eq=False)
class LocalRounds:
    """The rounds of an epoch in which each rank groups its own samples.

    Attributes:
        buffer: This rank's samples.
        peers: The other ranks.
        builder: Makes a batch of a group; runs before the others go on, so that a failure stops all.
        join: Hand out every sample of every rank.
        stop: Set when nobody takes micro-steps any more.
        seeds: Of the order of groups within rounds; the same on all ranks.
        num_rounds: Rounds so far.
        num_dropped: Samples not handed out, without `join`.
    """

    buffer: SampleBuffer
    peers: Peers
    builder: Builder
    join: bool
    stop: threading.Event
    seeds: tuple[int, ...] = (0,)
    num_rounds: int = 0
    num_dropped: int = 0
    has_stopped: bool = False

    def __iter__(self) -> Iterator[list[MicroStep]]:
        """Yields the micro-steps of a round, as many as on every other rank.

        Raises:
            Exception: What the data set, a worker or `collate_fn` raised on this rank, naming the sample.
            RankFailedError: If that happened on another rank.
            StoppedElsewhereError: If another rank stopped iterating.
        """
        while True:
            new = self._filled()
            rows = self.peers.gather(self._report())
            reports = [RankReport.from_array(row[1:]) for row in rows]
            plan = plan_round(reports, join=self.join)
            if plan.ends:
                self.num_dropped = len(self.buffer.window)
                return
            raise_if_stopped(self.peers.rank, [int(row[0]) for row in rows])
            self._or_tell(self.builder.prepare, new, reports, self.peers)
            groups = self._in_drawn_order(self.buffer.take(plan.num_groups))
            batches = [self._or_tell(self.builder.build, group) for group in groups]
            local = [counts_of(group) for group in groups]
            totals = gather_totals(self.peers, local)
            yield [MicroStep(*parts) for parts in zip(groups, batches, local, totals, strict=True)]

    def _in_drawn_order(self, groups: list[list[Entry]]) -> list[list[Entry]]:
        """Shuffles a round, so that an epoch does not drift through lengths.

        Groups are sorted by what they cost first and all ranks draw the same order, so that equally large groups meet.
        """
        budget = self.buffer.window.budget
        cost = [budget.tokens(np.array([entry.length for entry in group], dtype=np.int64)) for group in groups]
        by_cost = sorted(range(len(groups)), key=lambda i: -cost[i])
        order = np.random.default_rng([*self.seeds, self.num_rounds]).permutation(len(groups))
        self.num_rounds += 1
        return [groups[by_cost[i]] for i in order]

    def _filled(self) -> list[Entry]:
        """The new samples; none once nobody takes micro-steps."""
        self.has_stopped = self.stop.is_set()
        return [] if self.has_stopped else self._or_tell(self.buffer.fill)

    def _report(self) -> list[int]:
        """Whether this rank has stopped, and its report."""
        if self.has_stopped:
            return [1, *RankReport(0, 0, has_ended=True).to_array()]
        return [0, *self.buffer.window.report().to_array()]

    def _or_tell(self, function: Callable[..., Any], *args: Any) -> Any:
        return or_tell_others(self.peers, function, *args)


def or_tell_others(peers: Peers, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function; if it raises, tells the other ranks at their next gather, and raises naming rank and sample."""
    try:
        return function(*args)
    except SampleError as error:
        failure = error.failure
    except Exception as error:
        failure = SampleFailure.of(f"`{getattr(function, '__name__', function)}`", error)
    peers.tell_failure(failure.message)
    raise failure.raised_by(peers.rank)


def raise_if_stopped(rank: int, stopped: Sequence[int]) -> None:
    """Ends the epoch on all ranks alike, once one of them no longer iterates."""
    if any(stopped):
        raise StoppedElsewhereError(
            f"Rank {stopped.index(1)} stopped iterating while rank {rank} went on; all ranks must take the same number "
            "of batches."
        )


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
