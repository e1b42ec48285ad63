"""Dispatchers: which bin runs which item, so that the largest load is small.

One algorithm a file, one signature, one table. All are functions of the numbers in `DispatchProblem`: the same
numbers give the same layout on any machine (ties are broken by position).
"""

from __future__ import annotations

from collections.abc import Callable

from orch.comm.topology import IntArray
from orch.dispatch.binary_search import dispatch_binary_search
from orch.dispatch.greedy import dispatch_greedy
from orch.dispatch.none import dispatch_none
from orch.dispatch.problem import DispatchProblem

Dispatcher = Callable[[DispatchProblem], IntArray]

DISPATCHERS: dict[str, Dispatcher] = {
    "none": dispatch_none,
    "greedy": dispatch_greedy,
    "binary_search": dispatch_binary_search,
}

__all__ = ["DISPATCHERS", "DispatchProblem", "Dispatcher", "dispatch"]


def dispatch(problem: DispatchProblem, dispatcher: str) -> IntArray:
    """Dispatches with the named algorithm, but never worse than as drawn.

    Args:
        problem: Items and bins.
        dispatcher: A key of `DISPATCHERS`.

    Returns:
        int64[N], the bin of each item. As drawn where the algorithm breaks the cap and the drawn layout keeps it, or
        where the algorithm's largest load is no smaller.
    """
    dealt = DISPATCHERS[dispatcher](problem)
    if problem.fits(problem.home):
        worse = int(problem.loads(dealt).max(initial=0)) >= int(problem.loads(problem.home).max(initial=0))
        if worse or not problem.fits(dealt):
            return problem.home.copy()
    return dealt
