"""Dispatchers: which bin runs which item, so that the largest load is small.

One algorithm a file, one signature, one table. All are functions of the numbers in `DispatchProblem`: the same
numbers give the same layout on any machine (ties are broken by position).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import AdditiveCost, PaddedLikeCost, sum_by_bin
from orch.dispatch.binary_search import dispatch_binary_search
from orch.dispatch.bounds import least_load
from orch.dispatch.greedy import dispatch_greedy
from orch.dispatch.local import dispatch_local
from orch.dispatch.none import dispatch_none
from orch.dispatch.placed import place
from orch.dispatch.problem import DispatchProblem
from orch.dispatch.trade import trade

Dispatcher = Callable[[DispatchProblem], IntArray]

DISPATCHERS: dict[str, Dispatcher] = {
    "none": dispatch_none,
    "greedy": dispatch_greedy,
    "local": dispatch_local,
    "binary_search": dispatch_binary_search,
}
_LEVEL = 7  # a load within 2^-7 (0.8 %) of the lower bound is level
FROM_SCRATCH = ("greedy", "binary_search")
"""Dispatchers that do not look where items are, so that their batches want placing."""

__all__ = ["DISPATCHERS", "FROM_SCRATCH", "DispatchProblem", "Dispatcher", "default_dispatcher", "dispatch"]


def default_dispatcher(cost: object) -> str:
    """The best dispatcher for a cost model: `local` where it is additive, else `binary_search`."""
    return "local" if isinstance(cost, AdditiveCost) else "binary_search"


def check_dispatcher(dispatcher: str, cost: object) -> None:
    """Raises a `ValueError` if the dispatcher is unknown or does not suit the cost."""
    if dispatcher not in DISPATCHERS:
        raise ValueError(f"`dispatcher` must be one of {sorted(DISPATCHERS)}, but is {dispatcher!r} instead.")
    if dispatcher == "greedy" and not isinstance(cost, AdditiveCost):
        raise ValueError(f"`cost` must be additive for 'greedy', but is {cost} instead.")
    if dispatcher == "binary_search" and not isinstance(cost, PaddedLikeCost):
        raise ValueError(f"`cost` must have a padded part for 'binary_search', but is {cost} instead.")


def dispatch(problem: DispatchProblem, dispatcher: str, *, placement: bool = True) -> IntArray:
    """Dispatches with the named algorithm, but never worse than as drawn, and under the cap where it can be met.

    Args:
        problem: Items and bins.
        dispatcher: A key of `DISPATCHERS`.
        placement: Whether batches dealt from scratch are placed where most of their data is.

    Returns:
        int64[N], the bin of each item. As drawn where that keeps the cap and the algorithm either does not, or gives a
        larger largest load, or an equal one for as many bytes moved. Where nothing keeps the cap, the layout whose
        largest batch is least.
    """
    if not len(problem.lengths):
        return problem.home.copy()
    dealt = _under_the_cap(problem, dispatcher)
    if _order_of(problem, problem.drawn) <= _order_of(problem, dealt):
        return problem.drawn.copy()
    return place(problem, dealt) if placement and dispatcher in FROM_SCRATCH else dealt


def _order_of(problem: DispatchProblem, bins: IntArray) -> tuple[bool, int, int]:
    """Orders layouts, the better one first: under the cap, evenly loaded, with few bytes moved."""
    if not problem.fits(bins):
        return True, problem.largest_batch(bins), 0
    return False, problem.largest_load(bins), problem.moved_bytes(bins)


def _under_the_cap(problem: DispatchProblem, dispatcher: str) -> IntArray:
    """The algorithm's layout; where an additive cost piles up too many tokens, for a cost tilted towards tokens."""
    dealt = DISPATCHERS[dispatcher](problem)
    if problem.fits(dealt) or dispatcher == "none" or not isinstance(problem.cost, AdditiveCost):
        return dealt
    for quarters in range(1, 5):
        tilted = DISPATCHERS[dispatcher](replace(problem, cost=_TiltedCost(problem.cost, quarters)))
        if problem.fits(tilted):
            return _traded(problem, tilted)
        dealt = min(dealt, tilted, key=problem.largest_batch)
    return _traded(problem, problem.drawn) if problem.fits(problem.drawn) else dealt


def _traded(problem: DispatchProblem, bin_of_item: IntArray) -> IntArray:
    """The layout with costs level, where the cap leaves a tilted one far from it."""
    if problem.rough or problem.cap is None or problem.layout != "packed":
        return bin_of_item
    costs = problem.item_costs("trade")
    bound = least_load(costs, problem.num_bins)
    return trade(costs, problem.lengths, bin_of_item, problem.num_bins, problem.cap, bound + (bound >> _LEVEL))


@dataclass(frozen=True, slots=True)
class _TiltedCost:
    """An additive cost of which some quarters are replaced by tokens, scaled to weigh the same in all."""

    cost: AdditiveCost
    quarters: int

    def item_costs(self, lengths: IntArray) -> IntArray:
        costs = self.cost.item_costs(lengths)
        rate = max(1, int(costs.sum()) // max(1, int(lengths.sum())))
        return np.asarray((4 - self.quarters) * costs + self.quarters * rate * lengths, dtype=np.int64)

    def loads(self, lengths: IntArray, bin_of_item: IntArray, num_bins: int) -> IntArray:
        return sum_by_bin(self.item_costs(lengths), bin_of_item, num_bins)
