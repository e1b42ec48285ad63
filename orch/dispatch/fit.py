"""Fitting items into bins of one capacity, the least that a search finds: better than dealing where bins hold few.

MULTIFIT (Coffman, Garey, Johnson 1978): first-fit decreasing under a bisected capacity; at most 13/11 of the optimum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray

_PROBES = 10
_WIDEST = 10  # capacities of up to 1/10 above the lower bound are tried


def fit(costs: IntArray, num_bins: int, bound: int) -> IntArray | None:
    """Packs the items under the least capacity found.

    Args:
        costs: int64[N], above 0.
        num_bins: Number of bins.
        bound: A lower bound of the largest load.

    Returns:
        int64[N], the bin of each item; None where no capacity that was tried is enough.
    """
    sizes, kind, counts = np.unique(costs, return_inverse=True, return_counts=True)
    shelf = _Shelf(sizes.tolist(), counts.tolist())
    low, high = bound, bound + bound // _WIDEST
    best: list[_Take] | None = None
    for _ in range(_PROBES):
        capacity = (low + high) // 2
        takes = shelf.pack(capacity, num_bins)
        if takes is None:
            low = capacity + 1
        else:
            best, high = takes, capacity
        if low >= high:
            break
    return None if best is None else _laid_out(best, kind)


_Take = tuple[int, int, int]  # kind, bin, number of items


@dataclass(frozen=True, slots=True)
class _Shelf:
    """Items by kind: different sizes, ascending, and how many there are of each."""

    sizes: list[int]
    counts: list[int]

    def pack(self, capacity: int, num_bins: int) -> list[_Take] | None:
        """First-fit decreasing, bin by bin: always the largest item that fits. None where bins run out."""
        left, present = self.counts.copy(), list(range(len(self.sizes)))
        takes, remaining = [], sum(left)
        for number in range(num_bins):
            for kind, count in self._fill(capacity, left, present):
                takes.append((kind, number, count))
                remaining -= count
            if not remaining:
                return takes
        return None

    def _fill(self, room: int, left: list[int], present: list[int]) -> Iterator[tuple[int, int]]:
        """Takes what one bin gets off the shelf: kinds and numbers of items."""
        sizes, kind = self.sizes, len(self.sizes) - 1
        while (kind := _largest(present, bisect_right(sizes, room, 0, kind + 1) - 1)) >= 0:
            count = min(left[kind], room // sizes[kind])
            left[kind] -= count
            room -= count * sizes[kind]
            if not left[kind]:
                present[kind] = kind - 1
            yield kind, count


def _largest(present: list[int], kind: int) -> int:
    """The largest kind up to this one of which any are left, -1 for none; shortens the way for the next search."""
    passed = []
    while kind >= 0 and present[kind] != kind:
        passed.append(kind)
        kind = present[kind]
    for other in passed:
        present[other] = kind
    return kind


def _laid_out(takes: list[_Take], kind: IntArray) -> IntArray:
    """The bin of each item: those of a kind go, in order, to the bins that took some."""
    table = np.array(takes, dtype=np.int64)
    table = table[np.argsort(table[:, 0], kind="stable")]
    bin_of_item = np.empty(len(kind), dtype=np.int64)
    bin_of_item[np.argsort(kind, kind="stable")] = np.repeat(table[:, 1], table[:, 2])
    return bin_of_item
