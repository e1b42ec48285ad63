"""Topologies from launchers, hostfiles and host names; uneven nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orch.comm.hosts import check_topology, decode_text, encode_text, node_sizes_of_hosts
from orch.comm.launchers import parse_tasks_per_node, read_hostfile, read_launcher
from orch.comm.topology import Topology

TORCHRUN = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "RANK": "3"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "20", "SLURM_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_uneven_nodes_equal_a_plain_count(sizes):
    topology = Topology(sum(sizes), node_sizes=tuple(sizes))
    node, local = zip(*((n, i) for n, size in enumerate(sizes) for i in range(size)), strict=True)
    assert topology.node_of_rank.tolist() == list(node)
    assert topology.local_rank.tolist() == list(local)
    assert topology.num_ranks_of_node.tolist() == sizes
    assert topology.num_nodes == len(sizes)
    assert topology.node_size == max(sizes)
    assert topology.is_even == (len(set(sizes)) == 1)
    assert [topology.ranks_of_node(n)[0] for n in range(len(sizes))] == topology.first_rank_of_node.tolist()
    simplest = Topology.of_node_sizes(tuple(sizes))
    assert simplest.node_of_rank.tolist() == list(node)
    assert (simplest.node_sizes is None) == (len({*sizes[:-1]}) < 2 and sizes[-1] <= sizes[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"node_sizes": (2, 1)}, r"`node_sizes` must be positive and add up to 4 ranks, but is \(2, 1\)"),
        ({"node_sizes": (4, 0)}, r"`node_sizes` must be positive"),
        ({"node_sizes": ()}, r"`node_sizes` must be positive"),
        ({"node_sizes": (2, 2), "ranks_per_node": 2}, "`ranks_per_node` must be None beside `node_sizes`, but is 2"),
        ({"inter_node_us": -1}, "`inter_node_us` must not be negative, but is -1"),
    ],
)
def test_refuses_contradictions(arguments, message):
    with pytest.raises(ValueError, match=message):
        Topology(4, **arguments)


@pytest.mark.parametrize(
    ("environ", "expected", "launcher"),
    [
        (TORCHRUN, Topology(16, 8), "torchrun"),
        (TORCHRUN | SLURM, Topology(16, 8), "torchrun"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, Topology(4), "torchrun"),
        ({"WORLD_SIZE": "16", "LOCAL_SIZE": "8", "CROSS_SIZE": "2"}, Topology(16, 8), "deepspeed"),
        ({"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Topology(6, 2), "mpi"),
        (SLURM, Topology(20, 8), "slurm"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4,8(x2)"}, Topology(20, node_sizes=(4, 8, 8)), "slurm"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, Topology(8, 4), "slurm"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, Topology(3), "slurm"),
        ({}, Topology(1), "none"),
    ],
)
def test_from_environment(environ, expected, launcher):
    assert Topology.from_environment(environ) == expected
    assert read_launcher(environ).launcher == launcher


def test_speeds_are_kept():
    topology = Topology.from_environment(TORCHRUN, intra_node_gbps=100, inter_node_gbps=10)
    assert (topology.intra_node_gbps, topology.inter_node_gbps) == (100, 10)
    assert topology.select(np.array([0, 1, 8])) == Topology(3, 2, intra_node_gbps=100, inter_node_gbps=10)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "3"}, "counts 3 nodes instead of 2: they"),
        ({"WORLD_SIZE": "x", "LOCAL_WORLD_SIZE": "8"}, "WORLD_SIZE must be a positive number, but is 'x'"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE must be a positive number, but is '0'"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "8(x2)"}, r"must add up to 20 tasks, but are '8\(x2\)'"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "8(y2),4"}, r"must be like '8\(x2\),4', but are '8\(y2\),4'"),
        (SLURM | {"SLURM_DISTRIBUTION": "cyclic:block"}, "number ranks node by node.*--distribution=block"),
    ],
)
def test_environments_that_say_nothing_sound(environ, message):
    with pytest.raises(ValueError, match=message):
        Topology.from_environment(environ)


def test_slurm_tells_each_node_its_size():
    assert read_launcher(SLURM).local_size == 4
    assert read_launcher(SLURM | {"SLURM_NODEID": "0"}).local_size == 8
    assert parse_tasks_per_node("1,2(x3)") == (1, 2, 2, 2)


def test_hostfile(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two nodes\nworker-1 slots=8\n\nworker-2  slots = 8  # the new one\nworker-3 slots=4\n")
    assert read_hostfile(path) == {"worker-1": 8, "worker-2": 8, "worker-3": 4}
    assert Topology.from_hostfile(path, inter_node_gbps=100) == Topology(20, 8, inter_node_gbps=100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=8\na slots=8\n", "'a' is named again in line 2"),
        ("a slots=8\nb\n", "Line 2 of .* must be like 'worker-1 slots=8', but is 'b'"),
        ("a slots=0\n", "Line 1 of"),
        ("# nothing\n", "must name at least one host"),
    ],
)
def test_hostfiles_that_cannot_be_read(tmp_path, text, message):
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Topology.from_hostfile(path)


@given(st.text(max_size=40))
def test_names_travel_as_integers(name):
    assert decode_text(encode_text(name)) == name


def test_hosts_say_who_shares_a_node():
    assert node_sizes_of_hosts(["a", "a", "b"]) == (2, 1)
    with pytest.raises(ValueError, match="rank 12 is on 'a' and rank 11 on 'b'"):
        node_sizes_of_hosts(["a", "b", "a"], ranks=[10, 11, 12])


def test_topology_is_held_against_hosts():
    check_topology(Topology(4, 2), ["a", "a", "b", "b"])
    with pytest.raises(
        ValueError, match=r"rank 2 is on host 'a', but on node 1 .*rank 3 is on host 'b', but on node 1"
    ):
        check_topology(Topology(4, 2), ["a", "a", "a", "b"])
    with pytest.raises(ValueError, match="rank 7 is on host 'b', but on node 0 of the topology instead"):
        check_topology(Topology(2), ["a", "b"], ranks=[5, 7])
    with pytest.raises(ValueError, match="rank 1 is on host 'a', but on node 1 of the topology instead"):
        check_topology(Topology(2, 1), ["a", "a"])
    with pytest.raises(ValueError, match="`topology` must have 3 ranks, but has 2"):
        check_topology(Topology(2), ["a", "a", "a"])


@pytest.mark.parametrize("counts", [(2.5,), ("4",), (4, 3.0), (4, 0), (0,)])
def test_counts_are_whole_numbers(counts):
    with pytest.raises(ValueError, match=r"`(num_ranks|ranks_per_node)` must be a whole number of at least 1, but is"):
        Topology(*counts)
