"""Ranks, nodes and the speed of the links between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Topology:
    """Which node each rank is on.

    Ranks are numbered node by node, as torchrun and DeepSpeed number them; the last node may be partly filled.

    Attributes:
        num_ranks: Number of data-parallel ranks (world size).
        ranks_per_node: Ranks on each full node; None puts all ranks on one node.
        intra_node_gbps: Bandwidth between two ranks of one node, in Gbit/s a rank.
        inter_node_gbps: Bandwidth between nodes, in Gbit/s a rank.

    Raises:
        ValueError: If a count is not positive or a speed is not above zero.
    """

    num_ranks: int
    ranks_per_node: int | None = None
    intra_node_gbps: float = 3600.0
    inter_node_gbps: float = 400.0

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"`num_ranks` must be at least 1, but is {self.num_ranks} instead.")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"`ranks_per_node` must be at least 1, but is {self.ranks_per_node} instead.")
        for name in ("intra_node_gbps", "inter_node_gbps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, but is {getattr(self, name)} instead.")

    @property
    def node_size(self) -> int:
        """Ranks on a full node."""
        return min(self.ranks_per_node or self.num_ranks, self.num_ranks)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the partly filled last one included."""
        return -(-self.num_ranks // self.node_size)

    @property
    def node_of_rank(self) -> IntArray:
        """Node of each rank: int64[num_ranks]."""
        return np.arange(self.num_ranks, dtype=np.int64) // self.node_size

    @property
    def num_ranks_of_node(self) -> IntArray:
        """Number of ranks on each node: int64[num_nodes]."""
        return np.bincount(self.node_of_rank, minlength=self.num_nodes).astype(np.int64)
