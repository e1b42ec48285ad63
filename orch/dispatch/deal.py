"""Dealing items to bins by falling cost, in vectorised rounds: no Python loop over items.

Graham 1969: longest processing time first (LPT) gives a largest load of at most 4/3 - 1/(3d) of the optimum on d bins.
"""

from __future__ import annotations

import heapq

import numpy as np

from orch.comm.topology import IntArray
from orch.dispatch.order import ascending, descending, run_starts

_FEW_GROUPS = 4


def deal(costs: IntArray, loads: IntArray) -> tuple[IntArray, IntArray]:
    """Longest processing time first, exactly.

    With bins in order of load, item i of the rest goes to bin i as long as no bin served earlier in the round,
    with its new item, is lighter than bin i: up to there a round does what one item after another would. About as
    many rounds are needed as there are items a bin.

    Args:
        costs: int64[N], not negative.
        loads: int64[W], what is in each bin already; may be negative.

    Returns:
        int64[N], the bin of each item, and int64[W], the final loads.
    """
    order = descending(costs)
    costs, loads = costs[order], loads.copy()
    dealt = np.empty(len(costs), dtype=np.int64)  # bin of each item in falling order
    start, used = 0, np.cumsum(costs)
    while start < len(costs):
        bins = np.argsort(loads, kind="stable")[: len(costs) - start]
        old = loads[bins]
        new = old + costs[start : start + len(bins)]
        stale = old[1:] > np.minimum.accumulate(new)[:-1]
        served = int(np.argmax(stale)) + 1 if stale.any() else len(bins)
        if served == 1 and len(bins) > 1:  # one light bin among heavy ones takes items until it is light no more
            before = used[start - 1] if start else 0
            reach = before + old[1] - old[0]
            stop = min(int(np.searchsorted(used, reach, side="right")) + 1, len(costs))
            dealt[start:stop], loads[bins[0]], start = bins[0], old[0] + used[stop - 1] - before, stop
            continue
        dealt[start : start + served] = bins[:served]
        loads[bins[:served]] = new[:served]
        start += served
    bin_of_item = np.empty_like(dealt)
    bin_of_item[order] = dealt
    return bin_of_item, loads


def fold(costs: IntArray, num_bins: int) -> IntArray:
    """Gives every bin as many items, by the largest differencing method of Karmarkar and Karp (1982).

    Sorted items are cut into layers of one item a bin. The two layers that differ most within are added, the largest
    of one to the smallest of the other, until one is left. Better than longest processing time first where items are
    few a bin and alike.

    Args:
        costs: int64[N], not negative.
        num_bins: Number of bins.

    Returns:
        int64[N], the bin of each item.
    """
    size = len(costs)
    items = np.concatenate([descending(costs), np.full(-size % num_bins, size, dtype=np.int64)])
    padded = np.append(costs, 0)  # item N stands for none
    layers = items.reshape(-1, num_bins)
    heap = [(int(padded[row[-1]] - padded[row[0]]), turn, padded[row], row[None]) for turn, row in enumerate(layers)]
    heapq.heapify(heap)
    for turn in range(len(layers), 2 * len(layers) - 1):
        _, _, loads, members = heapq.heappop(heap)
        _, _, other_loads, other_members = heapq.heappop(heap)
        loads, members = loads + other_loads[::-1], np.concatenate([members, other_members[:, ::-1]])
        order = descending(loads)
        loads, members = loads[order], members[:, order]
        heapq.heappush(heap, (int(loads[-1] - loads[0]), turn, loads, members))
    bin_of_item = np.zeros(size + 1, dtype=np.int64)
    bin_of_item[heap[0][3]] = np.arange(num_bins)  # broadcast over the layers: int64[layers, num_bins]
    return bin_of_item[:size]


def deal_in_groups(costs: IntArray, group_of_item: IntArray, loads: IntArray, group_of_bin: IntArray) -> IntArray:
    """Deals items to the bins of their own group, all groups at once, longest processing time first or nearly so.

    A few groups are dealt by `deal`, one after the other. Of more, in a round, the bins of a group in order of load
    take the group's next items, as far as they are no fuller than the lightest is with its item.

    Args:
        costs: int64[N], not negative.
        group_of_item: int64[N].
        loads: int64[W], what is in each bin already.
        group_of_bin: int64[W], nondecreasing.

    Returns:
        int64[N], the bin of each item.
    """
    num_groups = int(group_of_bin[-1]) + 1
    if num_groups == 1:
        return deal(costs, loads)[0]
    if num_groups <= _FEW_GROUPS:
        return _deal_one_by_one(costs, group_of_item, loads, group_of_bin)
    loads = loads.copy()
    order = ascending(group_of_item, -costs)
    costs = costs[order]
    bin_of_item = np.empty(len(order), dtype=np.int64)
    size = np.bincount(group_of_item, minlength=num_groups)
    stop = size.cumsum()
    following = stop - size
    while True:
        bins = (following < stop)[group_of_bin].nonzero()[0]
        if not len(bins):
            return bin_of_item
        bins = bins[ascending(group_of_bin[bins], loads[bins])]
        group, old = group_of_bin[bins], loads[bins]
        first = run_starts(group)
        head = following[group]
        item = head + np.arange(len(bins)) - first
        served = (item < stop[group]) & (old <= old[first] + costs[head])
        bins, item = bins[served], item[served]
        bin_of_item[order[item]] = bins
        loads[bins] += costs[item]
        following += np.bincount(group[served], minlength=num_groups)


def _deal_one_by_one(costs: IntArray, group_of_item: IntArray, loads: IntArray, group_of_bin: IntArray) -> IntArray:
    bin_of_item = np.empty(len(costs), dtype=np.int64)
    for group in range(int(group_of_bin[-1]) + 1):
        items, first, stop = (group_of_item == group).nonzero()[0], *group_of_bin.searchsorted([group, group + 1])
        bin_of_item[items] = first + deal(costs[items], loads[first:stop])[0]
    return bin_of_item
