"""`local` for padded batches: similar lengths together, but only within each node.

A batch of similar lengths draws on items from everywhere, so nothing like "move the surplus" exists here: near home
and little padding exclude each other. This is the useful point between them: each node cuts its own items exactly, and
nothing crosses nodes. On the mixes of the benchmark at 64 ranks, 8 a node, the largest padded load is then 1.10-1.37
times that of `binary_search` over all ranks, where as drawn it is 2-15 times; cutting pairs of nodes gives
1.04-1.14.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from orch.comm.topology import IntArray, Topology
from orch.dispatch.binary_search import dispatch_binary_search
from orch.dispatch.problem import DispatchProblem


def search_within_nodes(problem: DispatchProblem) -> IntArray:
    """Cuts the items of each node into runs of similar length for its own bins, as `binary_search` does for all.

    Args:
        problem: Its cost must have a rectangle.

    Returns:
        int64[N], the bin of each item, on the node of its home.
    """
    node = problem.topology.node_of_rank[problem.home // problem.bins_per_rank]
    bin_of_item = problem.home.copy()
    for value, size in enumerate(problem.topology.num_ranks_of_node.tolist()):
        items = np.flatnonzero(node == value)
        first = int(problem.topology.first_rank_of_node[value]) * problem.bins_per_rank
        part = replace(
            problem, lengths=problem.lengths[items], home=problem.home[items] - first, topology=Topology(size)
        )
        bin_of_item[items] = dispatch_binary_search(part) + first
    return bin_of_item
