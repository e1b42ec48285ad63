"""`local`: keep every item at home while the target load allows, and move only the surplus, within the node first.

The target is 1/108 above the least possible load: that slack is what makes moves rare. Three levels, each with the
same three moves (`_settle`): items leave nodes that hold too much, then ranks, then micro-steps. What must cross nodes
at a target load T is at least `sum over nodes of max(0, load of node - bins of node * T)`.

An item whose output another rank needs (an encoder's) is spared one of its two transfers on either of the two. It
starts on the cheaper one, and when its place holds too much, the other is the first it is offered.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import is_additive, sum_by_bin
from orch.dispatch.bounds import least_load
from orch.dispatch.deal import deal_in_groups
from orch.dispatch.greedy import dispatch_greedy
from orch.dispatch.local_padded import search_within_nodes
from orch.dispatch.order import ascending, run_starts, starts_run
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
    if not is_additive(problem.cost):
        return search_within_nodes(problem)
    return dispatch_local_at_once([problem])[0]


def dispatch_local_at_once(problems: Sequence[DispatchProblem]) -> list[IntArray]:
    """Several problems side by side, in as many array operations as one takes: faster where they are small.

    Args:
        problems: At least one, with additive costs; of one topology, all rough or none, with equally many bins a rank.

    Returns:
        What `dispatch_local` gives for each, but for ties and rounding: int64[N] each.
    """
    sides = _SideBySide.of(problems)
    bound = np.array([least_load(costs, problems[0].num_bins) for costs in sides.costs_of_each()], dtype=np.int64)
    bins = _settle_level_by_level(sides, bound + bound // _INNER_SLACK)
    if problems[0].rough:
        return sides.bins_of_each(bins)
    goal = bound + bound // _SLACK
    bins = _bring_down(sides, bins, goal[sides.problem_of_bin])
    largest = _max_by_group(sum_by_bin(sides.costs, bins, len(sides.problem_of_bin)), sides.problem_of_bin)
    return [
        own if most <= enough else _dealt_anew_if_better(problem, own, int(most))
        for problem, own, most, enough in zip(problems, sides.bins_of_each(bins), largest, goal, strict=True)
    ]


def _dealt_anew_if_better(problem: DispatchProblem, bins: IntArray, largest: int) -> IntArray:
    dealt = dispatch_greedy(problem)
    least = problem.largest_load(dealt)
    return place(problem, dealt) if largest > least + least // _TOLERANCE else bins


@dataclass(frozen=True, slots=True, eq=False)
class _SideBySide:
    """Problems put together: the items, bins, ranks and nodes of each have numbers of their own.

    Attributes:
        costs: int64[N].
        home: int64[N], a bin.
        target: int64[N], a bin.
        raw: int64[N], bytes of the item.
        output: int64[N], bytes that `target` needs.
        problem: int64[N].
        problem_of_bin: int64[B].
        rank_of_bin: int64[B].
        node_of_bin: int64[B].
    """

    costs: IntArray
    home: IntArray
    target: IntArray
    raw: IntArray
    output: IntArray
    problem: IntArray
    problem_of_bin: IntArray
    rank_of_bin: IntArray
    node_of_bin: IntArray

    @classmethod
    def of(cls, problems: Sequence[DispatchProblem]) -> _SideBySide:
        """Puts them together."""
        topology, num_bins = problems[0].topology, problems[0].num_bins
        problem = np.repeat(np.arange(len(problems)), [len(each.lengths) for each in problems])
        first_bin = problem * num_bins
        problem_of_bin = np.repeat(np.arange(len(problems)), num_bins)
        node_of_bin = np.tile(np.repeat(topology.node_of_rank, problems[0].bins_per_rank), len(problems))
        return cls(
            costs=_joined([each.item_costs("local") for each in problems]),
            home=_joined([each.home for each in problems]) + first_bin,
            target=_joined([each.home if each.target is None else each.target for each in problems]) + first_bin,
            raw=_joined([each.lengths if each.move_bytes is None else each.move_bytes for each in problems]),
            output=_joined([_output_of(each) for each in problems]),
            problem=problem,
            problem_of_bin=problem_of_bin,
            rank_of_bin=np.arange(len(problem_of_bin)) // problems[0].bins_per_rank,
            node_of_bin=problem_of_bin * topology.num_nodes + node_of_bin,
        )

    def costs_of_each(self) -> list[IntArray]:
        """The costs of each problem's items."""
        return self._taken_apart(self.costs)

    def bins_of_each(self, bins: IntArray) -> list[IntArray]:
        """A layout (int64[N]) taken apart again, in each problem's own numbers."""
        num_problems = int(self.problem_of_bin[-1]) + 1
        return self._taken_apart(bins % (len(self.problem_of_bin) // num_problems))

    def _taken_apart(self, values: IntArray) -> list[IntArray]:
        cuts = self.problem.searchsorted(np.arange(int(self.problem_of_bin[-1]) + 2)).tolist()
        return [values[start:stop] for start, stop in itertools.pairwise(cuts)]


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _output_of(problem: DispatchProblem) -> IntArray:
    if problem.target is None or problem.target_bytes is None:
        return np.zeros_like(problem.lengths)
    return problem.target_bytes


def _settle_level_by_level(sides: _SideBySide, load: IntArray) -> IntArray:
    """Chooses the node, then the rank, then the bin of each item, with about `load` (int64[problems]) for each bin."""
    bin_of_bin = np.arange(len(sides.rank_of_bin))
    place = sides.problem  # at the level reached
    levels = (
        (sides.node_of_bin, sides.problem_of_bin),
        (sides.rank_of_bin, sides.node_of_bin),
        (bin_of_bin, sides.rank_of_bin),
    )
    for place_of_bin, parent_of_bin in levels:
        if place_of_bin[-1] > parent_of_bin[-1]:  # else each parent has the one place, of the same number
            level = _Level.of(sides, place_of_bin, parent_of_bin, place)
            load_of_place = load[sides.problem_of_bin[starts_run(place_of_bin)]]
            place = level.settle(sides.costs, load_of_place * level.num_bins)
    return place


def _bring_down(sides: _SideBySide, bins: IntArray, goal: IntArray) -> IntArray:
    """Brings what is still above the goal (int64[bins]) down to it, within nodes as far as that goes."""
    costs, nodes, problems = sides.costs, sides.node_of_bin, sides.problem_of_bin
    within_nodes = Limits(goal, group=nodes, scope=problems, patience=1, progress=0.2)
    bins = polish(costs, bins, len(nodes), within_nodes)
    bins = polish(costs, _deal_hard_nodes_anew(costs, bins, nodes, goal), len(nodes), within_nodes)
    if nodes[-1] == problems[-1]:  # one node
        return bins
    return polish(costs, bins, len(nodes), Limits(goal, group=problems, scope=problems, patience=24))


def _deal_hard_nodes_anew(costs: IntArray, bins: IntArray, node_of_bin: IntArray, goal: IntArray) -> IntArray:
    """Deals all items of a node over its bins where one of these is above the goal still, if that helps."""
    excess = sum_by_bin(costs, bins, len(node_of_bin)) - goal
    if not (excess > 0).any():
        return bins
    largest = _max_by_group(excess, node_of_bin)
    items = (largest > 0)[node_of_bin[bins]].nonzero()[0]
    dealt = bins.copy()
    dealt[items] = deal_in_groups(costs[items], node_of_bin[bins[items]], np.zeros_like(excess), node_of_bin)
    better = _max_by_group(sum_by_bin(costs, dealt, len(node_of_bin)) - goal, node_of_bin) < largest
    return np.where(better[node_of_bin[bins]], dealt, bins)


def _max_by_group(values: IntArray, group: IntArray) -> IntArray:
    return np.maximum.reduceat(values, starts_run(group).nonzero()[0])


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
    def of(cls, sides: _SideBySide, place_of_bin: IntArray, parent_of_bin: IntArray, parent: IntArray) -> _Level:
        """The level of which bin b is in place `place_of_bin[b]` (int64[B]), given each item's parent (int64[N])."""
        raw, output = sides.raw, sides.output
        home, target = place_of_bin[sides.home], place_of_bin[sides.target]
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

    def settle(self, costs: IntArray, load: IntArray) -> IntArray:
        """The place of each item (int64[N]), such that no place holds much more than its `load` (int64[P])."""
        place, num_places = self.place.copy(), len(self.num_bins)
        placed = place >= 0
        excess = sum_by_bin(costs[placed], place[placed], num_places) - load
        offered = np.where(self.other >= 0, place, _UNPLACED)
        chosen = pick_surplus(costs, self.other_price, offered, excess)
        chosen = chosen[_admitted(costs[chosen], self.other[chosen], -excess)]
        excess -= sum_by_bin(costs[chosen], place[chosen], num_places)
        excess += sum_by_bin(costs[chosen], self.other[chosen], num_places)
        place[chosen] = self.other[chosen]
        leaving = pick_surplus(costs, self.price, place, excess)
        excess -= sum_by_bin(costs[leaving], place[leaving], num_places)
        place[leaving] = _UNPLACED
        moving = (place < 0).nonzero()[0]
        place[moving] = deal_in_groups(costs[moving], self.parent[moving], excess, self.parent_of_place)
        return place


def _admitted(costs: IntArray, places: IntArray, spare: IntArray) -> IntArray:
    """Which of the items, in order, fit into the spare load of the place each is for: positions, int64."""
    order = ascending(places)
    total = np.cumsum(costs[order])
    start = run_starts(places[order])
    within = total - total[start] + costs[order][start]
    return np.sort(order[within <= spare[places[order]]])
