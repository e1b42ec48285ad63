"""How many rows travel between which ranks: one rank's view, and with nodes what two hops need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orch.comm.predict import Loads
from orch.comm.topology import IntArray, Topology


@dataclass(frozen=True, slots=True, eq=False)
class NodeSplits:
    """What a rank must know of its node to pass on the rows of others.

    Attributes:
        topology: Ranks and nodes.
        rank: This rank.
        sent: int64[ranks of this node, num_ranks], rows that each rank of this node sends to each rank.
        received: int64[ranks of this node, num_ranks], rows that each rank of this node receives from each rank.
        loads: What each method asks of the busiest rank; the same on all ranks.
        loads_back: The same of the way back.
    """

    topology: Topology
    rank: int
    sent: IntArray
    received: IntArray
    loads: Loads
    loads_back: Loads

    @classmethod
    def of(cls, source: IntArray, target: IntArray, num_rows: IntArray, rank: int, topology: Topology) -> NodeSplits:
        """The view of `rank`, where item i moves `num_rows[i]` rows from `source[i]` to `target[i]` (int64[N] each)."""
        pairs = topology.num_ranks * source + target
        pair, index = np.unique(pairs, return_inverse=True)
        rows = sum_by(index, num_rows, len(pair))
        senders, receivers = np.divmod(pair, topology.num_ranks)
        return cls(
            topology,
            rank,
            _table(senders, receivers, rows, rank, topology),
            _table(receivers, senders, rows, rank, topology),
            Loads.of(senders, receivers, rows, topology),
            Loads.of(receivers, senders, rows, topology),
        )

    def inverse(self) -> NodeSplits:
        """The way back."""
        return NodeSplits(self.topology, self.rank, self.received, self.sent, self.loads_back, self.loads)


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """One rank's view of what all ranks send to each other, in rows; no index of a row.

    Attributes:
        send_splits: int64[num_ranks], rows sent to each rank.
        recv_splits: int64[num_ranks], rows received from each rank.
        send_starts: int64[num_ranks], where this rank's piece begins among all that each target receives.
        recv_starts: int64[num_ranks], where this rank's piece begins among all that each source sends.
        most_sent: The most rows that any rank sends, itself included.
        most_received: The most rows that any rank receives, itself included.
        nodes: What two hops need; None where it was not asked for.
    """

    send_splits: IntArray
    recv_splits: IntArray
    send_starts: IntArray
    recv_starts: IntArray
    most_sent: int
    most_received: int
    nodes: NodeSplits | None

    @classmethod
    def between(
        cls,
        source: IntArray,
        target: IntArray,
        num_rows: IntArray,
        rank: int,
        num_ranks: int,
        topology: Topology | None,
    ) -> Splits:
        """The view of `rank`, where item i moves `num_rows[i]` rows from `source[i]` to `target[i]` (int64[N] each).

        Raises:
            ValueError: If the topology has another number of ranks.
        """
        if topology is not None and topology.num_ranks != num_ranks:
            raise ValueError(f"`topology` must have {num_ranks} ranks, but has {topology.num_ranks} instead.")
        num_rows = np.asarray(num_rows, dtype=np.int64)
        sent, received = source == rank, target == rank
        return Splits(
            send_splits=sum_by(target[sent], num_rows[sent], num_ranks),
            recv_splits=sum_by(source[received], num_rows[received], num_ranks),
            send_starts=sum_by(target[source < rank], num_rows[source < rank], num_ranks),
            recv_starts=sum_by(source[target < rank], num_rows[target < rank], num_ranks),
            most_sent=int(sum_by(source, num_rows, num_ranks).max()),
            most_received=int(sum_by(target, num_rows, num_ranks).max()),
            nodes=None if topology is None else NodeSplits.of(source, target, num_rows, rank, topology),
        )


def _table(from_rank: IntArray, to_rank: IntArray, rows: IntArray, rank: int, topology: Topology) -> IntArray:
    """Rows from each rank of the node of `rank` to each rank: int64[ranks of the node, num_ranks]."""
    node = topology.node_of_rank
    own = node[from_rank] == node[rank]
    cells = topology.local_rank[from_rank[own]] * topology.num_ranks + to_rank[own]
    size = int(topology.num_ranks_of_node[node[rank]])
    return sum_by(cells, rows[own], size * topology.num_ranks).reshape(size, topology.num_ranks)


def sum_by(index: IntArray, values: IntArray, size: int) -> IntArray:
    """Sums of `values` by `index`: int64[size]."""
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, index, values)
    return total
