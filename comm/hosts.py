"""Which ranks share a host, asked of the ranks themselves, and held against what a launcher or a user says."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import numpy as np
from torch.distributed import ProcessGroup

from orch.comm.gather import gather_ragged
from orch.comm.groups import get_global_ranks, get_world_size
from orch.comm.launchers import read_launcher
from orch.comm.topology import IntArray, Topology


def discover_topology(
    group: ProcessGroup | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    intra_node_gbps: float = 3600.0,
    inter_node_gbps: float = 400.0,
) -> Topology:
    """The topology of the ranks of a group, from the names of their hosts; all of them call it.

    What each rank's launcher says of its own node is checked against these names where the group is the whole world.

    Args:
        group: A CPU (gloo) group; None for the world.
        environ: Environment variables; None for those of this process.
        intra_node_gbps: Bandwidth between two ranks of one node, in Gbit/s a rank.
        inter_node_gbps: Bandwidth between nodes, in Gbit/s a rank.

    Raises:
        ValueError: On all ranks alike, if the ranks of a host do not follow each other, or if a launcher says
            otherwise; names the ranks.
    """
    local_size = read_launcher(environ).local_size or 0
    words = gather_ragged(np.concatenate([[local_size], encode_text(socket.gethostname())]), group, label="hosts")
    ranks, hosts = get_global_ranks(group), [decode_text(word[1:]) for word in words]
    sizes = node_sizes_of_hosts(hosts, ranks)
    if len(ranks) == get_world_size():
        _check_launchers([int(word[0]) for word in words], sizes, hosts)
    return Topology.of_node_sizes(sizes, intra_node_gbps=intra_node_gbps, inter_node_gbps=inter_node_gbps)


def gather_hosts(group: ProcessGroup | None = None) -> list[str]:
    """The name of each rank's host, on every rank; no pickle, bytes in integers.

    Args:
        group: A CPU (gloo) group; None for the world.
    """
    return [decode_text(words) for words in gather_ragged(encode_text(socket.gethostname()), group, label="hosts")]


def check_topology(topology: Topology, hosts: Sequence[str], ranks: Sequence[int] | None = None) -> None:
    """Holds a topology against the names of the hosts; pure, so that all ranks that gathered them agree.

    Args:
        topology: What is claimed.
        hosts: The host of each rank, from `gather_hosts`.
        ranks: What to call each rank in the message; its position if not given.

    Raises:
        ValueError: If the number of ranks differs, two hosts share a node, or a host is on two nodes; names the ranks
            that disagree with the first of their node or host.
    """
    if topology.num_ranks != len(hosts):
        raise ValueError(f"`topology` must have {len(hosts)} ranks, but has {topology.num_ranks} instead.")
    names = list(ranks) if ranks is not None else list(range(len(hosts)))
    host_of_node: dict[int, str] = {}
    node_of_host: dict[str, int] = {}
    wrong = []
    for rank, node, host in zip(names, topology.node_of_rank.tolist(), hosts, strict=True):
        expected = host_of_node.setdefault(node, host), node_of_host.setdefault(host, node)
        if expected != (host, node):
            wrong.append(f"rank {rank} is on host {host!r}, but on node {node} of the topology")
    if wrong:
        known = ", ".join(f"node {node} is host {host!r}" for node, host in host_of_node.items())
        raise ValueError(
            f"`topology` must put ranks of one host on one node ({known}), but {'; '.join(wrong)} instead."
        )


def node_sizes_of_hosts(hosts: Sequence[str], ranks: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ranks on each host, hosts in the order of their first rank.

    Args:
        hosts: The host of each rank.
        ranks: What to call each rank in the message; its position if not given.

    Raises:
        ValueError: If the ranks of a host do not follow each other.
    """
    names = list(ranks) if ranks is not None else list(range(len(hosts)))
    sizes: dict[str, int] = {}
    for index, host in enumerate(hosts):
        if host in sizes and hosts[index - 1] != host:
            raise ValueError(
                f"Ranks must be numbered host by host, but rank {names[index]} is on {host!r} "
                f"and rank {names[index - 1]} on {hosts[index - 1]!r} instead."
            )
        sizes[host] = sizes.get(host, 0) + 1
    return tuple(sizes.values())


def _check_launchers(said: Sequence[int], sizes: Sequence[int], hosts: Sequence[str]) -> None:
    """What launchers say of their nodes (0: nothing) against the number of ranks on each host."""
    size_of_rank = np.repeat(np.asarray(sizes, dtype=np.int64), sizes)
    wrong = [rank for rank, size in enumerate(said) if size not in (0, size_of_rank[rank])]
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"Launcher and hosts must agree on the ranks of a node, but ranks {wrong} disagree: rank {first} was told "
            f"of {said[first]} on its node and shares host {hosts[first]!r} with {size_of_rank[first]} instead, itself "
            "included. If hosts share a name, or nodes are played on one host, pass `topology=`."
        )


def encode_text(text: str) -> IntArray:
    """A text as integers: its UTF-8 bytes, eight to a word, behind their number: int64[n]."""
    data = text.encode()
    return np.concatenate([[len(data)], np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), dtype="<i8")])


def decode_text(words: IntArray) -> str:
    """The text that `encode_text` made into integers."""
    return words[1:].astype("<i8").tobytes()[: int(words[0])].decode(errors="replace")
