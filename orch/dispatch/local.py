"""`local`: keep every item at home while the target load allows, and move only the surplus, within the node first.

The target is 1/108 above the least possible load: that slack is what makes moves rare. Three levels, each with the
same three moves (`_settle`): items leave nodes that hold too much, then ranks, then micro-steps. What must cross nodes
at a target load T is at least `sum over nodes of max(0, load of node - bins of node * T)`.

An item whose output another rank needs (an encoder's) is spared one of its two transfers on either of the two. It
starts on the cheaper one, and when its place holds too much, the other is the first it is offered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import AdditiveCost, sum_by_bin
from orch.dispatch.bounds import least_load
from orch.dispatch.deal import deal_in_groups
from orch.dispatch.greedy import dispatch_greedy
from orch.dispatch.local_padded import search_within_nodes
from orch.dispatch.order import ascending, run_starts
from orch.dispatch.placed import place
from orch.dispatch.polish import Limits, polish
from orch.dispatch.problem import DispatchProblem
from orch.dispatch.surplus import pick_surplus

_SLACK = 108  # the target is 1/108 (0.93 %) above the bound,
_INNER_SLACK = 220  # and places are filled to 1/220 above it, so that what fits a node can be spread over its bins
_TOLERANCE = 64  # where the target is missed, dealing all anew must gain 1/64 (1.6 %) to be worth the bytes
_UNPLACED = -1


def dispatch_local(problem: DispatchProblem) -> IntArray:
    """Moves the surplus and nothing else.

    Padded batches are cut within each node (`local_padded`).

    Args:
        problem: `move_bytes` (the lengths where None), `target` and `target_bytes` say what a move takes.

    Returns:
        int64[N], the bin of each item; its largest load is at most 1 + 1/108 of the least possible one wherever the
        items allow it, and never larger than that of `greedy` by more than 1/64.
    """
    if not isinstance(problem.cost, AdditiveCost):
        return search_within_nodes(problem)
    costs = problem.cost.item_costs(problem.lengths)
    bound = least_load(costs, problem.num_bins)
    bins = _settle_level_by_level(problem, costs, bound + bound // _INNER_SLACK)
    if problem.rough:
        return bins
    goal = bound + bound // _SLACK
    bins = _bring_down(costs, bins, np.repeat(problem.topology.node_of_rank, problem.bins_per_rank), goal)
    largest = _largest(costs, bins, problem.num_bins)
    if largest <= goal:
        return bins
    dealt = dispatch_greedy(problem)
    least = _largest(costs, dealt, problem.num_bins)
    return place(problem, dealt) if largest > least + least // _TOLERANCE else bins


def _settle_level_by_level(problem: DispatchProblem, costs: IntArray, load: int) -> IntArray:
    """Chooses the node, then the rank, then the bin of each item, with about `load` for each bin: int64[N]."""
    bin_of_bin = np.arange(problem.num_bins)
    rank_of_bin = bin_of_bin // problem.bins_per_rank
    node_of_bin = problem.topology.node_of_rank[rank_of_bin]
    place = np.zeros(len(costs), dtype=np.int64)  # at the level reached: first all are in the one cluster
    levels = ((node_of_bin, np.zeros_like(bin_of_bin)), (rank_of_bin, node_of_bin), (bin_of_bin, rank_of_bin))
    for place_of_bin, parent_of_bin in levels:
        if place_of_bin[-1] > parent_of_bin[-1]:  # else each parent has the one place, of the same number
            place = _Level.of(problem, place_of_bin, parent_of_bin, place).settle(costs, load)
    return place


def _bring_down(costs: IntArray, bins: IntArray, node_of_bin: IntArray, goal: int) -> IntArray:
    """Brings what is still above the goal down to it, within nodes as far as that goes."""
    within_nodes = Limits(goal, group=node_of_bin, patience=1, progress=0.2)
    bins = polish(costs, bins, len(node_of_bin), within_nodes)
    bins = polish(costs, _deal_hard_nodes_anew(costs, bins, node_of_bin, goal), len(node_of_bin), within_nodes)
    return polish(costs, bins, len(node_of_bin), Limits(goal, patience=24)) if node_of_bin[-1] > 0 else bins


def _deal_hard_nodes_anew(costs: IntArray, bins: IntArray, node_of_bin: IntArray, goal: int) -> IntArray:
    """Deals all items of a node over its bins where one of these is above the goal still, if that helps."""
    loads = sum_by_bin(costs, bins, len(node_of_bin))
    if int(loads.max()) <= goal:
        return bins
    largest = _max_by_group(loads, node_of_bin)
    items = np.flatnonzero((largest > goal)[node_of_bin[bins]])
    dealt = bins.copy()
    dealt[items] = deal_in_groups(costs[items], node_of_bin[bins[items]], np.zeros_like(loads), node_of_bin)
    better = _max_by_group(sum_by_bin(costs, dealt, len(node_of_bin)), node_of_bin) < largest
    return np.where(better[node_of_bin[bins]], dealt, bins)


def _max_by_group(values: IntArray, group: IntArray) -> IntArray:
    return np.maximum.reduceat(values, np.flatnonzero(np.diff(group, prepend=-1)))


def _largest(costs: IntArray, bins: IntArray, num_bins: int) -> int:
    return int(sum_by_bin(costs, bins, num_bins).max())


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """Items and the places of one level: nodes of the cluster, ranks of each node, or bins of each rank.

    Attributes:
        place: int64[N], where each item starts; `_UNPLACED` where its parent was chosen and neither its home nor its
            target is in there.
        other: int64[N], the one of its home and its target that it does not start in; `_UNPLACED` where there is none.
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
    def of(cls, problem: DispatchProblem, place_of_bin: IntArray, parent_of_bin: IntArray, parent: IntArray) -> _Level:
        """The level of which bin b is in place `place_of_bin[b]` (int64[bins]), given each item's parent (int64[N])."""
        raw = problem.lengths if problem.move_bytes is None else problem.move_bytes
        home = place_of_bin[problem.home]
        target, output = home, np.zeros_like(raw)
        if problem.target is not None and problem.target_bytes is not None:
            target, output = place_of_bin[problem.target], problem.target_bytes
        parent_of_place = np.zeros(int(place_of_bin[-1]) + 1, dtype=np.int64)
        parent_of_place[place_of_bin] = parent_of_bin
        at_home, at_target = parent_of_place[home] == parent, parent_of_place[target] == parent
        apart = home != target
        starts_at_target = at_target & apart & (~at_home | (raw < output))
        start = np.where(starts_at_target, target, np.where(at_home, home, _UNPLACED))
        paid = np.where(starts_at_target, raw, np.where(apart, output, 0))  # by staying where it starts
        other = np.where(apart & at_home & at_target, np.where(starts_at_target, home, target), _UNPLACED)
        return cls(
            place=start,
            other=other,
            price=raw + output - paid,
            other_price=np.abs(raw - output),
            parent=parent,
            parent_of_place=parent_of_place,
            num_bins=np.bincount(place_of_bin),
        )

    def settle(self, costs: IntArray, load: int) -> IntArray:
        """The place of each item (int64[N]), such that no place holds much more than `load` for each of its bins."""
        place, num_places = self.place.copy(), len(self.num_bins)
        placed = place >= 0
        excess = sum_by_bin(costs[placed], place[placed], num_places) - load * self.num_bins
        offered = np.where(self.other >= 0, place, _UNPLACED)
        chosen = pick_surplus(costs, self.other_price, offered, excess)
        chosen = chosen[_admitted(costs[chosen], self.other[chosen], -excess)]
        excess -= sum_by_bin(costs[chosen], place[chosen], num_places)
        excess += sum_by_bin(costs[chosen], self.other[chosen], num_places)
        place[chosen] = self.other[chosen]
        leaving = pick_surplus(costs, self.price, place, excess)
        excess -= sum_by_bin(costs[leaving], place[leaving], num_places)
        place[leaving] = _UNPLACED
        moving = np.flatnonzero(place < 0)
        place[moving] = deal_in_groups(costs[moving], self.parent[moving], excess, self.parent_of_place)
        return place


def _admitted(costs: IntArray, places: IntArray, spare: IntArray) -> IntArray:
    """Which of the items, in order, fit into the spare load of the place each is for: positions, int64."""
    order = ascending(places)
    total = np.cumsum(costs[order])
    start = run_starts(places[order])
    within = total - total[start] + costs[order][start]
    return np.sort(order[within <= spare[places[order]]])
