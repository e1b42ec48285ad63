"""Substitutions between places, and two swaps at once between bins."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.dispatch.polish import Limits, _State, polish
from orch.dispatch.prices import Prices
from orch.dispatch.substitute import substitute
from orch.dispatch.two_swaps import best_two_swaps
from tests.unit.planning import arrays

ONE = arrays([0, 0])


def priced_as_costs(costs, start, rate=1.0):
    return Prices(start, np.full(len(costs), -1), costs * 0, costs, rate)


def excess_of(costs, place, goal):
    return np.bincount(place, weights=costs, minlength=len(goal)).astype(np.int64) - goal


def test_two_that_stayed_go_instead_of_one_that_moved():
    """40 of 0 went to 1, 3 too few. No other item of 0 costs 43, but 20 and 23 do."""
    costs, start = arrays([40, 20, 23, 90, 30]), arrays([0, 0, 0, 0, 1])
    place = arrays([1, 0, 0, 0, 1])
    prices, excess = priced_as_costs(costs, start), arrays([3, -3])
    assert substitute(costs, place, excess, prices, ONE).tolist() == [0, 1, 1, 0, 1]
    assert substitute(costs, place, excess - 3, prices, ONE).tolist() == place.tolist()  # nothing is above its load


def test_no_item_goes_twice():
    """20 and 20 would do it, but there is one 20 only."""
    costs, start, place = arrays([37, 20, 90, 30]), arrays([0, 0, 0, 1]), arrays([1, 0, 0, 1])
    excess = arrays([3, -3])
    assert substitute(costs, place, excess, priced_as_costs(costs, start), ONE).tolist() == place.tolist()


def test_one_that_moved_too_much_comes_home():
    costs, start, place = arrays([4, 50, 60]), arrays([0, 0, 1]), arrays([1, 0, 1])
    assert substitute(costs, place, arrays([-9, 2]), priced_as_costs(costs, start), ONE).tolist() == [0, 0, 1]


def test_a_substitute_takes_no_more_than_the_gap_is_worth():
    """43 instead of 40 would draw level; it takes 7 more where the gap of 6 is worth 6 by default."""
    costs, start, place = arrays([40, 43, 90, 30]), arrays([0, 0, 0, 1]), arrays([1, 0, 0, 1])
    for rate, found in ((1.0, place.tolist()), (1.2, [0, 1, 0, 1])):
        prices = Prices(start, np.full(4, -1), costs * 0, arrays([40, 47, 90, 30]), rate)
        assert substitute(costs, place, arrays([3, -3]), prices, ONE).tolist() == found


def test_items_that_start_nowhere_are_left_alone():
    costs, start, place = arrays([40, 43, 30]), arrays([0, -1, -1]), arrays([1, 0, 1])
    assert substitute(costs, place, arrays([30, -50]), priced_as_costs(costs, start), ONE).tolist() == [1, 0, 1]


@pytest.mark.parametrize(("seed", "bits"), [(1, 0), (3, 0), (3, 40), (5, 0)])
def test_places_draw_level_to_the_token(seed, bits):
    """Six tokens to spare in all, and few items that move: no single ones make it up. Costs of any size."""
    rng = np.random.default_rng(seed)
    costs, start = rng.integers(200, 2000, 480) << bits, np.repeat(np.arange(4), 120)
    place = start.copy()
    place[[3, 7, 130, 140, 250]] = [1, 2, 3, 2, 3]
    excess, scope = arrays([37, -20, 13, -36]) << bits, np.zeros(4, dtype=np.int64)
    goal = np.array([costs[place == number].sum() for number in range(4)]) - excess
    found = substitute(costs, place, excess, priced_as_costs(costs, start), scope)
    assert all(costs[found == number].sum() <= goal[number] for number in range(4))
    assert costs[found != start].sum() < costs[place != start].sum() + (100 << bits)


@st.composite
def layouts(draw):
    size = draw(st.integers(1, 24))
    integers = lambda low, high: arrays(draw(st.lists(st.integers(low, high), min_size=size, max_size=size)))  # noqa: E731
    costs, price = integers(0, 30), integers(0, 30)
    scope = arrays([0, 0, 0, 1, 1])
    place, start = integers(0, 4), integers(-1, 4)
    start = np.where((start >= 0) & (scope[start] == scope[place]), start, -1)  # of the same layout
    cheap = np.where(draw(st.booleans()) & (start >= 0), place, -1)
    prices = Prices(
        start, np.where(cheap == start, -1, cheap), price // 2, price, draw(st.sampled_from([0.0, 1.0, 3.0]))
    )
    return costs, place, prices, scope, arrays(draw(st.lists(st.integers(0, 90), min_size=5, max_size=5)))


@given(layouts())
def test_substitution_only_improves(case):
    costs, place, prices, scope, goal = case
    before = place.copy()
    excess = excess_of(costs, place, goal)
    found = substitute(costs, place, excess, prices, scope)
    np.testing.assert_array_equal(place, before)
    np.testing.assert_array_equal(scope[found], scope[place])
    after = excess_of(costs, found, goal)
    for number in range(2):
        mine = scope == number
        assert after[mine].max() <= excess[mine].max()
        assert (after[mine] ** 2).sum() <= (excess[mine] ** 2).sum()
        if excess[mine].max() <= 0:
            np.testing.assert_array_equal(found[mine[place]], place[mine[place]])
    changed = found != place
    assert (prices.free[changed] >= 0).all()
    assert (costs[changed] > 0).all()


def brute_force(full, empty, gap):
    """How far the best of all two swaps misses level loads."""
    ways = lambda own: [sum(way) for size in range(3) for way in itertools.combinations(own, size)]  # noqa: E731
    changes = [one - other for one in ways(full) for other in ways(empty)]
    return min((abs(2 * change - gap) for change in changes if 0 < change < gap), default=None)


def test_two_swaps_are_next_to_the_best_there_are():
    """The mate of a swap is the nearest that shares no item with it on either side, which can miss the best."""
    rng, best = np.random.default_rng(5), 0
    for number in range(200):
        sizes = rng.integers(1, 9, 2)
        costs = np.sort(rng.integers(1, 400, sizes.sum()))
        in_full = np.zeros(sizes.sum(), dtype=bool)
        in_full[rng.permutation(len(costs))[: sizes[0]]] = True
        gap = int(rng.integers(2, 500))
        found = best_two_swaps(costs, np.arange(len(costs)), costs * 0, in_full, arrays([gap]))
        least = brute_force(costs[in_full].tolist(), costs[~in_full].tolist(), gap)
        if least is None:
            assert not len(found.pair), number
            best += 1
            continue
        if not len(found.pair):
            continue
        for moved, side in ((found.leaves[:, 0], True), (found.returns[:, 0], False)):
            real = moved[moved >= 0]
            assert len(set(real.tolist())) == len(real)
            assert (in_full[real] == side).all()
        change = sum(
            sign * int(costs[moved[moved >= 0]].sum()) for sign, moved in ((1, found.leaves), (-1, found.returns))
        )
        assert change == found.change[0]
        assert 0 < change < gap
        best += abs(2 * change - gap) == least
    assert best >= 190


@pytest.mark.parametrize("seed", range(200))
def test_pairs_are_swapped_each_within_itself(seed):
    """Three pairs of bins at once; each finds what it finds alone."""
    rng, size = np.random.default_rng(seed), 4 + seed // 8
    costs = np.sort(rng.integers(1, 900, size))
    pair, in_full, gap = rng.integers(0, 3, size), rng.random(size) < 0.5, rng.integers(2, 600, 3)
    together = best_two_swaps(costs, np.arange(size), pair, in_full, gap)
    found = 0
    for number in range(3):
        items = np.flatnonzero(pair == number)
        alone = best_two_swaps(costs, items, items * 0, in_full[items], gap[number : number + 1])
        here = together.pair == number
        np.testing.assert_array_equal(together.change[here], alone.change)
        np.testing.assert_array_equal(together.leaves[:, here], alone.leaves)
        np.testing.assert_array_equal(together.returns[:, here], alone.returns)
        found += len(alone.pair)
    assert found == len(together.pair)


def test_prices_of_bins_are_those_of_the_places_they_lie_in():
    prices = Prices(arrays([0, 1]), arrays([1, -1]), arrays([3, 0]), arrays([7, 8]), 1.0, arrays([0, 0, 1, 2]))
    for bin_, expected in ((0, [0, 8]), (1, [0, 8]), (2, [3, 0]), (3, [7, 8])):
        assert prices.of(np.arange(2), np.full(2, bin_)).tolist() == expected
    assert prices.taken(arrays([1])).of(arrays([0]), arrays([1])).tolist() == [8]


def test_each_of_few_bins_has_its_turn_as_the_other_of_a_pair():
    excess, one = arrays([10, -1, -2, -3, -4]), np.zeros(5, dtype=np.int64)
    state = _State(one, one, excess, one, one, one, None)
    pairs = [state.pair(arrays([0]), arrays([turn])) for turn in range(4)]
    assert [pair.full.tolist() for pair in pairs] == [[0]] * 4
    assert sorted(pair.empty.tolist() for pair in pairs) == [[1], [2], [3], [4]]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32))
def test_a_polish_that_swaps_twice_is_legal_and_no_worse(seed):
    rng = np.random.default_rng(seed)
    costs, bins = rng.integers(1, 3000, 96), rng.integers(0, 4, 96)
    goal = -(-int(costs.sum()) // 4)
    loads = []
    for twice in (False, True):
        found = polish(costs, bins, 4, Limits(goal, patience=6, two_swaps=twice))
        loads.append(int(np.bincount(found, weights=costs, minlength=4).max()))
    assert loads[1] <= np.bincount(bins, weights=costs).max()
    assert loads[1] - goal <= max(1, loads[0] - goal)
