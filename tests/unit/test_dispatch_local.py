from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orch.balancing import balance
from orch.bounds import lower_bounds
from orch.comm.topology import Topology
from orch.cost import PackedCost, PaddedCost
from orch.dispatch import DISPATCHERS, DispatchProblem
from orch.dispatch.between_nodes import Aims, _Needs
from orch.dispatch.bounds import least_load
from orch.dispatch.level import Level
from orch.dispatch.local import dispatch_local_at_once
from orch.dispatch.side_by_side import SideBySide
from tests.unit.planning import arrays


def drawn(num_ranks: int, per_rank: int, seed: int = 0, ranks_per_node: int | None = 8) -> DispatchProblem:
    lengths = np.random.default_rng(seed).lognormal(6, 0.8, num_ranks * per_rank).astype(np.int64) + 1
    home = np.repeat(np.arange(num_ranks), per_rank)
    return DispatchProblem(lengths, home, Topology(num_ranks, ranks_per_node), PackedCost())


def crossing(problem: DispatchProblem, bins: np.ndarray, source: np.ndarray | None = None) -> np.ndarray:
    node = np.repeat(problem.topology.node_of_rank, problem.bins_per_rank)
    return node[bins] != node[problem.home if source is None else source]


@pytest.mark.parametrize(
    ("num_ranks", "per_rank", "ranks_per_node"), [(64, 32, 8), (63, 32, 8), (64, 32, 1), (24, 60, 5)]
)
@pytest.mark.parametrize("seed", range(3))
def test_reaches_the_target_and_moves_little_between_nodes(num_ranks, per_rank, ranks_per_node, seed):
    problem = drawn(num_ranks, per_rank, seed, ranks_per_node)
    bins = DISPATCHERS["local"](problem)
    bounds = lower_bounds(problem.lengths, problem.home, problem.topology)
    assert problem.largest_load(bins) <= 1.01 * bounds.load
    total = int(problem.lengths.sum())
    moved = int(problem.lengths[crossing(problem, bins)].sum())
    assert bounds.inter_node <= moved
    assert moved <= bounds.inter_node + (0.005 if ranks_per_node > 1 else 0.02) * total


@pytest.mark.parametrize(("num_ranks", "per_rank", "most"), [(64, 32, 1.005), (64, 60, 1.005), (256, 16, 1.008)])
@pytest.mark.parametrize("seed", range(3))
def test_comes_near_the_least_load_for_little_more_between_nodes(num_ranks, per_rank, most, seed):
    problem = drawn(num_ranks, per_rank, seed)
    bins = DISPATCHERS["local"](problem)
    bounds = lower_bounds(problem.lengths, problem.home, problem.topology)
    assert problem.largest_load(bins) <= most * bounds.load
    moved = int(problem.lengths[crossing(problem, bins)].sum())
    assert moved <= bounds.inter_node + 0.005 * problem.lengths.sum()


@pytest.mark.parametrize("seed", range(3))
def test_one_node_is_polished_to_the_least_load(seed):
    problem = drawn(8, 32, seed)
    assert problem.largest_load(DISPATCHERS["local"](problem)) <= 1.0005 * least_load(problem.lengths, 8)


@pytest.mark.parametrize("seed", range(3, 10))
def test_sixteen_items_a_bin_draw_level_to_the_token(seed):
    """Two swaps at once do it; single ones leave a token or two."""
    problem = drawn(8, 16, seed)
    assert problem.largest_load(DISPATCHERS["local"](problem)) == least_load(problem.lengths, 8)


def test_few_items_cross_nodes_where_their_own_has_no_room():
    """The longest is the bound. Two of 502 on a rank are near enough to it, but other nodes have empty ranks."""
    lengths, home = np.array([1000, 502, 502, 502, 300]), np.array([0, 1, 1, 2, 3])
    ranks = balance(lengths, home, Topology(6, 3))
    assert np.bincount(ranks, weights=lengths).max() == 1000


