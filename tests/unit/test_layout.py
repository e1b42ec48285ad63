"""Layouts and exchanges: all ranks played in one process, held to a plain twin that moves item by item."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orch.comm.layout import Exchange, Layout, Rearrangement
from orch.comm.topology import Topology


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Rearrangement, np.ndarray]:
    num_ranks = draw(st.integers(1, 5))
    num_items = draw(st.integers(0, 14))
    ranks = st.lists(st.integers(0, num_ranks - 1), min_size=num_items, max_size=num_items)
    rows = draw(st.lists(st.integers(0, 4), min_size=num_items, max_size=num_items))
    source, target = (Layout(np.array(draw(ranks), np.int64), num_ranks) for _ in range(2))
    return Rearrangement(source, target), np.array(rows, np.int64)


def _plain_rows(layout: Layout, num_rows: np.ndarray, rank: int) -> list[tuple[int, int]]:
    """What a rank holds: (item, row of the item), item by item in ascending id."""
    return [
        (item, row) for item in range(len(layout)) if layout.rank_of_item[item] == rank for row in range(num_rows[item])
    ]


def _play(exchanges: list[Exchange], rows: list[list[object]]) -> list[list[object]]:
    """Carries out the exchanges of all ranks in one process."""
    num_ranks = len(exchanges)
    outboxes = []
    for exchange, mine in zip(exchanges, rows, strict=True):
        ordered = [mine[index] for index in exchange.send_index]
        ends = np.cumsum(exchange.send_splits)
        outboxes.append([ordered[end - n : end] for end, n in zip(ends, exchange.send_splits, strict=True)])
    results = []
    for rank, exchange in enumerate(exchanges):
        pieces = [outboxes[source][rank] for source in range(num_ranks)]
        assert [len(piece) for piece in pieces] == exchange.recv_splits.tolist()
        arrived = [row for piece in pieces for row in piece]
        results.append([arrived[index] for index in exchange.recv_index])
    return results


def _exchanges(rearrangement: Rearrangement, num_rows: np.ndarray) -> list[Exchange]:
    return [Exchange.of(rearrangement, rank, num_rows) for rank in range(rearrangement.source.num_ranks)]


@given(scenes())
def test_exchange_equals_the_plain_twin_and_its_inverse_leads_back(scene):
    rearrangement, num_rows = scene
    ranks = range(rearrangement.source.num_ranks)
    before = [_plain_rows(rearrangement.source, num_rows, rank) for rank in ranks]
    after = [_plain_rows(rearrangement.target, num_rows, rank) for rank in ranks]
    exchanges = _exchanges(rearrangement, num_rows)
    assert _play(exchanges, before) == after
    assert _play([exchange.inverse() for exchange in exchanges], after) == before


@given(scenes())
def test_inverse_exchange_is_the_exchange_of_the_inverse(scene):
    rearrangement, num_rows = scene
    ranks = range(rearrangement.source.num_ranks)
    rows = [_plain_rows(rearrangement.target, num_rows, rank) for rank in ranks]
    planned = _exchanges(rearrangement.inverse(), num_rows)
    derived = [exchange.inverse() for exchange in _exchanges(rearrangement, num_rows)]
    assert _play(planned, rows) == _play(derived, rows)
    for one, other in zip(planned, derived, strict=True):
        for name in ("send_splits", "recv_splits", "send_starts", "recv_starts", "most_sent", "most_received"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


@given(scenes())
def test_starts_say_where_a_piece_lies_on_the_other_side(scene):
    rearrangement, num_rows = scene
    exchanges = _exchanges(rearrangement, num_rows)
    for rank, exchange in enumerate(exchanges):
        for peer, other in enumerate(exchanges):
            assert exchange.recv_starts[peer] == other.send_splits[:rank].sum()
            assert exchange.send_starts[peer] == other.recv_splits[:rank].sum()
        assert exchange.most_sent == max(other.send_splits.sum() for other in exchanges)
        assert exchange.most_received == max(other.recv_splits.sum() for other in exchanges)


@given(scenes(), st.data())
def test_composition_is_one_after_the_other(scene, data):
    first, num_rows = scene
    num_items, num_ranks = len(first.source), first.source.num_ranks
    ranks = st.lists(st.integers(0, num_ranks - 1), min_size=num_items, max_size=num_items)
    second = Rearrangement(first.target, Layout(np.array(data.draw(ranks), np.int64), num_ranks))
    rows = [_plain_rows(first.source, num_rows, rank) for rank in range(num_ranks)]
    step_by_step = _play(_exchanges(second, num_rows), _play(_exchanges(first, num_rows), rows))
    assert _play(_exchanges(first.then(second), num_rows), rows) == step_by_step


@given(scenes(), st.integers(1, 3))
def test_volumes_equal_a_plain_count(scene, ranks_per_node):
    rearrangement, sizes = scene
    topology = Topology(rearrangement.source.num_ranks, ranks_per_node)
    expected: dict[tuple[int, int], int] = {}
    crossing = 0
    for item, size in enumerate(sizes.tolist()):
        pair = int(rearrangement.source.rank_of_item[item]), int(rearrangement.target.rank_of_item[item])
        if pair[0] != pair[1]:
            expected[pair] = expected.get(pair, 0) + size
            crossing += size * (pair[0] // topology.node_size != pair[1] // topology.node_size)
    volumes = rearrangement.volumes(sizes)
    counted = zip(volumes.source.tolist(), volumes.target.tolist(), volumes.size.tolist(), strict=True)
    assert {(source, target): size for source, target, size in counted} == expected
    assert volumes.intra_and_inter_node(topology) == (sum(expected.values()) - crossing, crossing)


def test_layout_counts_and_selects():
    layout = Layout(np.array([2, 0, 2]), 4)
    assert layout.num_items_per_rank().tolist() == [1, 0, 2, 0]
    assert layout.items_on(2).tolist() == [0, 2]
    assert layout.select(np.array([2, 1])).rank_of_item.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[0]], r"`rank_of_item` must be a vector, but has shape \(1, 1\) instead"),
        ([0, 2], r"`rank_of_item` must be in \[0, 2\), but spans \[0, 2\] instead"),
        ([-1, 0], r"but spans \[-1, 0\] instead"),
    ],
)
def test_layout_refuses_ranks_that_do_not_exist(ranks, message):
    with pytest.raises(ValueError, match=message):
        Layout(np.array(ranks), 2)


def test_rearrangements_must_fit():
    one, other = Layout(np.array([0, 1]), 2), Layout(np.array([1, 1]), 2)
    with pytest.raises(ValueError, match="`target` must lay out the items and ranks of `source`"):
        Rearrangement(one, Layout(np.array([0]), 2))
    with pytest.raises(ValueError, match="`following` must start at the target"):
        Rearrangement(one, other).then(Rearrangement(one, other))


@pytest.mark.parametrize(
    ("topology", "nodes", "sizes"),
    [
        (Topology(5, 2), [0, 0, 1, 1, 2], [2, 2, 1]),
        (Topology(3), [0, 0, 0], [3]),
        (Topology(2, 8), [0, 0], [2]),
    ],
)
def test_topology_numbers_nodes(topology, nodes, sizes):
    assert topology.node_of_rank.tolist() == nodes
    assert topology.num_ranks_of_node.tolist() == sizes
    assert topology.num_nodes == len(sizes)


@pytest.mark.parametrize("wrong", [{"num_ranks": 0}, {"num_ranks": 2, "ranks_per_node": 0}])
def test_topology_refuses_counts_below_one(wrong):
    with pytest.raises(ValueError, match="must be a whole number of at least 1, but is 0 instead"):
        Topology(**wrong)


def test_topology_refuses_a_speed_of_zero():
    with pytest.raises(ValueError, match="`inter_node_gbps` must be above 0"):
        Topology(2, inter_node_gbps=0)
