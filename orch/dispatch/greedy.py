"""`greedy`: longest processing time first, for packed batches with any additive cost.

Graham 1969: the largest load is at most 4/3 - 1/(3d) of the optimum on d bins.
"""

from __future__ import annotations

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import AdditiveCost
from orch.dispatch.problem import DispatchProblem, descending


def dispatch_greedy(problem: DispatchProblem) -> IntArray:
    """Deals items by falling cost, each to the bin with the least load so far.

    Args:
        problem: Its cost must be additive.

    Returns:
        int64[N], the bin of each item. Items that cost nothing stay where they are.

    Raises:
        ValueError: If the cost is not additive.
    """
    if not isinstance(problem.cost, AdditiveCost):
        raise ValueError(f"`cost` must be additive for `greedy`, but is {problem.cost} instead.")
    costs = problem.cost.item_costs(problem.lengths)
    bin_of_item = problem.home.copy()
    items = np.flatnonzero(costs)
    bin_of_item[items], _ = deal(costs[items], np.zeros(problem.num_bins, dtype=np.int64))
    return bin_of_item


def deal(costs: IntArray, loads: IntArray) -> tuple[IntArray, IntArray]:
    """Longest processing time first, exactly, in vectorised rounds.

    With bins in order of load, item i of the rest goes to bin i as long as no bin served earlier in the round,
    with its new item, is lighter than bin i: up to there a round does what one item after another would. About as
    many rounds are needed as there are items a bin.

    Args:
        costs: int64[N], not negative.
        loads: int64[W], what is in each bin already.

    Returns:
        int64[N], the bin of each item, and int64[W], the final loads.
    """
    order = descending(costs)
    costs, loads = costs[order], loads.copy()
    bin_of_item = np.empty(len(costs), dtype=np.int64)
    start, used = 0, np.cumsum(costs)
    while start < len(costs):
        bins = np.argsort(loads, kind="stable")[: len(costs) - start]
        old = loads[bins]
        new = old + costs[start : start + len(bins)]
        stale = old[1:] > np.minimum.accumulate(new)[:-1]
        served = int(np.argmax(stale)) + 1 if stale.any() else len(bins)
        if served == 1 and len(bins) > 1:  # one light bin among heavy ones takes items until it is light no more
            before = used[start - 1] if start else 0
            count = int(np.searchsorted(used[start:] - before, old[1] - old[0], side="right")) + 1
            count = min(count, len(costs) - start)
            bin_of_item[order[start : start + count]] = bins[0]
            loads[bins[0]] += used[start + count - 1] - before
            start += count
            continue
        bin_of_item[order[start : start + served]] = bins[:served]
        loads[bins[:served]] = new[:served]
        start += served
    return bin_of_item, loads
