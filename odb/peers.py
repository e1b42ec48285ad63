"""The other ranks, as the loader sees them: integers from each, or all fail together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed import ProcessGroup

from orch.comm.gather import RankFailedError, Status, gather, gather_status
from orch.comm.topology import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """The ranks that share a loader.

    Attributes:
        rank: This rank.
        num_ranks: All of them.
        group: A CPU group that the loader alone uses; None for a single rank.
    """

    rank: int
    num_ranks: int
    group: ProcessGroup | None = None

    def gather(self, values: Sequence[int] | IntArray) -> list[IntArray]:
        """One int64 vector from each rank.

        Raises:
            RankFailedError: On all ranks, if one told of a failure instead.
        """
        vector = np.asarray(values, dtype=np.int64)
        if self.num_ranks == 1:
            return [vector]
        return gather(vector, Status.OK, "", self.group, label="odb").values

    def tell_failure(self, message: str) -> None:
        """Meets the others' `gather`, which raises there and names this rank."""
        if self.num_ranks == 1:
            return
        with contextlib.suppress(RankFailedError, RuntimeError):
            gather_status(Status.FAILED, message, self.group, label="odb")
