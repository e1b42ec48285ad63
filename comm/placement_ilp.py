"""Placement as an integer linear program in PuLP, solved by HiGHS within a limit of nodes and iterations."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

import highspy
import numpy as np
import pulp

from orch.comm.placement import Traffic
from orch.comm.topology import IntArray

_MAX_NODES = 500
_MAX_ITERATIONS = 50_000


def solve_ilp(traffic: Traffic, fallback: IntArray) -> IntArray:
    """Minimises the largest volume that any rank sends to or receives from other nodes.

    x[b, n] = 1 puts batch b on node n; t is at least what every batch receives from other nodes and what every rank
    sends to them. One thread, one seed, and limits on work instead of time, so that the answer is a function of the
    numbers. What the solver says of its own success is not believed: its answer is checked, and weighed by the caller.
    Within the limits it is exact up to the solver's tolerance, a millionth of the largest batch.

    Args:
        traffic: Where the bytes lie.
        fallback: int64[num_ranks], returned if the limit leaves no whole answer.

    Returns:
        node_of_batch: int64[num_ranks].
    """
    problem, chosen = _model(traffic)
    solver = pulp.HiGHS(
        msg=False,
        threads=1,
        random_seed=0,
        mip_max_nodes=_MAX_NODES,
        simplex_iteration_limit=_MAX_ITERATIONS,
        mip_rel_gap=0.0,
    )
    problem.solve(solver)
    values = np.array([[variable.value() or 0.0 for variable in row] for row in chosen])
    node_of_batch = values.argmax(axis=1).astype(np.int64)
    filled = np.bincount(node_of_batch, minlength=traffic.topology.num_nodes)
    return node_of_batch if np.array_equal(filled, traffic.topology.num_ranks_of_node) else fallback


def _model(traffic: Traffic) -> tuple[pulp.LpProblem, list[list[pulp.LpVariable]]]:
    topology = traffic.topology
    batches, nodes = range(topology.num_ranks), range(topology.num_nodes)
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    largest = pulp.LpVariable("largest", lowBound=0)
    chosen = [[pulp.LpVariable(f"x_{b}_{n}", cat="Binary") for n in nodes] for b in batches]
    unit = max(int(traffic.of_batch.max()), int(traffic.of_source.max()), 1)
    problem += largest
    for b in batches:
        problem += pulp.lpSum(chosen[b]) == 1
        crossing = (traffic.of_batch[b] - traffic.from_node[b]) / unit
        problem += pulp.lpSum(float(crossing[n]) * chosen[b][n] for n in nodes) <= largest
    for n, size in enumerate(topology.num_ranks_of_node.tolist()):
        problem += pulp.lpSum(chosen[b][n] for b in batches) == size
    for rank, node in enumerate(topology.node_of_rank.tolist()):
        span = slice(*traffic.pairs.indptr[rank : rank + 2])
        held = zip(traffic.pairs.indices[span].tolist(), (traffic.pairs.data[span] / unit).tolist(), strict=True)
        stays = pulp.lpSum(share * chosen[b][node] for b, share in held)
        problem += float(traffic.of_source[rank] / unit) - stays <= largest
    return problem, chosen


def _hush_banner() -> None:
    """Makes the first solver of the process, which prints a banner to the C library's stdout whatever is asked."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        libc = ctypes.CDLL(None)
        sys.stdout.flush()
        libc.fflush(None)
        saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 1)
            highspy.Highs()
            libc.fflush(None)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            os.close(nowhere)


_hush_banner()
