"""`binary_search`: padded batches of the least largest cost, exactly.

Sort the items by falling length. Under a bound B on `n * slot(L)`, the longest item left is in some batch and sets its
L, so that batch takes `B // slot(L)` items, and the longest ones left are the best to take (any other choice leaves
longer ones behind). The batches are runs, B is feasible if they are at most as many as the bins, and the least
such B is the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import PaddedLikeCost
from orch.dispatch.order import descending
from orch.dispatch.problem import DispatchProblem

_ALWAYS = 1 << 62  # every run is cheaper


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
    starts = _Runs.of(problem, order).best(problem.num_bins)
    bin_of_item = np.empty(len(order), dtype=np.int64)
    bin_of_item[order] = np.searchsorted(starts, np.arange(len(order)), side="right") - 1
    return bin_of_item


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Items sorted by falling length, as lists: a probe reads one item a bin, which Python does faster from a list.

    Attributes:
        slots: N, cost of a row of the rectangle of which the item is the longest.
        packed: N, cost of each item beside the rectangle; None where there is none.
        prefix: N + 1, sums of `packed`.
        most: N, how many items the cap allows in a batch of which this one is the longest; None without a cap.
    """

    slots: list[int]
    packed: list[int] | None
    prefix: IntArray
    most: list[int] | None

    @classmethod
    def of(cls, problem: DispatchProblem, order: IntArray) -> _Runs:
        """The runs of the items in `order`."""
        assert isinstance(problem.cost, PaddedLikeCost)
        lengths = problem.lengths[order]
        packed = problem.cost.packed_costs(lengths)
        prefix = np.zeros(len(order) + 1, dtype=np.int64)
        if packed is not None:
            np.cumsum(packed, out=prefix[1:])
        slots = problem.cost.slot_costs(lengths).tolist()
        most = None
        if problem.cap is not None and int(lengths[0]) * len(lengths) > problem.cap:
            most = np.maximum(problem.cap // np.maximum(lengths, 1), 1).tolist()
        return cls(slots, None if packed is None else packed.tolist(), prefix, most)

    def best(self, num_bins: int) -> IntArray:
        """The starts of the runs under the least feasible bound: int64[runs]."""
        size = len(self.slots)
        low = self._least(num_bins)
        best, high = self._cut(_ALWAYS, num_bins), _ALWAYS
        if best is None:  # the cap alone needs more bins than there are: leave it to the caller, who checks
            return replace(self, most=None).best(num_bins)
        step = max(low >> 7, 1)  # optima lie a few percent above the average of all items: climb from there, then halve
        while low < high:
            bound = min(low + step, (low + high) // 2)
            starts = self._cut(bound, num_bins)
            if starts is None:
                low, step = bound + 1, 2 * step
            else:
                best, high = starts, self._largest(starts)
        assert best is not None
        return _without_empty_bins(best, size, num_bins)

    def _cut(self, bound: int, num_bins: int) -> list[int] | None:
        """The starts of the longest runs under `bound`, or None if they are more than the bins."""
        if self.packed is not None:
            return self._cut_with_rest(bound, num_bins)
        slots, most, size = self.slots, self.most, len(self.slots)
        starts, start = [], 0
        for _ in range(num_bins):
            starts.append(start)
            count = bound // slots[start] if slots[start] else size
            start += count if most is None or count < most[start] else most[start]
            if start >= size:
                return starts
        return None

    def _cut_with_rest(self, bound: int, num_bins: int) -> list[int] | None:
        """As `_cut`; a run is found in a few steps, each as long as if all later items cost what the next one does."""
        assert self.packed is not None
        slots, packed, most, size = self.slots, self.packed, self.most, len(self.slots)
        starts, start = [], 0
        for _ in range(num_bins):
            starts.append(start)
            limit = size if most is None else min(size, start + most[start])
            stop, left = start, bound
            while stop < limit:
                each = slots[start] + packed[stop]
                count = min(left // each if each else limit, limit - stop)
                if not count:
                    break
                left -= slots[start] * count + int(self.prefix[stop + count] - self.prefix[stop])
                stop += count
            start = max(stop, start + 1)
            if start >= size:
                return starts
        return None

    def _largest(self, starts: list[int]) -> int:
        """The largest cost of the runs that begin at `starts`."""
        first = np.asarray(starts, dtype=np.int64)
        stop = np.append(first[1:], len(self.slots))
        slots = np.asarray([self.slots[start] for start in starts], dtype=np.int64)
        return int((slots * (stop - first) + self.prefix[stop] - self.prefix[first]).max())

    def _least(self, num_bins: int) -> int:
        """No bound below this is feasible: the longest item alone, and the average of all items without padding."""
        total = sum(self.slots) + int(self.prefix[-1])
        return max(self.slots[0] + (self.packed[0] if self.packed else 0), -(-total // num_bins))


def _without_empty_bins(starts: list[int], size: int, num_bins: int) -> IntArray:
    """Lets the last runs start later, so that every bin has an item where there are enough: int64[runs].

    The new runs at the end hold one of the last items each, the shortest, so no cost grows.
    """
    runs = min(num_bins, size)
    first = np.append(np.asarray(starts, dtype=np.int64), np.full(runs - len(starts), size, dtype=np.int64))
    return np.minimum(first, size - runs + np.arange(runs))
