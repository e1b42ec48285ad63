"""Prepares batches ahead of training in a background thread, which hands over its errors."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL_S = 0.5
_CLOSED = "This iteration has ended, since its loader was iterated anew or given a state to go on from."


class _End:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Prefetcher(Generic[T]):
    """Runs an iterable in a thread, at most `depth` results ahead.

    Closing does not interrupt the iterable, which may be in the middle of a collective: results are thrown away until
    it ends by itself, which it is expected to do once `closing` is set.

    Args:
        source: Produces results; runs in the thread.
        depth: Results held ready, besides the one that the thread is working on; 0 for no thread: `next` does the work.
        closing: Set by `close`.
        on_wait: Called every half second while `next` waits; raises to end the wait.

    Attributes:
        num_taken: Results that `next` has given.
    """

    def __init__(
        self, source: Iterable[T], depth: int, closing: threading.Event, on_wait: Callable[[float], None]
    ) -> None:
        self._on_wait, self._closing, self.num_taken = on_wait, closing, 0
        self._ready: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._direct: Iterator[T] | None = None
        self._thread: threading.Thread | None = None
        if depth:
            self._thread = threading.Thread(target=self._run, args=(source,), daemon=True, name="orch-prefetch")
            self._thread.start()
        else:
            self._direct = iter(source)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def next(self) -> T | None:
        """The next result; None at the end.

        Raises:
            BaseException: What the iterable raised, or what `on_wait` raised.
            RuntimeError: If it was closed.
        """
        result = self._next_result()
        if not isinstance(result, _End):
            self.num_taken += result is not None
            return result
        if result.error is not None:
            raise result.error
        return None

    def _next_result(self) -> T | _End | None:
        waited = 0.0
        while not self.is_closed:
            if self._direct is not None:
                return next(self._direct, None)
            try:
                return self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                waited += _POLL_S
                self._on_wait(waited)
        raise RuntimeError(_CLOSED)

    def close(self, timeout_s: float) -> bool:
        """Waits for the thread to end; whether it did. While the interpreter ends no thread runs: it does not wait.

        Without one, a thread lets the iterable come to its end, which other ranks may wait for.
        """
        self._closing.set()
        if sys.is_finalizing():
            return self._thread is None or not self._thread.is_alive()
        if self._direct is not None:
            ending = threading.Thread(target=self._run, args=(self._direct,), daemon=True, name="orch-close")
            self._direct = None
            with contextlib.suppress(RuntimeError):  # as the interpreter begins to end
                ending.start()
                self._thread = ending
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, source: Iterable[T]) -> None:
        end = _End()
        try:
            for result in source:
                self._put(result)
        except BaseException as error:
            end = _End(error)
        self._put(end)

    def _put(self, result: T | _End) -> None:
        while not self._closing.is_set():
            try:
                self._ready.put(result, timeout=_POLL_S)
                return
            except queue.Full:
                continue
