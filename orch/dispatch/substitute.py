"""Substitution: items that move are replaced by others from where they start, until places draw level.

How much must leave a place is known, but not in which items. One that has moved goes back, and up to two of those that
stayed go to where it was instead: what moves hardly changes, and the two places draw level. There are so many pairs of
items that stay that some make up next to any difference, where a swap of two items leaves what no two differ by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin
from orch.dispatch.order import ascending, starts_run
from orch.dispatch.prices import Prices

_ROUNDS = 48
_PATIENCE = 4  # rounds in a row in which the largest excess may stay
_MOVES = 64  # that are looked at in a round, those between the least level places first
_CHOICES = 64  # of the first item to go instead of each; the second is the best of all
_MOST_BITS = 62
_NONE = -1


def substitute(costs: IntArray, place: IntArray, excess: IntArray, prices: Prices, scope: IntArray) -> IntArray:
    """Brings places down to their load, by what moves between them already.

    A round makes, of all substitutions, those that lower the sum of squared loads most, each place taking part in one
    at most. None takes more than moving the difference of the two places usually takes.

    Args:
        costs: int64[N], not negative.
        place: int64[N], the layout to start from.
        excess: int64[P], what each place holds above its load.
        prices: Of running items elsewhere; they start where they are free.
        scope: int64[P], nondecreasing: layouts apart, improved at once.

    Returns:
        int64[N], the improved layout. Its largest excess is no larger.
    """
    place, excess, start = place.copy(), excess.copy(), prices.free
    movable = (start >= 0) & (costs > 0)
    pool = _Pool.of(costs, place, start, movable, len(excess))
    mean = sum_by_bin(excess, scope, int(scope[-1]) + 1) // np.bincount(scope)
    first_of_scope = starts_run(scope).nonzero()[0]
    above, stale = np.maximum.reduceat(excess, first_of_scope), np.zeros(len(mean), dtype=np.int64)
    failed = 0
    for _ in range(_ROUNDS):
        over = (above > 0) & (stale <= _PATIENCE)
        moved = (movable & (place != start)).nonzero()[0]
        home, guest = start[moved], place[moved]
        gap = excess[home] - excess[guest]
        higher = np.maximum(excess[home], excess[guest])
        of = scope[home]
        useful = (over[of] & (higher > mean[of]) & (np.abs(gap) > 1)).nonzero()[0]
        useful = useful[ascending(-np.abs(gap[useful]))][failed * _MOVES : (failed + 1) * _MOVES]
        if not len(useful):
            break
        moves = _Moves(moved[useful], home[useful], guest[useful], gap[useful])
        found = pool.best(costs, prices, moves)
        made = found.apart(moves, len(excess))
        if not len(made):
            failed += 1
            continue
        failed = 0
        found.make(made, moves, pool, place, excess)
        before, above = above, np.maximum.reduceat(excess, first_of_scope)
        stale = np.where(above < before, 0, stale + 1)
    return place


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """Items that moved: int64[M] each.

    Attributes:
        item: The item.
        home: The place that it left.
        guest: The place that it is in.
        gap: By how much home holds more above its load than the other place, may be negative.
    """

    item: IntArray
    home: IntArray
    guest: IntArray
    gap: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """Items by where they start, and there by cost; before those of each place one that stands for none.

    Attributes:
        item: int64[K]; -1 for none.
        cost: int64[K].
        stays: bool[K], whether it may go.
        key: int64[K], ascending: place and cost in one number,
        shift: and the bits of a cost that there was no room for,
        bits: and those that there are.
        first: int64[P], where each place begins,
        size: int64[P], and how many it has.
        position: int64[N], of each item.
    """

    item: IntArray
    cost: IntArray
    stays: npt.NDArray[np.bool_]
    key: IntArray
    shift: int
    bits: int
    first: IntArray
    size: IntArray
    position: IntArray

    @classmethod
    def of(
        cls, costs: IntArray, place: IntArray, start: IntArray, movable: npt.NDArray[np.bool_], num_places: int
    ) -> _Pool:
        """The pool of the movable items."""
        items = movable.nonzero()[0]
        items = items[ascending(start[items], costs[items])]
        size = np.bincount(start[items], minlength=num_places) + 1
        first = size.cumsum() - size
        at = np.arange(len(items)) + start[items] + 1
        item, cost = np.full(len(items) + num_places, _NONE), np.zeros(len(items) + num_places, dtype=np.int64)
        item[at], cost[at] = items, costs[items]
        stays = np.ones(len(item), dtype=np.bool_)
        stays[at] = place[items] == start[items]
        bits = int(cost.max()).bit_length() + 1
        shift = max(0, bits + num_places.bit_length() - _MOST_BITS)
        bits -= shift
        key = (np.repeat(np.arange(num_places), size) << bits) | (cost >> shift)
        position = np.full(len(costs), _NONE)
        position[items] = at
        return cls(item, cost, stays, key, shift, bits, first, size, position)

    def best(self, costs: IntArray, prices: Prices, moves: _Moves) -> _Found:
        """The best substitution for each item that moved."""
        size = self.size[moves.home]
        tried = np.minimum(size, _CHOICES)
        move = np.repeat(np.arange(len(tried)), tried)
        turn = np.arange(len(move)) - (tried.cumsum() - tried)[move]
        home = moves.home[move]
        one = self.first[home] + turn * size[move] // tried[move]
        back, gap = costs[moves.item][move], moves.gap[move]
        wish = np.clip(back + gap // 2 - self.cost[one], 0, ((1 << self.bits) - 1) << self.shift)
        at = self.key.searchsorted((home << self.bits) | (wish >> self.shift))
        change, gain, two = np.zeros_like(one), np.zeros(len(one)), one
        for near in (at - 1, np.minimum(at, len(self.key) - 1)):
            inside = (near >= self.first[home]) & (near < self.first[home] + size[move])
            twice = (near == one) & (self.item[one] != _NONE)
            shifted = self.cost[one] + self.cost[near] - back
            gained = shifted.astype(np.float64) * (gap - shifted)
            taken = self._price(prices, one, moves.guest[move]) + self._price(prices, near, moves.guest[move])
            taken -= prices.of(moves.item, moves.guest)[move]
            may = inside & ~twice & self.stays[one] & self.stays[near] & (taken <= prices.rate * np.abs(gap))
            better = may & (gained > gain)
            change, gain, two = (
                np.where(better, shifted, change),
                np.where(better, gained, gain),
                np.where(better, near, two),
            )
        most = np.maximum.reduceat(gain, tried.cumsum() - tried)
        chosen = ((gain == most[move]) & (gain > 0)).nonzero()[0]
        move, firsts = np.unique(move[chosen], return_index=True)
        chosen = chosen[firsts]
        return _Found(move, one[chosen], two[chosen], change[chosen], gain[chosen])

    def _price(self, prices: Prices, at: IntArray, places: IntArray) -> IntArray:
        return np.where(self.item[at] == _NONE, 0, prices.of(self.item[at], places))


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Substitutions.

    Attributes:
        move: int64[F], the item that goes back, a number in `_Moves`.
        one: int64[F], what goes instead, positions in the pool.
        two: int64[F].
        change: int64[F], what the guest's place gains.
        gain: float64[F], what the sum of squares loses, halved.
    """

    move: IntArray
    one: IntArray
    two: IntArray
    change: IntArray
    gain: npt.NDArray[np.float64]

    def apart(self, moves: _Moves, num_places: int) -> IntArray:
        """Those that are the best of both their places: positions, at least one if there are any."""
        order = np.lexsort((self.move, -self.gain))
        home, guest = moves.home[self.move[order]], moves.guest[self.move[order]]
        number, least = np.arange(len(order)), np.full(num_places, len(order))
        np.minimum.at(least, home, number)
        np.minimum.at(least, guest, number)
        return order[(least[home] == number) & (least[guest] == number)]

    def make(self, which: IntArray, moves: _Moves, pool: _Pool, place: IntArray, excess: IntArray) -> None:
        """Makes these, in place."""
        move, change = self.move[which], self.change[which]
        back, home, guest = moves.item[move], moves.home[move], moves.guest[move]
        for at in (self.one[which], self.two[which]):
            real = pool.item[at] != _NONE
            place[pool.item[at[real]]] = guest[real]
            pool.stays[at[real]] = False
        place[back] = home
        pool.stays[pool.position[back]] = True
        excess[home] -= change
        excess[guest] += change
