"""The board on which ranks post their heartbeats and failures: typed, and never waited for beyond a limit.

It lies in a `torch.distributed` store. No store says by itself when its host is gone: reading from a stopped host waits
for ever, whatever timeout is set. So every access runs in a thread of its own that is given up after the limit.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LivenessConfig:
    """Limits of the heartbeat, in seconds.

    Attributes:
        interval_s: Time between two beats.
        suspect_after_s: After a failed collective, a rank silent for this long is missing.
        lost_after_s: Without a failed collective, a rank silent for this long is lost.
        end_after_s: A process whose training thread makes no progress for this long after a peer was lost is ended
            with exit code 1; None never ends it.

    Raises:
        ValueError: If a limit is not positive, or below two intervals.
    """

    interval_s: float = 1.0
    suspect_after_s: float = 5.0
    lost_after_s: float = 30.0
    end_after_s: float | None = 30.0

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise ValueError(f"`interval_s` must be above 0, but is {self.interval_s} instead.")
        for name in ("suspect_after_s", "lost_after_s"):
            if not getattr(self, name) >= 2 * self.interval_s:
                raise ValueError(
                    f"`{name}` must be at least two intervals ({2 * self.interval_s}), "
                    f"but is {getattr(self, name)} instead."
                )
        if self.end_after_s is not None and not self.end_after_s > 0:
            raise ValueError(f"`end_after_s` must be above 0 or None, but is {self.end_after_s} instead.")


@dataclass(frozen=True, slots=True)
class Beat:
    """What one rank last said of itself.

    Attributes:
        count: Grows with every beat; a rank whose count stands still is stopped, dead or cut off.
        doing: Step, stage and phase, in words.
        for_s: How long it had been doing that, in seconds.
        state: "running", "left" (ended as it should), "gone" (ended in the middle of something) or "victim" (ended
            because another rank was lost).
    """

    count: int
    doing: str
    for_s: float
    state: str = "running"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank failed, as it says itself; or that it is lost, as another says that has ended because of it.

    Attributes:
        rank: The rank that failed or is lost.
        text: Where and why, or since when it is silent.
        by: Who says so.
    """

    rank: int
    text: str
    by: int

    def __str__(self) -> str:
        return f"rank {self.rank} {'failed ' if self.by == self.rank else ''}{self.text}"


class BoardLostError(RuntimeError):
    """The store that holds the board does not answer.

    Attributes:
        host_rank: The rank that hosts the store, and so is lost; None if none does (torchrun's launcher, a file).
    """

    def __init__(self, message: str, host_rank: int | None) -> None:
        self.host_rank = host_rank
        super().__init__(message)


class Board:
    """Heartbeats and failures of all ranks, in a store.

    Args:
        store: The store; a connection of its own is opened to it where the store allows.
        num_ranks: Number of ranks.
        limit_s: Longest time that one access may take.
    """

    def __init__(self, store: dist.Store, num_ranks: int, limit_s: float = 10.0) -> None:
        self.num_ranks, self.limit_s = num_ranks, limit_s
        self.lost: BoardLostError | None = None
        self.host_rank = _host_rank(store)
        self._lock = threading.Lock()
        own = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore("orch/liveness", own)

    @classmethod
    def on_default_store(cls, num_ranks: int, limit_s: float = 10.0) -> Board:
        """The board in the store of the default process group (file, TCP or torchrun's)."""
        return cls(distributed_c10d._get_default_store(), num_ranks, limit_s)

    def post(self, rank: int, beat: Beat) -> None:
        """Replaces what `rank` last said.

        Raises:
            BoardLostError: If the store does not answer; so do all other methods.
        """
        self._call(lambda: self._store.set(_beat_key(rank), json.dumps(asdict(beat))))

    def read(self, ranks: Sequence[int] | None = None) -> list[Beat | None]:
        """The last beat of each of `ranks`, or of every rank; None for one that has never posted."""
        return self._call(lambda: self._read_beats(range(self.num_ranks) if ranks is None else ranks))

    def post_failure(self, failure: Failure) -> None:
        """Adds a failure."""

        def add() -> None:
            index = self._store.add("num_failures", 1) - 1
            self._store.set(f"failure/{index}", json.dumps(asdict(failure)))

        self._call(add)

    def read_failures(self, first: int = 0) -> list[Failure]:
        """Failures posted since the first `first` ones. One key is looked at if there is none."""

        def read() -> list[Failure]:
            failures: list[Failure] = []
            while self._store.check([key := f"failure/{first + len(failures)}"]):
                failures.append(Failure(**json.loads(self._store.get(key))))
            return failures

        return self._call(read)

    def count(self, key: str, more: int) -> int:
        """Adds to a number that starts at 0, and returns it."""
        return self._call(lambda: int(self._store.add(f"count/{key}", more)))

    def _read_beats(self, ranks: Sequence[int]) -> list[Beat | None]:
        keys = [_beat_key(rank) for rank in ranks]
        if self._store.has_extended_api() and self._store.check(keys):  # type: ignore[attr-defined]
            return [_beat(text) for text in self._store.multi_get(keys)]
        return [_beat(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def _call(self, access: Callable[[], T]) -> T:
        if self.lost:
            raise self.lost
        box: list[Any] = []
        thread = threading.Thread(target=self._run, args=(access, box), name="orch-board", daemon=True)
        thread.start()
        thread.join(self.limit_s)
        outcome = box[0] if box else TimeoutError(f"no answer in {self.limit_s:g} s")
        if isinstance(outcome, BaseException):
            self.lost = self._lost_by(outcome)
            raise self.lost from outcome
        return outcome

    def _lost_by(self, error: BaseException) -> BoardLostError:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        host = "" if self.host_rank is None else f"rank {self.host_rank} is lost: it hosts "
        return BoardLostError(f"{host}the store of the process group, which cannot be reached ({said})", self.host_rank)

    def _run(self, access: Callable[[], Any], box: list[Any]) -> None:
        try:
            with self._lock:
                box.append(access())
        except BaseException as error:
            box.append(error)


def _host_rank(store: dist.Store) -> int | None:
    """Rank 0 hosts a TCP store, unless torchrun's launcher does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not by_launcher else None


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _beat(text: bytes) -> Beat:
    return Beat(**json.loads(text))


def describe_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, runs of them shortened: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'s' if len(ranks) != 1 else ''} {text}"
