"""The debug mode, `ORCH_DEBUG=1`: ids travel with all that moves between ranks, and are held against the plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orch.comm.layout import Rearrangement
from orch.comm.topology import IntArray
from orch.plan import MicroStepPlan

TAG_BYTES = 16  # A multiple of `orch.wire.ALIGNMENT`, so that what follows a tag can be read in place.
_KIND = 1 << 40


def is_debugging() -> bool:
    """Whether the environment asks for the debug mode."""
    return os.environ.get("ORCH_DEBUG", "0") not in ("", "0")


class MisroutedError(RuntimeError):
    """What came from another rank is not what the plan says."""


@dataclass(frozen=True, slots=True, eq=False)
class Tags:
    """The ids in one exchange, as this rank sees them. A tag is int64[2]: step and id.

    Attributes:
        step: The step.
        where: The exchange, in words.
        stages: Names of the stages.
        sent: int64[n], the id of each thing that this rank hands over.
        expected: int64[m], the id of each thing that it is to get.
        senders: int64[m], the rank that each of these comes from.
    """

    step: int
    where: str
    stages: Sequence[str]
    sent: IntArray
    expected: IntArray
    senders: IntArray

    @classmethod
    def of(
        cls, step: int, where: str, stages: Sequence[str], ids: IntArray, move: Rearrangement, rank: int,
        num_rows: IntArray | int = 1,
    ) -> Tags:  # fmt: skip
        """Tags of all that moves; `ids` and `num_rows` (of each thing, each of which is tagged) are int64[N]."""
        source, target = (np.repeat(side.rank_of_item, num_rows) for side in (move.source, move.target))
        of_row = np.repeat(ids, num_rows)
        here = target == rank
        return cls(step, where, stages, of_row[source == rank], of_row[here], source[here])

    def outgoing(self) -> torch.Tensor:
        """int64[n, 2], the tags to send along."""
        ids = torch.from_numpy(self.sent)
        return torch.stack([torch.full_like(ids, self.step), ids], dim=1)

    def check(self, found: torch.Tensor) -> None:
        """Holds the tags that came, int64[m, 2], against the plan.

        Raises:
            MisroutedError: If one is another; names step, stage, sender, and both ids.
        """
        steps, ids = found.cpu().numpy().T
        wrong = np.flatnonzero((steps != self.step) | (ids != self.expected))
        if len(wrong):
            first = int(wrong[0])
            expected, came = self._name(self.expected[first]), self._name(ids[first])
            raise MisroutedError(
                f"step {self.step}, {self.where}: rank {self.senders[first]} was to send {expected}, but {came} "
                f"of step {steps[first]} came instead ({len(wrong)} of {len(ids)} ids are wrong)."
            )

    def attach(self, parcels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each parcel (uint8[k]) with its tag behind it."""
        tags = self.outgoing().view(torch.uint8)
        return [torch.cat([parcel, tag]) for parcel, tag in zip(parcels, tags, strict=True)]

    def detach(self, parcels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each parcel without its tag, which is checked."""
        tags = [parcel[-TAG_BYTES:].view(torch.int64) for parcel in parcels]
        self.check(torch.stack(tags) if tags else torch.empty(0, 2, dtype=torch.int64))
        return [parcel[:-TAG_BYTES] for parcel in parcels]

    def _name(self, number: int) -> str:
        kind, index = divmod(int(number), _KIND)
        if not 0 <= kind <= len(self.stages):
            return f"something unknown ({number})"
        return f"item {index} of stage {self.stages[kind - 1]}" if kind else f"sample {index}"


def ids_in(plan: MicroStepPlan) -> list[IntArray]:
    """Ids that differ throughout a step: those of the samples, then of the items of each stage."""
    return [plan.samples, *(_KIND * (k + 1) + stage.items for k, stage in enumerate(plan.stages.values()))]