def test_loads_are_least_where_no_node_need_send_much_for_it():
    """Nodes draw 0.5 % more or less than the mean, so that little must cross for them to be exactly level."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(100, 200, 64 * 60)
    for node in range(8):
        own = lengths[node * 480 : node * 480 + 480]
        missing = 72000 - own.sum() + (360 if node % 2 else -360)
        own += missing // 480
        own[: missing % 480] += 1
    home = np.repeat(np.arange(64), 60)
    problem = DispatchProblem(lengths, home, Topology(64, 8), PackedCost())
    bins = DISPATCHERS["local"](problem)
    assert lengths.sum() == 64 * 9000
    assert problem.largest_load(bins) <= 9001
    assert lengths[crossing(problem, bins)].sum() <= 4 * 360 + 0.005 * lengths.sum()


def test_what_may_cross_is_spent_where_nothing_else_draws_nodes_level():
    """Three nodes draw 20 tokens more than their share, the fourth 60 less, and no item is as short as that."""
    lengths = np.random.default_rng(7).integers(100, 200, 32 * 60)
    for node, more in enumerate((-60, 20, 20, 20)):
        own = lengths[node * 480 : node * 480 + 480]
        missing = 72000 + more - own.sum()
        own += missing // 480
        own[: missing % 480] += 1
    problem = DispatchProblem(lengths, np.repeat(np.arange(32), 60), Topology(32, 8), PackedCost())
    bins = DISPATCHERS["local"](problem)
    assert problem.largest_load(bins) == 9000
    assert 0 < lengths[crossing(problem, bins)].sum() <= 60 + 0.005 * lengths.sum()


@pytest.mark.parametrize("slack", [0.01, 0.05, 0.2])
def test_slack_spares_bytes_and_is_kept(slack):
    problem = drawn(64, 32)
    loose = DISPATCHERS["local"](replace(problem, slack=slack))
    tight = DISPATCHERS["local"](problem)
    least = least_load(problem.lengths, 64)
    assert problem.largest_load(tight) < 1.004 * least < problem.largest_load(loose) <= (1 + slack) * least
    sent = [int(problem.lengths[crossing(problem, bins)].sum()) for bins in (loose, tight)]
    must = lower_bounds(problem.lengths, problem.home, problem.topology, target=int((1 + slack) * least)).inter_node
    assert must <= sent[0] < sent[1]
    assert problem.moved_bytes(loose) < 0.95 * problem.moved_bytes(tight)


def test_slack_never_breaks_a_cap_that_can_be_met():
    lengths, home = np.arange(1, 13), np.repeat([0, 1], 6)
    for dispatcher in ("local", "greedy"):
        for slack in (0.0, 0.1, 0.5, 1.0):
            ranks = balance(lengths, home, Topology(2), slack=slack, max_tokens=40, dispatcher=dispatcher)
            assert np.bincount(ranks, weights=lengths).tolist() in ([39, 39], [38, 40], [40, 38])


@pytest.mark.parametrize("slack", [0.0, 0.0092, 0.02])
def test_nodes_get_room_where_they_need_it_before_all_is_dealt_anew(slack):
    """Few long and many short items: a node filled to the brim could not spread the long ones over its ranks."""
    rng = np.random.default_rng(355)
    lengths, home = np.where(rng.random(1024) < 0.1, 4000, 50), np.repeat(np.arange(16), 64)
    problem = DispatchProblem(lengths, home, Topology(16, 4), PackedCost(), slack=slack)
    bins = DISPATCHERS["local"](problem)
    assert problem.largest_load(bins) <= (1 + max(0.01, slack)) * least_load(lengths, 16)
    assert lengths[crossing(problem, bins)].sum() < 0.05 * lengths.sum()


@pytest.mark.parametrize("seed", range(12))
def test_what_crosses_is_cheap_where_bytes_are_not_as_lengths(seed):
    """One in twenty items is short and heavy: none of these needs to leave its node."""
    lengths = np.random.default_rng(seed).lognormal(6, 1, 3840).astype(np.int64) + 1
    heavy = lengths < np.quantile(lengths, 0.05)
    home, topology = np.repeat(np.arange(64), 60), Topology(64, 8)
    ranks = balance(lengths, home, topology, sizes=np.where(heavy, 10**7, lengths))
    gone = topology.node_of_rank[ranks] != topology.node_of_rank[home]
    assert gone.any()
    assert not (gone & heavy).any()


@given(
    st.lists(st.integers(0, 50), min_size=3, max_size=3),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.integers(0, 60),
    st.integers(0, 40),
    st.integers(0, 60),
)
def test_the_least_load_that_makes_no_more_cross_is_found(loads, num_bins, low, width, limit):
    loads, num_bins, one = arrays(loads), arrays(num_bins), np.zeros(3, dtype=np.int64)
    needs = _Needs(one, one, one, loads, num_bins, one, arrays([loads.sum()]))
    found = int(needs.least_load(arrays([low]), arrays([low + width]), arrays([limit]))[0])

    def crosses(load):
        return sum(max(0, own - load * bins) for own, bins in zip(loads.tolist(), num_bins.tolist(), strict=True))

    enough = [load for load in range(low, low + width + 1) if crosses(load) <= limit]
    assert found == min(enough, default=low + width)


@pytest.mark.parametrize(("size", "close"), [(1 << 10, 0), (1 << 14, 1 << 4), (1 << 15, 1 << 7), (1 << 18, 1 << 14)])
def test_many_items_need_not_be_dealt_to_the_last_token(size, close):
    """Bounds are 2^7 times the size; with N items loads within N^2 / 2^45 of them will do, 2^-11 at most."""
    lengths = np.full(size, 1 << 10)
    problem = DispatchProblem(lengths, np.zeros(size, dtype=np.int64), Topology(8), PackedCost())
    aims = Aims.of(SideBySide.of([problem]), [problem], roomy=False)
    assert int(aims.wanted[0] - aims.bound[0]) == int(aims.close[0]) == close


@pytest.mark.parametrize(
    ("slack", "roomy", "least"), [(0.0, False, 0), (0.02, False, 10), (0.0, True, 4), (0.02, True, 4)]
)
def test_nodes_are_filled_to_half_the_slack_or_to_what_gives_room(slack, roomy, least):
    problem = DispatchProblem(np.full(8, 1000), np.arange(8), Topology(8, 4), PackedCost(), slack=slack)
    aims = Aims.of(SideBySide.of([problem]), [problem], roomy=roomy)
    assert (aims.least - aims.bound).tolist() == [least]


def test_an_item_that_goes_where_its_output_is_needed_has_not_moved():
    start, other, none = arrays([0, 0, 0]), arrays([1, -1, 1]), arrays([0, 0])
    needs = _Needs(arrays([5, 7, 9]), start, other, arrays([21, 0]), arrays([1, 1]), none, arrays([21]))
    assert needs.moved(arrays([1, 1, 0])).tolist() == [7]


def test_places_draw_level_by_what_the_gap_is_worth():
    """19 for 10 would do it exactly, but 19 would leave and 10 too; 18 comes home for 10."""
    costs, start, place = arrays([19, 18, 10, 51, 60]), arrays([0, 1, 1, 0, 1]), arrays([0, 0, 1, 0, 1])
    nowhere, none = np.full(5, -1), costs * 0
    level = Level(start, nowhere, costs, none, none, arrays([0, 0]), arrays([1, 1]))
    assert level.draw_level(costs, place, arrays([79, 79])).tolist() == [0, 1, 0, 0, 1]
    assert level.draw_level(costs, place, arrays([88, 70])).tolist() == place.tolist()


def test_places_draw_level_by_two_that_cross_instead_of_one():
    """40 crosses to place 1, 3 too few; 20 and 23 of the same place do it, and no single one does."""
    costs, start, place = arrays([40, 20, 23, 90, 30]), arrays([0, 0, 0, 0, 1]), arrays([1, 0, 0, 0, 1])
    level = Level(start, np.full(5, -1), costs, costs * 0, costs * 0, arrays([0, 0]), arrays([1, 1]))
    assert level.draw_level(costs, place, arrays([130, 73])).tolist() == [0, 1, 1, 0, 1]


def test_problems_side_by_side_keep_each_its_own_slack():
    problems = [replace(drawn(64, 32, seed), slack=slack) for seed, slack in enumerate((0.0, 0.1, 0.0))]
    together = dispatch_local_at_once(problems)
    ratio = [
        each.largest_load(bins) / least_load(each.lengths, 64) for each, bins in zip(problems, together, strict=True)
    ]
    assert ratio[0] < 1.005 < 1.03 < ratio[1] <= 1.1
    assert ratio[2] < 1.005


def test_moves_nothing_where_the_drawn_layout_is_balanced():
    problem = DispatchProblem(arrays([10, 10, 10, 10]), arrays([0, 1, 2, 3]), Topology(4, 2), PackedCost())
    assert DISPATCHERS["local"](problem).tolist() == [0, 1, 2, 3]


def test_moves_only_the_surplus_and_within_the_node():
    lengths = arrays([50, 30, 20, 70, 30, 100, 100])
    problem = DispatchProblem(lengths, arrays([0, 0, 0, 0, 1, 2, 3]), Topology(4, 2), PackedCost())
    assert DISPATCHERS["local"](problem).tolist() in (
        [0, 0, 0, 1, 1, 2, 3],
        [0, 0, 1, 1, 1, 2, 3],
        [1, 0, 1, 0, 1, 2, 3],
    )


def test_cheap_items_leave_first():
    """Text weighs 16 bytes a token, images 7,000: what leaves a node is text as long as there is some."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(200, 600, 512)
    heavy = rng.random(512) < 0.5
    home = np.sort(np.where(rng.random(512) < 0.3, 0, rng.integers(0, 16, 512)))
    problem = DispatchProblem(
        lengths, home, Topology(16, 4), PackedCost(), move_bytes=np.where(heavy, 7000, 16) * lengths
    )
    bins = DISPATCHERS["local"](problem)
    gone = crossing(problem, bins)
    assert problem.largest_load(bins) <= 1.01 * least_load(lengths, 16)
    assert gone.sum() > 20
    assert lengths[gone & heavy].sum() < 0.1 * lengths[gone].sum()


