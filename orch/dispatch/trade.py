"""Trade: two bins deal items anew, so that their costs draw level while neither holds more tokens than allowed.

Where batches are filled to the brim and cost is not proportional to tokens (attention within samples), no single move
or swap helps: it would spill. So of the items of two bins the longest and some of the others are dealt anew, by the
best of all ways to do so. These are searched by meeting in the middle (Horowitz and Sahni 1974): the sums of all
subsets of one half of them, sorted, are looked up for each subset of the other half.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin

_MAX_TRADES = 64
_MAX_PARTNERS = 4
_HALF = 11  # items in each half, of which there are 2^11 subsets
_LONGEST = 8  # of the items dealt anew
_TURNS = 3  # choices of items to deal anew, where there are more
_CLOSE = 11  # costs within 2^-11 (0.05 %) of level are level
_MAX_PAIRS = 1 << 17  # of subsets that are looked at, where more keep the cap; all of up to 17 items


def trade(costs: IntArray, lengths: IntArray, bin_of_item: IntArray, num_bins: int, cap: int, goal: int) -> IntArray:
    """Lowers the largest load of a packed layout under a cap on tokens.

    Args:
        costs: int64[N], not decreasing in the length.
        lengths: int64[N], tokens.
        bin_of_item: int64[N], the layout to start from.
        num_bins: Number of bins.
        cap: The most tokens of a bin; bins that hold more at the start are left alone.
        goal: Stop once no load is above this.

    Returns:
        int64[N], a layout whose largest load is no larger, and none of whose bins newly exceeds the cap.
    """
    bin_of_item = bin_of_item.copy()
    loads = sum_by_bin(costs, bin_of_item, num_bins)
    for _ in range(_MAX_TRADES):
        full = int(np.argmax(loads))
        if loads[full] <= goal:
            break
        partners = np.argsort(loads, kind="stable")[:_MAX_PARTNERS]
        if not any(_trade_pair(costs, lengths, bin_of_item, loads, (full, int(p)), cap) for p in partners if p != full):
            break
    return bin_of_item


def _trade_pair(
    costs: IntArray, lengths: IntArray, bin_of_item: IntArray, loads: IntArray, pair: tuple[int, int], cap: int
) -> bool:
    """Deals items of two bins anew, in place, if that lowers the fuller one; whether it did."""
    items = np.flatnonzero((bin_of_item == pair[0]) | (bin_of_item == pair[1]))
    items = items[np.argsort(-lengths[items], kind="stable")]
    cost, tokens, in_first = costs[items], lengths[items], bin_of_item[items] == pair[0]
    total, all_tokens = int(cost.sum()), int(tokens.sum())
    for turn in range(_TURNS):
        chosen = _chosen(len(items), turn)
        _deal_anew(cost, tokens, in_first, chosen, cap)
        first = int(cost[in_first].sum())
        if len(chosen) == len(items) or abs(2 * first - total) <= total >> _CLOSE:
            break
    of_first = int(tokens[in_first].sum())
    if max(first, total - first) >= loads[pair[0]] or max(of_first, all_tokens - of_first) > cap:
        return False
    bin_of_item[items] = np.where(in_first, pair[0], pair[1])
    loads[pair[0]], loads[pair[1]] = first, total - first
    return True


def _chosen(num_items: int, turn: int) -> IntArray:
    """Positions of those dealt anew, of items by falling length: the longest, and an even choice of the rest."""
    most = 2 * _HALF
    if num_items <= most:
        return np.arange(num_items)
    num_rest, num_others = num_items - _LONGEST, most - _LONGEST
    others = _LONGEST + (np.arange(num_others) * num_rest // num_others + turn) % num_rest
    return np.concatenate([np.arange(_LONGEST), others])


def _deal_anew(costs: IntArray, tokens: IntArray, in_first: npt.NDArray[np.bool_], chosen: IntArray, cap: int) -> None:
    """Puts the chosen items into one bin or the other, in place, for the most level costs that keep the cap."""
    stays = in_first.copy()
    stays[chosen] = False
    wish, low = int(costs.sum()) - 2 * int(costs[stays].sum()), int(tokens.sum()) - cap - int(tokens[stays].sum())
    high = cap - int(tokens[stays].sum())
    one, other = chosen[::2], chosen[1::2]  # each with its share of long and short ones
    ways, other_ways = _SUBSETS[: 1 << len(one), : len(one)], _SUBSETS[: 1 << len(other), : len(other)]
    other_tokens = other_ways @ tokens[other]
    by_tokens = np.argsort(other_tokens, kind="stable")
    other_tokens, other_costs = other_tokens[by_tokens], (other_ways @ costs[other])[by_tokens]
    own_tokens, own_costs = ways @ tokens[one], ways @ costs[one]
    begin = other_tokens.searchsorted(low - own_tokens)
    count = np.maximum(other_tokens.searchsorted(high - own_tokens, side="right") - begin, 0)
    tried = np.minimum(count, _MAX_PAIRS // len(ways))
    row = np.repeat(np.arange(len(ways)), tried)
    if not len(row):
        return
    turn = np.arange(len(row)) - np.repeat(tried.cumsum() - tried, tried)
    column = begin[row] + turn * count[row] // tried[row]
    best = int(np.argmin(np.abs(wish - 2 * (own_costs[row] + other_costs[column]))))
    in_first[one] = ways[row[best]] == 1
    in_first[other] = other_ways[by_tokens[column[best]]] == 1


def _subsets() -> IntArray:
    """All subsets of `_HALF` items: int64[2^items, items], ones and zeros."""
    return (np.arange(1 << _HALF)[:, None] >> np.arange(_HALF)) & 1


_SUBSETS = _subsets()
