"""Polish: moves and swaps between full and empty bins, until the goal is met or the budget of work is spent.

A round pairs the fullest bins with the emptiest ones, all pairs at once. In each pair it makes the one move or swap
that brings the two loads closest to each other; a pair of few items is dealt anew instead, by trying every subset.
No bin ever becomes as full as the fuller of its pair was, so the largest load never grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin
from orch.dispatch.order import ascending, run_starts

_NEVER = np.iinfo(np.int64).max
_FEW_ITEMS = 10  # of a pair of bins; 2^9 ways to split them
_WORK_OF_SPLITS = 32  # trying them all, counted in items looked at; and the overhead of a round likewise
_WORK_OF_ROUND = 4000
_EXACT = 1 << 49  # sums of so few costs below this are exact in float64


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What a polish may do.

    Attributes:
        goal: Bins up to this load are left alone.
        group: int64[bins], nondecreasing; items stay within their group of bins (a node, say). None for one group.
        patience: How many rounds in a row may fail to lower the largest load.
        max_work: The budget, in items looked at over all rounds.
    """

    goal: int
    group: IntArray | None = None
    patience: int = 12
    max_work: int = 1_000_000


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
    loads = sum_by_bin(costs, bin_of_item, num_bins)
    largest = int(loads.max())
    if largest <= limits.goal:
        return bin_of_item
    order = ascending(costs)
    group = limits.group if limits.group is not None else np.zeros(num_bins, dtype=np.int64)
    state = _State(costs[order], bin_of_item[order], loads, group)
    work, stale = 0, 0
    while largest > limits.goal and stale <= limits.patience and work < limits.max_work:
        # The upper half of what is above the goal first: the rest is worth no work before these have come down. But
        # where nothing helps, other pairs may change what the fullest bin can be paired with.
        floor = (limits.goal + largest) // 2 if stale % 3 == 0 else limits.goal
        pairs = state.pair(floor, shift=stale * stale)
        work += state.improve(pairs) + 2 * num_bins + len(costs) // 4 + _WORK_OF_ROUND
        stale = stale + 1 if int(loads.max()) == largest else 0
        largest = int(loads.max())
    polished = np.empty_like(bin_of_item)
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
    """A layout under way. Items are numbered by rising cost; `bin_of_item` and `loads` change in place."""

    costs: IntArray
    bin_of_item: IntArray
    loads: IntArray
    group: IntArray

    def pair(self, floor: int, shift: int) -> _Pairs:
        """In each group of n bins, pairs the i-th of m above the floor with the (i + shift)-th emptiest of the others.

        At most half of the bins of a group count as above the floor.
        """
        order = ascending(self.group, self.loads)
        group = self.group[order]
        size = np.bincount(group)
        first = np.cumsum(size) - size
        height = (first + size)[group] - 1 - np.arange(len(order))  # 0 for the fullest of its group
        upper = np.flatnonzero((height < size[group] // 2) & (self.loads[order] > floor))
        others = size - np.bincount(group[upper], minlength=len(size))
        of_group = group[upper]
        full, empty = order[upper], order[first[of_group] + (height[upper] + shift) % others[of_group]]
        useful = self.loads[empty] < self.loads[full]
        return _Pairs(full[useful], empty[useful])

    def improve(self, pairs: _Pairs) -> int:
        """Improves each pair as far as one step can; returns the work done."""
        if not len(pairs):
            return 0
        tag_of_bin = np.full(len(self.loads), -1, dtype=np.int64)
        tag_of_bin[pairs.full] = np.arange(len(pairs))
        tag_of_bin[pairs.empty] = np.arange(len(pairs)) + len(pairs)
        tag = tag_of_bin[self.bin_of_item]
        items = np.flatnonzero(tag >= 0)
        pair, in_full = tag[items] % len(pairs), tag[items] < len(pairs)
        few = (np.bincount(pair, minlength=len(pairs)) <= _FEW_ITEMS) & bool(self.costs[-1] < _EXACT)
        split = few[pair]
        if few.any():
            self._split(pairs, items[split], pair[split])
        if not few.all():
            gives, takes = in_full & ~split, ~in_full & ~split
            self._swap(pairs, items[gives], pair[gives], items[takes], pair[takes])
        return len(items) + _WORK_OF_SPLITS * int(few.sum())

    def _swap(self, pairs: _Pairs, leaves: IntArray, pair: IntArray, others: IntArray, pair_of_other: IntArray) -> None:
        """Makes the best move or swap of each pair; `leaves` are in full bins, `others` in empty ones."""
        stride = len(self.costs) + 1
        keys = np.sort(pair_of_other * stride + others)
        gap = (self.loads[pairs.full] - self.loads[pairs.empty])[pair]
        wish = self.costs[leaves] - gap // 2  # the cost of the ideal item to get back
        at = np.searchsorted(keys, pair * stride + np.searchsorted(self.costs, wish))
        miss, returns = _miss(self.costs[leaves], gap), np.full(len(leaves), -1, dtype=np.int64)
        for candidate in (at - 1, at) if len(keys) else ():
            key = keys[np.clip(candidate, 0, len(keys) - 1)]
            same_pair = key // stride == pair
            item = np.where(same_pair, key % stride, 0)
            found = np.where(same_pair, _miss(self.costs[leaves] - self.costs[item], gap), _NEVER)
            miss, returns = np.where(found < miss, found, miss), np.where(found < miss, item, returns)
        least = np.full(len(pairs), _NEVER, dtype=np.int64)
        np.minimum.at(least, pair, miss)
        winners = np.flatnonzero((miss == least[pair]) & (miss < _NEVER))
        _, first = np.unique(pair[winners], return_index=True)
        winners = winners[first]
        self._exchange(pairs, pair[winners], leaves[winners], returns[winners])

    def _exchange(self, pairs: _Pairs, pair: IntArray, leaves: IntArray, returns: IntArray) -> None:
        full, empty, swaps = pairs.full[pair], pairs.empty[pair], returns >= 0
        change = self.costs[leaves]
        change[swaps] -= self.costs[returns[swaps]]
        self.bin_of_item[leaves] = empty
        self.bin_of_item[returns[swaps]] = full[swaps]
        self.loads[full] -= change
        self.loads[empty] += change

    def _split(self, pairs: _Pairs, items: IntArray, pair: IntArray) -> None:
        """Deals the items of each pair anew, by the best of all ways to split them."""
        order = ascending(pair)
        items, pair = items[order], pair[order]
        present, row = np.unique(pair, return_inverse=True)
        slot = np.arange(len(items)) - run_starts(pair)
        table = np.zeros((len(present), _FEW_ITEMS))  # float64: its matrix product is the fast one, and exact
        table[row, slot] = self.costs[items]
        sums = table @ _SUBSETS
        total = table.sum(axis=1)
        best = np.argmin(np.abs(2 * sums - total[:, None]), axis=1)
        found = sums[np.arange(len(present)), best]
        gains = np.maximum(found, total - found) < self.loads[pairs.full[present]]
        in_subset = _SUBSETS[slot, best[row]] == 1
        to = np.where(in_subset, pairs.full[pair], pairs.empty[pair])
        self.bin_of_item[items[gains[row]]] = to[gains[row]]
        self.loads[pairs.full[present[gains]]] = found[gains]
        self.loads[pairs.empty[present[gains]]] = (total - found)[gains]


def _subsets() -> npt.NDArray[np.float64]:
    """All subsets of `_FEW_ITEMS` items without the last one: [items, 2^(items - 1)], ones and zeros."""
    numbers = np.arange(1 << (_FEW_ITEMS - 1))
    return ((numbers[None, :] >> np.arange(_FEW_ITEMS)[:, None]) & 1).astype(np.float64)


_SUBSETS = _subsets()


def _miss(change: IntArray, gap: IntArray) -> IntArray:
    """How far the loads of a pair are from equal when `change` moves over; `_NEVER` where that does not help."""
    return np.where((change <= 0) | (change >= gap), _NEVER, np.abs(2 * change - gap))
