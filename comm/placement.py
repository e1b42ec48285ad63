"""Node-wise rearrangement: which rank hosts which balanced batch, so that little crosses nodes.

A balanced batch may run on any rank. Following OrchMLLM's node-wise rearrangement (arXiv 2503.23830), batches are given
to ranks so that the largest volume that any rank sends to or receives from other nodes is least. Only the node of a
batch matters for that; inside its node a batch goes where most of it already is.

Everything is a function of the numbers: solvers are limited by work, never by the clock, and ties go to the lower
index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from orch.comm.topology import IntArray, Topology

METHODS = ("auto", "ilp", "assignment", "identity")
MAX_RANKS_FOR_ILP = 16


def place_batches(
    source: IntArray, batch: IntArray, num_bytes: IntArray, topology: Topology, *, method: str = "auto"
) -> IntArray:
    """Decides which rank hosts which batch; never worse than batch i on rank i.

    Entry p says that `num_bytes[p]` bytes of batch `batch[p]` lie on rank `source[p]`. Pairs may repeat.

    Args:
        source: int64[P], ranks.
        batch: int64[P], batches 0 to num_ranks - 1, one for each rank.
        num_bytes: int64[P].
        topology: Ranks and nodes.
        method: "ilp" (exact within a limit of work), "assignment" (linear assignment, then swaps; milliseconds at any
            scale), "identity", or "auto": the ILP up to `MAX_RANKS_FOR_ILP` ranks, else the assignment.

    Returns:
        rank_of_batch: int64[num_ranks], a permutation of the ranks.

    Raises:
        ValueError: If the arrays do not match each other or the topology, or the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {list(METHODS)}, but is {method!r} instead.")
    traffic = Traffic.of(source, batch, num_bytes, topology)
    as_numbered = topology.node_of_rank
    if method == "identity":
        return np.arange(topology.num_ranks, dtype=np.int64)
    if topology.num_nodes == 1 or traffic.largest_volume(as_numbered) == 0:
        return _place_inside_nodes(traffic, as_numbered)
    use_ilp = method == "ilp" or (method == "auto" and topology.num_ranks <= MAX_RANKS_FOR_ILP)
    return _place_inside_nodes(traffic, _best_nodes(traffic, use_ilp))


def _best_nodes(traffic: Traffic, use_ilp: bool) -> IntArray:
    """Node of each batch: the best answer of all methods that apply, the simplest of equally good ones."""
    from orch.comm.placement_search import search_nodes

    answers = [traffic.topology.node_of_rank, *search_nodes(traffic)]
    if use_ilp:
        from orch.comm.placement_ilp import solve_ilp

        answers.append(solve_ilp(traffic, min(answers, key=traffic.badness)))
    return min(answers, key=traffic.badness)


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Where the bytes of every batch lie.

    Attributes:
        topology: Ranks and nodes.
        pairs: Sparse int64[num_ranks, num_ranks], bytes on each source rank (row) of each batch (column).
        from_node: int64[num_ranks, num_nodes], bytes of each batch on each node.
        of_batch: int64[num_ranks], bytes of each batch.
        of_source: int64[num_ranks], bytes on each rank.
    """

    topology: Topology
    pairs: csr_array
    from_node: IntArray
    of_batch: IntArray
    of_source: IntArray

    @classmethod
    def of(cls, source: IntArray, batch: IntArray, num_bytes: IntArray, topology: Topology) -> Traffic:
        """Adds up the entries; see `place_batches`."""
        source, batch, num_bytes = _checked(source, batch, num_bytes, topology.num_ranks)
        num_ranks, num_nodes = topology.num_ranks, topology.num_nodes
        pairs: Any = csr_array((num_bytes, (source, batch)), shape=(num_ranks, num_ranks))  # type: ignore[arg-type]
        cell = batch * num_nodes + topology.node_of_rank[source]
        return cls(
            topology,
            pairs,
            _sum_by(cell, num_bytes, num_ranks * num_nodes).reshape(num_ranks, num_nodes),
            _sum_by(batch, num_bytes, num_ranks),
            _sum_by(source, num_bytes, num_ranks),
        )

    def sent(self, node_of_batch: IntArray) -> IntArray:
        """Bytes that each rank sends to other nodes: int64[num_ranks]."""
        coo = self.pairs.tocoo()
        source, batch = coo.coords
        stays = self.topology.node_of_rank[source] == node_of_batch[batch]
        return self.of_source - _sum_by(source[stays], coo.data[stays], len(self.of_source))

    def received(self, node_of_batch: IntArray) -> IntArray:
        """Bytes of each batch that come from other nodes: int64[num_ranks]."""
        return self.of_batch - self.from_node[np.arange(len(node_of_batch)), node_of_batch]

    def largest_volume(self, node_of_batch: IntArray) -> int:
        """Largest volume that a rank sends to or receives from other nodes, in bytes: what placement minimises."""
        return int(max(self.sent(node_of_batch).max(), self.received(node_of_batch).max()))

    def badness(self, node_of_batch: IntArray) -> tuple[int, int]:
        """The largest volume of a rank, then the sum that crosses nodes."""
        return self.largest_volume(node_of_batch), int(self.received(node_of_batch).sum())


def _checked(
    source: IntArray, batch: IntArray, num_bytes: IntArray, num_ranks: int
) -> tuple[IntArray, IntArray, IntArray]:
    arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in (source, batch, num_bytes)]
    if arrays[0].ndim != 1 or any(array.shape != arrays[0].shape for array in arrays):
        shapes = [array.shape for array in arrays]
        raise ValueError(f"`source`, `batch` and `num_bytes` must be vectors of one length, but are {shapes} instead.")
    for name, array, limit in (("source", arrays[0], num_ranks), ("batch", arrays[1], num_ranks)):
        if array.size and not (array.min() >= 0 and array.max() < limit):
            raise ValueError(f"`{name}` must be in [0, {limit}), but spans [{array.min()}, {array.max()}] instead.")
    if arrays[2].size and arrays[2].min() < 0:
        raise ValueError(f"`num_bytes` must not be negative, but goes down to {arrays[2].min()} instead.")
    return arrays[0], arrays[1], arrays[2]


def _sum_by(index: IntArray, values: IntArray, size: int) -> IntArray:
    """Sums of `values` by `index`, exact while they are below 2 ** 53."""
    return np.bincount(index, weights=values, minlength=size).astype(np.int64)


def _place_inside_nodes(traffic: Traffic, node_of_batch: IntArray) -> IntArray:
    """Gives each batch a rank of its node so that the most bytes stay where they are."""
    rank_of_batch = np.empty(len(node_of_batch), dtype=np.int64)
    node_of_rank = traffic.topology.node_of_rank
    batches_by_node = np.argsort(node_of_batch, kind="stable")
    ends = np.cumsum(traffic.topology.num_ranks_of_node)
    for ranks, batches in zip(
        np.split(np.arange(len(node_of_rank)), ends[:-1]), np.split(batches_by_node, ends[:-1]), strict=True
    ):
        stays = traffic.pairs[ranks[0] : ranks[-1] + 1].toarray()[:, batches]
        rows, columns = linear_sum_assignment(stays, maximize=True)
        rank_of_batch[batches[columns]] = ranks[rows]
    return rank_of_batch
