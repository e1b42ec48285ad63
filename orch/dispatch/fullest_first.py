"""The fullest bin first: of all moves and swaps that bring it down to its goal, the one that takes least.

Where bins hold few items, few of those of other bins make up what one holds too much, and pairs of bins that are drawn
up beforehand miss them. This looks at all, or evenly chosen ones where they are many, for one bin at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin
from orch.dispatch.prices import Prices

_WORK_OF_STEP = 20_000  # the overhead of a step, counted in pairs of items
_NO_LIMIT = np.iinfo(np.int64).max
_NONE = -1


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is looked at.

    Attributes:
        leaving: Items of the fullest bin,
        returning: and of other bins for each of them; where there are more, others at each turn.
        work: The budget of all scopes that are above their goal, in pairs of items; each has the same share.
    """

    leaving: int = 256
    returning: int = 4096
    work: int = 1 << 25


def fullest_first(
    costs: IntArray,
    bins: IntArray,
    goal: IntArray,
    scope: IntArray,
    prices: Prices | None = None,
    spare: IntArray | None = None,
    effort: Effort = Effort(),
) -> IntArray:
    """Brings bins down to their goal, the fullest of a scope first.

    Of the moves and swaps after which neither bin is above its goal the one is made that takes least; where there is
    none, of those that leave the fuller of the two least full.

    Args:
        costs: int64[N], not negative.
        bins: int64[N], the layout to start from.
        goal: int64[B], not negative.
        scope: int64[B], nondecreasing: layouts apart.
        prices: Of running items elsewhere, where that matters.
        spare: int64[scopes], what all steps of a scope may take together; None for any amount.
        effort: How much is looked at.

    Returns:
        int64[N], the improved layout; its largest excess is no larger.
    """
    excess = sum_by_bin(costs, bins, len(goal)) - goal
    if not (excess > 0).any():
        return bins
    search = _Search(costs, bins.copy(), excess, prices, effort)
    items = costs.nonzero()[0]
    scope_of_item = scope[bins[items]]
    above = np.unique(scope[excess > 0]).tolist()
    for number in above:
        inside, most = (scope == number).nonzero()[0], _NO_LIMIT if spare is None else int(spare[number])
        search.bring_down(items[scope_of_item == number], inside, most, effort.work // len(above))
    return search.bins


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """The search; `bins` and `excess` change in place."""

    costs: IntArray
    bins: IntArray
    excess: IntArray
    prices: Prices | None
    effort: Effort

    def bring_down(self, items: IntArray, inside: IntArray, spare: int, most_work: int) -> None:
        """In one scope, of these items and bins."""
        stride = -(-len(items) // self.effort.returning)
        failed = np.zeros(len(self.excess), dtype=np.int64)  # turns of each bin since it last changed
        none = np.full(len(inside), _NONE)
        work, turn = 0, 0
        while work < most_work:
            full = int(inside[np.where(failed[inside] < stride, self.excess[inside], 0).argmax()])
            if failed[full] == stride or self.excess[full] <= 0:
                return
            bins, some = self.bins[items], slice(turn % stride, None, stride)
            leaving = items[bins == full]
            leaving = leaving[:: -(-len(leaving) // self.effort.leaving)]
            returning = np.concatenate([items[some], none])
            other = np.concatenate([bins[some], inside])  # the bin that it is in; for none, each bin
            step = self._cheapest(full, leaving, returning, other)
            work, turn = work + len(leaving) * len(returning) + _WORK_OF_STEP, turn + 1
            if step is None or step.taken > spare:
                failed[full] += 1
                continue
            spare -= step.taken
            self._make(step, full)
            failed[[full, step.to]] = 0

    def _cheapest(self, full: int, leaving: IntArray, returning: IntArray, other: IntArray) -> _Step | None:
        """The step to make, of any of the items that leave the fullest bin for any that returns from another."""
        change = self.costs[leaving][:, None] - np.where(returning == _NONE, 0, self.costs[returning])
        fuller = self.excess[other] + change
        np.subtract(self.excess[full], change, out=change)
        np.maximum(fuller, change, out=fuller)
        least = int(fuller.min())
        if least >= self.excess[full]:
            return None
        row, column = np.divmod((fuller <= max(least, 0)).ravel().nonzero()[0], len(returning))
        leaves, returns, to = leaving[row], returning[column], other[column]
        taken = self._taken(leaves, full, to) + np.where(returns == _NONE, 0, self._taken(returns, to, full))
        best = int(taken.argmin())
        return _Step(int(leaves[best]), int(returns[best]), int(to[best]), int(taken[best]))

    def _taken(self, items: IntArray, start: IntArray | int, to: IntArray | int) -> IntArray:
        """What it takes more to run each item in another bin: int64[K]."""
        if self.prices is None:
            return np.zeros_like(items)
        start, to = (np.broadcast_to(bins, items.shape) for bins in (start, to))
        return self.prices.of(items, to) - self.prices.of(items, start)

    def _make(self, step: _Step, full: int) -> None:
        change = int(self.costs[step.leaves])
        self.bins[step.leaves] = step.to
        if step.returns != _NONE:
            change -= int(self.costs[step.returns])
            self.bins[step.returns] = full
        self.excess[full] -= change
        self.excess[step.to] += change


@dataclass(frozen=True, slots=True)
class _Step:
    """A move or a swap: the item that leaves the fullest bin, the one that returns or -1, the other bin, the price."""

    leaves: int
    returns: int
    to: int
    taken: int
