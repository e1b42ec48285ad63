"""Which items leave a bin that holds too much, so that they weigh little."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin
from orch.dispatch.order import ascending, run_starts, starts_run

_STEPS = 2  # items that do not fit, in one bin
_EXPENSIVE = np.iinfo(np.int64).max


def pick_surplus(costs: IntArray, prices: IntArray, bin_of_item: IntArray, excess: IntArray) -> IntArray:
    """Chooses items to leave each bin, so that their cost is at least the excess and their price is small.

    The minimum knapsack by Gens and Levner (1979), all bins at once: take items, those cheap for their cost first,
    as long as they fit into what is left to go; at each item that does not, the cheapest one that covers all that is
    left would end the search; of all such ends the cheapest is taken, at no more than twice the least price. (Here the
    search is over after a few such items at the latest: later ends were never found to be cheaper.)

    Args:
        costs: int64[N], not negative.
        prices: int64[N], what it takes to move each item.
        bin_of_item: int64[N]; -1 for items that are in no bin.
        excess: int64[W], what has to leave each bin; at most 0 where nothing has to.

    Returns:
        Positions of the items that leave, ascending.
    """
    bins = (excess > 0).nonzero()[0]
    if not len(bins):
        return bins
    number = np.full(len(excess) + 1, -1)  # the last is that of no bin
    number[bins] = np.arange(len(bins))
    number_of_item = number[bin_of_item]
    items = ((number_of_item >= 0) & (costs > 0)).nonzero()[0]
    if not len(items):
        return items
    items = items[ascending(number_of_item[items])]
    search = _Search.of(costs[items], prices[items], number_of_item[items], excess[bins])
    for step in range(_STEPS + 1):
        search.end(step)
        if step == _STEPS or not search.take(step):
            break
    return np.sort(items[search.chosen()])


def _coarse(density: npt.NDArray[np.float64]) -> IntArray:
    """Not negative numbers to 5 digits, as integers of the same order: proportional prices are equal then."""
    return density.astype(np.float32).view(np.int32).astype(np.int64) >> 6


@dataclass(slots=True, eq=False)
class _Search:
    """The state of the search. Items are those of bins with an excess, ordered by bin.

    Attributes:
        costs: int64[n].
        prices: int64[n].
        bins: int64[n].
        rest: int64[m], items that may be taken still, by bin, those cheap for their cost first.
        covers: int64[k], items that may end the search still, ascending.
        left: int64[W], what is left to go.
        spent: int64[W], the price of what was taken.
        step: int64[n], the step in which each item was taken.
        best_price: int64[W], the price of the best end so far.
        best_step: int64[W], the step before which it ends.
        best_cover: int64[W], the item that ends it, -1 for none.
    """

    costs: IntArray
    prices: IntArray
    bins: IntArray
    rest: IntArray
    covers: IntArray
    left: IntArray
    spent: IntArray
    step: IntArray
    best_price: IntArray
    best_step: IntArray
    best_cover: IntArray

    @classmethod
    def of(cls, costs: IntArray, prices: IntArray, bins: IntArray, excess: IntArray) -> _Search:
        """The start of the search: nothing taken."""
        return cls(
            costs,
            prices,
            bins,
            ascending(bins, _coarse(prices / costs), -costs),
            np.arange(len(costs)),
            excess,
            excess * 0,
            np.full(len(costs), _EXPENSIVE),
            np.full(len(excess), _EXPENSIVE),
            excess * 0,
            np.full(len(excess), -1),
        )

    def still_to_go(self) -> IntArray:
        """What is left of each bin whose search can end cheaper still, else 0: int64[W]."""
        return np.where(self.best_price > self.spent, np.maximum(self.left, 0), 0)

    def end(self, step: int) -> None:
        """Looks at the end of each bin here: with the cheapest item that covers what is left, if anything is."""
        done = ((self.left <= 0) & (self.best_price > self.spent)).nonzero()[0]
        self.best_price[done], self.best_step[done], self.best_cover[done] = self.spent[done], step, -1
        left = self.still_to_go()[self.bins[self.covers]]
        may_end = (left > 0) & (self.step[self.covers] == _EXPENSIVE)
        self.covers, left = self.covers[may_end], left[may_end]
        ends = self._cheapest(self.covers[self.costs[self.covers] >= left])
        bins = self.bins[ends]
        price = self.spent[bins] + self.prices[ends]
        better = price < self.best_price[bins]
        bins = bins[better]
        self.best_price[bins], self.best_step[bins], self.best_cover[bins] = price[better], step, ends[better]

    def _cheapest(self, items: IntArray) -> IntArray:
        """The first of the cheapest items of each bin."""
        if not len(items):
            return items
        prices, starts = self.prices[items], starts_run(self.bins[items])
        least = np.minimum.reduceat(prices, starts.nonzero()[0])
        cheapest = items[prices == least[starts.cumsum() - 1]]
        return cheapest[starts_run(self.bins[cheapest])]

    def take(self, step: int) -> bool:
        """Takes the items up to the first that does not fit, in each bin; whether any may be taken later."""
        left = self.still_to_go()
        if not left.any():
            return False
        rest = self.rest[self.costs[self.rest] <= left[self.bins[self.rest]]]
        bins, costs = self.bins[rest], self.costs[rest]
        start = run_starts(bins)
        total = costs.cumsum()
        total -= (total - costs)[start]
        blocks = total > left[bins]
        blocked = blocks.cumsum()
        fits = blocked == (blocked - blocks)[start]
        taken, bins = rest[fits], bins[fits]
        self.step[taken] = step
        self.left -= sum_by_bin(costs[fits], bins, len(left))
        self.spent += sum_by_bin(self.prices[taken], bins, len(left))
        self.rest = rest[~fits]
        return len(rest) > 0

    def chosen(self) -> IntArray:
        """The items of the best end of each bin, ascending."""
        chosen = self.step < self.best_step[self.bins]
        chosen[self.best_cover[self.best_cover >= 0]] = True
        return chosen.nonzero()[0]
