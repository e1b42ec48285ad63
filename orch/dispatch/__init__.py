"""Dispatchers: which bin runs which item, so that the largest load is small.

One algorithm a file, one signature, one table. All are functions of the numbers in `DispatchProblem`: the same
numbers give the same layout on any machine (ties are broken by position).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import AdditiveCost, PaddedCost, PaddedLikeCost, is_additive, sum_by_bin
from orch.dispatch.binary_search import dispatch_binary_search
from orch.dispatch.bounds import least_load
from orch.dispatch.greedy import dispatch_greedy
from orch.dispatch.local import dealt_anew_if_better, dispatch_local, dispatch_local_at_once
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
_AT_ONCE = 1 << 15  # more items gain nothing from company, and their arrays would hold the interpreter for longer
_TILTED_BITS = 60  # of the sum of costs that are tilted, of which there are four times as many
_LEVEL = 7  # a load within 2^-7 (0.8 %) of the lower bound is level
FROM_SCRATCH = ("greedy", "binary_search")
"""Dispatchers that do not look where items are, so that their batches want placing."""

__all__ = [
    "DISPATCHERS",
    "FROM_SCRATCH",
    "DispatchProblem",
    "Dispatcher",
    "default_dispatcher",
    "dispatch",
    "dispatch_all",
]


def default_dispatcher(cost: object) -> str:
    """The best dispatcher for a cost model: `local` where it is additive, else `binary_search`."""
    return "local" if is_additive(cost) else "binary_search"


def check_dispatcher(dispatcher: str, cost: object) -> None:
    """Raises a `ValueError` if the dispatcher is unknown or does not suit the cost."""
    if dispatcher not in DISPATCHERS:
        raise ValueError(f"`dispatcher` must be one of {sorted(DISPATCHERS)}, but is {dispatcher!r} instead.")
    if dispatcher == "greedy" and not is_additive(cost):
        raise ValueError(f"`cost` must be additive for 'greedy', but is {cost} instead.")
    if dispatcher == "binary_search" and not isinstance(cost, PaddedLikeCost):
        raise ValueError(
            f"`cost` must have a padded part for 'binary_search', as PaddedCost has, but is {cost} instead."
        )


def check_slack(slack: float) -> None:
    """Raises a `ValueError` if it is not a share; no bool is one."""
    if isinstance(slack, bool) or not (isinstance(slack, Real) and 0 <= slack <= 1):
        raise ValueError(f"`slack` must be a number from 0 to 1, but is {slack!r} instead.")


def dispatch(problem: DispatchProblem, dispatcher: str, *, placement: bool = True) -> IntArray:
    """Dispatches with the named algorithm, but never worse than as drawn, and under the cap where it can be met.

    Args:
        problem: Items and bins.
        dispatcher: A key of `DISPATCHERS`.
        placement: Whether batches dealt from scratch are placed where most of their data is.

    Returns:
        int64[N], the bin of each item. As drawn where that keeps the cap and the algorithm either does not, or gives a
        larger step load, or an equal one for as many bytes moved. Where nothing keeps the cap, the layout whose
        largest batch is least.
    """
    return dispatch_all([problem], [dispatcher], placement=placement)[0]


def dispatch_all(
    problems: Sequence[DispatchProblem], dispatchers: Sequence[str], *, placement: bool = True
) -> list[IntArray]:
    """`dispatch` for several problems, which must be of one topology; small ones are dealt at once, which is faster.

    Args:
        problems: All rough or none, with equally many bins a rank.
        dispatchers: A key of `DISPATCHERS` for each.
        placement: As in `dispatch`.

    Returns:
        int64[N] for each.
    """
    dealt: dict[int, IntArray] = {}
    for company in _companies(problems, dispatchers):
        found = dispatch_local_at_once([problems[number] for number in company])
        dealt |= dict(zip(company, found, strict=True))
    return [
        _not_worse(problem, name, dealt[number] if number in dealt else DISPATCHERS[name](problem), placement)
        if len(problem.lengths)
        else problem.home.copy()
        for number, (problem, name) in enumerate(zip(problems, dispatchers, strict=True))
    ]


def _companies(problems: Sequence[DispatchProblem], dispatchers: Sequence[str]) -> Iterator[list[int]]:
    """Numbers of problems that are dealt at once: at least two, with no more items than `_AT_ONCE` together."""
    company: list[int] = []
    num_items = 0
    for number, (problem, dispatcher) in enumerate(zip(problems, dispatchers, strict=True)):
        size = len(problem.lengths)
        if not size or dispatcher != "local" or not is_additive(problem.cost):
            continue
        if num_items + size > _AT_ONCE:
            if len(company) > 1:
                yield company
            company, num_items = [], 0
        company, num_items = [*company, number], num_items + size
    if len(company) > 1:
        yield company


def _not_worse(problem: DispatchProblem, dispatcher: str, dealt: IntArray, placement: bool) -> IntArray:
    """What the algorithm dealt, kept under the cap; as drawn where that is as good."""
    dealt = _under_the_cap(problem, dispatcher, dealt)
    if _is_as_good(problem, problem.drawn, dealt):
        return problem.drawn.copy()
    return place(problem, dealt) if placement and dispatcher in FROM_SCRATCH else dealt


def _is_as_good(problem: DispatchProblem, bins: IntArray, other: IntArray) -> bool:
    """Whether a layout is no worse than another: under the cap, evenly loaded, with few bytes moved."""
    if not (problem.fits(bins) and problem.fits(other)):
        return problem.largest_batch(bins) <= problem.largest_batch(other)
    own, others = problem.step_load(bins), problem.step_load(other)
    return own < others or (own == others and problem.moved_bytes(bins) <= problem.moved_bytes(other))


def _under_the_cap(problem: DispatchProblem, dispatcher: str, dealt: IntArray) -> IntArray:
    """The algorithm's layout; where it piles up too many tokens, that for a cost tilted towards tokens.

    Of padded batches the one with the fewest tokens is known: where it does not fit, nothing does.
    """
    if problem.fits(dealt) or dispatcher == "none":
        return dealt
    if not is_additive(problem.cost):
        return min(dealt, dispatch_binary_search(replace(problem, cost=PaddedCost())), key=problem.largest_batch)
    if problem.slack:  # which the cap may leave no room for
        return _under_the_cap(
            replace(problem, slack=0.0), dispatcher, DISPATCHERS[dispatcher](replace(problem, slack=0.0))
        )
    for quarters in range(1, 5):
        towards_tokens = replace(problem, cost=_TiltedCost(problem.cost, quarters))
        tilted = DISPATCHERS[dispatcher](towards_tokens)
        if problem.fits(tilted):
            asked = dispatcher != "greedy" and not problem.rough
            better = dealt_anew_if_better(problem, tilted, towards_tokens) if asked else tilted
            return _traded(problem, better if problem.fits(better) else tilted)
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
        total, tokens = int(costs.sum()), int(lengths.sum())
        rate = max(1, total // max(1, tokens))
        shift = max(0, max(total, tokens).bit_length() - _TILTED_BITS)
        tilted = (4 - self.quarters) * (costs >> shift) + self.quarters * (rate * lengths >> shift)
        return np.asarray(tilted, dtype=np.int64)

    def loads(self, lengths: IntArray, bin_of_item: IntArray, num_bins: int) -> IntArray:
        return sum_by_bin(self.item_costs(lengths), bin_of_item, num_bins)
