"""The same number of micro-steps on every rank: the Distributed Group Alignment Problem, as a pure state machine.

Ranks that form groups on their own disagree on how many they have, and a collective of the training step then waits
for ever. So they go in rounds. In a round every rank reports (`RankReport`), all ranks derive the same `RoundPlan` from
the reports, and each hands out exactly `num_groups` positions: groups, or IDLE (an empty one).

**Which target is feasible.** Position t of a round needs a group on every rank that still has samples. A rank with b
buffered samples can fill at most b positions, since a group holds at least one sample, and can take at most as many as
it has free slots; an IDLE position takes a slot too. So T is feasible if and only if
`T <= min(b of the ranks with b > 0)` and `T <= min(free slots of all ranks)`; both are at least 1, so T = 1 always is.

**Which feasible target is chosen.** While any rank still reads, the least number of groups: nobody splits, and what is
recycled meets new samples. Once all have ended, the largest: who has fewer groups splits them instead of idling.

**What follows** (each is checked by exhaustive exploration in the tests): every round hands out at least one sample of
each rank that has any, so an epoch ends after at most max(samples of a rank) rounds and micro-steps; all ranks
make the same number; with `join`, each sample is handed out exactly once; without, all stop together.

Sources: "Online Dynamic Batching with Formal Guarantees for LLM Training" (arXiv 2606.19989) poses the problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from orch.comm.topology import IntArray
from orch.odb.budget import TokenBudget
from orch.odb.grouping import Groups, split_groups

FREE_SLOTS_UNBOUNDED = 2**31


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank tells the others at the start of a round.

    Attributes:
        num_buffered: Samples at hand.
        num_groups: Groups that it would hand out; positive if it has samples.
        num_free_slots: Positions that it can take, at least 1.
        has_ended: No sample will come beyond those buffered.

    Raises:
        ValueError: If a rank with samples offers no group, has no free slot, or waits for samples without having ended.
    """

    num_buffered: int
    num_groups: int
    has_ended: bool
    num_free_slots: int = FREE_SLOTS_UNBOUNDED

    def __post_init__(self) -> None:
        if self.num_free_slots < 1:
            raise ValueError(f"`num_free_slots` must be at least 1, but is {self.num_free_slots} instead.")
        if not min(1, self.num_buffered) <= self.num_groups <= self.num_buffered:
            raise ValueError(
                f"`num_groups` must be in [{min(1, self.num_buffered)}, {self.num_buffered}], "
                f"but is {self.num_groups} instead."
            )
        if not self.num_buffered and not self.has_ended:
            raise ValueError("`num_buffered` must be above 0 until the rank has ended, but is 0 instead.")

    def to_array(self) -> IntArray:
        """The report as integers: int64[4]."""
        return np.array(astuple(self), dtype=np.int64)

    @classmethod
    def from_array(cls, values: IntArray) -> RankReport:
        """The inverse of `to_array`."""
        num_buffered, num_groups, has_ended, num_free_slots = np.asarray(values).tolist()
        return cls(num_buffered, num_groups, bool(has_ended), num_free_slots)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What all ranks do in a round.

    Attributes:
        num_groups: T, the positions that every rank hands out, IDLE ones included.
        ends: The epoch is over, and `num_groups` is 0.
    """

    num_groups: int
    ends: bool


def plan_round(reports: Sequence[RankReport], *, join: bool = True) -> RoundPlan:
    """The plan that all ranks derive from everyone's reports.

    Args:
        reports: One for each rank.
        join: Go on until every rank has handed out every sample; otherwise until the first rank has.
    """
    active = [report for report in reports if report.num_buffered]
    if not active or (not join and len(active) < len(reports)):
        return RoundPlan(0, ends=True)
    feasible = min(min(report.num_buffered for report in active), min(report.num_free_slots for report in reports))
    num_groups = [report.num_groups for report in active]
    wanted = max(num_groups) if all(report.has_ended for report in active) else min(num_groups)
    return RoundPlan(min(wanted, feasible), ends=False)


def fit_to_target(
    groups: Groups, lengths: IntArray, num_groups: int, budget: TokenBudget, is_urgent: Sequence[bool] | None = None
) -> tuple[Groups, Groups]:
    """Turns the groups of a rank into exactly `num_groups` positions.

    Args:
        groups: What the rank formed; empty if it has no sample.
        lengths: int64[n], the lengths that the groups' positions refer to.
        num_groups: The target of the round.
        budget: Says how full a group is.
        is_urgent: For each group, whether it goes before fuller ones, lest its samples wait for ever.

    Returns:
        The positions handed out, and the groups that are recycled. A rank without samples hands out IDLE (empty)
        positions; one with too few groups splits; one with too many keeps the largest, the first on a tie.

    Raises:
        ValueError: If there are samples, but fewer than `num_groups`.
    """
    if not groups:
        return [np.empty(0, dtype=np.int64)] * num_groups, []
    if len(groups) <= num_groups:
        return split_groups(groups, lengths, num_groups), []
    urgent = is_urgent or [False] * len(groups)
    order = sorted(range(len(groups)), key=lambda i: (not urgent[i], -int(lengths[groups[i]].sum()), i))
    kept = set(order[:num_groups])
    return [groups[i] for i in sorted(kept)], [group for i, group in enumerate(groups) if i not in kept]
