"""The alignment protocol: every schedule of small worlds, random large ones, and mutants that must be caught.

All ranks are played in one process by the code that the loader runs: `GroupingWindow` and `plan_round`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.comm.topology import Topology
from orch.odb.alignment import RankReport, RoundPlan, fit_to_target, plan_round
from orch.odb.budget import TokenBudget
from orch.odb.global_grouping import GlobalWindow
from orch.odb.grouping import form_groups
from orch.odb.window import GroupingWindow

LENGTHS = (1, 3, 2, 1, 2, 3)
BUDGET = TokenBudget(4)
Plan = Callable[..., RoundPlan]


class Violation(AssertionError):
    """A guarantee of the protocol does not hold."""


def require(holds: bool, guarantee: str) -> None:
    if not holds:
        raise Violation(guarantee)


@dataclass
class Rank:
    """One rank of a world that is explored: how many samples are still to be read, and its window."""

    num_unread: int
    window: GroupingWindow
    next_ordinal: int = 0

    def copy(self) -> Rank:
        window = type(self.window)(
            BUDGET,
            list(self.window.ordinals),
            list(self.window.lengths),
            list(self.window.rounds_waited),
            self.window.has_ended,
        )
        return Rank(self.num_unread, window, self.next_ordinal)

    def read(self, count: int, notices_end: bool) -> Rank:
        """The rank after it read `count` samples, and perhaps noticed that there are no more."""
        rank = self.copy()
        for _ in range(count):
            rank.window.add(rank.next_ordinal, LENGTHS[rank.next_ordinal % len(LENGTHS)])
            rank.next_ordinal += 1
        rank.num_unread -= count
        rank.window.has_ended = rank.window.has_ended or notices_end
        return rank

    def choices(self) -> Iterator[Rank]:
        """Every way in which samples may have arrived when the round begins."""
        if self.window.has_ended:
            yield self
            return
        for count in range(self.num_unread + 1):
            for notices_end in {count == self.num_unread, False}:
                if notices_end or len(self.window) + count:
                    yield self.read(count, notices_end)

    def key(self) -> tuple[Any, ...]:
        window = self.window
        return self.num_unread, tuple(window.ordinals), tuple(window.rounds_waited), window.has_ended


def play_round(ranks: Sequence[Rank], capacities: Sequence[int], plan: Plan, join: bool) -> list[Rank] | None:
    """Plays a round and checks it; None if the epoch has ended."""
    reports = [rank.window.report(capacity) for rank, capacity in zip(ranks, capacities, strict=True)]
    decided = plan(reports, join=join)
    if decided.ends:
        drained = [not len(rank.window) and not rank.num_unread for rank in ranks]
        require(all(drained) if join else any(drained), "an epoch ends when its samples have been handed out")
        return None
    require(decided.num_groups >= 1, "every round makes progress")
    require(decided.num_groups <= min(capacities), "nobody takes more positions than it has slots")
    after = [rank.copy() for rank in ranks]
    for rank in after:
        before, had = list(rank.window.ordinals), len(rank.window)
        positions = rank.window.take(decided.num_groups)
        handed = [ordinal for group in positions for ordinal in group]
        require(len(positions) == decided.num_groups, "all ranks hand out the same number of positions")
        require(all(positions) or not had, "a rank with samples does not idle")
        require(sorted([*handed, *rank.window.ordinals]) == before, "each sample is handed out once or kept")
    return after


def explore_worlds(plan: Plan, window: type[GroupingWindow]) -> None:
    for sizes in WORLDS:
        longest_epoch(sizes, [1, 2, 6], plan, True, window)


def longest_epoch(sizes: Sequence[int], capacities: Iterable[int], plan: Plan, join: bool, window: Any) -> int:
    """Explores every schedule of a world; returns the most rounds of any.

    One rank has each number of free slots in turn, the others the largest: only the least of them matters.
    """
    capacities = list(capacities)
    known: dict[tuple[Any, ...], int] = {}

    def explore(ranks: list[Rank]) -> int:
        key = tuple(rank.key() for rank in ranks)
        if key not in known:
            known[key] = 0
            for choice in itertools.product(*(rank.choices() for rank in ranks)):
                for capacity in capacities:
                    rest = [capacities[-1]] * (len(ranks) - 1)
                    after = play_round(choice, [capacity, *rest], plan, join)
                    known[key] = max(known[key], 0 if after is None else 1 + explore(after))
        return known[key]

    return explore([Rank(size, window(BUDGET)) for size in sizes])


WORLDS = [
    *itertools.combinations_with_replacement(range(7), 2),
    *itertools.combinations_with_replacement(range(4), 3),
    *itertools.combinations_with_replacement(range(3), 4),
]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("join", [True, False])
def test_every_schedule_of_small_worlds_keeps_the_guarantees(num_ranks: int, join: bool) -> None:
    for sizes in (sizes for sizes in WORLDS if len(sizes) == num_ranks):
        rounds = longest_epoch(sizes, [1, 2, 3, 6] if num_ranks == 2 else [1, 6], plan_round, join, GroupingWindow)
        assert rounds <= max(sizes), "an epoch ends after at most as many rounds as a rank has samples"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 3, 4), (1, 4, 4)])
def test_every_schedule_of_three_ranks_with_four_samples(sizes: tuple[int, ...]) -> None:
    assert longest_epoch(sizes, [1, 6], plan_round, True, GroupingWindow) <= max(sizes)


def wants_too_much(reports: Sequence[RankReport], *, join: bool) -> RoundPlan:
    """A mutant: the largest group count, whether or not the others can fill it."""
    plan = plan_round(reports, join=join)
    return plan if plan.ends else RoundPlan(max(report.num_groups for report in reports), ends=False)


def ends_with_the_first(reports: Sequence[RankReport], *, join: bool) -> RoundPlan:
    """A mutant: stops when the first rank runs out, although samples are left."""
    return plan_round(reports, join=False)


def counts_empty_buffers(reports: Sequence[RankReport], *, join: bool) -> RoundPlan:
    """A mutant: takes the least of all counts, those of ranks without samples too."""
    plan = plan_round(reports, join=join)
    return plan if plan.ends else RoundPlan(min(report.num_buffered for report in reports), ends=False)


class Forgetful(GroupingWindow):
    """A mutant: drops what it should recycle."""

    def take(self, num_groups: int) -> list[list[int]]:
        taken = super().take(num_groups)
        self.ordinals, self.lengths, self.rounds_waited = [], [], []
        return taken


class Repeating(GroupingWindow):
    """A mutant: keeps what it has handed out."""

    def _keep_all_but(self, gone: set[int]) -> None:
        super()._keep_all_but(set(sorted(gone)[1:]))


@pytest.mark.parametrize("plan", [wants_too_much, ends_with_the_first, counts_empty_buffers])
def test_a_broken_plan_is_caught(plan: Plan) -> None:
    with pytest.raises((Violation, ValueError)):
        explore_worlds(plan, GroupingWindow)


@pytest.mark.parametrize("window", [Forgetful, Repeating])
def test_a_broken_window_is_caught(window: type[GroupingWindow]) -> None:
    with pytest.raises(Violation, match="handed out once or kept"):
        explore_worlds(plan_round, window)


@settings(max_examples=60, deadline=None)
@given(
    shards=st.lists(st.lists(st.integers(1, 120), max_size=60), min_size=1, max_size=9),
    layout=st.sampled_from(["packed", "padded"]),
    join=st.booleans(),
    data=st.data(),
)
def test_random_worlds_keep_the_guarantees(
    shards: list[list[int]], layout: str, join: bool, data: st.DataObject
) -> None:
    budget = TokenBudget(100, layout)
    windows = [GroupingWindow(budget) for _ in shards]
    num_read, seen, num_positions = [0] * len(shards), [], 0
    for _ in range(max(map(len, shards)) + 1):
        for rank, (window, shard) in enumerate(zip(windows, shards, strict=True)):
            target = data.draw(st.integers(len(window) or 1, 24))
            while len(window) < target and num_read[rank] < len(shard):
                window.add(num_read[rank], shard[num_read[rank]])
                num_read[rank] += 1
            window.has_ended = window.has_ended or len(window) < target
        reports = [window.report(data.draw(st.integers(1, 5))) for window in windows]
        plan = plan_round(reports, join=join)
        if plan.ends:
            break
        num_positions += plan.num_groups
        for rank, window in enumerate(windows):
            positions = window.take(plan.num_groups)
            assert len(positions) == plan.num_groups
            for group in positions:
                assert budget.fits(np.array([shards[rank][i] for i in group], dtype=np.int64))
            seen += [(rank, ordinal) for group in positions for ordinal in group]
    assert plan.ends
    assert num_positions <= max(map(len, shards))
    assert len(seen) == len(set(seen))
    if join:
        assert len(seen) == sum(map(len, shards))
    else:
        assert any(sum(r == rank for r, _ in seen) == len(shard) for rank, shard in enumerate(shards))


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(st.lists(st.integers(1, 120), max_size=60), min_size=1, max_size=9),
    layout=st.sampled_from(["packed", "padded"]),
    ranks_per_node=st.integers(1, 4),
    window_size=st.integers(1, 30),
)
def test_global_grouping_hands_out_each_sample_once(
    shards: list[list[int]], layout: str, ranks_per_node: int, window_size: int
) -> None:
    budget = TokenBudget(100, layout)
    window = GlobalWindow(budget, Topology(len(shards), ranks_per_node))
    num_read, seen, num_steps = [0] * len(shards), [], 0
    while True:
        rows = []
        for rank, shard in enumerate(shards):
            room = window_size - int((window.rank == rank).sum())
            new = range(num_read[rank], min(len(shard), num_read[rank] + room))
            num_read[rank] = new.stop if len(new) else num_read[rank]
            rows.append(np.array([(i, shard[i], 1, 8, i, 0) for i in new], dtype=np.int64).reshape(-1, 6))
        window.add(rows)
        all_ended = num_read == [len(shard) for shard in shards]
        steps = window.plan_steps(all_ended=all_ended)
        if not steps:
            break
        before = len(window)
        for step in steps:
            assert len(step) == len(shards)
            assert all(budget.fits(window.length[group]) for group in step)
            assert all(map(len, step)) or before < len(steps) * len(shards)
            seen += [(int(window.rank[i]), int(window.ordinal[i])) for group in step for i in group]
        window.remove(steps)
        num_steps += len(steps)
    assert sorted(seen) == sorted((rank, i) for rank, shard in enumerate(shards) for i in range(len(shard)))
    assert num_steps <= len(seen)


def test_a_target_is_feasible_for_every_rank_that_has_samples() -> None:
    streaming, short, ended = RankReport(9, 5, False), RankReport(2, 1, True), RankReport(0, 0, True)
    assert plan_round([streaming, ended]) == RoundPlan(5, False)
    assert plan_round([streaming, short, ended]) == RoundPlan(1, False)
    assert plan_round([RankReport(9, 5, True), short, ended]) == RoundPlan(2, False), "the short one splits"
    assert plan_round([RankReport(9, 5, True), RankReport(9, 4, True, num_free_slots=3)]) == RoundPlan(3, False)
    assert plan_round([streaming, ended], join=False) == RoundPlan(0, True)
    assert plan_round([ended, ended]) == RoundPlan(0, True)


@pytest.mark.parametrize(
    ("values", "match"),
    [((0, 0, False), "num_buffered"), ((3, 0, False), "num_groups"), ((3, 4, True), "num_groups")],
)
def test_reports_that_make_no_sense_are_refused(values: tuple[int, int, bool], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RankReport(*values)
    with pytest.raises(ValueError, match="num_free_slots"):
        RankReport(3, 1, False, num_free_slots=0)


def test_reports_survive_the_wire() -> None:
    report = RankReport(7, 3, True, 5)
    assert RankReport.from_array(report.to_array()) == report


def test_too_many_groups_keep_the_largest_and_too_few_split() -> None:
    lengths = np.array([4, 9, 1, 7, 3], dtype=np.int64)
    groups = form_groups(lengths, TokenBudget(9))
    kept, recycled = fit_to_target(groups, lengths, 2, TokenBudget(9))
    assert sorted(int(lengths[group].sum()) for group in kept) == [8, 9]
    assert sorted(i for group in [*kept, *recycled] for i in group) == [0, 1, 2, 3, 4]
    split, none = fit_to_target(groups, lengths, 5, TokenBudget(9))
    assert (len(split), none) == (5, [])
    idle, _ = fit_to_target([], lengths, 3, TokenBudget(9))
    assert [len(group) for group in idle] == [0, 0, 0]
    with pytest.raises(ValueError, match="at most 5"):
        fit_to_target(groups, lengths, 6, TokenBudget(9))
    urgent = [len(group) == 2 and 0 in group for group in groups]
    kept, _ = fit_to_target(groups, lengths, 1, TokenBudget(9), urgent)
    assert kept[0].tolist() in ([0, 4], [0, 2], [0, 2, 4]) or not any(urgent)
