"""Problems put together, so that one array operation serves them all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray
from orch.dispatch.problem import DispatchProblem

_MOST_BITS = 62


@dataclass(frozen=True, slots=True, eq=False)
class SideBySide:
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
    def of(cls, problems: Sequence[DispatchProblem]) -> SideBySide:
        """Puts them together."""
        topology, num_bins = problems[0].topology, problems[0].num_bins
        problem = np.repeat(np.arange(len(problems)), [len(each.lengths) for each in problems])
        first_bin = problem * num_bins
        problem_of_bin = np.repeat(np.arange(len(problems)), num_bins)
        node_of_bin = np.tile(np.repeat(topology.node_of_rank, problems[0].bins_per_rank), len(problems))
        most_bins = int(np.bincount(node_of_bin).max())
        return cls(
            costs=_with_room(_joined([each.item_costs("local") for each in problems]), most_bins),
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


def _with_room(costs: IntArray, num_bins: int) -> IntArray:
    """The costs, or in coarser units, such that twice the largest fits into 62 bits for each of the bins of a node."""
    shift = max(0, int(costs.max(initial=0)).bit_length() + num_bins.bit_length() + 1 - _MOST_BITS)
    return -(-costs >> shift) if shift else costs


def _output_of(problem: DispatchProblem) -> IntArray:
    if problem.target is None or problem.target_bytes is None:
        return np.zeros_like(problem.lengths)
    return problem.target_bytes
