"""How long planning keeps other threads from running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def longest_gil_ms(function: Callable[[], Any], repeats: int) -> float:
    """The longest time another thread waited for the interpreter while `function` ran: the median of several runs.

    The other thread wants the interpreter every millisecond, as a training loop does; a busy machine adds to its wait,
    which is why the same is measured over an idle sleep and taken off.
    """

    def longest(work: Callable[[], Any]) -> float:
        done, waits = threading.Event(), []

        def tick() -> None:
            last = time.perf_counter()
            while not done.is_set():
                time.sleep(0.001)
                now = time.perf_counter()
                waits.append((now - last) * 1e3 - 1)
                last = now

        thread = threading.Thread(target=tick)
        thread.start()
        work()
        done.set()
        thread.join()
        return max(waits, default=0.0)

    start = time.perf_counter()
    function()
    spent = time.perf_counter() - start
    busy = np.median([longest(function) for _ in range(repeats)])
    idle = np.median([longest(lambda: time.sleep(spent)) for _ in range(repeats)])
    return max(float(busy - idle), 0.0)
