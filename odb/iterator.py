"""What iterating a loader returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orch.odb.batches import Delivery
from orch.odb.pipeline import Pipeline

ITERATED_ANEW = (
    "A loader must have one iterator at a time, but was iterated anew before the epoch of this one had come to its end "
    "instead."
)


class LoaderIterator:
    """The batches of one epoch.

    Args:
        pipeline: Prepares them.
        note_taken: Called for each that is taken.
        note_end: Called when all have been, with their number.
    """

    def __init__(
        self, pipeline: Pipeline[Delivery], note_taken: Callable[[Delivery], None], note_end: Callable[[int], None]
    ) -> None:
        self._pipeline, self._note_taken, self._note_end = pipeline, note_taken, note_end
        self._num_taken = 0
        self._has_ended = False

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            RuntimeError: If the loader was iterated anew before this iterator had come to its end.
        """
        try:
            delivery = next(self._pipeline)
        except StopIteration:
            if not self._has_ended and not self._pipeline.is_closed:
                self._has_ended = True
                self._note_end(self._num_taken)
            raise
        self._num_taken += 1
        self._note_taken(delivery)
        return delivery.item

    def close(self) -> None:
        """Stops before the end; the other ranks are told at their next round."""
        self._has_ended = True
        self._pipeline.close()

    def __del__(self) -> None:
        self.close()
