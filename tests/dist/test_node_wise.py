"""The node-wise exchange on ranks: nodes of any sizes, gradients, how it is chosen, subgroups, and under the model."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist

import orch
from orch import odb
from orch.comm.all_to_all import exchange_many, exchange_rows, resolve_method
from orch.comm.collective_log import CollectiveLog
from orch.comm.groups import destroy_group, new_cpu_group, new_node_groups
from orch.comm.hosts import check_topology, discover_topology, gather_hosts
from orch.comm.layout import Exchange, Layout, Rearrangement
from orch.comm.parcels import exchange_parcels
from orch.comm.topology import Topology
from tests.dist.test_all_to_all import KINDS, _data, _loss_weights, _rows_on, _scene
from tests.dist.test_gradients import STEPS, Groups, draw
from tests.omni import largest_error, reference_gradients, small_model
from tests.ranks import run_ranks

TOPOLOGIES = [
    Topology(4, 2),
    Topology(4, node_sizes=(1, 3)),
    Topology(4, 1),
    Topology(4),
    Topology(6, 2),
    Topology(6, node_sizes=(3, 1, 2)),
    Topology(6, 4),
]
AT_HOME = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: "-".join(map(str, t.num_ranks_of_node)))


@AT_HOME
def test_rows_and_gradients_equal_those_of_one_process(topology):
    scenes, shape = [_scene(topology.num_ranks, kind) for kind in KINDS], (3,)

    def fn():
        rank, group = dist.get_rank(), new_node_groups(new_cpu_group(), topology)
        for rearrangement, num_rows in scenes:
            total = int(num_rows.sum())
            exchange = Exchange.of(rearrangement, rank, num_rows, topology)
            mine = _rows_on(rearrangement.source, num_rows, rank)
            arrived = _rows_on(rearrangement.target, num_rows, rank)
            whole, weights = _data(total, shape, torch.float64), _loss_weights(total, shape)
            rows = whole[mine].requires_grad_()
            number = torch.arange(total, dtype=torch.int64)
            result, numbers = exchange_many([rows, number[mine]], exchange, group, method="node_wise")
            assert torch.equal(result, whole[arrived])
            assert torch.equal(numbers, number[arrived])
            (result.pow(3) * weights[arrived]).sum().backward()
            assert torch.equal(rows.grad, (3 * whole.pow(2) * weights)[mine])
        destroy_group(group)
        assert dist.get_rank(group.whole) == rank  # still there, as it was not made with the hops

    run_ranks(fn, topology.num_ranks)


def test_both_ways_take_two_hops_and_nothing_crosses_that_need_not():
    topology = Topology(6, node_sizes=(3, 1, 2))
    rearrangement, num_rows = _scene(6, "uneven")
    node = topology.node_of_rank
    source, target = node[rearrangement.source.rank_of_item], node[rearrangement.target.rank_of_item]

    def fn():
        group, rank = new_node_groups(new_cpu_group(), topology), dist.get_rank()
        exchange = Exchange.of(rearrangement, rank, num_rows, topology)
        rows = torch.ones(len(exchange.send_index), 2, dtype=torch.float64, requires_grad=True)
        with CollectiveLog() as log:
            exchange_rows(rows, exchange, group, method="node_wise", label="vision").sum().backward()
        return [(entry.label, entry.num_bytes) for entry in log.entries]

    logs = run_ranks(fn, 6)
    labels = ["vision.inside", "vision", "vision.backward.inside", "vision.backward"]
    for rank, log in enumerate(logs):
        assert [label for label, _ in log] == (labels if rank != 3 else labels[1::2])  # rank 3 is alone on its node
    crossing = 16 * int(num_rows[source != target].sum())
    assert crossing > 0
    assert sum(dict(log)["vision"] for log in logs) == crossing
    assert sum(dict(log)["vision.backward"] for log in logs) == crossing


def test_second_derivatives():
    topology = Topology(4, node_sizes=(3, 1))
    rearrangement, num_rows = _scene(4, "uneven")

    def fn():
        group = new_node_groups(new_cpu_group(), topology)
        exchange = Exchange.of(rearrangement, dist.get_rank(), num_rows, topology)
        rows = torch.randn(len(exchange.send_index), 2, dtype=torch.float64, requires_grad=True)
        result = exchange_rows(rows, exchange, group, method="node_wise")
        (grad,) = torch.autograd.grad(result.pow(3).sum(), rows, create_graph=True)
        assert torch.allclose(grad, 3 * rows**2)
        (second,) = torch.autograd.grad(grad.sum(), rows)
        assert torch.allclose(second, 6 * rows)

    run_ranks(fn, 4)


@pytest.mark.parametrize("topology", [Topology(4, 2), Topology(4, node_sizes=(1, 3))])
def test_parcels_travel_by_every_method(topology):
    rearrangement, num_bytes = _scene(4, "uneven")

    def fn():
        rank, group = dist.get_rank(), new_node_groups(new_cpu_group(), topology)
        mine = rearrangement.source.items_on(rank)
        parcels = [torch.full((int(num_bytes[i]),), i, dtype=torch.uint8) for i in mine]
        for method in ("flat", "node_wise", "auto"):
            arrived = exchange_parcels(parcels, rearrangement, num_bytes, rank, group, method=method, topology=topology)
            expected = rearrangement.target.items_on(rank)
            assert [parcel.tolist() for parcel in arrived] == [[i] * int(num_bytes[i]) for i in expected]

    run_ranks(fn, 4)


def test_auto_is_the_same_on_all_ranks_and_follows_the_links():
    rearrangement, num_rows = _scene(4, "uneven")
    many, slow_inside = Topology(4, 2), Topology(4, 2, intra_node_gbps=1e-3, intra_node_us=0, inter_node_us=0)

    def fn():
        group, chosen = new_node_groups(new_cpu_group(), many), []
        for topology in (many, slow_inside):
            exchange = Exchange.of(rearrangement, dist.get_rank(), num_rows, topology)
            with CollectiveLog() as log:
                exchange_rows(torch.zeros(len(exchange.send_index), 2), exchange, group, method="auto")
            chosen += [resolve_method(exchange, group, 8), log.count()]
        return chosen

    assert run_ranks(fn, 4) == [["node_wise", 2, "flat", 1]] * 4


def test_refuses_what_it_cannot_do():
    rearrangement, num_rows = _scene(2, "uneven")

    def fn():
        topology, rank = Topology(2, 1), dist.get_rank()
        exchange = Exchange.of(rearrangement, rank, num_rows, topology)
        rows = torch.zeros(len(exchange.send_index), 2)
        with pytest.raises(ValueError, match="must be made with a topology for the method 'node_wise'"):
            exchange_rows(rows, exchange, method="node_wise")
        plain, group = Exchange.of(rearrangement, rank, num_rows), new_node_groups(new_cpu_group(), topology)
        with pytest.raises(ValueError, match="must be made with a topology"):
            exchange_rows(rows, plain, group, method="node_wise")
        with pytest.raises(ValueError, match="`topology` must have 2 ranks, but has 3"):
            new_node_groups(dist.group.WORLD, Topology(3))

    run_ranks(fn, 2)


def _host_of(rank: int, hosts: list[str]) -> None:
    socket.gethostname = lambda: hosts[rank]


@pytest.mark.parametrize(
    ("hosts", "said", "expected"),
    [
        (["a", "a", "b"], [2, 2, 1], Topology(3, 2)),
        (["a", "b", "b"], [1, 2, 2], Topology(3, node_sizes=(1, 2))),
        (["a", "a", "a"], [3, 3, 3], Topology(3)),
        (["a", "b", "a"], [2, 1, 2], "host by host, but rank 2 is on 'a' and rank 1 on 'b'"),
        (["a", "a", "a"], [2, 2, 1], r"ranks \[0, 1, 2\] disagree: rank 0 was told of 2 .* 'a' with 3"),
        (["a", "a", "b"], [2, 2, 2], r"ranks \[2\] disagree: rank 2 was told of 2 .*'b' with 1"),
    ],
)
def test_topology_is_discovered_and_checked_on_all_ranks(hosts, said, expected):
    def fn():
        rank = dist.get_rank()
        _host_of(rank, hosts)
        environ = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": str(said[rank])}
        assert gather_hosts() == hosts
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                discover_topology(environ=environ)
            return
        assert discover_topology(environ=environ) == expected
        check_topology(expected, gather_hosts())

    run_ranks(fn, 3)


def test_the_loaders_topology_comes_from_the_hosts():
    def fn():
        rank = dist.get_rank()
        _host_of(rank, ["a", "b", "b"])
        model = small_model(torch.float32)
        samples = draw(model.config, STEPS["mixed"][:3])[rank]
        with pytest.raises(ValueError, match=r"ranks .* disagree"):  # the launcher of these tests says 3 on one node
            orch.orchestrate(Groups(samples), model, timeout_s=30)

    run_ranks(fn, 3)

    def alone():
        model = small_model(torch.float32)
        loader = orch.orchestrate(Groups([]), model, timeout_s=30)
        return loader.setup.topology

    assert run_ranks(alone, 2) == [Topology(2)] * 2


@pytest.mark.parametrize("topology", [Topology(4, 2), Topology(4, node_sizes=(1, 3))])
@pytest.mark.parametrize("kind", ["mixed", "no media on a rank", "a rank has no sample"])
def test_gradients_of_the_model_equal_those_of_one_process(kind, topology):
    def fn():
        model = small_model()
        groups = draw(small_model(staged=False).config, STEPS[kind])
        _, expected = reference_gradients([s for rank in groups for group in rank for s in group])
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        errors = []
        for exchange in ("node_wise", "auto"):
            model.zero_grad()
            own = Groups(groups[dist.get_rank()])
            loader = orch.orchestrate(own, ddp, topology=topology, exchange=exchange, timeout_s=50)
            with CollectiveLog() as log:
                for batch in loader:
                    ddp(**batch).loss.backward()
            if exchange == "node_wise":
                assert log.count("vision") == log.count("vision.backward")
            found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
            errors.append(largest_error(found, expected))
        return errors

    for errors in run_ranks(fn, 4, timeout_s=200):
        assert max(errors) < 1e-9


def test_an_axis_of_a_mesh_shares_the_data_and_its_peers_share_the_plan():
    kinds = STEPS["mixed"]

    def fn():
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match=r"`mesh\['dp'\]`, but is a mesh of 2 axes \('dp', 'tp'\)"):
            orch.orchestrate(Groups([]), small_model(), group=mesh)
        model, place = small_model(), mesh["dp"].get_local_rank()
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        groups = draw(small_model(staged=False).config, kinds[:2])
        _, expected = reference_gradients([s for rank in groups for group in rank for s in group])
        loader = orch.orchestrate(Groups(groups[place]), ddp, group=mesh["dp"], timeout_s=50)
        trained = []
        for batch in loader:
            trained += [sample["id"] for sample in batch["orch"].samples]
            ddp(**batch).loss.backward()
        with pytest.raises(ValueError, match=r"`group` must hold the ranks of the engine's group"):
            orch.orchestrate(Groups([]), ddp, group=mesh["tp"])
        with pytest.raises(ValueError, match=r"`mesh\['dp'\]`, but is a mesh of 2 axes \('dp', 'tp'\)"):
            odb.ODBDataLoader([], token_budget=1, group=mesh)
        drawn = odb.ODBDataLoader([{"input_ids": [i]} for i in range(9)], token_budget=2, group=mesh["dp"])
        assert sorted(s["input_ids"][0] for group in drawn.groups() for s in group) == list(range(place, 9, 2))
        found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        return largest_error(found, expected), loader.setup.topology, loader.setup.rank, trained

    results = run_ranks(fn, 4, timeout_s=200)
    for error, topology, rank, _ in results:
        assert error < 1e-9
        assert topology == Topology(2)
        assert rank in (0, 1)
    assert [result[2] for result in results] == [0, 0, 1, 1]
    assert results[0][3] == results[1][3] != results[2][3] == results[3][3]


def test_an_exchange_for_nobody_leaves_everything_in_place():
    topology = Topology(3, node_sizes=(2, 1))
    layout = Layout(np.array([0, 1, 2, 2]), 3)

    def fn():
        group = new_node_groups(new_cpu_group(), topology)
        exchange = Exchange.of(Rearrangement(layout, layout), dist.get_rank(), np.array([1, 0, 2, 1]), topology)
        rows = torch.arange(len(exchange.send_index), dtype=torch.float32)
        assert torch.equal(exchange_rows(rows, exchange, group, method="node_wise"), rows)

    run_ranks(fn, 3)
