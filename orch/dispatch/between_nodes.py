"""Chooses the node of each item, so that little crosses nodes.

What must cross at a target load T is at least `sum over nodes of max(0, load of node - bins of node * T)`: the lower
the target, the more. The one that is taken is the least for which no more than 1/200 of all costs cross beyond what
must at 1.01 times the least possible load. Nodes then draw level, mostly by other items that cross instead, and at last
by dear swaps, as long as something of that 1/200 is left.

Where bins hold few items this limits nothing, since so few cannot fill nodes to any load: bins are brought down by
swaps between nodes, the cheapest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orch.comm.topology import IntArray
from orch.cost import sum_by_bin
from orch.dispatch.bounds import least_load
from orch.dispatch.fullest_first import Effort, fullest_first
from orch.dispatch.level import Level
from orch.dispatch.polish import Limits, polish
from orch.dispatch.prices import Prices
from orch.dispatch.problem import DispatchProblem
from orch.dispatch.side_by_side import SideBySide

_LOOSE = 100  # what must cross is reckoned at loads of 1/100 above the bound;
_ALLOWANCE = 200  # 1/200 (0.5 %) of all costs may cross beyond that
_TRIES = 5  # to keep to that
_STEP = 2  # how far the limit comes down at a try, in times of what was too much, doubled each time;
_MARGIN = 1 << 14  # and by this share of all costs
_PROBES = 10  # of the target in between
_ENOUGH = 108  # loads of up to 1/108 (0.93 %) above the bound will do where better ones make more cross
_ROOM = 220  # nodes filled to 1/220 above the bound can spread large items over their bins more easily
_FEW_ITEMS = 16  # of a bin;
_NEAR = 216  # where they are that few, loads come down to 1/216 (0.46 %) above the bound, whatever crosses
_PATIENCE = 6
_LAST_PATIENCE = 24
_SPENDING = Effort(leaving=64, returning=1024, work=1 << 21)
_CLOSE = 1 << 45  # of N items, loads within N^2 / 2^45 of what is wanted will do,
_LEAST_CLOSE = 1 << 11  # but no more than 2^-11 (0.05 %)


@dataclass(frozen=True, slots=True, eq=False)
class Aims:
    """Loads of a bin: int64[problems] each.

    Attributes:
        bound: The least possible one, or less.
        least: What nodes are filled to at least,
        most: and at most.
        wanted: What is wanted wherever it can be had for little.
        enough: What will do elsewhere.
        close: What lies this much above a load is as good.
    """

    bound: IntArray
    least: IntArray
    most: IntArray
    wanted: IntArray
    enough: IntArray
    close: IntArray

    @classmethod
    def of(cls, sides: SideBySide, problems: Sequence[DispatchProblem], *, roomy: bool) -> Aims:
        """The aims of problems that are dealt side by side; with more room in nodes, or less."""
        bounds = [least_load(costs, problems[0].num_bins) for costs in sides.costs_of_each()]
        bound = np.array(bounds, dtype=np.int64)
        slack = np.array([each.slack_of(least) for least, each in zip(bounds, problems, strict=True)], dtype=np.int64)
        close = bound // max(_LEAST_CLOSE, _CLOSE // max(1, len(sides.costs)) ** 2)
        return cls(
            bound=bound,
            least=bound + (bound // _ROOM if roomy else slack // 2),
            most=bound + np.maximum(bound // _ROOM, 0 if roomy else slack // 2),
            wanted=bound + np.maximum(slack, close),
            enough=bound + np.maximum(slack, bound // _ENOUGH),
            close=close,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BetweenNodes:
    """What crosses nodes.

    Attributes:
        sides: The problems.
        aims: What they aim at.
        level: The level of nodes.
    """

    sides: SideBySide
    aims: Aims
    level: Level

    @classmethod
    def of(cls, sides: SideBySide, aims: Aims) -> BetweenNodes:
        """The level of nodes of these problems."""
        return cls(sides, aims, Level.of(sides, sides.node_of_bin, sides.problem_of_bin, sides.problem))

    def choose(self, *, rough: bool) -> tuple[IntArray, IntArray]:
        """Chooses the node of each item; where it is rough, or bins hold few, whatever crosses for the least load.

        Returns:
            int64[N], and int64[problems], the load of a bin that nodes were filled to.
        """
        aims = self.aims
        if rough or (aims.least >= aims.most).all():
            return self._filled_to(aims.least), aims.least
        needs, few = _Needs.of(self.sides.costs, self.level), self._hold_few()
        most = needs.crossing(aims.bound + aims.bound // _LOOSE) + needs.total // _ALLOWANCE
        limit = most
        node, load, wrong = self.sides.problem, aims.most, np.ones(len(limit), dtype=np.bool_)
        for number in range(_TRIES):
            tried = needs.least_load(aims.least, aims.most, limit)
            found = self._filled_to(tried)
            over = needs.moved(found) - most
            node, load = np.where(wrong[self.sides.problem], found, node), np.where(wrong, tried, load)
            wrong &= (over > 0) & ~few
            if not wrong.any():
                return self._spend(node, load, most - needs.moved(node)), load
            limit = np.where(wrong, limit - (_STEP << number) * over - needs.total // _MARGIN, limit)
        least = self._filled_to(aims.most, level=False)
        return np.where(wrong[self.sides.problem], least, node), np.where(wrong, aims.most, load)

    def _spend(self, node: IntArray, load: IntArray, spare: IntArray) -> IntArray:
        """Brings nodes that are still too full down by moves and swaps for which up to `spare` costs cross."""
        costs, level = self.sides.costs, self.level
        crossing = Prices(level.place, level.other, np.zeros_like(costs), costs, rate=1.0)
        scope = level.parent_of_place
        return fullest_first(costs, node, self._goal(load), scope, crossing, np.maximum(spare, 0), _SPENDING)

    def _goal(self, load: IntArray) -> IntArray:
        """What nodes come down to that are filled to the load (int64[problems]) of a bin: int64[nodes]."""
        return self.level.filled(np.maximum(load + self.aims.close, self.aims.wanted))

    def _hold_few(self) -> npt.NDArray[np.bool_]:
        """Of which problems the bins hold few items each, one of which is more than may cross: bool[problems]."""
        num_items = np.bincount(self.sides.problem[self.sides.costs > 0], minlength=len(self.aims.bound))
        return num_items < _FEW_ITEMS * np.bincount(self.sides.problem_of_bin)

    def _filled_to(self, load: IntArray, *, level: bool = True) -> IntArray:
        """The node of each item: nodes are filled to the load (int64[problems]) of a bin, and draw level or not."""
        node = self.level.settle(self.sides.costs, self.level.filled(load))
        if not level:
            return node
        return self.level.draw_level(self.sides.costs, node, self._goal(load))

    def bring_down(self, bins: IntArray) -> IntArray:
        """Brings bins down by moves and swaps between nodes too, those first that take little.

        All bins come down to what will do. Those that hold few items come nearer to the bound: to what is wanted, as
        far as no move or swap takes more than moving the difference of its two bins usually takes, and at any price
        to 1/216 above the bound.

        Args:
            bins: int64[N], the layout to start from.

        Returns:
            int64[N].
        """
        aims, costs, scope, few = self.aims, self.sides.costs, self.sides.problem_of_bin, self._hold_few()
        near = np.maximum(aims.wanted, np.minimum(aims.enough, aims.bound + aims.bound // _NEAR))
        near = np.where(few, near, aims.enough)
        wanted = np.where(few, aims.wanted, aims.enough)
        if not (sum_by_bin(costs, bins, len(scope)) > wanted[scope]).any():
            return bins
        prices = self.level.prices(costs, self.sides.node_of_bin)
        if (wanted < near).any():
            limits = Limits(wanted[scope], scope, scope, patience=_PATIENCE, prices=prices)
            bins = polish(costs, bins, len(scope), limits)
        bins = fullest_first(costs, bins, near[scope], scope, prices)
        return polish(costs, bins, len(scope), Limits(aims.enough[scope], scope, scope, patience=_LAST_PATIENCE))


@dataclass(frozen=True, slots=True, eq=False)
class _Needs:
    """What must move between nodes.

    Attributes:
        costs: int64[N].
        start: int64[N], the node where each item moves nothing, or least,
        other: int64[N], and where it moves little more; -1 for none.
        loads: int64[nodes], cost of the items that start there.
        num_bins: int64[nodes].
        problem_of_node: int64[nodes].
        total: int64[problems], cost of all items.
    """

    costs: IntArray
    start: IntArray
    other: IntArray
    loads: IntArray
    num_bins: IntArray
    problem_of_node: IntArray
    total: IntArray

    @classmethod
    def of(cls, costs: IntArray, level: Level) -> _Needs:
        """The needs of the level of nodes."""
        loads = sum_by_bin(costs, level.place, len(level.num_bins))
        problems = int(level.parent_of_place[-1]) + 1
        total = sum_by_bin(loads, level.parent_of_place, problems)
        return cls(costs, level.place, level.other, loads, level.num_bins, level.parent_of_place, total)

    def crossing(self, load: IntArray) -> IntArray:
        """The least that leaves nodes if no bin holds more than the load (int64[problems]): int64[problems]."""
        surplus = np.maximum(self.loads - load[self.problem_of_node] * self.num_bins, 0)
        return sum_by_bin(surplus, self.problem_of_node, len(load))

    def moved(self, node: IntArray) -> IntArray:
        """Cost of the items that are in another node (int64[N]) than where they start or may be: int64[problems]."""
        moves = (node != self.start) & (node != self.other)
        return sum_by_bin(self.costs[moves], self.problem_of_node[node[moves]], len(self.total))

    def least_load(self, low: IntArray, high: IntArray, limit: IntArray) -> IntArray:
        """About the least load between two (int64[problems]) that makes no more cross than the limit; `high` if none.

        It is `low` itself where that does.
        """
        at_once = self.crossing(low) <= limit
        if at_once.all():
            return low
        least, below = high, low
        for _ in range(_PROBES):
            middle = (below + least) // 2
            enough = self.crossing(middle) <= limit
            least, below = np.where(enough, middle, least), np.where(enough, below, middle)
        return np.where(at_once, low, least)
