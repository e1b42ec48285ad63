"""Trade: two bins deal their items anew, so that their costs draw level while neither holds more tokens than allowed.

Where batches are filled to the brim and cost is not proportional to tokens (attention within samples), no single move
or swap helps: it would spill. So two bins pool their items, sort them by length and split each neighbouring pair
between them; which of a pair goes where changes tokens and cost by the small differences of neighbours. This is
differencing (Karmarkar and Karp 1982) in two dimensions, finished by turning round the pairs, and swapping the items,
that serve best.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin

_MAX_TRADES = 96
_MAX_PARTNERS = 3
_MAX_FLIPS = 64
_MAX_SWAPS = 16
_NEVER = np.iinfo(np.int64).max
_SPILL_WEIGHT = 4
_MAX_PAIRS = 512  # flips look at pairs of pairs; bins of more items are level enough without


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
    """Deals the items of two bins anew, in place, if that lowers the fuller one; whether it did."""
    items = np.flatnonzero((bin_of_item == pair[0]) | (bin_of_item == pair[1]))
    items = items[np.argsort(-lengths[items], kind="stable")]
    total_cost, total_tokens = int(costs[items].sum()), int(lengths[items].sum())
    slack = 2 * cap - total_tokens
    if slack < 0 or len(items) > 2 * _MAX_PAIRS:
        return False
    signs = _signs(_differences(costs[items]), _differences(lengths[items]), slack)
    to_first = np.repeat(signs > 0, 2)[: len(items)]
    to_first[1::2] = ~to_first[1::2]
    _swap_items(costs[items], lengths[items], to_first, slack)
    first = int(costs[items[to_first]].sum())
    tokens = int(lengths[items[to_first]].sum())
    if max(first, total_cost - first) >= loads[pair[0]] or max(tokens, total_tokens - tokens) > cap:
        return False
    bin_of_item[items] = np.where(to_first, pair[0], pair[1])
    loads[pair[0]], loads[pair[1]] = first, total_cost - first
    return True


def _differences(values: IntArray) -> IntArray:
    """Of each pair of neighbours, the first minus the second; a last one alone counts whole."""
    padded = np.append(values, 0) if len(values) % 2 else values
    return padded[::2] - padded[1::2]


def _signs(cost: IntArray, tokens: IntArray, slack: int) -> IntArray:
    """Which way round each pair goes (+1, -1: int64[m]), so that costs are level and tokens within the slack."""
    rate = int(cost.sum()) // max(int(tokens.sum()), 1)
    beside = cost - rate * tokens  # what tokens do not explain
    signs = np.ones(len(cost), dtype=np.int64)
    balance = 0
    for index in np.argsort(-np.abs(beside), kind="stable"):  # the largest first, each against the sum so far
        signs[index] = -1 if (balance > 0) == (beside[index] > 0) else 1
        balance += int(signs[index] * beside[index])
    for _ in range(_MAX_FLIPS):
        flipped = _best_flip(signs * cost, signs * tokens, slack, _SPILL_WEIGHT * rate)
        if flipped is None:
            break
        signs[flipped] *= -1
    return signs


def _best_flip(cost: IntArray, tokens: IntArray, slack: int, spill_cost: int) -> IntArray | None:
    """The one or two pairs to turn round that bring costs closest to level, a spilt token costing `spill_cost`."""

    def miss(change_of_cost: IntArray, change_of_tokens: IntArray) -> IntArray:
        spill = np.maximum(np.abs(tokens.sum() - 2 * change_of_tokens) - slack, 0)
        return np.abs(cost.sum() - 2 * change_of_cost) + spill_cost * spill

    both = miss(_one_or_two(cost), _one_or_two(tokens))
    best = int(np.argmin(both))
    if both.ravel()[best] >= miss(np.int64(0), np.int64(0)):
        return None
    return np.unique(np.array(np.unravel_index(best, both.shape)))


def _swap_items(costs: IntArray, tokens: IntArray, to_first: npt.NDArray[np.bool_], slack: int) -> None:
    """Moves and swaps single items while that brings costs closer to level and tokens within the slack, in place."""
    for _ in range(_MAX_SWAPS):
        first, second = np.append(np.flatnonzero(to_first), -1), np.append(np.flatnonzero(~to_first), -1)
        gap = 2 * int(costs[to_first].sum()) - int(costs.sum())
        excess = 2 * int(tokens[to_first].sum()) - int(tokens.sum())
        left = [np.append(values, 0)[first][:, None] - np.append(values, 0)[second] for values in (costs, tokens)]
        allowed = np.abs(excess - 2 * left[1]) <= max(slack, abs(excess) - 1)
        miss = np.where(allowed, np.abs(gap - 2 * left[0]), _NEVER)
        row, column = np.unravel_index(int(np.argmin(miss)), miss.shape)
        if miss[row, column] >= (abs(gap) if abs(excess) <= slack else _NEVER):
            return
        for item in (first[row], second[column]):
            if item >= 0:
                to_first[item] = not to_first[item]


def _one_or_two(values: IntArray) -> IntArray:
    """The sum of each pair of values, and on the diagonal each value alone: int64[m, m]."""
    both = values[:, None] + values[None, :]
    np.fill_diagonal(both, values)
    return both
