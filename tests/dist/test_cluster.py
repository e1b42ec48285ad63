"""What crosses the links of an emulated cluster is what the plan says. Bytes are asserted, times only printed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

import orch
from orch.comm.all_to_all import exchange_rows
from orch.comm.groups import NodeGroups, new_cpu_group, new_node_groups
from orch.comm.hosts import discover_topology
from orch.comm.layout import Exchange, Layout, Rearrangement
from orch.comm.topology import Topology
from tests.cluster import Cluster, NotPermittedError, link_bytes
from tests.dist.test_gradients import Groups
from tests.omni import make_sample, small_model

SIZES = {"2x2": (2, 2), "4x1": (1, 1, 1, 1), "1+3": (1, 3)}
ROW_BYTES = 4096


@pytest.fixture(params=SIZES)
def cluster(request) -> Iterator[Cluster]:
    try:
        with Cluster(SIZES[request.param], mbit=400) as built:
            yield built
    except NotPermittedError as error:
        pytest.skip(f"no cluster can be emulated here: {error}")


def _crossed(do, group) -> tuple[int, int, float]:
    """Bytes that left and entered this node while all ranks did something, and the seconds."""
    idle, busy = (_between_barriers(what, group) for what in (lambda: None, do))
    return busy[0] - idle[0], busy[1] - idle[1], busy[2]


def _between_barriers(do, group) -> tuple[int, int, float]:
    dist.barrier(group)
    before = link_bytes()
    dist.barrier(group)
    start = time.perf_counter()
    do()
    seconds = time.perf_counter() - start
    dist.barrier(group)
    after = link_bytes()
    dist.barrier(group)
    return after.sent - before.sent, after.received - before.received, seconds


def _scene(topology: Topology, kind: str, num_items: int = 200) -> tuple[Rearrangement, np.ndarray]:
    random = np.random.default_rng(11)
    source = np.sort(random.integers(0, topology.num_ranks, num_items))
    target = random.integers(0, topology.num_ranks, num_items)
    if kind == "stays inside nodes":
        first, size = topology.first_rank_of_node, topology.num_ranks_of_node
        node = topology.node_of_rank[source]
        target = first[node] + target % size[node]
    layouts = Layout(source, topology.num_ranks), Layout(target, topology.num_ranks)
    return Rearrangement(*layouts), random.integers(1, 12, num_items)


def _planned(rearrangement: Rearrangement, num_rows: np.ndarray, topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that leave and enter each node, item by item."""
    node, out, into = topology.node_of_rank, *np.zeros((2, topology.num_nodes), np.int64)
    for s, t, n in zip(
        rearrangement.source.rank_of_item, rearrangement.target.rank_of_item, num_rows.tolist(), strict=True
    ):
        if node[s] != node[t]:
            out[node[s]] += n * ROW_BYTES
            into[node[t]] += n * ROW_BYTES
    return out, into


