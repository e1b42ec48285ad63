"""The node-wise exchange with all ranks played in one process, and the prediction of which method is fastest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.comm.all_to_all import resolve_method
from orch.comm.layout import Exchange, Layout, Rearrangement
from orch.comm.node_wise import in_order_of_sources, take_blocks
from orch.comm.predict import Hop, Loads, choose_method, gateway_of, predict_seconds
from orch.comm.topology import Topology
from orch.comm.two_hops import TwoHops
from tests.unit.planning import topologies


@st.composite
def scenes(draw: st.DrawFn):
    topology = draw(topologies(9))
    num_items = draw(st.integers(0, 20))
    ranks = st.lists(st.integers(0, topology.num_ranks - 1), min_size=num_items, max_size=num_items)
    rows = draw(st.lists(st.integers(0, 4), min_size=num_items, max_size=num_items))
    source, target = (Layout(np.array(draw(ranks), np.int64), topology.num_ranks) for _ in range(2))
    return Rearrangement(source, target), np.array(rows, np.int64), topology


def outboxes(exchanges):
    """The send buffer of every rank: rows that say from where to where they go, and their number in the block."""
    return [
        torch.tensor(
            [(rank, t, n) for t, count in enumerate(e.send_splits.tolist()) for n in range(count)], dtype=torch.int64
        ).reshape(-1, 3)
        for rank, e in enumerate(exchanges)
    ]


def flat(exchanges, buffers):
    """The plain twin: what each rank receives, by source."""
    return [
        torch.cat([rows[rows[:, 1] == rank] for rows in buffers]) if len(buffers) else None
        for rank in range(len(exchanges))
    ]


def all_to_all(buffers, sends, recvs):
    """One collective of some ranks, played; sizes must agree on both sides."""
    pieces = [torch.split(buffer, send.tolist()) for buffer, send in zip(buffers, sends, strict=True)]
    results = []
    for rank, recv in enumerate(recvs):
        arriving = [piece[rank] for piece in pieces]
        assert [len(piece) for piece in arriving] == recv.tolist()
        results.append(torch.cat(arriving))
    return results


def node_wise(exchanges, buffers, topology):
    hops = [TwoHops.of(exchange) for exchange in exchanges]
    leaving = [take_blocks(rows, h.send_sizes, h.send_blocks) for rows, h in zip(buffers, hops, strict=True)]
    arrived = []
    for node in range(topology.num_nodes):
        own = topology.ranks_of_node(node).tolist()
        arrived += all_to_all(
            [leaving[r] for r in own], [hops[r].inside_send for r in own], [hops[r].inside_recv for r in own]
        )
    crossing = [take_blocks(rows, h.collected_sizes, h.across_blocks) for rows, h in zip(arrived, hops, strict=True)]
    crossed = all_to_all(crossing, [h.across_send for h in hops], [h.across_recv for h in hops])
    staying = [take_blocks(rows, h.collected_sizes, h.staying_blocks) for rows, h in zip(arrived, hops, strict=True)]
    return [in_order_of_sources(s, c, h) for s, c, h in zip(staying, crossed, hops, strict=True)], hops


@settings(max_examples=150, deadline=None)
@given(scenes(), st.booleans())
def test_two_hops_equal_the_flat_exchange_and_no_row_crosses_twice(scene, back):
    rearrangement, num_rows, topology = scene
    exchanges = [Exchange.of(rearrangement, rank, num_rows, topology) for rank in range(topology.num_ranks)]
    if back:
        exchanges = [exchange.inverse() for exchange in exchanges]
    buffers = outboxes(exchanges)
    results, hops = node_wise(exchanges, buffers, topology)
    for result, expected in zip(results, flat(exchanges, buffers), strict=True):
        assert torch.equal(result, expected)
    node = topology.node_of_rank
    crossing = sum(int((node[rows[:, 0]] != node[rows[:, 1]]).sum()) for rows in buffers)
    assert sum(int(h.across_send.sum()) for h in hops) == crossing
    for rank, h in enumerate(hops):
        assert not h.across_send[node == node[rank]].any()
        for other in range(topology.num_nodes):
            assert np.count_nonzero(h.across_recv[node == other]) <= 1
        if topology.is_even:
            assert not h.across_send[topology.local_rank != topology.local_rank[rank]].any()


@given(scenes())
def test_all_ranks_predict_alike_and_the_way_back_is_the_inverse(scene):
    rearrangement, num_rows, topology = scene
    views = [Exchange.of(rearrangement, rank, num_rows, topology).nodes for rank in range(topology.num_ranks)]
    backs = [Exchange.of(rearrangement.inverse(), rank, num_rows, topology).nodes for rank in range(len(views))]
    for view, back in zip(views, backs, strict=True):
        assert view.loads == views[0].loads == back.loads_back
        assert view.inverse().loads == back.loads
        assert np.array_equal(view.inverse().sent, back.sent)
        assert np.array_equal(view.sent, back.received)


@given(scenes())
def test_loads_equal_a_plain_count(scene):
    rearrangement, num_rows, topology = scene
    source, target = rearrangement.source.rank_of_item, rearrangement.target.rank_of_item
    num_ranks, node = topology.num_ranks, topology.node_of_rank.tolist()
    rows, peers = (
        np.zeros((2, 2, num_ranks), np.int64),
        [[[set() for _ in range(num_ranks)] for _ in "ab"] for _ in "ab"],
    )
    for s, t, n in zip(source.tolist(), target.tolist(), num_rows.tolist(), strict=True):
        if s != t and n:
            crosses = int(node[s] != node[t])
            for way, (one, other) in enumerate([(s, t), (t, s)]):
                rows[crosses, way, one] += n
                peers[crosses][way][one].add(other)
    most = [max(len(names) for way in peers[crosses] for names in way) for crosses in (0, 1)]
    expected = Hop(int(rows[0].max()), int(rows[1].max()), *most)
    assert Hop.of(source, target, num_rows, topology) == expected
    assert Loads.of(source, target, num_rows, topology).hops["flat"] == (expected,)


def test_gateways_are_in_the_senders_node_and_reach_every_target():
    topology = Topology(6, node_sizes=(3, 1, 2))
    pairs = np.array(list(itertools.product(range(6), range(6)))).T
    gateway = gateway_of(*pairs, topology)
    assert np.array_equal(topology.node_of_rank[gateway], topology.node_of_rank[pairs[0]])
    chosen = {(int(s), int(t)): int(g) for s, t, g in zip(*pairs, gateway, strict=True)}
    assert chosen[0, 2] == 2
    assert [chosen[0, t] for t in (3, 4, 5)] == [0, 0, 1]
    assert [chosen[3, t] for t in (0, 1, 2, 4, 5)] == [3] * 5
    assert [chosen[4, t] for t in (0, 1, 2)] == [4, 5, 4]


def loads_of(pairs, topology):
    source, target, rows = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    return Loads.of(source, target, rows, topology)


def test_seconds_by_hand():
    topology = Topology(4, 2, intra_node_gbps=80, inter_node_gbps=8, intra_node_us=1, inter_node_us=100)
    loads = loads_of([(0, 2, 500), (0, 3, 500), (1, 0, 200)], topology)
    seconds = predict_seconds(loads, 1000, topology)
    assert seconds["flat"] == pytest.approx(1e-3 + 200e-6)  # 1000 rows of 1 kB at 1 GB/s, two messages across
    hops = 1e-6 + 500 * 1e3 / 1e10, 0.5e-3 + 100e-6  # half of them by rank 1, which takes half of the time across
    assert seconds["node_wise"] == pytest.approx(sum(hops))
    assert seconds["all_gather"] == pytest.approx(1000 * 2 / 2 * 1e3 / 1e9 + 300e-6)


def test_the_choice_follows_speeds_and_sizes():
    topology = Topology(8, 4, intra_node_gbps=3600, inter_node_gbps=400)
    everyone = loads_of([(s, t, 10) for s in range(8) for t in range(8) if s != t], topology)
    assert choose_method(everyone, 8, topology) == "node_wise"  # fewer messages
    assert choose_method(everyone, 10_000_000, topology) == "flat"  # bytes alone: the first hop would be wasted
    slow = Topology(8, 4, intra_node_gbps=1, inter_node_gbps=400, intra_node_us=0, inter_node_us=0)
    assert choose_method(everyone, 8, slow) == "flat"
    one_sender = loads_of([(0, t, 10) for t in range(4, 8)], topology)
    assert choose_method(one_sender, 10_000_000, topology) == "node_wise"  # four links to the outside instead of one
    inside = loads_of([(0, 1, 10)], topology)
    assert choose_method(inside, 8, topology) == "flat"
    assert choose_method(Loads.of(*[np.empty(0, np.int64)] * 3, topology), 8, topology) == "flat"


def test_without_topology_or_hops_auto_is_flat():
    source, target = Layout(np.array([0, 0, 0]), 4), Layout(np.array([1, 2, 3]), 4)
    rows = np.array([1, 1, 1])
    assert resolve_method(Exchange.of(Rearrangement(source, target), 0, rows), None, 8) == "flat"
    assert resolve_method(Exchange.of(Rearrangement(source, target), 0, rows, Topology(4, 2)), None, 8) == "flat"
    with pytest.raises(ValueError, match="`topology` must have 4 ranks, but has 5"):
        Exchange.of(Rearrangement(source, target), 0, rows, Topology(5))
