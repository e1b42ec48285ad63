"""`none`: every item stays in the group that it was drawn into."""

from __future__ import annotations

from orch.comm.topology import IntArray
from orch.dispatch.problem import DispatchProblem


def dispatch_none(problem: DispatchProblem) -> IntArray:
    """The layout as drawn: int64[N]."""
    return problem.drawn.copy()
