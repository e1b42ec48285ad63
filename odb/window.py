"""One rank's window of samples that wait to be grouped: numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from orch.comm.topology import IntArray
from orch.odb.alignment import FREE_SLOTS_UNBOUNDED, RankReport, fit_to_target
from orch.odb.budget import TokenBudget
from orch.odb.grouping import Groups, form_groups

MAX_ROUNDS_WAITED = 2


@dataclass(slots=True)
class GroupingWindow:
    """Samples that arrived and have not been handed out, in order of arrival.

    Attributes:
        budget: When a group is full.
        ordinals: The number of each waiting sample, ascending.
        lengths: The length of each.
        rounds_waited: How often each was recycled; from `MAX_ROUNDS_WAITED` on its group goes first.
        has_ended: No more samples will be added.
    """

    budget: TokenBudget
    ordinals: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rounds_waited: list[int] = field(default_factory=list)
    has_ended: bool = False
    _groups: Groups | None = None

    def __len__(self) -> int:
        return len(self.ordinals)

    def add(self, ordinal: int, length: int, rounds_waited: int = 0) -> None:
        """Adds a sample."""
        assert not self.has_ended
        assert not self.ordinals or ordinal > self.ordinals[-1], (ordinal, self.ordinals[-1])
        self.ordinals.append(ordinal)
        self.lengths.append(length)
        self.rounds_waited.append(rounds_waited)
        self._groups = None

    def report(self, num_free_slots: int = FREE_SLOTS_UNBOUNDED) -> RankReport:
        """What this rank tells the others.

        While samples still come, the emptiest group is held back: it fills up in the next round.
        """
        num_groups = len(self._formed())
        if not self.has_ended and num_groups > 1:
            num_groups -= 1
        return RankReport(len(self), num_groups, self.has_ended, num_free_slots)

    def take(self, num_groups: int) -> list[list[int]]:
        """Hands out `num_groups` positions: the ordinals of each group, none for IDLE. The rest stays."""
        lengths, waited = np.array(self.lengths, dtype=np.int64), np.array(self.rounds_waited, dtype=np.int64)
        groups = self._formed()
        urgent = [bool(waited[group].max() >= MAX_ROUNDS_WAITED) for group in groups]
        taken, _ = fit_to_target(groups, lengths, num_groups, self.budget, urgent)
        handed_out = [[self.ordinals[i] for i in group] for group in taken]
        self._keep_all_but({ordinal for group in handed_out for ordinal in group})
        return handed_out

    def _formed(self) -> Groups:
        if self._groups is None:
            self._groups = form_groups(np.array(self.lengths, dtype=np.int64), self.budget)
        return self._groups

    def _keep_all_but(self, gone: set[int]) -> None:
        kept: IntArray = np.array([i for i, ordinal in enumerate(self.ordinals) if ordinal not in gone], dtype=np.int64)
        self.ordinals = [self.ordinals[i] for i in kept]
        self.lengths = [self.lengths[i] for i in kept]
        self.rounds_waited = [self.rounds_waited[i] + 1 for i in kept]
        self._groups = None
