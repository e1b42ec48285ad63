"""Gathers integers from all ranks, and with them how each rank fares, so that all go on or stop together.

Nothing is pickled: a header of three words from each rank, then values and message padded to the longest, both int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch.distributed import ProcessGroup

from orch.comm.collective_log import log_collective
from orch.comm.groups import all_gather_single, get_global_ranks, get_world_size
from orch.comm.topology import IntArray

MAX_MESSAGE_BYTES = 65536


class Status(IntEnum):
    """How a rank fares: it goes on, has come to the end of its data, or has failed and says why."""

    OK = 0
    ENDED = 1
    FAILED = 2


class RankFailedError(RuntimeError):
    """A rank failed; raised by all ranks alike.

    Attributes:
        rank: Rank in the world of the failed one (the lowest, if several failed).
        message: What it said.
    """

    def __init__(self, rank: int, message: str, *, also_failed: tuple[int, ...] = ()) -> None:
        self.rank, self.message, self.also_failed = rank, message, also_failed
        others = f" (ranks {list(also_failed)} failed too)" if also_failed else ""
        super().__init__(f"Rank {rank} failed{others}: {message}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (self.rank, self.message, self.also_failed)


def _rebuild_error(rank: int, message: str, also_failed: tuple[int, ...]) -> RankFailedError:
    return RankFailedError(rank, message, also_failed=also_failed)


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """What all ranks said, in the order of their ranks in the group.

    Attributes:
        values: One int64 vector from each rank.
        statuses: OK or ENDED for each rank; a FAILED one has been raised.
    """

    values: list[IntArray]
    statuses: list[Status]

    @property
    def all_ended(self) -> bool:
        """Whether no rank has data left."""
        return all(status is Status.ENDED for status in self.statuses)


def gather_ragged(values: IntArray, group: ProcessGroup | None = None, *, label: str = "lengths") -> list[IntArray]:
    """Gathers vectors of any length: returns one int64 vector for each rank, on every rank.

    Args:
        values: int64[n], n may differ between ranks and be 0.
        group: A CPU (gloo) group; None for the world.
        label: What it is for, in a `CollectiveLog`.

    Raises:
        RankFailedError: On all ranks, if one called `gather_status` with FAILED instead.
        ValueError: If `values` is not a vector of integers.
    """
    return gather(values, Status.OK, "", group, label=label).values


def gather_status(
    status: Status, message: str = "", group: ProcessGroup | None = None, *, label: str = "lengths"
) -> list[Status]:
    """Says how this rank fares; meets the others' `gather_ragged`, `gather_status` or `gather`.

    Returns:
        OK or ENDED for each rank.

    Raises:
        RankFailedError: On all ranks, this one included, if any says FAILED.
    """
    return gather(np.empty(0, dtype=np.int64), status, message, group, label=label).statuses


def gather(
    values: IntArray, status: Status, message: str = "", group: ProcessGroup | None = None, *, label: str = "lengths"
) -> Gathered:
    """Gathers a vector and a status from each rank, in one go: two collectives, or one if nobody has values.

    Args:
        values: int64[n], n may differ between ranks and be 0.
        status: How this rank fares.
        message: Why it failed; at most `MAX_MESSAGE_BYTES` of it travel.
        group: A CPU (gloo) group; None for the world.
        label: What it is for, in a `CollectiveLog`.

    Raises:
        RankFailedError: On all ranks alike, if any says FAILED.
        ValueError: If `values` is not a vector of integers.
    """
    vector = _as_int64_vector(values)
    encoded = message.encode(errors="replace")[:MAX_MESSAGE_BYTES] if status is Status.FAILED else b""
    words = np.frombuffer(encoded.ljust(-(-len(encoded) // 8) * 8, b"\0"), dtype="<i8").astype(np.int64)
    header = np.array([status, len(vector), len(encoded)], dtype=np.int64)
    headers = _all_gather(header, group, f"{label}.header")
    num_words = headers[:, 1] + -(-headers[:, 2] // 8)
    padded = np.zeros(int(num_words.max()), dtype=np.int64)
    padded[: len(vector) + len(words)] = np.concatenate([vector, words])
    rows = _all_gather(padded, group, label) if len(padded) else np.empty((len(headers), 0), dtype=np.int64)
    _raise_failures(headers, rows, group)
    gathered = [row[:size].copy() for row, size in zip(rows, headers[:, 1], strict=True)]
    return Gathered(gathered, [Status(int(word)) for word in headers[:, 0]])


def _as_int64_vector(values: IntArray) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"`values` must be a vector of integers, but is {array.dtype} of shape {array.shape} instead.")
    return array.astype(np.int64)


def _all_gather(words: IntArray, group: ProcessGroup | None, label: str) -> IntArray:
    """One row for each rank: int64[W, n]."""
    num_ranks = get_world_size(group)
    if num_ranks == 1:
        return words[None]
    log_collective("all_gather", label, words.nbytes)
    rows = torch.empty(num_ranks * len(words), dtype=torch.int64)
    all_gather_single(rows, torch.from_numpy(words), group)
    return rows.numpy().reshape(num_ranks, len(words))


def _raise_failures(headers: IntArray, rows: IntArray, group: ProcessGroup | None) -> None:
    failed = np.flatnonzero(headers[:, 0] == Status.FAILED)
    if not len(failed):
        return
    first = int(failed[0])
    _, num_values, num_bytes = (int(word) for word in headers[first])
    message = rows[first, num_values:].astype("<i8").tobytes()[:num_bytes].decode(errors="replace")
    ranks = get_global_ranks(group)
    raise RankFailedError(ranks[first], message, also_failed=tuple(ranks[rank] for rank in failed[1:]))
