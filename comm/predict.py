"""How long an exchange takes by each method, predicted from the speed of links and the rows that the plan moves.

Pure, and a function of what all ranks know: all choose the same method. A rank's link inside the node and its link to
other nodes work side by side; hops follow each other; the busiest rank decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray, Topology


@dataclass(frozen=True, slots=True)
class Hop:
    """What one collective asks of the busiest rank.

    Attributes:
        intra_rows: The most rows that a rank sends to or receives from its node.
        inter_rows: The most rows that a rank sends to or receives from other nodes.
        intra_messages: The most ranks of its node that a rank sends to or receives from.
        inter_messages: The most ranks of other nodes that a rank sends to or receives from.
    """

    intra_rows: int = 0
    inter_rows: int = 0
    intra_messages: int = 0
    inter_messages: int = 0

    @classmethod
    def of(cls, source: IntArray, target: IntArray, rows: IntArray, topology: Topology) -> Hop:
        """From the rows of each pair of ranks (int64[P] each); pairs may repeat, rows that stay cost nothing."""
        moves = (source != target) & (rows > 0)
        pair, index = np.unique(source[moves] * topology.num_ranks + target[moves], return_inverse=True)
        size = np.bincount(index, weights=rows[moves], minlength=len(pair))
        source, target = np.divmod(pair, topology.num_ranks)
        crosses = topology.node_of_rank[source] != topology.node_of_rank[target]
        return cls(
            *(_busiest(source[own], target[own], size[own], topology.num_ranks) for own in (~crosses, crosses)),
            *(_busiest(source[own], target[own], None, topology.num_ranks) for own in (~crosses, crosses)),
        )

    def seconds(self, row_bytes: int, topology: Topology) -> float:
        """Its time, for rows of `row_bytes` bytes."""
        intra = 8e-9 * self.intra_rows * row_bytes / topology.intra_node_gbps
        inter = 8e-9 * self.inter_rows * row_bytes / topology.inter_node_gbps
        return max(
            intra + 1e-6 * topology.intra_node_us * self.intra_messages,
            inter + 1e-6 * topology.inter_node_us * self.inter_messages,
        )


@dataclass(frozen=True, slots=True)
class Loads:
    """What each method asks of the busiest rank, hop by hop.

    Attributes:
        hops: By name of the method.
    """

    hops: Mapping[str, tuple[Hop, ...]]

    @classmethod
    def of(cls, source: IntArray, target: IntArray, rows: IntArray, topology: Topology) -> Loads:
        """From the rows of each pair of ranks: int64[P] each."""
        gateway = gateway_of(source, target, topology)
        return cls(
            {
                "flat": (Hop.of(source, target, rows, topology),),
                "node_wise": (
                    Hop.of(source, gateway, rows, topology),
                    Hop.of(gateway, target, rows, topology),
                ),
                "all_gather": (_gathering(source, rows, topology),),
            }
        )


def predict_seconds(loads: Loads, row_bytes: int, topology: Topology) -> dict[str, float]:
    """Seconds of an exchange by each method."""
    return {name: sum(hop.seconds(row_bytes, topology) for hop in hops) for name, hops in loads.hops.items()}


def choose_method(loads: Loads, row_bytes: int, topology: Topology) -> str:
    """The method that is predicted to be fastest; of equally fast ones the first of flat, node-wise, all-gather."""
    seconds = predict_seconds(loads, row_bytes, topology)
    return min(seconds, key=seconds.__getitem__)


def gateway_of(source: IntArray, target: IntArray, topology: Topology) -> IntArray:
    """The rank of the source's node through which rows reach the target in two hops: int64[P].

    Within a node it is the target itself. Between nodes it is the rank with the target's place in its own node, counted
    round where the source's node is smaller: so each rank receives from one rank of each other node, and where nodes
    are equal, ranks talk across nodes only to those with their own place.
    """
    node, local, size = topology.node_of_rank, topology.local_rank, topology.num_ranks_of_node
    first = topology.first_rank_of_node
    across = first[node[source]] + local[target] % size[node[source]]
    return np.where(node[source] == node[target], target, across)


def _gathering(source: IntArray, rows: IntArray, topology: Topology) -> Hop:
    """Every rank receives from every other what the largest sends; a node's links share what comes from outside."""
    most = int(np.bincount(source, weights=rows, minlength=1).max()) if len(source) else 0
    num_ranks, smallest = topology.num_ranks, int(topology.num_ranks_of_node.min())
    outside = num_ranks - smallest
    return Hop(
        intra_rows=most * (num_ranks - 1),
        inter_rows=-(-most * outside // smallest) if topology.num_nodes > 1 else 0,
        intra_messages=num_ranks - 1,
        inter_messages=num_ranks - 1 if topology.num_nodes > 1 else 0,
    )


def _busiest(source: IntArray, target: IntArray, weights: np.ndarray | None, num_ranks: int) -> int:
    """The most that a rank sends or receives."""
    sums = (np.bincount(ranks, weights=weights, minlength=num_ranks) for ranks in (source, target))
    return int(max(values.max() for values in sums))
