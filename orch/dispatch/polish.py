"""Polish: moves and swaps between full and empty bins, until the goal is met or the budget of work is spent.

A round pairs the fullest bins with the emptiest ones, all pairs at once. In each pair it makes the one move or swap
that brings the two loads closest to each other; a pair of few items is dealt anew instead, by trying every subset.
Where rounds have not helped, it may make two swaps at once.
No bin ever becomes as full as the fuller of its pair was, so the largest load never grows.

Where moves have prices, a move or a swap may take what moving a cost of the gap between its two bins usually takes,
and no more: of two bins that are nearly level, items are swapped that are moved already, or spare something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin
from orch.dispatch.order import ascending, run_starts, starts_run
from orch.dispatch.prices import Prices
from orch.dispatch.two_swaps import MOST_SWAPS, NEVER, best_two_swaps, first_of_least

_FEW_ITEMS = 10  # of a pair of bins; 2^9 ways to split them
_WORK_OF_SPLITS = 32  # trying them all, counted in items looked at; and the overhead of a round likewise
_WORK_OF_ROUND = 4000
_STALE = 2  # rounds without progress, after which two swaps are made at once
_MOST_TWICE = 16  # pairs in a round, the fullest ones first
_FEW_BINS = 4  # with so many to pair with, each has its turn
_MOST_BITS = 62
_LOW = 8  # the lowest eighth of what is above the goal waits
_EXACT, _EXACT_SINGLE = 1 << 49, 1 << 20  # sums of so few costs below these are exact in float64 and float32


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What a polish may do.

    Attributes:
        goal: Bins up to this load are left alone: one for all, or int64[bins], the same within a group but with prices.
        group: int64[bins], nondecreasing; items stay within their group of bins (a node, say). None for one group.
        scope: int64[bins], nondecreasing, each of whole groups: layouts apart, polished at once. None for one.
        patience: How many rounds in a row may fail to make progress, in a scope.
        max_work: The budget, in items looked at over all rounds, for each scope.
        progress: The largest load must come closer to the goal by more than this share of the way.
        two_swaps: Whether two swaps are made at once where rounds have not helped; not with prices.
        prices: Of moving items, where that matters.
    """

    goal: int | IntArray
    group: IntArray | None = None
    scope: IntArray | None = None
    patience: int = 12
    max_work: int = 1_000_000
    progress: float = 0.0
    two_swaps: bool = False
    prices: Prices | None = None


