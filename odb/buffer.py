"""The samples of a rank's window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orch.comm.counts import check_count
from orch.comm.topology import IntArray
from orch.odb.feed import Entry, FeedRun


@dataclass(frozen=True, slots=True)
class WindowSize:
    """When a rank's window is full.

    Attributes:
        num_samples: At least so many samples,
        num_tokens: and at least so many tokens, lest a window of short samples makes too few groups,
        max_bytes: but not once they take so many bytes,
        max_samples: nor once there are so many of them.

    Raises:
        ValueError: If a limit is not positive.
    """

    num_samples: int
    num_tokens: int
    max_bytes: int
    max_samples: int

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_bytes", "max_samples"):
            check_count(name, getattr(self, name))

    def is_full(self, num_samples: int, num_tokens: int, num_bytes: int) -> bool:
        """Whether a window that holds this is full."""
        if num_samples >= self.max_samples or num_bytes >= self.max_bytes:
            return True
        return num_samples >= self.num_samples and num_tokens >= self.num_tokens


@dataclass(slots=True, eq=False)
class SampleBuffer:
    """Samples that were read and not handed out.

    Attributes:
        run: Where samples come from.
        size: When the window is full.
        entries: The samples by ordinal, ascending.
        has_ended: No more will come.
        longer_than: Samples above this length are counted.
        num_over_budget: How many there were.
    """

    run: FeedRun
    size: WindowSize
    longer_than: int
    entries: dict[int, Entry] = field(default_factory=dict)
    has_ended: bool = False
    num_over_budget: int = 0
    _num_ordinals: int = 0

    @property
    def num_consumed(self) -> int:
        """Samples of this rank's order that were read so far, before a resume too."""
        return self.run.order_position(self._num_ordinals)

    @property
    def unread_again(self) -> list[Any]:
        """Indices that a resume gave back and that have not been read yet."""
        return self.run.given_back[self._num_ordinals :]

    def fill(self, num_rounds: int = 0) -> list[Entry]:
        """Takes samples in order until the window is full or the epoch has ended; returns the new ones.

        When it is full depends on the samples alone, never on which have arrived.

        Args:
            num_rounds: Rounds so far; noted in the samples.

        Raises:
            SampleError: If a sample failed.
        """
        num_tokens = sum(entry.length for entry in self.entries.values())
        num_bytes = sum(entry.num_bytes for entry in self.entries.values())
        new: list[Entry] = []
        while not self.has_ended and not self.size.is_full(len(self.entries), num_tokens, num_bytes):
            read = next(self.run, None)
            if read is None:
                self.has_ended, self._num_ordinals = True, self.run.num_read
                break
            entry = replace(read, first_round=num_rounds - self.run.rounds_waited(read.ordinal))
            self.entries[entry.ordinal] = entry
            self._num_ordinals = entry.ordinal + 1
            self.num_over_budget += entry.length > self.longer_than
            num_tokens += entry.length
            num_bytes += entry.num_bytes
            new.append(entry)
        return new

    def pop(self, ordinals: Sequence[int] | IntArray) -> list[Entry]:
        """Hands out the samples of these ordinals, in their order."""
        return [self.entries.pop(int(ordinal)) for ordinal in ordinals]
