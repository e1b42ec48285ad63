"""One level of places (nodes, ranks or micro-steps), and which items leave those that hold too much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin
from orch.dispatch.deal import deal_in_groups
from orch.dispatch.order import ascending, run_starts
from orch.dispatch.polish import Limits, polish
from orch.dispatch.prices import Prices
from orch.dispatch.side_by_side import SideBySide
from orch.dispatch.substitute import substitute
from orch.dispatch.surplus import pick_surplus

_UNPLACED = -1
_STAYING = 512  # of the items that stay in a place so many, or twice as many, may be swapped for some that move,
_STAYING_IN_ALL = 1 << 14  # but of all places no more than these
_RATED = 4096  # of so many items the median price of a cost is taken
_PATIENCE = 6
_MAX_WORK = 200_000


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Items and the places of one level: nodes of the cluster, ranks of each node, or bins of each rank.

    Attributes:
        place: int64[N], where each item starts; -1 where its parent was chosen and neither its home nor its
            target is in there.
        other: int64[N], the one of its home and its target that it does not start in; -1 where there is none.
        price: int64[N], bytes that moving the item anywhere takes, more than where it starts.
        other_price: int64[N], bytes that moving it to `other` takes, more than where it starts.
        parent: int64[N], the place of the level above that the item is in.
        parent_of_place: int64[P], nondecreasing.
        num_bins: int64[P], bins of each place.
    """

    place: IntArray
    other: IntArray
    price: IntArray
    other_price: IntArray
    parent: IntArray
    parent_of_place: IntArray
    num_bins: IntArray

    @classmethod
    def of(cls, sides: SideBySide, place_of_bin: IntArray, parent_of_bin: IntArray, parent: IntArray) -> Level:
        """The level of which bin b is in place `place_of_bin[b]` (int64[B]), given each item's parent (int64[N])."""
        home, target = place_of_bin[sides.home], place_of_bin[sides.target]
        parent_of_place = np.zeros(int(place_of_bin[-1]) + 1, dtype=np.int64)
        parent_of_place[place_of_bin] = parent_of_bin
        start, other = np.where(parent_of_place[home] == parent, home, _UNPLACED), np.full_like(home, _UNPLACED)
        price = sides.raw + sides.output
        apart = (home != target).nonzero()[0]
        if len(apart):
            raw, output, home, target = sides.raw[apart], sides.output[apart], home[apart], target[apart]
            at_home, at_target = start[apart] >= 0, parent_of_place[target] == parent[apart]
            starts_at_target = at_target & (~at_home | (raw < output))
            start[apart] = np.where(starts_at_target, target, start[apart])
            other[apart] = np.where(at_home & at_target, np.where(starts_at_target, home, target), _UNPLACED)
            price[apart] -= np.where(starts_at_target, raw, output)  # paid by staying where it starts
        return cls(
            place=start,
            other=other,
            price=price,
            other_price=np.abs(sides.raw - sides.output),
            parent=parent,
            parent_of_place=parent_of_place,
            num_bins=np.bincount(place_of_bin),
        )

    def settle(self, costs: IntArray, load: IntArray) -> IntArray:
        """The place of each item (int64[N]), such that no place holds much more than its `load` (int64[P])."""
        place, num_places = self.place.copy(), len(self.num_bins)
        placed = place >= 0
        excess = sum_by_bin(costs[placed], place[placed], num_places) - load
        if (self.other >= 0).any():
            self._offer_other(costs, place, excess)
        leaving = pick_surplus(costs, self.price, place, excess)
        excess -= sum_by_bin(costs[leaving], place[leaving], num_places)
        place[leaving] = _UNPLACED
        moving = (place < 0).nonzero()[0]
        place[moving] = deal_in_groups(costs[moving], self.parent[moving], excess, self.parent_of_place)
        return place

    def _offer_other(self, costs: IntArray, place: IntArray, excess: IntArray) -> None:
        """Moves items of places with an excess (int64[P]) to the other place that suits them, in place."""
        offered = np.where(self.other >= 0, place, _UNPLACED)
        chosen = pick_surplus(costs, self.other_price, offered, excess)
        chosen = chosen[_admitted(costs[chosen], self.other[chosen], -excess)]
        excess -= sum_by_bin(costs[chosen], place[chosen], len(excess))
        excess += sum_by_bin(costs[chosen], self.other[chosen], len(excess))
        place[chosen] = self.other[chosen]

    def draw_level(self, costs: IntArray, place: IntArray, load: IntArray) -> IntArray:
        """Brings places down to their `load` (int64[P]), as far as that takes few bytes more.

        First by other items that move in place of those that do; then by moves and swaps, of which none takes more
        than moving the difference of its two places usually takes; and, these having opened other ways, by the
        former again.

        Args:
            costs: int64[N].
            place: int64[N], the layout to start from.
            load: int64[P].

        Returns:
            int64[N], a layout whose largest excess is no larger. Of the items that stay where they start only some are
            looked at.
        """
        excess = sum_by_bin(costs, place, len(load)) - load
        if not (excess > 0).any():
            return place
        items = self._looked_at(costs, place, len(load))
        prices, scope, own, at = self.prices(costs).taken(items), self.parent_of_place, costs[items], place[items]
        at = substitute(own, at, excess, prices, scope)
        goal = sum_by_bin(own, place[items], len(load)) - excess  # of these items
        limits = Limits(goal, scope, scope, patience=_PATIENCE, max_work=_MAX_WORK, prices=prices)
        swapped = polish(own, at, len(load), limits)
        if swapped is not at:
            at = substitute(own, swapped, sum_by_bin(own, swapped, len(load)) - goal, prices, scope)
        place = place.copy()
        place[items] = at
        return place

    def _looked_at(self, costs: IntArray, place: IntArray, num_places: int) -> IntArray:
        """The items that do not stay where they start, and some of those that do."""
        stays = (place == self.place) & (costs > 0)
        staying = stays.nonzero()[0]
        most = min(num_places * _STAYING, _STAYING_IN_ALL)
        return np.concatenate([(~stays).nonzero()[0], staying[:: max(1, len(staying) // most)]])

    def prices(self, costs: IntArray, place_of_bin: IntArray | None = None) -> Prices:
        """What it takes to run items elsewhere than where they start."""
        some = slice(None, None, 1 + len(costs) // _RATED)
        rate = float(np.median(self.price[some] / np.maximum(costs[some], 1)))
        return Prices(self.place, self.other, self.other_price, self.price, rate, place_of_bin)

    def filled(self, load: IntArray) -> IntArray:
        """The load of each place (int64[P]) whose bins are filled to that of their parent (int64[parents])."""
        return load[self.parent_of_place] * self.num_bins


def _admitted(costs: IntArray, places: IntArray, spare: IntArray) -> IntArray:
    """Which of the items, in order, fit into the spare load of the place each is for: positions, int64."""
    order = ascending(places)
    total = np.cumsum(costs[order])
    start = run_starts(places[order])
    within = total - total[start] + costs[order][start]
    return np.sort(order[within <= spare[places[order]]])
