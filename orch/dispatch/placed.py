"""Places batches that were dealt from scratch on the ranks that hold most of their data already."""

from __future__ import annotations

import numpy as np

from orch.comm.topology import IntArray
from orch.dispatch.problem import DispatchProblem


def place(problem: DispatchProblem, bins: IntArray) -> IntArray:
    """Permutes the batches of each micro-step over ranks (OrchMLLM's node-wise rearrangement).

    Args:
        problem: Where the items are and what they weigh.
        bins: int64[N], the bin of each item.

    Returns:
        int64[N], the bin of each item after the permutation; every load is some bin's load still.
    """
    from orch.comm.placement import place_batches  # imports a solver, which `local` has no need of

    rank, micro_step = np.divmod(bins, problem.bins_per_rank)
    weights = [(problem.home, problem.lengths if problem.move_bytes is None else problem.move_bytes)]
    if problem.target is not None and problem.target_bytes is not None:
        weights.append((problem.target, problem.target_bytes))
    for value in range(problem.bins_per_rank):
        chosen = np.flatnonzero(micro_step == value)
        source = np.concatenate([bins_of[chosen] // problem.bins_per_rank for bins_of, _ in weights])
        num_bytes = np.concatenate([sizes[chosen] for _, sizes in weights])
        batch = np.tile(rank[chosen], len(weights))
        rank[chosen] = place_batches(source, batch, num_bytes, problem.topology)[rank[chosen]]
    return rank * problem.bins_per_rank + micro_step
