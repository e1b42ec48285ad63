"""The way of one rank's rows in two hops: collected inside the node, then across; pure.

Rows are handled in blocks: all that one rank sends to another. A rank's send buffer holds a block for each target, in
the order of targets. The first hop takes each block to its gateway, the rank of the sender's own node that passes it on
(`orch.comm.predict.gateway_of`); the second takes what gateways collected to the targets. Each rank hears from one rank
of every other node, so what arrives lies in the order of source ranks, as after a flat exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orch.comm.predict import gateway_of
from orch.comm.splits import Splits
from orch.comm.topology import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class TwoHops:
    """What one rank does with blocks of rows.

    Attributes:
        send_blocks: int64[num_ranks], the blocks of the send buffer in the order in which they leave for gateways.
        send_sizes: int64[num_ranks], rows of each block of the send buffer.
        inside_send: int64[ranks of the node], rows for each gateway.
        inside_recv: int64[ranks of the node], rows from each rank of the node.
        collected_sizes: int64[B], rows of each block that a gateway received.
        across_blocks: int64[C], those of them that go to other nodes, by target.
        staying_blocks: int64[ranks of the node], those that are for this rank, by source.
        across_send: int64[num_ranks], rows for each rank of another node.
        across_recv: int64[num_ranks], rows from each rank of another node.
        own_place: Rows from nodes before this one: where those of this node go among what arrived.
    """

    send_blocks: IntArray
    send_sizes: IntArray
    inside_send: IntArray
    inside_recv: IntArray
    collected_sizes: IntArray
    across_blocks: IntArray
    staying_blocks: IntArray
    across_send: IntArray
    across_recv: IntArray
    own_place: int

    @classmethod
    def of(cls, splits: Splits) -> TwoHops:
        """From a rank's view of an exchange that was made with a topology."""
        nodes = splits.nodes
        assert nodes is not None
        topology, rank, num_ranks = nodes.topology, nodes.rank, nodes.topology.num_ranks
        node, all_ranks = topology.node_of_rank, np.arange(num_ranks, dtype=np.int64)
        neighbours = topology.ranks_of_node(int(node[rank]))
        gateway = gateway_of(np.full(num_ranks, rank), all_ranks, topology)
        passed_on = np.flatnonzero(gateway == rank)  # the targets for which this rank is the gateway
        collected = nodes.sent[:, passed_on]
        blocks = np.arange(collected.size, dtype=np.int64).reshape(collected.shape)
        away = passed_on != rank
        across_send = np.zeros(num_ranks, dtype=np.int64)
        across_send[passed_on[away]] = collected[:, away].sum(axis=0)
        return cls(
            send_blocks=np.argsort(gateway, kind="stable"),
            send_sizes=splits.send_splits,
            inside_send=np.array([splits.send_splits[gateway == other].sum() for other in neighbours]),
            inside_recv=collected.sum(axis=1),
            collected_sizes=collected.ravel(),
            across_blocks=blocks[:, away].T.ravel(),
            staying_blocks=blocks[:, ~away].ravel(),
            across_send=across_send,
            across_recv=_from_gateways(splits, node, rank),
            own_place=int(splits.recv_splits[node < node[rank]].sum()),
        )


def _from_gateways(splits: Splits, node: IntArray, rank: int) -> IntArray:
    """Rows that each rank of another node passes on to `rank`: int64[num_ranks]."""
    assert splits.nodes is not None
    sources = np.flatnonzero(node != node[rank])
    gateway = gateway_of(sources, np.full(len(sources), rank), splits.nodes.topology)
    received = np.zeros(len(node), dtype=np.int64)
    np.add.at(received, gateway, splits.recv_splits[sources])
    return received
