"""`binary_search`: padded batches of the least largest cost, exactly.

Sort the items by falling length. Under a bound B on `n * slot(L)`, the longest item left is in some batch and sets its
L, so that batch takes `B // slot(L)` items, and the longest ones left are the best to take (any other choice leaves
longer ones behind). The batches are runs, B is feasible if they are at most as many as the bins, and the least
such B is the optimum.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import PaddedLikeCost
from orch.dispatch.problem import DispatchProblem, descending


def dispatch_binary_search(problem: DispatchProblem) -> IntArray:
    """Cuts the items, sorted by length, into runs whose largest cost is least.

    The optimum of padded costs, under the cap too; with a packed rest beside the rectangle, the best sorted runs.

    Args:
        problem: Its cost must have a rectangle (`PaddedCost`, `RectangleFrontCost`).

    Returns:
        int64[N], the bin of each item; the longest items are in bin 0. No bin is empty where N >= the number of bins.

    Raises:
        ValueError: If the cost has no rectangle.
    """
    if not isinstance(problem.cost, PaddedLikeCost):
        raise ValueError(f"`cost` must have a padded part for `binary_search`, but is {problem.cost} instead.")
    if not len(problem.lengths):
        return problem.home.copy()
    order = descending(problem.lengths)
    runs = _Runs.of(problem, order)
    starts = runs.best(problem.num_bins)
    bin_of_item = np.empty(len(order), dtype=np.int64)
    bin_of_item[order] = np.searchsorted(starts, np.arange(len(order)), side="right") - 1
    return bin_of_item


class _Runs:
    """Sorted items, as lists, which Python reads one by one faster than arrays; a probe reads one item a bin."""

    def __init__(self, slots: list[int], packed: list[int] | None, most_items: list[int] | None) -> None:
        self.slots = slots
        self.packed = [0, *accumulate(packed)] if packed is not None else None
        self.most_items = most_items  # the cap: items in a batch of which this one is the longest

    @classmethod
    def of(cls, problem: DispatchProblem, order: IntArray) -> _Runs:
        """The runs of the items in `order`."""
        assert isinstance(problem.cost, PaddedLikeCost)
        lengths = problem.lengths[order]
        packed = problem.cost.packed_costs(lengths)
        most = None
        if problem.cap is not None:
            most = np.maximum(problem.cap // np.maximum(lengths, 1), 1).tolist()
        return cls(problem.cost.slot_costs(lengths).tolist(), None if packed is None else packed.tolist(), most)

    def best(self, num_bins: int) -> list[int]:
        """The starts of the runs under the least feasible bound."""
        low, high = self._least(num_bins), self._cost(0, len(self.slots))
        best, _ = self.probe(high, num_bins)
        if best is None:  # the cap alone needs more bins than there are
            self.most_items = None
            best, _ = self.probe(high, num_bins)
        assert best is not None, (high, num_bins)
        while low < high:
            # Bounds near the average of all items are the likely ones: climb from there before halving.
            middle = min((low + high) // 2, low + (low >> 6) + 1)
            starts, bound = self.probe(middle, num_bins)
            low, high, best = (low, bound, starts) if starts is not None else (bound, high, best)
        return best

    def probe(self, bound: int, num_bins: int) -> tuple[list[int] | None, int]:
        """The starts of the runs under `bound` and their largest cost, or None and the next bound worth trying."""
        starts, start, size, largest, following = [], 0, len(self.slots), 0, None
        for remaining in range(num_bins, 0, -1):
            count = self._fill(start, bound)
            if start + count < size:
                grown = self._cost(start, start + count + 1)
                if (self.most_items is None or count < self.most_items[start]) and grown > bound:
                    following = grown if following is None else min(following, grown)
            count = min(count, max(size - start - remaining + 1, 1))
            starts.append(start)
            largest = max(largest, self._cost(start, start + count))
            start += count
            if start >= size:
                return starts, largest
        return None, following if following is not None else bound + 1

    def _fill(self, start: int, bound: int) -> int:
        """How many items a run from `start` holds under `bound`; at least one."""
        size = len(self.slots) - start
        slot = self.slots[start]
        if self.packed is None:
            count = min(bound // slot, size) if slot else size
        else:
            count = bisect_right(range(size + 1), bound, key=lambda n: self._cost(start, start + n)) - 1
        if self.most_items is not None:
            count = min(count, self.most_items[start])
        return max(count, 1)

    def _cost(self, start: int, stop: int) -> int:
        rectangle = self.slots[start] * (stop - start)
        return rectangle if self.packed is None else rectangle + self.packed[stop] - self.packed[start]

    def _least(self, num_bins: int) -> int:
        """No bound below this is feasible: the longest item alone, and the average of all items without padding."""
        total = sum(self.slots) + (self.packed[-1] if self.packed is not None else 0)
        return max(self._cost(0, 1), -(-total // num_bins))
