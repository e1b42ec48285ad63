"""`greedy`: longest processing time first, for packed batches with any additive cost, then a polish.

Graham 1969: the largest load is at most 4/3 - 1/(3d) of the optimum on d bins; the polish only lowers it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin
from orch.dispatch.bounds import least_load
from orch.dispatch.deal import deal, fold
from orch.dispatch.fit import fit
from orch.dispatch.fullest_first import fullest_first
from orch.dispatch.polish import Limits, polish
from orch.dispatch.problem import DispatchProblem

_PATIENCE = 24
_NEAR = 10  # where no more than 2^-10 (0.1 %) is missing to the goal,
_PATIENCE_NEAR = 200  # more pairs are tried: each has a small chance to be off by just what is missing
_FEW_ITEMS = 4096  # up to here the drawn layout is a start as well
_FEW_A_BIN = 12  # and up to here what fits under the least capacity
_EXPENSIVE = 1 << 62
_MANY_ITEMS = 1 << 16
_CLOSE = 14  # with more, a load within 2^-14 (0.006 %) of the lower bound is good enough


def dispatch_greedy(problem: DispatchProblem) -> IntArray:
    """Deals items by falling cost, each to the bin with the least load so far, and polishes the result.

    Where that misses the lower bound, the polish is tried from other starts too, and the best of them taken.

    Args:
        problem: Its cost must be additive.

    Returns:
        int64[N], the bin of each item. Items that cost nothing stay where they are.

    Raises:
        ValueError: If the cost is not additive.
    """
    costs = problem.item_costs("greedy")
    bound, few = least_load(costs, problem.num_bins), len(costs) <= _FEW_ITEMS
    near = bound >> _CLOSE if len(costs) > _MANY_ITEMS else 0
    limits = Limits(bound + max(near, problem.slack_of(bound)), patience=_PATIENCE)
    items = np.flatnonzero(costs)
    best, least, one = problem.home, _EXPENSIVE, np.zeros(problem.num_bins, dtype=np.int64)
    starts = [_longest_first, _folded]
    few_a_bin = len(items) <= _FEW_A_BIN * problem.num_bins
    starts += [_fitted] * few_a_bin + [_as_drawn] * few
    for start in starts if len(items) else ():
        if least > limits.goal:
            bin_of_item = problem.home.copy()
            bin_of_item[items] = start(costs[items], problem.drawn[items], problem.num_bins)
            bin_of_item = polish(costs, bin_of_item, problem.num_bins, limits)
            largest = int(sum_by_bin(costs, bin_of_item, problem.num_bins).max())
            if largest < least:
                best, least = bin_of_item, largest
    if few_a_bin and least > limits.goal:
        best = fullest_first(costs, best, one + limits.goal, one)
        least = int(sum_by_bin(costs, best, problem.num_bins).max())
    if limits.goal < least <= limits.goal + (limits.goal >> _NEAR):
        best = polish(costs, best, problem.num_bins, replace(limits, patience=_PATIENCE_NEAR))
    return best.copy()


def _longest_first(costs: IntArray, drawn: IntArray, num_bins: int) -> IntArray:
    return deal(costs, np.zeros(num_bins, dtype=np.int64))[0]


def _folded(costs: IntArray, drawn: IntArray, num_bins: int) -> IntArray:
    return fold(costs, num_bins)


def _fitted(costs: IntArray, drawn: IntArray, num_bins: int) -> IntArray:
    fitted = fit(costs, num_bins, least_load(costs, num_bins))
    return drawn if fitted is None else fitted


def _as_drawn(costs: IntArray, drawn: IntArray, num_bins: int) -> IntArray:
    return drawn
