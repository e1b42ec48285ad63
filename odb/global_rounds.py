"""Rounds in which the ranks group the samples of all their windows together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orch.comm.layout import Layout, Rearrangement
from orch.comm.parcels import exchange_parcels
from orch.comm.topology import IntArray
from orch.odb.errors import SampleFailure
from orch.odb.feed import Entry, SampleError
from orch.odb.global_grouping import FIELDS, GlobalWindow
from orch.odb.grouping import Groups
from orch.odb.packing import pack_samples
from orch.odb.rounds import MicroStep, RoundContext, raise_if_stopped
from orch.odb.state import Ranks
from orch.odb.step_info import GroupCounts

NO_INDEX = -1


@dataclass(slots=True, eq=False)
class GlobalRounds:
    """The rounds of an epoch with groups over all ranks.

    Attributes:
        context: Samples, ranks and what to make of groups. Without `join`, a last step with fewer samples than ranks
            is left out.
        window: The numbers of all ranks' samples.
        exchanges: Move samples to the rank of their group; False hands out those that a rank has of each step.
        num_rounds: Rounds so far, of the whole epoch.
        num_dropped: Samples not handed out, without `join`.
    """

    context: RoundContext
    window: GlobalWindow
    exchanges: bool = True
    num_rounds: int = 0
    num_dropped: int = 0

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
            has_stopped = context.stop.is_set()
            new: list[Entry] = [] if has_stopped else context.or_tell(self._fill)
            all_ended, stopped = self._share(new, has_stopped)
            steps = self._plan(all_ended)
            if not steps:
                self.num_dropped = len(context.buffer.entries)
                return
            raise_if_stopped(peers.rank, stopped)
            num_samples = np.bincount(self.window.rank, minlength=peers.num_ranks)
            context.or_tell(context.builder.prepare, new, num_samples, peers)
            yield self._micro_steps(steps)

    def _fill(self) -> list[Entry]:
        buffer = self.context.buffer
        new = buffer.fill(self.num_rounds)
        if self.context.peers.num_ranks == 1:
            return new
        packed = [_packed(entry) for entry in new]
        buffer.entries.update({entry.ordinal: entry for entry in packed})
        return packed

    def _share(self, new: Sequence[Entry], has_stopped: bool) -> tuple[bool, list[int]]:
        """Tells the others of new samples and adds theirs; returns whether all have ended, and who has stopped."""
        rows = np.array([self._row(entry) for entry in new], dtype=np.int64)
        has_ended = has_stopped or self.context.buffer.has_ended
        said = self.context.peers.gather(np.concatenate([[int(has_stopped), int(has_ended)], rows.reshape(-1)]))
        self.window.add([words[2:].reshape(-1, len(FIELDS)) for words in said])
        return all(int(words[1]) for words in said), [int(words[0]) for words in said]

    def _row(self, entry: Entry) -> tuple[int, ...]:
        index = int(entry.index) if isinstance(entry.index, (int, np.integer)) else NO_INDEX
        waited = self.num_rounds - entry.first_round
        return entry.ordinal, entry.length, entry.label_tokens, entry.num_bytes, index, waited

    def _plan(self, all_ended: bool) -> list[Groups]:
        steps = self.window.plan_steps(all_ended=all_ended)
        if not self.context.join:
            steps = [step for step in steps if all(len(group) for group in step)]
        return [steps[i] for i in self.context.order_of(len(steps), self.num_rounds)]

    def _micro_steps(self, steps: list[Groups]) -> list[MicroStep]:
        totals = [self._total(step) for step in steps]
        groups, ranks = (self._moved(steps), ()) if self.exchanges else self._at_home(steps)
        self.window.remove(steps)
        batches = self.context.build(groups)
        self.context.peers.gather([])
        self.num_rounds += 1
        return self.context.micro_steps(groups, batches, totals, self.num_rounds, ranks)

    def _total(self, step: Groups) -> GroupCounts:
        everyone = np.concatenate(step)
        window = self.window
        return GroupCounts(
            len(everyone), int(window.num_label_tokens[everyone].sum()), int(window.length[everyone].sum())
        )

    def _at_home(self, steps: list[Groups]) -> tuple[list[list[Entry]], Ranks]:
        """This rank's samples of each step, whichever rank's group they are in, and which that is."""
        groups, ranks, group_rank = [], [], self._group_rank(steps)
        for step in steps:
            everyone = np.sort(np.concatenate(step))
            here = everyone[self.window.rank[everyone] == self.context.peers.rank]
            groups.append(self.context.buffer.pop(self.window.ordinal[here]))
            ranks.append(tuple(group_rank[here].tolist()))
        return groups, tuple(ranks)

    def _moved(self, steps: list[Groups]) -> list[list[Entry]]:
        """This rank's group of each step, after the samples of all steps have moved."""
        window, rank, target = self.window, self.context.peers.rank, self._group_rank(steps)
        moving = np.flatnonzero((target >= 0) & (target != window.rank))
        moving = moving[np.lexsort((window.ordinal[moving], window.rank[moving]))]
        arrived = self._exchange(moving, target[moving])
        mine = [group for step in steps for group in [step[rank]]]
        return [[arrived.get(i) or self.context.buffer.pop([window.ordinal[i]])[0] for i in g.tolist()] for g in mine]

    def _group_rank(self, steps: list[Groups]) -> IntArray:
        """The rank whose group each sample of the window is in, -1 for none: int64[N]."""
        group_rank = np.full(len(self.window), -1, dtype=np.int64)
        for step in steps:
            for rank, group in enumerate(step):
                group_rank[group] = rank
        return group_rank

    def _exchange(self, moving: IntArray, target: IntArray) -> dict[int, Entry]:
        """Sends and receives; returns what arrived here, by its position in the window."""
        if not len(moving):
            return {}
        window, num_ranks = self.window, self.context.peers.num_ranks
        source = window.rank[moving]
        sent = self.context.buffer.pop(window.ordinal[moving[source == self.context.peers.rank]])
        ways = Rearrangement(Layout(source, num_ranks), Layout(target, num_ranks))
        with self.context.peers.explaining():
            parcels = exchange_parcels(
                [entry.data for entry in sent],
                ways,
                window.num_bytes[moving],
                self.context.peers.rank,
                self.context.peers.group,
            )
        positions = moving[target == self.context.peers.rank].tolist()
        return {i: self._arrived(i, data) for i, data in zip(positions, parcels, strict=True)}

    def _arrived(self, position: int, data: Any) -> Entry:
        window = self.window
        index, ordinal = int(window.index[position]), int(window.ordinal[position])
        return Entry(
            ordinal,
            index if index != NO_INDEX else f"number {ordinal} of rank {window.rank[position]}",
            int(window.length[position]),
            int(window.num_label_tokens[position]),
            len(data),
            data,
            is_packed=True,
        )


def _packed(entry: Entry) -> Entry:
    """The sample as bytes.

    Raises:
        SampleError: If it cannot be packed; says what to do.
    """
    if entry.is_packed:
        return entry
    try:
        data, _ = pack_samples([entry.data])
    except ValueError as error:
        where = f"Sample {entry.index} cannot travel between ranks (`grouping='local'` leaves it where it is)"
        raise SampleError(SampleFailure.of(where, error)) from error
    return replace(entry, data=data, num_bytes=data.numel(), is_packed=True)
