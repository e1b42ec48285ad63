"""An emulated cluster: each node a network namespace, joined by a bridge, its link shaped with `tc`.

    with Cluster(node_sizes=(2, 2), mbit=200) as cluster:
        results = cluster.run(fn, timeout_s=60)

Ranks of one node talk through its loopback; what goes to another node crosses the node's link, whose counters any rank
of the node reads (`link_bytes`). Needs root, and `ip` and `tc` (iproute2).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
_LINK = "eth0"
_numbers = itertools.count()


class NotPermittedError(RuntimeError):
    """This machine does not let us emulate a cluster; says why."""


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What has crossed a node's link since it was made, headers included.

    Attributes:
        sent: Bytes that left the node.
        received: Bytes that came to it.
    """

    sent: int
    received: int


class Cluster(contextlib.AbstractContextManager["Cluster"]):
    """Nodes of some ranks each.

    Args:
        node_sizes: Ranks on each node.
        mbit: What a node's link carries each way, in Mbit/s.

    Raises:
        NotPermittedError: On entry, if this machine does not allow it or lacks the tools.
    """

    def __init__(self, node_sizes: tuple[int, ...], mbit: float = 200) -> None:
        self.node_sizes, self.mbit = node_sizes, mbit
        self._tag = f"o{os.getpid() % 10**6}x{next(_numbers)}"
        self._names: list[str] = []

    @property
    def num_ranks(self) -> int:
        return sum(self.node_sizes)

    @property
    def nodes(self) -> list[str]:
        """The namespace of each node."""
        return [f"{self._tag}n{node}" for node in range(len(self.node_sizes))]

    def __enter__(self) -> Cluster:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise NotPermittedError(f"there is no `{tool}` (package iproute2)")
        try:
            self._build()
        except NotPermittedError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:  # their links go with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        self._names.clear()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
        """Runs `fn(*args)` on every rank, as `tests.ranks.run_ranks` does, each in its node.

        Hosts are called node0, node1, ...; the environment is that of torchrun on these nodes.
        """
        with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
            return run_ranks(
                _in_node, self.num_ranks, self, folder, timeout_s, fn, args,
                timeout_s=timeout_s, init_process_group=False,
            )  # fmt: skip

    def _build(self) -> None:
        switch = f"{self._tag}sw"
        for name in [switch, *self.nodes]:
            _do(f"ip netns add {name}")
            self._names.append(name)
            _do(f"ip -n {name} link set lo up")
        _do(f"ip -n {switch} link add br0 type bridge")
        _do(f"ip -n {switch} link set br0 up")
        for number, node in enumerate(self.nodes):
            _do(f"ip -n {switch} link add port{number} type veth peer name {_LINK} netns {node}")
            _do(f"ip -n {switch} link set port{number} master br0 up")
            _do(f"ip -n {node} addr add 10.77.0.{number + 1}/24 dev {_LINK}")
            _do(f"ip -n {node} link set {_LINK} up")
        self._shape("add", self.mbit)

    def set_link(self, mbit: float) -> None:
        """Changes what a node's link carries each way, in Mbit/s; any process of the cluster may."""
        self._shape("change", mbit)

    def _shape(self, action: str, mbit: float) -> None:
        burst_kb = max(256, round(mbit / 8))  # at least what passes in a millisecond
        for number, node in enumerate(self.nodes):
            for space, link in ((node, _LINK), (f"{self._tag}sw", f"port{number}")):  # out of the node, and into it
                _do(
                    f"tc -n {space} qdisc {action} dev {link} root tbf rate {mbit}mbit burst {burst_kb}kb latency 400ms"
                )


def link_bytes() -> LinkBytes:
    """What has crossed the link of the node that this process is in."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == _LINK:
            fields = counts.split()
            return LinkBytes(sent=int(fields[8]), received=int(fields[0]))
    raise RuntimeError(f"there is no {_LINK} here: not a node of an emulated cluster")


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise NotPermittedError(f"`{command}` says: {done.stderr.strip() or done.returncode}")


def _in_node(cluster: Cluster, folder: str, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rank, sizes = int(os.environ["RANK"]), cluster.node_sizes
    node, local_rank = [(node, i) for node, size in enumerate(sizes) for i in range(size)][rank]
    _enter(cluster.nodes[node], f"node{node}")
    os.environ.update(
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(sizes[node]),
        GROUP_RANK=str(node),
        GROUP_WORLD_SIZE=str(len(sizes)),
        GLOO_SOCKET_IFNAME=_LINK,
    )
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=cluster.num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    result = fn(*args)
    dist.destroy_process_group()
    return result


def _enter(namespace: str, host: str) -> None:
    """Moves this thread, and all that it will start, into a node."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(host)
