"""Two swaps at once: of a pair of bins, up to two items of each change places.

What no move or swap makes up, two of them often do: of two bins of sixteen items each, 289 single ones make tens of
thousands of pairs. The best is found by sorting the single ones by what they shift and looking up, for each, the one
that makes up the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orch.comm.topology import IntArray
from orch.dispatch.order import ascending, run_starts, starts_run

MOST_SWAPS = 17 * 17
"""Single moves and swaps of a pair of bins that are looked at."""
_MOST_ITEMS = 16  # of a bin: those in between are as good
NEVER = np.iinfo(np.int64).max
_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class TwoSwaps:
    """The best two swaps of some pairs of bins.

    Attributes:
        pair: int64[F], numbers of pairs.
        leaves: int64[2, F], items that leave the fuller bin of each; -1 for none.
        returns: int64[2, F], and that come in from the other.
        change: int64[F], what the fuller one loses.
    """

    pair: IntArray
    leaves: IntArray
    returns: IntArray
    change: IntArray


def best_two_swaps(
    costs: IntArray, items: IntArray, pair: IntArray, in_full: npt.NDArray[np.bool_], gap: IntArray
) -> TwoSwaps:
    """For each pair of bins the two swaps that bring their loads closest to each other, where any bring them closer.

    Args:
        costs: int64[N], not negative.
        items: int64[K], numbers of items, in an even choice of which any order of theirs is kept.
        pair: int64[K], the pair of bins that each is in, from 0.
        in_full: bool[K], whether it is in the fuller one.
        gap: int64[pairs], by how much that is fuller.
    """
    swaps = _all_swaps(items, pair, in_full, len(gap))
    pair, leaves, returns = swaps
    costs = np.append(costs, 0)  # of none
    shifted = costs[leaves] - costs[returns]
    order = ascending(pair, shifted)
    pair, leaves, returns, shifted = pair[order], leaves[order], returns[order], shifted[order]
    levels, level = np.unique(shifted, return_inverse=True)
    stride = len(levels) + 1
    at = (pair * stride + level).searchsorted(pair * stride + levels.searchsorted(gap[pair] // 2 - shifted))
    miss, mate = np.full(len(pair), NEVER), np.zeros(len(pair), dtype=np.int64)
    for near in (np.maximum(at - 1, 0), np.minimum(at, len(pair) - 1)):
        apart = (leaves[near] != leaves) | (leaves == _NONE)
        apart &= (returns[near] != returns) | (returns == _NONE)
        change = shifted + shifted[near]
        helps = (pair[near] == pair) & apart & (change > 0) & (change < gap[pair])
        missing = np.where(helps, np.abs(2 * change - gap[pair]), NEVER)
        better = missing < miss
        miss, mate = np.where(better, missing, miss), np.where(better, near, mate)
    best = first_of_least(miss, pair)
    other = mate[best]
    change = shifted[best] + shifted[other]
    return TwoSwaps(
        pair[best], np.stack([leaves[best], leaves[other]]), np.stack([returns[best], returns[other]]), change
    )


def _all_swaps(
    items: IntArray, pair: IntArray, in_full: npt.NDArray[np.bool_], num_pairs: int
) -> tuple[IntArray, IntArray, IntArray]:
    """All moves and swaps: int64[S] pair, the item that leaves the fuller bin and that which comes in, -1 for none."""
    bins = 2 * pair + in_full
    order = ascending(bins)
    items, bins = items[order], bins[order]
    size = np.bincount(bins, minlength=2 * num_pairs)
    taken = np.minimum(size, _MOST_ITEMS)
    width = 1 + taken  # with none
    table = np.full((2 * num_pairs, 1 + _MOST_ITEMS), _NONE)
    turn = np.arange(len(items)) - run_starts(bins)
    column = turn * taken[bins] // size[bins]
    table[bins, 1 + column] = items  # the last of those that share a column
    number = width[0::2] * width[1::2]
    of = np.repeat(np.arange(num_pairs), number)
    turn = np.arange(len(of)) - (number.cumsum() - number)[of]
    leaving, returning = np.divmod(turn, width[0::2][of])
    return of, table[2 * of + 1, leaving], table[2 * of, returning]


def first_of_least(values: IntArray, group: IntArray) -> IntArray:
    """Positions of the first least value of each group (nondecreasing) that has one other than `NEVER`."""
    least = np.minimum.reduceat(values, starts_run(group).nonzero()[0])
    number = starts_run(group).cumsum() - 1
    found = ((values == least[number]) & (values < NEVER)).nonzero()[0]
    return found[starts_run(group[found])]
