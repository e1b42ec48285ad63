"""Counts collectives: tests and reports look at them through `CollectiveLog`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that this rank entered.

    Attributes:
        kind: "all_to_all" or "all_gather".
        label: What it was for: a stage's name, "lengths", ...; a backward exchange ends in ".backward".
        num_bytes: Bytes of this rank's own contribution.
    """

    kind: str
    label: str
    num_bytes: int


@dataclass(eq=False)
class CollectiveLog:
    """Records every collective of `orch.comm` in this process, from any thread, while its `with` block runs.

    Attributes:
        entries: The collectives, in the order in which they began.
    """

    entries: list[Collective] = field(default_factory=list)

    def count(self, label: str | None = None) -> int:
        """Number of collectives, or of those with exactly this label."""
        return sum(label in (None, entry.label) for entry in self.entries)

    def __enter__(self) -> CollectiveLog:
        with _lock:
            _logs.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            _logs.remove(self)


_logs: list[CollectiveLog] = []
_lock = threading.Lock()


def log_collective(kind: str, label: str, num_bytes: int) -> None:
    """Adds a collective to all logs that are open."""
    if not _logs:
        return
    with _lock:
        for log in _logs:
            log.entries.append(Collective(kind, label, num_bytes))
