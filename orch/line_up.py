"""Which of a rank's batches run at the same time: those of all ranks with large samples or items line up.

In each micro-step all ranks wait for the costliest. An item that is more than a rank's share holds up the others in
whatever micro-step it is in; so such items had better be in the same one. Which samples make a batch is known here; in
what order each rank runs its batches is not. If only one number of each batch counts, the sum over micro-steps of the
largest one is least where every rank runs them by falling number, as sorted lists always go together best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray

_LEVEL = 64  # LLM loads that differ by less than 1/64 of the mean are level: encoders decide


@dataclass(frozen=True, slots=True, eq=False)
class StageLoads:
    """What a stage's items cost in each batch, of which rank and micro-step are the row and the column.

    Attributes:
        total: int64[R, K], cost of all items of a batch.
        floor: int64[R, K], what some rank takes at least in the micro-step of that batch: its largest item where items
            are dealt to ranks anew; all of them where they stay.
    """

    total: IntArray
    floor: IntArray

    @property
    def mean(self) -> int:
        """Cost of the step for a rank if none waits."""
        return max(1, int(self.total.sum()) // len(self.total))

    def step_load(self, order: IntArray) -> int:
        """About the cost of the step if each rank runs its batches in this order, in 2^-20 of `mean`."""
        total, floor = (np.take_along_axis(loads, order, axis=1) for loads in (self.total, self.floor))
        of_micro_steps = np.maximum(total.sum(axis=0) // len(total), floor.max(axis=0))
        return (int(of_micro_steps.sum()) << 20) // self.mean


def line_up(llm: StageLoads, encoders: Sequence[StageLoads]) -> IntArray:
    """The micro-step in which each rank runs each of its batches, such that as little as possible is waited for.

    Of the orders looked at (as they are; by LLM load; by that where it differs much, else by the largest items of
    encoders) the one is taken with the least sum of step loads over stages, each relative to its mean.

    Args:
        llm: Of the LLM.
        encoders: Of the encoder stages.

    Returns:
        int64[R, K], the micro-step of each batch.
    """
    loads = llm.floor // max(1, llm.mean // (_LEVEL * llm.total.shape[1]))
    items = sum((stage.floor / stage.mean for stage in encoders), np.zeros(llm.total.shape))
    orders = (
        np.broadcast_to(np.arange(llm.total.shape[1]), llm.total.shape),
        np.argsort(-llm.floor, axis=1, kind="stable"),
        np.lexsort((-items, -loads), axis=1),
    )
    best = min(orders, key=lambda order: sum(stage.step_load(order) for stage in (llm, *encoders)))
    return np.argsort(best, axis=1, kind="stable")
