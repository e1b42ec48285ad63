"""Placement against brute force and a bound; legal, deterministic and never worse than identity."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from orch.comm.placement import METHODS, Traffic, place_batches
from orch.comm.placement_ilp import solve_ilp
from orch.comm.placement_search import _SwapSearch, assign_nodes
from orch.comm.topology import Topology
from tests.unit.planning import topologies


def _largest_volume(rank_of_batch, source, batch, num_bytes, topology) -> int:
    """The plain twin: item by item."""
    sent, received = [0] * topology.num_ranks, [0] * topology.num_ranks
    for origin, number, size in zip(source.tolist(), batch.tolist(), num_bytes.tolist(), strict=True):
        host = int(rank_of_batch[number])
        if topology.node_of_rank[origin] != topology.node_of_rank[host]:
            sent[origin] += size
            received[host] += size
    return max(sent + received)


def _instance(num_ranks: int, per_rank: int, seed: int):
    """Items of skewed sizes, dealt to batches longest first."""
    random = np.random.default_rng(seed)
    num_bytes = np.minimum(np.exp(random.normal(5, 1, num_ranks * per_rank)).astype(np.int64) + 1, 8192) * 100
    load, batch = np.zeros(num_ranks), np.empty(len(num_bytes), np.int64)
    for item in np.argsort(-num_bytes, kind="stable"):
        batch[item] = load.argmin()
        load[batch[item]] += num_bytes[item]
    return np.repeat(np.arange(num_ranks), per_rank), batch, num_bytes


@st.composite
def instances(draw: st.DrawFn, max_ranks: int = 9):
    topology = draw(topologies(max_ranks))
    num_ranks = topology.num_ranks
    num_entries = draw(st.integers(0, 20))
    ranks = st.lists(st.integers(0, num_ranks - 1), min_size=num_entries, max_size=num_entries)
    sizes = st.lists(st.integers(0, 10**9), min_size=num_entries, max_size=num_entries)
    source, batch, num_bytes = (np.array(draw(values), np.int64) for values in (ranks, ranks, sizes))
    return (source, batch, num_bytes), topology


@settings(max_examples=60, deadline=None)
@given(instances(), st.sampled_from(METHODS))
def test_is_a_permutation_deterministic_and_never_worse_than_identity(instance, method):
    entries, topology = instance
    placed = place_batches(*entries, topology, method=method)
    assert placed.dtype == np.int64
    assert sorted(placed.tolist()) == list(range(topology.num_ranks))
    assert np.array_equal(placed, place_batches(*entries, topology, method=method))
    identity = np.arange(topology.num_ranks)
    assert _largest_volume(placed, *entries, topology) <= _largest_volume(identity, *entries, topology)


@settings(max_examples=40, deadline=None)
@given(instances(max_ranks=6))
def test_ilp_by_itself_equals_brute_force(instance):
    entries, topology = instance
    traffic = Traffic.of(*entries, topology)
    orders = itertools.permutations(topology.node_of_rank.tolist())
    least = min(traffic.largest_volume(np.array(nodes)) for nodes in set(orders))
    worst = topology.node_of_rank[::-1].copy()
    assert least <= traffic.largest_volume(solve_ilp(traffic, worst)) <= least + _tolerance(traffic)


@settings(max_examples=30, deadline=None)
@given(instances(max_ranks=6))
def test_placement_equals_brute_force(instance):
    entries, topology = instance
    least = min(
        _largest_volume(np.array(order), *entries, topology)
        for order in itertools.permutations(range(topology.num_ranks))
    )
    placed = _largest_volume(place_batches(*entries, topology, method="ilp"), *entries, topology)
    assert least <= placed <= least + _tolerance(Traffic.of(*entries, topology))


def _tolerance(traffic: Traffic) -> float:
    """The solver's tolerance of 1e-6, in bytes."""
    return 3e-6 * max(traffic.of_batch.max(), traffic.of_source.max())


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(6, 2), (7, 3), (7, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_realistic_small_worlds_against_brute_force(num_ranks, ranks_per_node, seed):
    entries, topology = _instance(num_ranks, 6, seed), Topology(num_ranks, ranks_per_node)
    traffic = Traffic.of(*entries, topology)
    orders = set(itertools.permutations(topology.node_of_rank.tolist()))
    least = min(traffic.largest_volume(np.array(nodes)) for nodes in orders)
    exact = place_batches(*entries, topology, method="ilp")
    searched = place_batches(*entries, topology, method="assignment")
    assert _largest_volume(exact, *entries, topology) == least
    assert _largest_volume(searched, *entries, topology) <= 1.15 * least


@pytest.mark.parametrize("topology", [Topology(22, 4), Topology(22, node_sizes=(4, 1, 8, 5, 4))])
@pytest.mark.parametrize("seed", range(4))
def test_every_swap_lowers_the_largest_volume_and_keeps_the_books(seed, topology):
    traffic = Traffic.of(*_instance(22, 8, seed), topology)
    search = _SwapSearch(traffic, topology.node_of_rank)
    before = traffic.largest_volume(search.node_of_batch)
    num_swaps = 0
    while search.swap_once():
        num_swaps += 1
        assert np.array_equal(search._sent[:22], traffic.sent(search.node_of_batch))
        assert np.array_equal(search._received, traffic.received(search.node_of_batch))
        assert np.array_equal(search._local, search._bytes_in_own_node())
        assert traffic.largest_volume(search.node_of_batch) <= before
        assert num_swaps < 500
    assert num_swaps > 3
    assert traffic.largest_volume(search.node_of_batch) < 0.9 * before


@given(instances())
def test_traffic_equals_the_plain_twin(instance):
    entries, topology = instance
    traffic = Traffic.of(*entries, topology)
    order = np.roll(np.arange(topology.num_ranks), 1)
    assert traffic.largest_volume(topology.node_of_rank[order]) == _largest_volume(order, *entries, topology)


@pytest.mark.parametrize("seed", range(3))
def test_search_is_near_the_exact_answer_and_above_the_linear_bound(seed):
    entries, topology = _instance(32, 16, seed), Topology(32, 8)
    bound = _linear_bound(Traffic.of(*entries, topology))
    exact, searched, identity = (
        _largest_volume(place_batches(*entries, topology, method=method), *entries, topology)
        for method in ("ilp", "assignment", "identity")
    )
    assert bound * (1 - 1e-6) <= exact <= searched <= 1.05 * exact
    assert exact < 0.7 * identity


def _linear_bound(traffic: Traffic) -> float:
    """The linear relaxation: fractions of batches on nodes."""
    num_ranks, num_nodes = traffic.from_node.shape
    unit, nodes = float(traffic.of_batch.max()), traffic.topology.node_of_rank
    upper, limit = np.zeros((2 * num_ranks, num_ranks * num_nodes + 1)), np.zeros(2 * num_ranks)
    upper[:, -1] = -1
    pairs = traffic.pairs.toarray()
    for rank in range(num_ranks):
        places = slice(rank * num_nodes, (rank + 1) * num_nodes)
        upper[rank, places] = (traffic.of_batch[rank] - traffic.from_node[rank]) / unit
        upper[num_ranks + rank, nodes[rank] : -1 : num_nodes] = -pairs[rank] / unit
        limit[num_ranks + rank] = -traffic.of_source[rank] / unit
    once = np.kron(np.eye(num_ranks), np.ones(num_nodes))
    full = np.kron(np.ones(num_ranks), np.eye(num_nodes))
    equal = np.hstack([np.vstack([once, full]), np.zeros((num_ranks + num_nodes, 1))])
    totals = np.concatenate([np.ones(num_ranks), traffic.topology.num_ranks_of_node])
    cost = np.zeros(upper.shape[1])
    cost[-1] = 1
    return linprog(cost, upper, limit, equal, totals, bounds=(0, None)).fun * unit


def test_batches_that_lie_together_are_put_where_they_lie():
    """Batch i lies on rank `where[i]` alone: everything can stay."""
    where = np.random.default_rng(0).permutation(24)
    batch = np.arange(24)
    for method in ("auto", "ilp", "assignment"):
        placed = place_batches(where, batch, np.full(24, 10), Topology(24, 8), method=method)
        assert np.array_equal(placed, where), method


def test_inside_a_node_a_batch_goes_where_most_of_it_is():
    source, batch = np.array([0, 1, 1, 2]), np.array([1, 1, 0, 2])
    placed = place_batches(source, batch, np.array([9, 1, 5, 1]), Topology(3))
    assert placed.tolist() == [1, 0, 2]


def test_assignment_keeps_as_many_bytes_as_an_exact_one():
    from scipy.optimize import linear_sum_assignment

    traffic = Traffic.of(*_instance(64, 16, 1), Topology(64, 8))
    columns = np.repeat(np.arange(8), 8)
    rows, exact = linear_sum_assignment(traffic.from_node[:, columns], maximize=True)
    most = traffic.from_node[rows, columns[exact]].sum()
    kept = traffic.from_node[np.arange(64), assign_nodes(traffic)].sum()
    assert 0.99 * most <= kept <= most


def test_2560_ranks_in_a_moment():
    entries, topology = _instance(2560, 16, 0), Topology(2560, 8)
    started = time.process_time()
    placed = place_batches(*entries, topology)
    assert time.process_time() - started < 5
    traffic = Traffic.of(*entries, topology)
    identity = traffic.largest_volume(topology.node_of_rank)
    assert traffic.largest_volume(topology.node_of_rank[placed]) < 0.5 * identity


def test_partly_filled_last_node():
    topology = Topology(11, 4)
    entries = _instance(11, 8, 2)
    for method in METHODS:
        placed = place_batches(*entries, topology, method=method)
        assert sorted(placed.tolist()) == list(range(11)), method


def test_the_solver_prints_nothing():
    code = (
        "import numpy as np; from orch.comm.placement import place_batches; from orch.comm.topology import Topology\n"
        "a = np.arange(4); print(place_batches(a, a[::-1], a + 1, Topology(4, 2), method='ilp').tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("[3, 2, 1, 0]\n", "")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (([0], [0, 1], [1, 1]), "must be vectors of one length"),
        (([4], [0], [1]), r"`source` must be in \[0, 4\), but spans \[4, 4\] instead"),
        (([0], [-1], [1]), r"`batch` must be in \[0, 4\), but spans \[-1, -1\] instead"),
        (([0], [1], [-5]), "`num_bytes` must not be negative, but goes down to -5 instead"),
    ],
)
def test_refuses_entries_that_do_not_fit(entries, message):
    with pytest.raises(ValueError, match=message):
        place_batches(*(np.array(values) for values in entries), Topology(4, 2))


def test_refuses_an_unknown_method():
    empty = np.empty(0, np.int64)
    with pytest.raises(ValueError, match="`method` must be one of"):
        place_batches(empty, empty, empty, Topology(2, 1), method="magic")
