"""When is a group full?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from orch.comm.counts import check_count
from orch.comm.topology import IntArray

BatchLayout = Literal["packed", "padded"]
BATCH_LAYOUTS: tuple[str, ...] = get_args(BatchLayout)


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The most tokens that one group may hold.

    A packed group holds the sum of its lengths; a padded one its number of samples times its longest length.

    Attributes:
        max_tokens: The budget, in the unit of the lengths (tokens of the LLM).
        layout: "packed" or "padded".
        max_samples: The most samples of a group, whatever their lengths; None for no such limit.

    Raises:
        ValueError: If a limit is no whole number or below 1, or the layout is unknown.
    """

    max_tokens: int
    layout: BatchLayout = "packed"
    max_samples: int | None = None

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens)
        if self.layout not in BATCH_LAYOUTS:
            raise ValueError(f"`layout` must be one of {BATCH_LAYOUTS}, but is {self.layout!r} instead.")
        if self.max_samples is not None:
            check_count("max_samples", self.max_samples)

    def tokens(self, lengths: IntArray) -> int:
        """Tokens that a group of these lengths occupies, padding included; 0 for no sample."""
        if not len(lengths):
            return 0
        return int(np.max(lengths)) * len(lengths) if self.layout == "padded" else int(np.sum(lengths))

    def fits(self, lengths: IntArray) -> bool:
        """Whether these lengths may form one group; a single sample always may."""
        within = self.max_samples is None or len(lengths) <= self.max_samples
        return len(lengths) <= 1 or (within and self.tokens(lengths) <= self.max_tokens)

    def fill(self, lengths: IntArray) -> float:
        """Share of the budget that holds real tokens; above 1 only for a single sample over budget."""
        return float(np.sum(lengths)) / self.max_tokens

    def capacity(self, longest: int) -> int:
        """The most samples of length `longest` in one group, at least 1."""
        count = max(1, self.max_tokens // max(1, longest))
        return count if self.max_samples is None else min(count, self.max_samples)
