"""`greedy`: longest processing time first, for packed batches with any additive cost, then a polish.

Graham 1969: the largest load is at most 4/3 - 1/(3d) of the optimum on d bins; the polish only lowers it.
"""

from __future__ import annotations

import numpy as np

from orch.comm.topology import IntArray
from orch.dispatch.bounds import least_load
from orch.dispatch.deal import deal
from orch.dispatch.polish import Limits, polish
from orch.dispatch.problem import DispatchProblem

_CLOSE = 14  # a load within 2^-14 (0.006 %) of the lower bound is good enough


def dispatch_greedy(problem: DispatchProblem) -> IntArray:
    """Deals items by falling cost, each to the bin with the least load so far, and polishes the result.

    Args:
        problem: Its cost must be additive.

    Returns:
        int64[N], the bin of each item. Items that cost nothing stay where they are.

    Raises:
        ValueError: If the cost is not additive.
    """
    costs = problem.item_costs("greedy")
    bin_of_item = problem.home.copy()
    items = np.flatnonzero(costs)
    dealt, _ = deal(costs[items], np.zeros(problem.num_bins, dtype=np.int64))
    bound = least_load(costs, problem.num_bins)
    bin_of_item[items] = dealt
    return polish(costs, bin_of_item, problem.num_bins, Limits(bound + (bound >> _CLOSE)))
