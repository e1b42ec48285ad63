"""Which batches the model was run on: ranks that skip different ones train on different steps from then on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

_KEPT = 62  # batches whose fate is told to the others: bits of a number
_HELD = 8  # batches that a script may hold, besides those of a step, before it runs the model on the first


class Skips:
    """What became of this rank's batches, as far as it is decided.

    A script may look ahead: it takes further batches before the model has run on one. So that one was skipped is known
    when the model has run on a later one, or when a script could hardly hold that many.

    Args:
        num_held: Batches that a script may have been handed, or that lie ready for it, without having run on them.
    """

    def __init__(self, num_held: int) -> None:
        self._num_held = num_held + _HELD
        self._undecided: deque[threading.Event] = deque()
        self._num_decided = self._bits = 0

    def hand_over(self, entered: threading.Event) -> None:
        """Notes the next batch; the event is set once the model runs on it."""
        self._undecided.append(entered)

    def told(self) -> tuple[int, int]:
        """How many batches are decided, and which of the last ones were skipped: a bit each, the last one's first."""
        run = [number for number, entered in enumerate(self._undecided) if entered.is_set()]
        for _ in range(max(run[-1] + 1 if run else 0, len(self._undecided) - self._num_held)):
            skipped = not self._undecided.popleft().is_set()
            self._bits = (self._bits << 1 | skipped) & ((1 << _KEPT) - 1)
            self._num_decided += 1
        return self._num_decided, self._bits


def skipped_apart(told: Sequence[tuple[int, int]]) -> list[int] | None:
    """How many batches each rank skipped, if they are not the same ones; None if they are, as far as all are decided.

    Args:
        told: What each rank told.
    """
    decided = [number for number, _ in told]
    common, num_known = min(decided), _KEPT - (max(decided) - min(decided))
    if num_known <= 0:
        return None
    bits = [(mask >> (number - common)) & ((1 << num_known) - 1) for number, mask in told]
    return None if len(set(bits)) == 1 else [each.bit_count() for each in bits]