@pytest.mark.parametrize(("raw", "output", "at_target"), [(19, 7, False), (5, 7, True), (7, 7, False)])
def test_items_start_on_the_cheaper_of_home_and_target(raw, output, at_target):
    ones = np.full(8, 10, dtype=np.int64)
    home, target = np.arange(8), (np.arange(8) + 2) % 8
    problem = DispatchProblem(
        ones, home, Topology(8, 2), PackedCost(), move_bytes=ones * raw, target=target, target_bytes=ones * output
    )
    np.testing.assert_array_equal(DISPATCHERS["local"](problem), target if at_target else home)


def test_surplus_goes_to_the_rank_that_needs_the_output():
    """Node 0 holds too much; its items are offered to the node of their sample, which is node 1 for those of rank 0."""
    lengths = np.full(60, 10, dtype=np.int64)
    home = np.repeat([0, 1, 2, 3, 4, 5], [20, 12, 7, 7, 7, 7])
    target = np.where(home == 0, 3, home)
    problem = DispatchProblem(
        lengths, home, Topology(6, 2), PackedCost(), move_bytes=lengths * 9, target=target, target_bytes=lengths * 7
    )
    bins = DISPATCHERS["local"](problem)
    assert problem.largest_load(bins) == 100
    left_node = crossing(problem, bins)
    assert np.isin(bins[left_node], [2, 3]).sum() >= 6
    assert left_node.sum() == 12


