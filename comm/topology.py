"""Ranks, nodes and the speed of the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np
import numpy.typing as npt

from orch.comm.counts import check_count, check_kind

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Topology:
    """Which node each rank is on.

    Ranks are numbered node by node, as torchrun and DeepSpeed number them; the last node may be partly filled, and
    with `node_sizes` every node may have a size of its own.

    Attributes:
        num_ranks: Number of data-parallel ranks (world size).
        ranks_per_node: Ranks on each full node; None puts all ranks on one node, or as `node_sizes` says.
        intra_node_gbps: Bandwidth between two ranks of one node, in Gbit/s a rank.
        inter_node_gbps: Bandwidth between nodes, in Gbit/s a rank.
        node_sizes: Ranks on each node, where nodes are uneven; instead of `ranks_per_node`.
        intra_node_us: Microseconds that one message between ranks of a node takes besides its bytes.
        inter_node_us: Microseconds that one message between nodes takes besides its bytes.

    Raises:
        ValueError: If a count is not positive, a speed is not above zero, a time is negative, or `node_sizes` does not
            add up to `num_ranks`.
    """

    num_ranks: int
    ranks_per_node: int | None = None
    intra_node_gbps: float = 3600.0
    inter_node_gbps: float = 400.0
    node_sizes: tuple[int, ...] | None = None
    intra_node_us: float = 2.0
    inter_node_us: float = 10.0

    def __post_init__(self) -> None:
        for name in ("num_ranks", "ranks_per_node"):
            count = getattr(self, name)
            if name == "ranks_per_node" and count is None:
                continue
            check_count(name, count)
        for name in ("intra_node_gbps", "inter_node_gbps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, but is {getattr(self, name)} instead.")
        for name in ("intra_node_us", "inter_node_us"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must not be negative, but is {getattr(self, name)} instead.")
        if self.node_sizes is not None:
            self._check_node_sizes(self.node_sizes)

    def _check_node_sizes(self, sizes: tuple[int, ...]) -> None:
        object.__setattr__(self, "node_sizes", tuple(int(size) for size in sizes))
        if self.ranks_per_node is not None:
            raise ValueError(
                f"`ranks_per_node` must be None beside `node_sizes`, but is {self.ranks_per_node} instead."
            )
        if min(sizes, default=0) < 1 or sum(sizes) != self.num_ranks:
            raise ValueError(
                f"`node_sizes` must be positive and add up to {self.num_ranks} ranks, but is {sizes} instead."
            )

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        intra_node_gbps: float = 3600.0,
        inter_node_gbps: float = 400.0,
    ) -> Topology:
        """The topology of the world as torchrun, DeepSpeed's launcher, SLURM or Open MPI set it up.

        Args:
            environ: Environment variables; None for those of this process.
            intra_node_gbps: Bandwidth between two ranks of one node, in Gbit/s a rank.
            inter_node_gbps: Bandwidth between nodes, in Gbit/s a rank.

        Returns:
            The topology; one rank where no launcher has set anything. It is what the launcher says:
            `orch.comm.hosts.check_topology` holds it against the names of the hosts.

        Raises:
            ValueError: If the variables contradict each other, ranks are not numbered node by node, or nodes are
                uneven under a launcher that tells each node its own size only (torchrun).
        """
        from orch.comm.launchers import node_sizes_of, read_launcher

        return cls.of_node_sizes(
            node_sizes_of(read_launcher(environ)), intra_node_gbps=intra_node_gbps, inter_node_gbps=inter_node_gbps
        )

    @classmethod
    def from_hostfile(
        cls, path: str | PathLike[str], *, intra_node_gbps: float = 3600.0, inter_node_gbps: float = 400.0
    ) -> Topology:
        """The topology of a DeepSpeed hostfile: lines such as `worker-1 slots=8`.

        Args:
            path: The file.
            intra_node_gbps: Bandwidth between two ranks of one node, in Gbit/s a rank.
            inter_node_gbps: Bandwidth between nodes, in Gbit/s a rank.

        Raises:
            ValueError: If a line cannot be read, a host is named twice, or there is no host.
        """
        from orch.comm.launchers import read_hostfile

        return cls.of_node_sizes(
            tuple(read_hostfile(path).values()), intra_node_gbps=intra_node_gbps, inter_node_gbps=inter_node_gbps
        )

    @classmethod
    def of_node_sizes(
        cls, sizes: tuple[int, ...], *, intra_node_gbps: float = 3600.0, inter_node_gbps: float = 400.0
    ) -> Topology:
        """The topology of nodes of these sizes; the simplest way to say it, so that equal ones compare equal."""
        first = sizes[0] if sizes else 0
        is_even = all(size == first for size in sizes[:-1]) and sizes[-1:] <= (first,)
        return cls(
            sum(sizes),
            None if len(sizes) == 1 or not is_even else first,
            intra_node_gbps,
            inter_node_gbps,
            None if is_even else sizes,
        )

    @property
    def node_size(self) -> int:
        """Ranks on a full node; on the largest one where nodes are uneven."""
        if self.node_sizes is not None:
            return max(self.node_sizes)
        return min(self.ranks_per_node or self.num_ranks, self.num_ranks)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the partly filled last one included."""
        return len(self.node_sizes) if self.node_sizes is not None else -(-self.num_ranks // self.node_size)

    @property
    def is_even(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return len(set(self.num_ranks_of_node.tolist())) == 1

    @property
    def node_of_rank(self) -> IntArray:
        """Node of each rank: int64[num_ranks]."""
        if self.node_sizes is not None:
            return np.repeat(np.arange(len(self.node_sizes), dtype=np.int64), self.node_sizes)
        return np.arange(self.num_ranks, dtype=np.int64) // self.node_size

    @property
    def num_ranks_of_node(self) -> IntArray:
        """Number of ranks on each node: int64[num_nodes]."""
        return np.bincount(self.node_of_rank, minlength=self.num_nodes).astype(np.int64)

    @property
    def first_rank_of_node(self) -> IntArray:
        """The lowest rank of each node: int64[num_nodes]."""
        sizes = self.num_ranks_of_node
        return np.cumsum(sizes) - sizes

    @property
    def local_rank(self) -> IntArray:
        """Position of each rank within its node: int64[num_ranks]."""
        return np.arange(self.num_ranks, dtype=np.int64) - self.first_rank_of_node[self.node_of_rank]

    def ranks_of_node(self, node: int) -> IntArray:
        """The ranks of a node, ascending: int64[n]."""
        return np.flatnonzero(self.node_of_rank == node)

    def select(self, ranks: IntArray) -> Topology:
        """The topology of a subset of the ranks, renumbered in the given, ascending order."""
        sizes = np.bincount(self.node_of_rank[ranks], minlength=self.num_nodes)
        chosen = Topology.of_node_sizes(tuple(sizes[sizes > 0].tolist()))
        counts = {name: getattr(chosen, name) for name in ("num_ranks", "ranks_per_node", "node_sizes")}
        return replace(self, **counts)


def check_topology_kind(value: object) -> None:
    """Raises a `ValueError` unless it is a `Topology`; a number of ranks is none."""
    check_kind("topology", value, Topology, "orch.Topology(num_ranks=8, ranks_per_node=4)")
