from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orch
from orch.bounds import LowerBounds
from orch.cost import PackedCost, PaddedCost, RectangleFrontCost
from tests.unit.planning import LENGTHS, arrays, topologies


def test_the_names_users_import():
    lengths, home = [9, 1, 1, 1], [0, 0, 1, 1]
    topology = orch.Topology(num_ranks=2, ranks_per_node=1)
    ranks = orch.balance(lengths, home, topology)
    assert ranks.tolist() == [0, 1, 1, 1]
    assert orch.lower_bounds(lengths, home, topology) == LowerBounds(load=9, target=9, inter_node=1)


@settings(max_examples=100, deadline=None)
@given(st.data(), topologies(), st.sampled_from(["none", "greedy", "local", "binary_search"]))
def test_never_worse_than_drawn(data, topology, dispatcher):
    lengths = data.draw(st.lists(LENGTHS, max_size=30))
    rank = st.integers(0, topology.num_ranks - 1)
    home = data.draw(st.lists(rank, min_size=len(lengths), max_size=len(lengths)))
    cost = PaddedCost() if dispatcher == "binary_search" else PackedCost()
    ranks = orch.balance(lengths, home, topology, dispatcher=dispatcher, cost=cost)
    before, after = (cost.loads(arrays(lengths), arrays(where), topology.num_ranks).max() for where in (home, ranks))
    assert after <= before
    assert orch.lower_bounds(lengths, home, topology, cost=cost).load <= after


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 20))
def test_the_bound_of_bytes_between_nodes_is_one(items, slack):
    """Against every layout of two nodes of one rank."""
    lengths, sizes = [length for length, _ in items], [size for _, size in items]
    home, topology = [index % 2 for index in range(len(items))], orch.Topology(2, 1)
    target = orch.lower_bounds(lengths, home, topology).load + slack
    bounds = orch.lower_bounds(lengths, home, topology, sizes=sizes, target=target)
    for ranks in itertools.product((0, 1), repeat=len(items)):
        if np.bincount(ranks, weights=lengths).max() <= target:
            assert bounds.inter_node <= sum(size for size, a, b in zip(sizes, ranks, home, strict=True) if a != b)


@pytest.mark.parametrize("target", [-1, 3.5, "9"])
def test_a_target_is_a_whole_number_of_the_costs_units(target):
    with pytest.raises(ValueError, match="`target` must be a whole number of the cost's units, not negative, but is"):
        orch.lower_bounds([3, 4], [0, 1], orch.Topology(2), target=target)


@pytest.mark.parametrize("dispatcher", ["local", "binary_search"])
@pytest.mark.parametrize(
    "cost", [PaddedCost(), PaddedCost(2.0, 1.0, 0.5), RectangleFrontCost(0.3, 1.0, 1.0, 0.1)], ids=str
)
def test_padded_batches_meet_every_cap_that_can_be_met(cost, dispatcher):
    rng = np.random.default_rng(0)
    for _ in range(60):
        num_ranks, size = int(rng.integers(2, 4)), int(rng.integers(2, 7))
        topology, lengths = orch.Topology(num_ranks, 1), rng.integers(1, 10, size)
        home = rng.integers(num_ranks, size=size)
        layouts = itertools.product(range(num_ranks), repeat=size)
        least = min(_largest_padded(lengths, np.array(ranks)) for ranks in layouts)
        ranks = orch.balance(lengths, home, topology, cost=cost, dispatcher=dispatcher, max_tokens=least)
        assert _largest_padded(lengths, ranks) == least
        if least > 1:
            with pytest.raises(ValueError, match=f"`max_tokens` must be at least {least} for these lengths"):
                orch.balance(lengths, home, topology, cost=cost, dispatcher=dispatcher, max_tokens=least - 1)


def _largest_padded(lengths, ranks):
    return max(int(lengths[ranks == rank].max() * (ranks == rank).sum()) for rank in set(ranks.tolist()))


def test_max_tokens():
    lengths, home, topology = [6, 6, 4, 4], [0, 0, 1, 1], orch.Topology(2)
    ranks = orch.balance(lengths, home, topology, max_tokens=10)
    assert np.bincount(ranks, weights=lengths).tolist() == [10, 10]
    with pytest.raises(ValueError, match="`max_tokens` must be at least 10 for these lengths, but is 9 instead"):
        orch.balance(lengths, home, topology, max_tokens=9)
    with pytest.raises(ValueError, match="`max_tokens` must be at least 12 for these lengths, but is 9 instead"):
        orch.balance(lengths, home, topology, max_tokens=9, cost=PaddedCost(), dispatcher="binary_search")


def test_slack():
    lengths, home = np.random.default_rng(0).integers(1, 900, 400), np.repeat(np.arange(8), 50)
    tight, loose = (orch.balance(lengths, home, orch.Topology(8), slack=slack) for slack in (0, 0.05))
    loads = [np.bincount(ranks, weights=lengths).max() for ranks in (tight, loose)]
    assert lengths.sum() / 8 <= loads[0] < 1.001 * lengths.sum() / 8 < loads[1] <= 1.05 * lengths.sum() / 8
    assert lengths[loose != home].sum() < 0.9 * lengths[tight != home].sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [1, -2]}, "`lengths` must not be negative, but is -2 at 1 instead"),
        ({"lengths": [1.5, 2.0]}, "`lengths` must be integers, but are float64 instead"),
        ({"lengths": [[1, 2]]}, r"`lengths` must be a vector, but has shape \(1, 2\) instead"),
        ({"home": [0]}, r"`home` must be a vector of 2, but has shape \(1,\) instead"),
        ({"home": [0, 5]}, "`home` must be below 2, but reaches 5 instead"),
        ({"sizes": [1]}, r"`sizes` must be a vector of 2, but has shape \(1,\) instead"),
        ({"dispatcher": "magic"}, "`dispatcher` must be one of .*, but is 'magic' instead"),
        ({"max_tokens": float("nan")}, "`max_tokens` must be a whole number of at least 1, but is nan instead"),
        ({"max_tokens": 20.5}, "`max_tokens` must be a whole number of at least 1, but is 20.5 instead"),
        ({"max_tokens": 0}, "`max_tokens` must be a whole number of at least 1, but is 0 instead"),
        ({"slack": -0.01}, "`slack` must be a number from 0 to 1, but is -0.01 instead"),
        ({"slack": float("nan")}, "`slack` must be a number from 0 to 1, but is nan instead"),
        ({"slack": "1%"}, "`slack` must be a number from 0 to 1, but is '1%' instead"),
        ({"cost": PaddedCost(), "dispatcher": "greedy"}, "`cost` must be additive for 'greedy'"),
        ({"dispatcher": "binary_search"}, "`cost` must have a padded part"),
    ],
)
def test_bad_input_raises(changes, message):
    arguments = {"lengths": [1, 2], "home": [0, 1], "topology": orch.Topology(2)} | changes
    with pytest.raises(ValueError, match=message):
        orch.balance(**arguments)