def test_micro_steps_are_balanced_without_leaving_the_rank():
    rng = np.random.default_rng(3)
    lengths = rng.lognormal(5, 0.5, 8 * 64).astype(np.int64) + 1
    home = np.repeat(np.arange(32), 16)
    problem = DispatchProblem(lengths, home, Topology(8, 4), PackedCost(), bins_per_rank=4)
    bins = DISPATCHERS["local"](problem)
    assert problem.largest_load(bins) <= 1.01 * least_load(lengths, 32)
    assert (lengths[bins // 4 != home // 4].sum()) < 0.25 * lengths.sum()


def test_padded_batches_stay_within_their_node():
    problem = drawn(32, 24)
    problem = DispatchProblem(problem.lengths, problem.home, problem.topology, PaddedCost(), layout="padded")
    bins = DISPATCHERS["local"](problem)
    assert not crossing(problem, bins).any()
    best = problem.largest_load(DISPATCHERS["binary_search"](problem))
    assert best <= problem.largest_load(bins) < 1.5 * best < problem.largest_load(problem.home)


@pytest.mark.parametrize("bits", [40, 55, 58, 61])
@pytest.mark.parametrize("bins_per_rank", [1, 4])
def test_a_giant_leaves_room_in_62_bits_for_all_bins_of_its_node(bits, bins_per_rank):
    rng, topology = np.random.default_rng(0), Topology(32, 4)
    lengths = rng.integers(1, 1000, 300)
    lengths[0] = 1 << bits
    home = np.sort(rng.integers(0, 32 * bins_per_rank, 300))
    problem = DispatchProblem(lengths, home, topology, PackedCost(), bins_per_rank=bins_per_rank)
    bins = DISPATCHERS["local"](problem)
    assert problem.largest_load(bins) == 1 << bits
    assert (bins != home).mean() < 0.05
    assert crossing(problem, bins).sum() <= 1
