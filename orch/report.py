"""What a run did, summed up: imbalance before and after, bytes, and the time that training waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orch.metrics import StepMetrics


@dataclass(slots=True)
class Report:
    """Figures of every step so far; the same on all ranks but for times, which are this rank's.

    Attributes:
        steps: The metrics of each step.
        plan_ms: Milliseconds of planning for each step.
        gather_ms: Milliseconds of gathering lengths for each step, waiting for the slowest rank included.
        exchange_ms: Milliseconds of moving raw items, for each micro-step.
        wait_ms: Milliseconds that training waited for a batch, for each micro-step.
    """

    steps: list[StepMetrics] = field(default_factory=list)
    plan_ms: list[float] = field(default_factory=list)
    gather_ms: list[float] = field(default_factory=list)
    exchange_ms: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)

    def stages(self) -> dict[str, dict[str, Any]]:
        """Per stage: imbalance before and after and the least possible one, items, largest batches, bytes."""
        names = list(self.steps[0].stages) if self.steps else []
        return {name: self._stage(name) for name in names}

    def summary(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        stages = self.stages()
        total = {
            where: sum(stage["bytes"][where] for stage in stages.values()) for where in ("intra_node", "inter_node")
        }
        times = {name: mean_and_max(getattr(self, name)) for name in ("plan_ms", "gather_ms", "exchange_ms", "wait_ms")}
        return {"stages": stages, "bytes": total, **times}

    def _stage(self, name: str) -> dict[str, Any]:
        rows = [step.stages[name] for step in self.steps]
        busy = [row for row in rows if row.num_items]
        imbalances = ("imbalance_before", "imbalance_after", "bound")
        return {
            **{key: mean_and_max([getattr(row, key) for row in busy]) for key in imbalances},
            "num_items": sum(row.num_items for row in rows),
            "largest_batch_before": max((row.largest_batch_before for row in rows), default=0),
            "largest_batch_after": max((row.largest_batch_after for row in rows), default=0),
            "bytes": {
                "intra_node": sum(row.moved.intra_node for row in rows),
                "inter_node": sum(row.moved.inter_node for row in rows),
            },
        }


def mean_and_max(values: Sequence[float]) -> dict[str, float]:
    """Mean and largest of some figures; 0 for none."""
    return {"mean": float(np.mean(values)), "max": float(np.max(values))} if len(values) else {"mean": 0.0, "max": 0.0}