def polish(costs: IntArray, bin_of_item: IntArray, num_bins: int, limits: Limits) -> IntArray:
    """Improves a layout.

    Args:
        costs: int64[N], not negative.
        bin_of_item: int64[N].
        num_bins: Number of bins.
        limits: What may be done.

    Returns:
        int64[N], the improved layout; its largest load is no larger.
    """
    goal = limits.goal if isinstance(limits.goal, np.ndarray) else np.full(num_bins, limits.goal, dtype=np.int64)
    excess = sum_by_bin(costs, bin_of_item, num_bins) - goal
    one = np.zeros(num_bins, dtype=np.int64)
    scope = one if limits.scope is None else limits.scope
    first_of_scope = starts_run(scope).nonzero()[0]
    above = np.maximum.reduceat(excess, first_of_scope)
    if not (above > 0).any():
        return bin_of_item
    group = one if limits.group is None else limits.group
    improvable = np.zeros(int(group[-1]) + 1, dtype=np.bool_)
    improvable[group[excess > 0]] = True
    order = improvable[group[bin_of_item]].nonzero()[0]  # the other items stay where they are
    order = order[ascending(costs[order])]
    prices = None if limits.prices is None else limits.prices.taken(order)
    state = _State(costs[order], bin_of_item[order], excess, goal, group, scope, prices)
    work, stale = 0, np.zeros_like(above)
    while work < limits.max_work * len(above):
        active = (above > 0) & (stale <= limits.patience)
        if not active.any():
            break
        # The upper part of what is above the goal first: the rest is worth no work before these have come down. But
        # where nothing helps, other pairs may change what the fullest bin can be paired with.
        floor = np.where(active, np.where(stale % 3 == 0, above // _LOW, 0), NEVER)
        pairs = state.pair(floor, stale)
        work += (
            state.improve(pairs, (stale >= _STALE) & limits.two_swaps) + 2 * num_bins + len(costs) // 4 + _WORK_OF_ROUND
        )
        before, above = above, np.maximum.reduceat(excess, first_of_scope)
        stale = np.where(before - above > limits.progress * before, 0, stale + 1)
    polished = bin_of_item.copy()
    polished[order] = state.bin_of_item
    return polished


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Disjoint pairs of bins, int64[P] each; `full` is the fuller one."""

    full: IntArray
    empty: IntArray

    def __len__(self) -> int:
        return len(self.full)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """A layout under way. Items are numbered by rising cost; `bin_of_item` and `excess` change in place.

    Attributes:
        costs: int64[N].
        bin_of_item: int64[N].
        excess: int64[bins], loads without the goal.
        goal: int64[bins].
        group: int64[bins].
        scope: int64[bins].
        prices: Of moving items.
    """

    costs: IntArray
    bin_of_item: IntArray
    excess: IntArray
    goal: IntArray
    group: IntArray
    scope: IntArray
    prices: Prices | None

    def pair(self, floor: IntArray, turn: IntArray) -> _Pairs:
        """In each group of n bins, pairs the i-th of m above the floor with the (i + shift)-th emptiest of the others.

        At most half of the bins of a group count as above the floor. The shift is the turn where the others are few,
        so that all come up; else its square, so that very different ones do.

        Args:
            floor: Above the goal; int64[scopes].
            turn: int64[scopes].
        """
        order = ascending(self.group, self.excess)
        excess, group = self.excess[order], self.group[order]
        size = np.bincount(group)
        stop = size.cumsum()
        upper = (excess > floor[self.scope]).nonzero()[0]  # order keeps bins in their group, and so in their scope
        height = stop[group[upper]] - 1 - upper  # 0 for the fullest of its group
        halves = height < size[group[upper]] // 2
        upper, height = upper[halves], height[halves]
        of_group = group[upper]
        others = (size - np.bincount(of_group, minlength=len(size)))[of_group]
        shift = turn[self.scope[upper]]
        shift = np.where(others <= _FEW_BINS, shift, shift * shift)
        lower = (stop - size)[of_group] + (height + shift) % others
        useful = excess[lower] < excess[upper]
        return _Pairs(order[upper[useful]], order[lower[useful]])

    def improve(self, pairs: _Pairs, stale: npt.NDArray[np.bool_]) -> int:
        """Improves each pair as far as one step can; returns the work done.

        Args:
            pairs: Pairs of bins.
            stale: bool[scopes], where two swaps are to be made at once.
        """
        num_pairs = len(pairs)
        if not num_pairs:
            return 0
        tag_of_bin = np.full(len(self.excess), -1, dtype=np.int64)
        tag_of_bin[pairs.full] = np.arange(num_pairs)
        tag_of_bin[pairs.empty] = np.arange(num_pairs, 2 * num_pairs)
        tag = tag_of_bin[self.bin_of_item]
        items = (tag >= 0).nonzero()[0]
        tag = tag[items]
        in_full = tag < num_pairs
        pair = np.where(in_full, tag, tag - num_pairs)
        if self.prices is not None:
            self._swap(pairs, items, pair, in_full)
            return len(items)
        few = np.bincount(pair, minlength=num_pairs) <= _FEW_ITEMS
        if self.costs[-1] >= _EXACT:
            few[:] = False
        twice = stale[self.scope[pairs.full]] & ~few
        if twice.any():
            twice[ascending(np.where(twice, -self.excess[pairs.full], NEVER))[_MOST_TWICE:]] = False
        work = len(items)
        for which, step, work_of_pair in (
            (few, self._split, _WORK_OF_SPLITS),
            (twice, self._swap_twice, MOST_SWAPS),
            (~(few | twice), self._swap, 0),
        ):
            number = int(np.count_nonzero(which))
            if number:
                some = slice(None) if number == num_pairs else which[pair]
                step(pairs, items[some], pair[some], in_full[some])
                work += number * work_of_pair
        return work

    def _swap(self, pairs: _Pairs, items: IntArray, pair: IntArray, in_full: npt.NDArray[np.bool_]) -> None:
        """Makes the best move or swap of each pair."""
        leaves, pair_of_leaving = _by_pair(items[in_full], pair[in_full])
        others, pair_of_other = _by_pair(items[~in_full], pair[~in_full])
        gap = (self.excess[pairs.full] - self.excess[pairs.empty])[pair_of_leaving]
        more = self._more(leaves, pairs.empty[pair_of_leaving], others, pairs.full[pair_of_other])
        miss, returns = self._missing(leaves, gap, more), np.full(len(leaves), -1, dtype=np.int64)
        for some in _by_price(more, others):
            found, item = self._best_returns(leaves, pair_of_leaving, gap, others[some], pair_of_other[some], more)
            better = found < miss
            miss, returns = np.where(better, found, miss), np.where(better, item, returns)
        best = first_of_least(miss, pair_of_leaving)
        self._exchange(pairs, pair_of_leaving[best], leaves[best], returns[best])

    def _swap_twice(self, pairs: _Pairs, items: IntArray, pair: IntArray, in_full: npt.NDArray[np.bool_]) -> None:
        """Makes the best two swaps of each pair."""
        found = best_two_swaps(self.costs, items, pair, in_full, self.excess[pairs.full] - self.excess[pairs.empty])
        full, empty = pairs.full[found.pair], pairs.empty[found.pair]
        for moved, to in ((found.leaves, empty), (found.returns, full)):
            real = moved >= 0
            self.bin_of_item[moved[real]] = np.broadcast_to(to, moved.shape)[real]
        self.excess[full] -= found.change
        self.excess[empty] += found.change

    def _more(self, leaves: IntArray, to: IntArray, others: IntArray, to_of_other: IntArray) -> IntArray | None:
        """What it takes more to run an item in the other bin of its pair: int64[N], or None where that is no matter."""
        if self.prices is None:
            return None
        more = np.zeros(len(self.costs), dtype=np.int64)
        for items, bins in ((leaves, to), (others, to_of_other)):
            more[items] = self.prices.of(items, bins) - self.prices.of(items, self.bin_of_item[items])
        return more

    def _missing(
        self, leaves: IntArray, gap: IntArray, more: IntArray | None, returns: IntArray | None = None
    ) -> IntArray:
        """How far a move or a swap misses level loads; `NEVER` where it does not help, or takes too much."""
        change = self.costs[leaves] if returns is None else self.costs[leaves] - self.costs[returns]
        miss = _miss(change, gap)
        if more is None:
            return miss
        assert self.prices is not None
        taken = more[leaves] if returns is None else more[leaves] + more[returns]
        return np.where(taken <= self.prices.rate * gap, miss, NEVER)

    def _best_returns(
        self,
        leaves: IntArray,
        pair: IntArray,
        gap: IntArray,
        others: IntArray,
        pair_of_other: IntArray,
        more: IntArray | None,
    ) -> tuple[IntArray, IntArray]:
        """For each item that leaves how far its best swap misses level loads, and the one of the others it is for.

        All are in order of their pairs, and there by cost.
        """
        least, best = np.full(len(leaves), NEVER), np.full(len(leaves), -1, dtype=np.int64)
        if not len(others):
            return least, best
        bits = min(int(self.costs[-1]).bit_length(), _MOST_BITS - int(pair[-1]).bit_length())
        shift = int(self.costs[-1]).bit_length() - bits  # of costs so large that there is no room for a pair beside
        keys = (pair_of_other << bits) | (self.costs[others] >> shift)
        wish = np.maximum(self.costs[leaves] - gap // 2, 0)  # the cost of the ideal item to get back
        at = keys.searchsorted((pair << bits) | (wish >> shift))
        for near in (np.maximum(at - 1, 0), np.minimum(at, len(others) - 1)):
            item = others[near]
            miss = self._missing(leaves, gap, more, item)
            better = (miss < least) & (pair_of_other[near] == pair)
            least, best = np.where(better, miss, least), np.where(better, item, best)
        return least, best

    def _exchange(self, pairs: _Pairs, pair: IntArray, leaves: IntArray, returns: IntArray) -> None:
        full, empty, swaps = pairs.full[pair], pairs.empty[pair], returns >= 0
        change = self.costs[leaves]
        change[swaps] -= self.costs[returns[swaps]]
        self.bin_of_item[leaves] = empty
        self.bin_of_item[returns[swaps]] = full[swaps]
        self.excess[full] -= change
        self.excess[empty] += change

    def _split(self, pairs: _Pairs, items: IntArray, pair: IntArray, _: npt.NDArray[np.bool_]) -> None:
        """Deals the items of each pair anew, by the best of all ways to split them."""
        order = ascending(pair)
        items, pair = items[order], pair[order]
        present, row = np.unique(pair, return_inverse=True)
        slot = np.arange(len(items)) - run_starts(pair)
        # Floats: their matrix product is the fast one, and exact.
        table = np.zeros((len(present), _FEW_ITEMS), np.float32 if self.costs[-1] < _EXACT_SINGLE else np.float64)
        table[row, slot] = self.costs[items]
        miss = table @ _SIDES.astype(table.dtype)
        np.abs(miss, out=miss)
        best = miss.argmin(axis=1)
        total = table.sum(axis=1).astype(np.int64)
        found = (table * _SIDES.T[best]).sum(axis=1).astype(np.int64) + total >> 1
        full, empty = pairs.full[present], pairs.empty[present]
        gains = np.maximum(found, total - found) < self.excess[full] + self.goal[full]
        to = np.where(_SIDES[slot, best[row]] > 0, pairs.full[pair], pairs.empty[pair])
        self.bin_of_item[items[gains[row]]] = to[gains[row]]
        self.excess[full[gains]] = found[gains] - self.goal[full[gains]]
        self.excess[empty[gains]] = (total - found)[gains] - self.goal[empty[gains]]


def _by_pair(items: IntArray, pair: IntArray) -> tuple[IntArray, IntArray]:
    """The items and their pairs, in order of these: what is looked up in that order lies close together."""
    order = ascending(pair)
    return items[order], pair[order]


def _by_price(more: IntArray | None, items: IntArray) -> list[IntArray | slice]:
    """Positions of the items that spare something when they move, of those that take nothing more, and of the rest.

    The item of the best cost is looked for in each kind, lest it be one that takes too much. One kind without prices.
    """
    if more is None:
        return [slice(None)]
    sign = np.sign(more[items])
    return [(sign == value).nonzero()[0] for value in (-1, 0, 1)]


def _sides() -> npt.NDArray[np.float64]:
    """All ways to split `_FEW_ITEMS` items, the last on the second side: [items, 2^(items - 1)], 1 and -1."""
    numbers = np.arange(1 << (_FEW_ITEMS - 1))
    return ((numbers[None, :] >> np.arange(_FEW_ITEMS)[:, None] & 1) * 2 - 1).astype(np.float64)


_SIDES = _sides()


def _miss(change: IntArray, gap: IntArray) -> IntArray:
    """How far the loads of a pair are from equal when `change` moves over; `NEVER` where that does not help."""
    return np.where((change <= 0) | (change >= gap), NEVER, np.abs(2 * change - gap))
