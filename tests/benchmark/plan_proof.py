"""Lower bounds that the planner has no need of: loads that patterns of items forbid, and the bytes of a whole step.

A bin of capacity C holds a pattern of item sizes. If even fractions of patterns need more than the bins there are,
then C is infeasible (Gilmore and Gomory 1961). Solved by column generation; its dual prices prove the bound, whatever
the solver's tolerance: a pattern is worth at most `best`, so the items' total worth over `best` is a number of bins
that are needed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from orch.bounds import lower_bounds
from orch.comm.topology import IntArray, Topology
from orch.config import BalanceConfig
from orch.lengths import StepLengths

MAX_SIZES = 500  # different sizes
MAX_WORK = 3_600_000  # different sizes times the capacity over their greatest common divisor
_MAX_COLUMNS = 400


def proven_load(costs: IntArray, num_bins: int, bound: int, found: int) -> int:
    """The largest load that is proven necessary, between a known bound and a load that was found.

    Args:
        costs: int64[N].
        num_bins: Number of bins.
        bound: A lower bound.
        found: The largest load of some layout.

    Returns:
        At least `bound`; more only where there are few different sizes.
    """
    sizes, counts = np.unique(costs[costs > 0], return_counts=True)
    if not len(sizes) or len(sizes) > MAX_SIZES:
        return bound
    unit = int(np.gcd.reduce(sizes))
    if found // unit * len(sizes) > MAX_WORK:
        return bound
    low, high = -(-bound // unit), found // unit  # loads are multiples of the unit
    while low < high:
        middle = (low + high) // 2
        if _needs_more(sizes // unit, counts, middle, num_bins):
            low = middle + 1
        else:
            high = middle
    return low * unit


def _needs_more(sizes: IntArray, counts: IntArray, capacity: int, num_bins: int) -> bool:
    """Whether more bins of the capacity are proven necessary."""
    if int(sizes.max()) > capacity:
        return True
    patterns = [
        np.eye(len(sizes), dtype=np.float64)[i] * min(capacity // size, counts[i]) for i, size in enumerate(sizes)
    ]
    for _ in range(_MAX_COLUMNS):
        table = np.array(patterns).T
        result = linprog(np.ones(table.shape[1]), A_ub=-table, b_ub=-counts, method="highs")
        worth = -result.ineqlin.marginals
        best, pattern = _best_pattern(sizes, counts, worth, capacity)
        if float(worth @ counts) / max(best, 1e-12) > num_bins * (1 + 1e-9):
            return True
        if best <= 1 + 1e-7 or result.fun <= num_bins:  # as far as fractions can tell, these bins are enough
            return False
        patterns.append(pattern)
    return False


def _best_pattern(
    sizes: IntArray, counts: IntArray, worth: npt.NDArray[np.float64], capacity: int
) -> tuple[float, npt.NDArray[np.float64]]:
    """The pattern of the most worth that fits, by dynamic programming over the capacity."""
    values = np.zeros(capacity + 1)
    tables = []
    for size, count, price in zip(sizes.tolist(), counts.tolist(), worth.tolist(), strict=True):
        tables.append(values)
        best = values
        for copies in range(1, min(capacity // size, count) + 1):
            shifted = np.full_like(values, -1.0)
            shifted[copies * size :] = values[: capacity + 1 - copies * size] + copies * price
            best = np.maximum(best, shifted)
        values = best
    pattern, left = np.zeros(len(sizes)), int(np.argmax(values))
    total, value = float(values[left]), float(values[left])
    for index in range(len(sizes) - 1, -1, -1):
        for copies in range(min(left // int(sizes[index]), int(counts[index])) + 1):
            rest = left - copies * int(sizes[index])
            if abs(tables[index][rest] + copies * worth[index] - value) < 1e-9:
                pattern[index], left, value = copies, rest, float(tables[index][rest])
                break
    return total, pattern


def least_step_bytes(lengths: StepLengths, topology: Topology, config: BalanceConfig) -> dict[str, int]:
    """The bytes that must cross nodes in a step of one micro-step at loads up to 1.01 times the bound of every stage.

    The raw items of an encoder's surplus have to leave their node; of the LLM, the text of its surplus of samples.
    These are different bytes, so that they add up. Outputs are left out, because an item that leaves together with its
    sample crosses only once: raw.

    Args:
        lengths: The step; its costs must be additive.
        topology: Ranks and nodes.
        config: The costs.

    Returns:
        By stage; the LLM is "llm" and comes last.
    """
    found = {}
    for name, items in lengths.stages.items():
        home, cost = lengths.home[items.sample], config.stage(name).cost_model
        found[name] = lower_bounds(items.length, home, topology, cost=cost, sizes=items.num_bytes).inter_node
    cost = config.llm.cost_model
    text = lower_bounds(lengths.llm_length, lengths.home, topology, cost=cost, sizes=lengths.num_bytes)
    return {**found, "llm": text.inter_node}
