"""Which items leave a bin that holds too much, so that they weigh little."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin
from orch.dispatch.order import ascending, run_starts

_STEPS = 5  # items that do not fit, in one bin
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
        bin_of_item: int64[N]; negative for items that are in no bin.
        excess: int64[W], what has to leave each bin; at most 0 where nothing has to.

    Returns:
        Positions of the items that leave, ascending.
    """
    items = np.flatnonzero((costs > 0) & (bin_of_item >= 0))
    items = items[excess[bin_of_item[items]] > 0]
    if not len(items):
        return items
    search = _Search.of(costs[items], prices[items], bin_of_item[items], excess)
    rest = ascending(search.bins, _coarse(prices[items] / costs[items]), -search.costs)
    for step in range(_STEPS):
        search.end(step)
        rest = search.take(rest, step)
        if not len(rest):
            break
    search.end(step + 1)
    return items[search.chosen()]


def _coarse(density: npt.NDArray[np.float64]) -> IntArray:
    """Not negative numbers to 5 digits, as integers of the same order: proportional prices are equal then."""
    return density.astype(np.float32).view(np.int32).astype(np.int64) >> 6


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """The state of the search, changed in place; items are those of bins with an excess.

    Attributes:
        costs: int64[n].
        prices: int64[n].
        bins: int64[n].
        by_price: int64[n], items by bin, then by price.
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
    by_price: IntArray
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
            ascending(bins, prices, costs),
            excess.copy(),
            np.zeros_like(excess),
            np.full(len(costs), _EXPENSIVE),
            np.full(len(excess), _EXPENSIVE),
            np.zeros_like(excess),
            np.full(len(excess), -1),
        )

    def end(self, step: int) -> None:
        """Looks at the end of each bin here: with the cheapest item that covers what is left, if anything is."""
        open_bins = self.best_price > self.spent
        covers = self.by_price[open_bins[self.bins[self.by_price]]]
        covers = covers[
            (self.step[covers] == _EXPENSIVE)
            & (self.costs[covers] >= self.left[self.bins[covers]])
            & (self.left[self.bins[covers]] > 0)
        ]
        covers = covers[np.flatnonzero(np.diff(self.bins[covers], prepend=-1))]  # the first of each bin
        self._note(self.bins[covers], self.spent[self.bins[covers]] + self.prices[covers], step, covers)
        done = np.flatnonzero((self.left <= 0) & open_bins)
        self._note(done, self.spent[done], step, np.full(len(done), -1))

    def _note(self, bins: IntArray, price: IntArray, step: int, cover: IntArray) -> None:
        better = price < self.best_price[bins]
        bins = bins[better]
        self.best_price[bins], self.best_step[bins], self.best_cover[bins] = price[better], step, cover[better]

    def take(self, rest: IntArray, step: int) -> IntArray:
        """Takes the items up to the first that does not fit, in each bin; returns those that may be taken later."""
        rest = rest[self.costs[rest] <= self.left[self.bins[rest]]]
        bins = self.bins[rest]
        start = run_starts(bins)
        total = np.cumsum(self.costs[rest])
        total -= total[start] - self.costs[rest[start]]
        blocked = np.cumsum(total > self.left[bins])
        fits: npt.NDArray[np.bool_] = blocked == (blocked - (total > self.left[bins]))[start]
        taken = rest[fits]
        self.step[taken] = step
        self.left[:] -= sum_by_bin(self.costs[taken], self.bins[taken], len(self.left))
        self.spent[:] += sum_by_bin(self.prices[taken], self.bins[taken], len(self.left))
        return rest[~fits]

    def chosen(self) -> IntArray:
        """The items of the best end of each bin, ascending."""
        chosen = self.step < self.best_step[self.bins]
        chosen[self.best_cover[self.best_cover >= 0]] = True
        return np.flatnonzero(chosen)