@pytest.mark.parametrize("method", ["flat", "node_wise"])
def test_the_link_carries_what_the_plan_says_both_ways(cluster, method):
    topology = Topology(4, node_sizes=cluster.node_sizes)
    scene, inside = (_scene(topology, kind) for kind in ("everywhere", "stays inside nodes"))

    def fn():
        rank, whole = dist.get_rank(), new_cpu_group()
        group, node = new_node_groups(whole, topology), int(topology.node_of_rank[rank])
        figures = []
        for rearrangement, num_rows in (scene, inside):
            exchange = Exchange.of(rearrangement, rank, num_rows, topology)
            rows = torch.ones(len(exchange.send_index), ROW_BYTES // 4, requires_grad=True)
            exchange_rows(rows[:, :1], exchange, group, method=method)  # connects
            results: list[torch.Tensor] = []
            forward = _crossed(lambda: results.append(exchange_rows(rows, exchange, group, method=method)), whole)  # noqa: B023
            backward = _crossed(lambda: results[0].sum().backward(), whole)  # noqa: B023
            figures.append((node, forward, backward))
        return figures

    out, into = _planned(*scene, topology)
    assert min(out) > 400_000
    for everywhere, stayed in cluster.run(fn):
        node, forward, backward = everywhere
        assert forward[0] == pytest.approx(out[node], rel=0.05)
        assert forward[1] == pytest.approx(into[node], rel=0.05)
        assert backward[0] == pytest.approx(into[node], rel=0.05)
        assert backward[1] == pytest.approx(out[node], rel=0.05)
        for direction in stayed[1:]:
            assert max(direction[:2]) < 0.02 * out[node]


def _samples(config, rank: int) -> list[dict]:
    """Much media on some ranks, little on others."""
    grids = [(32, 32 + 4 * i) for i in range(3)] if rank % 2 else [(4, 4)]
    frames = [200, 300] if rank < 2 else [20]
    return [make_sample(config, 10 * rank + i, grids=grids, frames=frames) for i in range(3)]


@pytest.mark.parametrize(
    ("cluster", "exchange"), [("2x2", "node_wise"), ("4x1", "flat"), ("1+3", "node_wise")], indirect=["cluster"]
)
def test_a_step_sends_what_the_report_says(cluster, exchange):
    def fn():
        model = small_model(torch.float32)
        loader = orch.orchestrate(
            Groups([_samples(model.config, dist.get_rank())] * 2),
            model,
            exchange=exchange,
            balance="post",
            dispatcher="greedy",
            prefetch=0,
            timeout_s=50,
        )
        whole, batches = loader.setup.integers, iter(loader)
        _train(model, next(batches))  # connects
        steps: list[object] = []
        prepared = _crossed(lambda: steps.append(next(batches)), whole)
        trained = _crossed(lambda: _train(model, steps[0]), whole)
        rows = sum(_row_bytes(stage, loader.setup) for stage in steps[0]["orch"].stages.values())
        moved = loader.report.steps[-1].moved.inter_node
        node = int(loader.setup.topology.node_of_rank[dist.get_rank()])
        return (
            node,
            loader.setup.topology,
            prepared[0],
            trained[0],
            rows,
            moved,
            isinstance(loader.setup.rows, NodeGroups),
        )

    results = cluster.run(fn, timeout_s=120)
    nodes = {result[0]: result for result in results}
    rows, moved = sum(result[4] for result in results), results[0][5]
    assert {result[1] for result in results} == {Topology.of_node_sizes(cluster.node_sizes)}
    assert rows > 200_000
    assert sum(result[2] for result in nodes.values()) == pytest.approx(moved - rows, rel=0.05)
    assert sum(result[3] for result in nodes.values()) == pytest.approx(2 * rows, rel=0.05)
    assert {result[6] for result in results} == {exchange == "node_wise"}


def _train(model, batch) -> None:
    model(**batch).loss.backward()
    model.zero_grad()


def _row_bytes(stage, setup) -> int:
    """Bytes of encoder output that this rank sends to other nodes in the forward."""
    node = setup.topology.node_of_rank
    away = stage.exchange.send_splits[node != node[setup.rank]].sum()
    return int(away) * setup.config.stage("vision").row_bytes


def test_hosts_are_found_by_their_names(cluster):
    def fn():
        assert socket.gethostname().startswith("node")
        return discover_topology()

    assert set(cluster.run(fn)) == {Topology.of_node_sizes(cluster.node_sizes)}


def test_the_link_is_no_faster_than_it_was_made(cluster):
    topology, burst = Topology(4, node_sizes=cluster.node_sizes), 256 * 1024
    rearrangement, num_rows = _scene(topology, "everywhere", 1000)

    def fn():
        rank, group = dist.get_rank(), new_cpu_group()
        exchange = Exchange.of(rearrangement, rank, num_rows)
        rows = torch.ones(len(exchange.send_index), ROW_BYTES // 4)
        return _crossed(lambda: exchange_rows(rows, exchange, group), group)[2]

    busiest = max(map(max, _planned(rearrangement, num_rows, topology)))
    assert max(cluster.run(fn)) > 0.9 * 8e-6 * (busiest - burst) / cluster.mbit


def test_nothing_is_left_behind(tmp_path):
    import subprocess

    try:
        with Cluster((1, 1)) as built:
            names = built.nodes
            with pytest.raises(RuntimeError, match="a rank fails"):
                built.run(_fail)
    except NotPermittedError as error:
        pytest.skip(f"no cluster can be emulated here: {error}")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not [name for name in names if name in left]


def _fail() -> None:
    raise ValueError("a rank fails")


def test_says_why_it_is_not_permitted(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotPermittedError, match="there is no `ip`"), Cluster((1, 1)):
        pass
