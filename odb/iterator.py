"""What iterating a loader returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orch.odb.batches import Delivery
from orch.odb.pipeline import Pipeline
from orch.odb.state import Position

ITERATED_ANEW = (
    "A loader must have one iterator at a time, but was iterated anew before the epoch of this one had come to its end "
    "instead."
)


class LoaderIterator:
    """The batches of one epoch.

    Args:
        pipeline: Prepares them.
        position: Where this epoch stands, which is noted here.
        note_end: Called when all have been taken, with their number.
    """

    def __init__(self, pipeline: Pipeline[Delivery], position: Position, note_end: Callable[[int], None]) -> None:
        self._pipeline, self._position, self._note_end = pipeline, position, note_end
        self._num_taken = 0

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            RuntimeError: If the loader was iterated anew before this iterator had come to its end.
        """
        try:
            delivery = next(self._pipeline)
        except BaseException as error:
            if isinstance(error, StopIteration) and not self._position.is_between and not self._pipeline.is_closed:
                self._note_end(self._num_taken)
            self.leave()
            raise
        self._num_taken += 1
        self._position.record = delivery.record.after(delivery.place + 1)
        return delivery.item

    def leave(self) -> None:
        """Says that nobody waits for further batches, though some may still be taken: an epoch may be set."""
        self._position.is_between = True

    def close(self) -> None:
        """Stops before the end; the other ranks are told at their next round."""
        self.leave()
        self._pipeline.close()

    def __del__(self) -> None:
        self.close()
