"""Which ranks are missing, judged by beats read over time, and the error that names them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from orch.comm.heartbeats import Beat, Failure, describe_ranks

_MAX_LISTED = 16
_OF_A_COLLECTIVE = re.compile(
    r"gloo|nccl|processgroup|connection (closed|reset|refused)|broken pipe|timed? ?out", re.IGNORECASE
)


class PeerWatch:
    """Which ranks' beats stand still, over several readings.

    Args:
        rank: The rank that watches, which is never missing.
        num_ranks: Number of ranks.
        watched: The ranks that are watched; all if not given.
    """

    def __init__(self, rank: int, num_ranks: int, watched: Sequence[int] | None = None) -> None:
        self.rank, self.watched = rank, range(num_ranks) if watched is None else watched
        self.beats: list[Beat | None] = [None] * num_ranks
        self._read_at = time.monotonic()
        self._changed_at = [self._read_at] * num_ranks

    def update(self, beats: Sequence[Beat | None]) -> None:
        """Takes in a reading of the board: the beats of those watched, in their order."""
        self._read_at = time.monotonic()
        for rank, beat in zip(self.watched, beats, strict=True):
            if beat != self.beats[rank]:
                self.beats[rank], self._changed_at[rank] = beat, self._read_at

    def silent_s(self, rank: int) -> float:
        """Seconds for which `rank` posted nothing new, as far as the readings go back."""
        return self._read_at - self._changed_at[rank]

    def missing(self, limit_s: float) -> list[int]:
        """Other ranks that ended in the middle of something, or were silent for `limit_s`; not those that left."""
        return [rank for rank in self.watched if rank != self.rank and self._is_missing(rank, limit_s)]

    def describe(self, ranks: Sequence[int]) -> str:
        """A line for each rank: since when it is silent and what it did last."""
        lines = [f"{describe_ranks([rank])} {self.describe_one(rank)}" for rank in ranks[:_MAX_LISTED]]
        if len(ranks) > _MAX_LISTED:
            lines.append(f"and likewise {describe_ranks(ranks[_MAX_LISTED:])}")
        return "\n".join(lines)

    def describe_all(self) -> str:
        """What all ranks are doing; ranks that do the same share a line."""
        ranks_doing: dict[str, list[int]] = {}
        for rank, beat in enumerate(self.beats):
            ranks_doing.setdefault(_doing(beat), []).append(rank)
        lines = [f"{describe_ranks(ranks)}: {doing}" for doing, ranks in ranks_doing.items()]
        return "\n".join(lines[:_MAX_LISTED])

    def _is_missing(self, rank: int, limit_s: float) -> bool:
        beat = self.beats[rank]
        if beat is not None and beat.state != "running":
            return beat.state == "gone"
        return self.silent_s(rank) >= limit_s

    def describe_one(self, rank: int) -> str:
        """Since when a rank is silent and what it did last."""
        beat = self.beats[rank]
        if beat is None:
            return "has never been heard of"
        if beat.state == "gone":
            return f"has ended, in: {beat.doing}"
        return (
            f"has been silent for {self.silent_s(rank):.1f} s or longer, last in: {beat.doing} (for {beat.for_s:g} s)"
        )


def _doing(beat: Beat | None) -> str:
    if beat is None:
        return "never heard of"
    return {"left": "has left", "victim": f"has stopped, in: {beat.doing}"}.get(beat.state, beat.doing)


class PeerLostError(RuntimeError):
    """A collective failed because other ranks are missing.

    Attributes:
        rank: The rank that raises.
        ranks: The ranks that are missing or have failed; empty if none is known to be.
        waited_in: What this rank was doing.
    """

    def __init__(self, rank: int, waited_in: str, ranks: Sequence[int], reason: str) -> None:
        self.rank, self.waited_in, self.ranks, self.reason = rank, waited_in, tuple(ranks), reason
        super().__init__(f"rank {rank} waited in {waited_in}, but {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return PeerLostError, (self.rank, self.waited_in, self.ranks, self.reason)


def peer_lost_error(
    waited_in: str, error: BaseException, watch: PeerWatch, limit_s: float, failures: Mapping[int, Failure]
) -> PeerLostError:
    """The error that names who failed and who is missing after `error`; or says what each rank is doing."""
    missing = [] if failures else watch.missing(limit_s)
    said = f"\n(The collective said: {first_line(error)})"
    if not failures and not missing:
        left = [rank for rank, beat in enumerate(watch.beats) if beat is not None and beat.state == "left"]
        why = f"{describe_ranks(left)} left: all must take the same number of batches" if left else "no rank is missing"
        return PeerLostError(watch.rank, waited_in, (), f"{why}. What each does:\n{watch.describe_all()}{said}")
    ranks = sorted({*failures, *missing})
    lines = [str(failures[rank]) for rank in sorted(failures)]
    lines += [watch.describe(missing)] if missing else []
    has_failed = any(failure.by == failure.rank for failure in failures.values())
    verb = "failed" if has_failed else "is lost" if len(ranks) == 1 else "are lost"
    return PeerLostError(watch.rank, waited_in, ranks, f"{describe_ranks(ranks)} {verb}:\n" + "\n".join(lines) + said)


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an error looks as if a collective raised it because of another rank."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _OF_A_COLLECTIVE.search(str(error)) is not None
    )


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]
