"""Runs a generator in a background thread, a bounded way ahead of who takes its results."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from orch.comm.groups import settle_before_exit

T = TypeVar("T")
_POLL_S = 1.0
_EXIT_S = 5.0


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None = None


class Pipeline(Generic[T]):
    """An iterator over rounds of items that a thread prepares.

    The thread starts its next round once at most half a round is left to take. An exception of the thread is raised
    to the taker, behind all items that came before it.

    Args:
        rounds: Makes the rounds; consumed by the thread.
        stop: Set by `close`; the rounds are expected to end soon after.
        release: Called at last, by the thread.
        check: Called now and then while the taker waits; may raise to it.
    """

    def __init__(
        self,
        rounds: Iterator[list[T]],
        stop: threading.Event,
        release: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._rounds, self._stop, self._release, self._check = rounds, stop, release, check
        self._items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._taken = threading.Condition()
        self._ended = False
        self._why_closed = ""
        self._thread = threading.Thread(target=self._work, name="odb-loader", daemon=True)
        _running.add(self)
        self._thread.start()

    def __iter__(self) -> Pipeline[T]:
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            RuntimeError: If it was closed before its end, for a reason that `close` was given.
        """
        item = _End() if self._ended else self._next_item()
        with self._taken:
            self._taken.notify_all()
        if self._why_closed:
            raise RuntimeError(self._why_closed)
        if isinstance(item, _End):
            self._ended = True
            raise StopIteration if item.error is None else item.error
        return item

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._stop.is_set()

    def close(self, why: str = "") -> None:
        """Tells the thread to stop; does not wait for it.

        Args:
            why: Raised to who takes further items; without it, or behind the end, they just see the end.
        """
        self._why_closed = self._why_closed if self._ended else why
        self._ended = True
        self._stop.set()
        with self._taken:
            self._taken.notify_all()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the thread to end; returns whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _next_item(self) -> T | _End:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._items.get(timeout=_POLL_S)
            if not self._thread.is_alive() and self._items.empty():
                return _End(RuntimeError("The loader's thread ended without a result."))
            self._check()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            for items in self._rounds:
                num_left = len(items) // 2
                while items:
                    self._items.put(items.pop(0))
                self._wait_until_taken(num_left)
        except BaseException as caught:
            error = caught
        self._items.put(_End(error))
        self._release()

    def _wait_until_taken(self, num_left: int) -> None:
        with self._taken:
            while self._items.qsize() > num_left and not self._stop.is_set():
                self._taken.wait(_POLL_S)


_running: weakref.WeakSet[Pipeline[Any]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends the threads before the interpreter does, which would abort one that is in the midst of native code."""
    running = list(_running)
    for pipeline in running:
        pipeline.close()
        pipeline.join(_EXIT_S)
    if running:
        settle_before_exit()
