"""The fullest bin first, against trying all moves and swaps; and where `local` and `greedy` use it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orch.comm.topology import Topology
from orch.cost import PackedCost
from orch.dispatch import DISPATCHERS, DispatchProblem
from orch.dispatch.between_nodes import Aims, BetweenNodes
from orch.dispatch.bounds import least_load
from orch.dispatch.fullest_first import Effort, fullest_first
from orch.dispatch.prices import Prices
from orch.dispatch.side_by_side import SideBySide
from tests.unit.planning import arrays

scope_of_bin = arrays([0, 0, 0, 1, 1])
ONE_STEP = Effort(work=1)


@st.composite
def layouts(draw):
    size = draw(st.integers(1, 16))
    integers = lambda low, high: arrays(draw(st.lists(st.integers(low, high), min_size=size, max_size=size)))  # noqa: E731
    costs, bins, price = integers(0, 30), integers(0, 4), integers(0, 30)
    prices = Prices(integers(0, 4), integers(0, 4), price // 2, price, 1.0)
    goal = arrays(draw(st.lists(st.integers(0, 90), min_size=5, max_size=5)))
    return costs, bins, goal, prices


def excess_of(costs, bins, goal):
    return np.bincount(bins, weights=costs, minlength=len(goal)).astype(np.int64) - goal


def taken(prices, bins):
    """What each item takes in its bin."""
    return prices.of(np.arange(len(bins)), bins)


def all_steps(costs, bins, full):
    """The layouts after any move out of the bin, or any swap with another of its scope."""
    for leaves in np.flatnonzero((bins == full) & (costs > 0)):
        for to in np.flatnonzero((scope_of_bin == scope_of_bin[full]) & (np.arange(5) != full)):
            for returns in [None, *np.flatnonzero((bins == to) & (costs > 0))]:
                found = bins.copy()
                found[leaves] = to
                if returns is not None:
                    found[returns] = full
                yield found, to


@given(layouts())
def test_a_step_is_the_cheapest_of_all_that_do_or_the_one_that_does_most(case):
    costs, bins, goal, prices = case
    goal = np.where(scope_of_bin == 1, 1000, goal)  # nothing is above there
    before = excess_of(costs, bins, goal)
    found = fullest_first(costs, bins, goal, scope_of_bin, prices, effort=ONE_STEP)
    full = int(before.argmax())
    steps = []
    for layout, to in all_steps(costs, bins, full):
        fuller = int(excess_of(costs, layout, goal)[[full, to]].max())
        if fuller < before[full]:
            steps.append((max(fuller, 0), int(taken(prices, layout).sum()), layout))
    if before[full] <= 0 or not steps:
        np.testing.assert_array_equal(found, bins)
        return
    after = excess_of(costs, found, goal)
    to = [int(each) for each in np.flatnonzero(after != before) if each != full]
    made = (max(int(after[[full, *to]].max()), 0), int(taken(prices, found).sum()))
    assert made == min(step[:2] for step in steps)


@given(layouts(), st.one_of(st.none(), st.integers(0, 40)))
def test_bins_come_down_and_what_it_takes_is_kept_to(case, spare):
    costs, bins, goal, prices = case
    spare = None if spare is None else arrays([spare, spare // 2])
    start = bins.copy()
    found = fullest_first(costs, bins, goal, scope_of_bin, prices, spare)
    np.testing.assert_array_equal(bins, start)
    np.testing.assert_array_equal(scope_of_bin[found], scope_of_bin[bins])
    assert (costs[found != bins] > 0).all()
    before, after = excess_of(costs, bins, goal), excess_of(costs, found, goal)
    for number in range(2):
        mine = scope_of_bin == number
        assert after[mine].max() <= before[mine].max()
        if before[mine].max() <= 0:
            np.testing.assert_array_equal(found[mine[bins]], bins[mine[bins]])
        if spare is not None:
            more = taken(prices, found) - taken(prices, bins)
            assert more[mine[bins]].sum() <= spare[number]


@given(layouts())
def test_scopes_are_layouts_apart(case):
    costs, bins, goal, prices = case
    found = fullest_first(costs, bins, goal, scope_of_bin, prices)
    for number in range(2):
        others_done = np.where(scope_of_bin == number, goal, 1000)
        alone = fullest_first(costs, bins, others_done, scope_of_bin, prices)
        mine = scope_of_bin[bins] == number
        np.testing.assert_array_equal(found[mine], alone[mine])


@pytest.mark.parametrize("returning", [1, 2, 5, 100])
def test_where_only_some_are_looked_at_all_have_their_turn(returning):
    """40 must go and 33 come back: one of 41 items, of which a turn looks at so many."""
    costs = arrays([40, 60, *[90] * 19, 33, *[90] * 20])
    bins = arrays([0, 0, *range(1, 41)])
    goal = np.where(np.arange(41) == 20, 41, 93)
    found = fullest_first(costs, bins, goal, bins[1:] * 0, effort=Effort(returning=returning))
    assert found[[0, 21]].tolist() == [20, 0]
    assert excess_of(costs, found, goal).max() <= 0


def test_little_that_takes_little_is_preferred():
    """Each of three bins has room for a swap; the one of the same node takes nothing."""
    costs, bins = arrays([50, 50, 40, 40, 40]), arrays([0, 0, 1, 2, 3])
    prices = Prices(arrays([0, 0, 1, 0, 1]), bins * 0 - 1, costs * 0, costs, 1.0, arrays([0, 1, 0, 1]))
    found = fullest_first(costs, bins, arrays([90, 50, 50, 50]), np.zeros(4, dtype=np.int64), prices)
    assert found.tolist() == [2, 0, 1, 0, 3]


def few_and_many():
    """A problem of 4 items a bin and one of 32, on the same 32 ranks."""
    rng, topology = np.random.default_rng(3), Topology(32, 8)
    return [
        DispatchProblem(rng.integers(200, 2000, 32 * each), np.repeat(np.arange(32), each), topology, PackedCost())
        for each in (4, 32)
    ]


def test_bins_of_few_items_come_nearer_to_the_bound_than_others_beside_them():
    problems = few_and_many()
    sides = SideBySide.of(problems)
    aims = Aims.of(sides, problems, roomy=False)
    between = BetweenNodes.of(sides, aims)
    lengths = [problem.lengths for problem in problems]
    bins = np.concatenate([DISPATCHERS["greedy"](problems[0]), DISPATCHERS["greedy"](problems[1]) + 32])
    loads = np.bincount(bins, weights=np.concatenate(lengths)).astype(np.int64).reshape(2, 32)
    for problem, bound in enumerate(aims.bound.tolist()):  # one item of each full bin goes to the emptiest one
        full = np.flatnonzero(bins // 32 == problem)
        item = full[np.argmin(np.abs(sides.costs[full] - 0.008 * bound))]
        to = 32 * problem + int(loads[problem].argmin())
        bins[item] = to
    before = np.bincount(bins, weights=sides.costs).astype(np.int64).reshape(2, 32)
    found = between.bring_down(bins)
    after = np.bincount(found, weights=sides.costs).astype(np.int64).reshape(2, 32)
    near = aims.bound + aims.bound // 216
    assert before[0].max() > aims.enough[0]
    assert after[0].max() <= near[0]
    assert near[1] < before[1].max() <= aims.enough[1]
    np.testing.assert_array_equal(found[sides.problem == 1], bins[sides.problem == 1])


@pytest.mark.parametrize("seed", range(4))
def test_few_items_a_bin_come_near_the_bound_and_few_of_them_cross(seed):
    """Lognormal lengths, 4 a bin: within nodes alone loads are 2 % or more above the bound."""
    rng = np.random.default_rng(seed)
    lengths, home = rng.lognormal(6, 0.5, 1024).astype(np.int64) + 50, np.repeat(np.arange(256), 4)
    problem = DispatchProblem(lengths, home, Topology(256, 8), PackedCost())
    bins = DISPATCHERS["local"](problem)
    bound = least_load(lengths, 256)
    assert problem.largest_load(bins) <= bound + bound // 180  # 216 at best
    must = sum(max(0, int(lengths[home // 8 == node].sum()) - 8 * bound) for node in range(32))
    crosses = home // 8 != bins // 8
    assert lengths[crosses].sum() <= must + 0.04 * lengths.sum()


@pytest.mark.parametrize("seed", range(3))
def test_greedy_finds_what_pairs_of_bins_miss(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    lengths = np.append(rng.integers(200, 800, 2556), rng.integers(800, 2600, 1024 * 4 - 2556))
    problem = DispatchProblem(lengths, np.repeat(np.arange(1024), 4), Topology(1024, 8), PackedCost())
    with_it = problem.largest_load(DISPATCHERS["greedy"](problem))
    monkeypatch.setattr("orch.dispatch.greedy.fullest_first", lambda costs, bins, *rest: bins)
    without = problem.largest_load(DISPATCHERS["greedy"](problem))
    assert with_it < without
