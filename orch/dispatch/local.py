"""`local`: keep every item at home while the target load allows, and move only the surplus, within the node first.

Three levels, each with the same three moves (`Level.settle`): items leave nodes that hold too much, then ranks, then
micro-steps. Within nodes the target is the least possible load, or the slack above it, and a polish comes near it.
Between nodes it is what little more has to cross for than must anyway (`choose_nodes`).

An item whose output another rank needs (an encoder's) is spared one of its two transfers on either of the two. It
starts on the cheaper one, and when its place holds too much, the other is the first it is offered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orch.comm.topology import IntArray
from orch.cost import is_additive, sum_by_bin
from orch.dispatch.between_nodes import Aims, BetweenNodes
from orch.dispatch.bounds import least_load
from orch.dispatch.deal import deal_in_groups
from orch.dispatch.greedy import dispatch_greedy
from orch.dispatch.level import Level
from orch.dispatch.local_padded import search_within_nodes
from orch.dispatch.order import starts_run
from orch.dispatch.placed import place
from orch.dispatch.polish import Limits, polish
from orch.dispatch.problem import DispatchProblem
from orch.dispatch.side_by_side import SideBySide

_TOLERANCE = 64  # where the target is missed, dealing all anew must gain 1/64 (1.6 %) to be worth the bytes
_PATIENCE = 12  # of the polish within nodes


def dispatch_local(problem: DispatchProblem) -> IntArray:
    """Moves the surplus and nothing else.

    Padded batches are cut within each node (`local_padded`).

    Args:
        problem: `move_bytes` (the lengths where None), `target` and `target_bytes` say what a move takes.

    Returns:
        int64[N], the bin of each item. Where the items allow it, its largest load is at most 1 + 1/108 of the least
        possible one, or 1 + `slack`, and nearer to it where 1/200 of all costs suffices to cross nodes for that; with
        fewer than 16 items a bin mostly 1 + 1/216, whatever crosses. It is never larger than both that and 1 + 1/64 of
        what `greedy` finds.
    """
    if not is_additive(problem.cost):
        return search_within_nodes(problem)
    return dispatch_local_at_once([problem])[0]


def dispatch_local_at_once(problems: Sequence[DispatchProblem]) -> list[IntArray]:
    """Several problems side by side, in as many array operations as one takes: faster where they are small.

    Args:
        problems: At least one, with additive costs; of one topology, all rough or none, with equally many bins a rank.

    Returns:
        int64[N] for each, as good as what `dispatch_local` gives, if not the same.
    """
    found, above = _deal(problems, roomy=False)
    missed = (above > 0).nonzero()[0].tolist()
    if not missed:
        return found
    again, above_again = _deal([problems[number] for number in missed], roomy=True)
    for number, bins, still_above in zip(missed, again, above_again.tolist(), strict=True):
        if still_above < above[number]:
            found[number] = bins
        if still_above > 0:
            found[number] = dealt_anew_if_better(problems[number], found[number])
    return found


def _deal(problems: Sequence[DispatchProblem], *, roomy: bool) -> tuple[list[IntArray], IntArray]:
    """The bins of each problem, and by how much the largest load is above what will do (int64[problems])."""
    sides = SideBySide.of(problems)
    aims = Aims.of(sides, problems, roomy=roomy)
    several = sides.node_of_bin[-1] != sides.problem_of_bin[-1]
    between = BetweenNodes.of(sides, aims) if several else None
    nodes, load = between.choose(rough=problems[0].rough) if between else (sides.problem, aims.least)
    bins = _settle_within_nodes(sides, nodes, load)
    if problems[0].rough:  # will do in any case
        return sides.bins_of_each(bins), np.zeros(len(problems), dtype=np.int64)
    if (aims.wanted < aims.enough).any():
        bins = _level_within_nodes(sides, bins, aims.wanted)
    bins = _bring_down_within_nodes(sides, bins, aims.enough[sides.problem_of_bin])
    if between:
        bins = between.bring_down(bins)
    loads = sum_by_bin(sides.costs, bins, len(sides.problem_of_bin))
    return sides.bins_of_each(bins), _max_by_group(loads, sides.problem_of_bin) - aims.enough


def dealt_anew_if_better(problem: DispatchProblem, bins: IntArray, tilted: DispatchProblem | None = None) -> IntArray:
    """What `greedy` finds, for another cost if one is given, where that is better by 1/64: worth the bytes."""
    load, bound = problem.largest_load(bins), least_load(problem.item_costs("local"), problem.num_bins)
    if load <= bound + bound // _TOLERANCE:  # nothing gains as much
        return bins
    dealt = dispatch_greedy(problem if tilted is None else tilted)
    least = problem.largest_load(dealt)
    return place(problem, dealt) if load > least + least // _TOLERANCE else bins


def _settle_within_nodes(sides: SideBySide, node: IntArray, load: IntArray) -> IntArray:
    """Chooses the rank, then the bin of each item, given its node, with about `load` (int64[problems]) for each bin."""
    rank = _settle(sides, sides.rank_of_bin, sides.node_of_bin, node, load)
    return _settle(sides, np.arange(len(sides.rank_of_bin)), sides.rank_of_bin, rank, load)


def _settle(
    sides: SideBySide, place_of_bin: IntArray, parent_of_bin: IntArray, parent: IntArray, load: IntArray
) -> IntArray:
    """Chooses the place of each item at a level of which bin b is in place `place_of_bin[b]`, given its parent."""
    if place_of_bin[-1] == parent_of_bin[-1]:  # each parent has the one place, of the same number
        return parent
    level = Level.of(sides, place_of_bin, parent_of_bin, parent)
    load_of_place = load[sides.problem_of_bin[starts_run(place_of_bin)]]
    return level.settle(sides.costs, load_of_place * level.num_bins)


def _level_within_nodes(sides: SideBySide, bins: IntArray, goal: IntArray) -> IntArray:
    """Brings bins down to the goal (int64[problems]), or to the largest mean of a node where that is above it."""
    nodes, problems = sides.node_of_bin, sides.problem_of_bin
    mean = -(-sum_by_bin(sides.costs, nodes[bins], int(nodes[-1]) + 1) // np.bincount(nodes))
    goal = np.maximum(goal, _max_by_group(mean, problems[starts_run(nodes)]))
    limits = Limits(goal[problems], nodes, problems, patience=_PATIENCE, two_swaps=True)
    return polish(sides.costs, bins, len(nodes), limits)


def _bring_down_within_nodes(sides: SideBySide, bins: IntArray, goal: IntArray) -> IntArray:
    """Brings what is still above the goal (int64[bins]) down to it, as far as that goes within nodes."""
    costs, nodes = sides.costs, sides.node_of_bin
    within_nodes = Limits(goal, group=nodes, scope=sides.problem_of_bin, patience=1, progress=0.35)
    bins = polish(costs, bins, len(nodes), within_nodes)
    if not (sum_by_bin(costs, bins, len(nodes)) > goal).any():
        return bins
    return polish(costs, _deal_hard_nodes_anew(costs, bins, nodes, goal), len(nodes), within_nodes)


def _deal_hard_nodes_anew(costs: IntArray, bins: IntArray, node_of_bin: IntArray, goal: IntArray) -> IntArray:
    """Deals all items of a node over its bins where one of these is above the goal still, if that helps."""
    excess = sum_by_bin(costs, bins, len(node_of_bin)) - goal
    largest = _max_by_group(excess, node_of_bin)
    items = (largest > 0)[node_of_bin[bins]].nonzero()[0]
    dealt = bins.copy()
    dealt[items] = deal_in_groups(costs[items], node_of_bin[bins[items]], np.zeros_like(excess), node_of_bin)
    better = _max_by_group(sum_by_bin(costs, dealt, len(node_of_bin)) - goal, node_of_bin) < largest
    return np.where(better[node_of_bin[bins]], dealt, bins)


def _max_by_group(values: IntArray, group: IntArray) -> IntArray:
    return np.maximum.reduceat(values, starts_run(group).nonzero()[0])
