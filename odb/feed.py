"""Processed samples in their order, read ahead by DataLoader workers."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from orch.comm.topology import IntArray
from orch.odb.errors import SampleFailure
from orch.odb.packing import unpack_sample
from orch.odb.sampling import GivenOrder, ShardedOrder
from orch.odb.state import RoundRecord
from orch.odb.worker import Chunk, ChunkDataset, ChunkStream, Measuring, Progress

CHUNKS_AHEAD = 8
FIRST_CHUNK_SIZE = 4
MAX_CHUNK_SIZE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One processed sample on this rank.

    Attributes:
        ordinal: Its number among the samples that this rank read in the epoch.
        index: The data set's index (the position in an iterable data set's stream).
        length: Its length.
        label_tokens: Its label tokens.
        num_bytes: Its size.
        data: Its bytes (uint8), or the sample itself if it is not packed.
        is_packed: Which of the two.
        first_round: The first round of the epoch for which it was there.
    """

    ordinal: int
    index: Any
    length: int
    label_tokens: int
    num_bytes: int
    data: Any
    is_packed: bool
    first_round: int = 0

    def sample(self) -> Any:
        """The sample; each call makes a new dict over the same storage."""
        return unpack_sample(self.data) if self.is_packed else self.data


class SampleError(Exception):
    """A sample failed; carries the `SampleFailure` that says how."""

    def __init__(self, failure: SampleFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True)
class ChunkSampler:
    """Cuts the order of an epoch into chunks of indices.

    Attributes:
        order: The order of the samples.
        begin: Which epoch comes next, and what of it is to be read again or left out.
        chunk_size: Indices in a chunk; may change at any time, since nothing depends on where chunks end.
        awaited: The chunks under way, oldest first.
    """

    order: ShardedOrder | GivenOrder
    begin: RoundRecord = field(default_factory=lambda: RoundRecord(0))
    chunk_size: int = FIRST_CHUNK_SIZE
    awaited: deque[list[Any]] = field(default_factory=deque)

    def __iter__(self) -> Iterator[list[Any]]:
        self.awaited.clear()
        chunk: list[Any] = []
        for index in self._indices():
            chunk.append(index)
            if len(chunk) >= self.chunk_size:
                self.awaited.append(chunk)
                yield chunk
                chunk = []
        if chunk:
            self.awaited.append(chunk)
            yield chunk

    def _indices(self) -> Iterator[Any]:
        yield from self.begin.indices
        yield from itertools.islice(self.order.indices(self.begin.epoch), self.begin.num_consumed, None)

    def __len__(self) -> int:
        return math.ceil(len(self.order) / self.chunk_size)


def _as_it_is(chunk: Any) -> Any:
    return chunk


class Feed:
    """Reads the samples of an epoch, in order, some way ahead of who takes them.

    Args:
        dataset: Map-style or iterable.
        order: The order of a map-style data set; None for an iterable one.
        measuring: How samples are measured.
        num_ahead: Samples to read ahead, at least,
        tokens_ahead: and at least so many tokens,
        max_bytes: but not more bytes than this, as far as the samples seen so far tell.
        rank: This rank, for an iterable data set.
        num_ranks: Ranks that share an iterable data set.
        shards_stream: Whether an iterable data set is divided among ranks and workers here.
        **dataloader_kwargs: For torch's DataLoader: `num_workers` and what belongs to workers.
    """

    def __init__(
        self,
        dataset: Any,
        order: ShardedOrder | GivenOrder | None,
        measuring: Measuring,
        *,
        num_ahead: int,
        tokens_ahead: int,
        max_bytes: int,
        rank: int,
        num_ranks: int,
        shards_stream: bool,
        **dataloader_kwargs: Any,
    ) -> None:
        num_workers = dataloader_kwargs.get("num_workers", 0)
        if num_workers:
            dataloader_kwargs["prefetch_factor"] = CHUNKS_AHEAD
        self.num_chunks_ahead, self.max_bytes = CHUNKS_AHEAD * max(1, num_workers), max_bytes
        self.num_ahead, self.tokens_ahead = num_ahead, tokens_ahead
        self.sampler = ChunkSampler(order) if order is not None else None
        self.progress = Progress(num_workers)
        self.source: ChunkDataset | ChunkStream = ChunkDataset(dataset, measuring, self.progress)
        if order is None:
            self.source = ChunkStream(dataset, measuring, rank=rank, num_ranks=num_ranks, shards=shards_stream)
        self.loader: DataLoader[Chunk] = DataLoader(
            self.source, batch_size=None, sampler=self.sampler, collate_fn=_as_it_is, **dataloader_kwargs
        )

    def start(self, begin: RoundRecord) -> FeedRun:
        """Starts the workers of an epoch, or of the rest of one, in the calling thread."""
        if self.sampler is not None:
            self.sampler.begin = begin
        elif isinstance(self.source, ChunkStream):
            self.source.set_epoch(begin.epoch)
        chunks = iter(self.loader)
        _leave_dead_workers_to_the_reader(chunks)
        return FeedRun(self, chunks, begin)

    def probe_lengths(self, num_probes: int) -> IntArray:
        """The lengths of a few samples spread over a map-style data set, the same on all ranks: int64[n]."""
        num_samples = len(cast(Sized, self.source.dataset))
        indices = range(0, num_samples, max(1, num_samples // num_probes))
        chunk = ChunkDataset(self.source.dataset, self.source.measuring, self.progress)[indices]
        return np.array([length for length in chunk.lengths if length], dtype=np.int64)

    def adapt_chunks(self, mean_length: float, mean_bytes: float) -> None:
        """Sets the size of the next chunks from the mean length and size of the samples seen so far."""
        if self.sampler is None:
            return
        by_count = max(self.num_ahead, self.tokens_ahead / max(1.0, mean_length)) / self.num_chunks_ahead
        by_bytes = self.max_bytes / (max(1.0, mean_bytes) * self.num_chunks_ahead)
        self.sampler.chunk_size = int(min(max(1.0, min(by_count, by_bytes)), MAX_CHUNK_SIZE))


class FeedRun:
    """The samples of one epoch; an iterator of entries.

    Attributes:
        epoch: Number of the epoch.
        given_back: Indices that a resume reads again, before the rest of the order.
        num_read: Samples read, skipped ones included.
        skipped: Index and reason of every sample that was dropped.
    """

    def __init__(self, feed: Feed, chunks: Iterator[Chunk], begin: RoundRecord) -> None:
        self._feed = feed
        self._chunks: Iterator[Chunk] | None = chunks
        self._num_bytes = self._num_tokens = 0
        self.epoch = begin.epoch
        self.given_back = begin.indices
        self._waited, self._num_consumed = begin.waited, begin.num_consumed
        self._pending: deque[Entry | SampleFailure] = deque()
        self.num_read = 0
        self.skipped: list[tuple[Any, str]] = []

    def __iter__(self) -> FeedRun:
        return self

    def __next__(self) -> Entry:
        """The next usable sample.

        Raises:
            SampleError: If the data set or a worker failed.
        """
        while not self._pending:
            self._take_chunk()
        entry = self._pending.popleft()
        if isinstance(entry, SampleFailure):
            raise SampleError(entry)
        return entry

    def take_below(self, ordinal: int) -> list[Entry]:
        """The next samples with numbers below `ordinal`."""
        taken: list[Entry] = []
        while True:
            entry = next(self, None)
            if entry is None:
                return taken
            if entry.ordinal >= ordinal:
                self._pending.appendleft(entry)
                return taken
            taken.append(entry)

    def rounds_waited(self, ordinal: int) -> int:
        """For how many rounds a sample had waited when the epoch was interrupted."""
        return self._waited[ordinal] if ordinal < len(self._waited) else 0

    def order_position(self, num_ordinals: int) -> int:
        """Where in the rank's order the first `num_ordinals` samples of this run lead."""
        return self._num_consumed + max(0, num_ordinals - len(self._waited))

    def close(self) -> None:
        """Stops the workers, unless they are persistent."""
        chunks, self._chunks = self._chunks, None
        if chunks is not None and not self._feed.loader.persistent_workers:
            getattr(chunks, "_shutdown_workers", lambda: None)()

    def _take_chunk(self) -> None:
        sampler = self._feed.sampler
        if self._chunks is None:
            raise StopIteration
        try:
            chunk = next(self._chunks)
        except StopIteration:
            raise
        except Exception as error:
            raise SampleError(SampleFailure.of(self._who_failed(), error)) from error
        if sampler is not None and sampler.awaited:
            sampler.awaited.popleft()
        self._pending.extend(self._entries(chunk))
        if chunk.failure is not None:
            self._pending.append(chunk.failure)
        if self.num_read:
            self._feed.adapt_chunks(self._num_tokens / self.num_read, self._num_bytes / self.num_read)

    def _who_failed(self) -> str:
        """The dead worker and its sample, if a worker died."""
        for worker, process in enumerate(getattr(self._chunks, "_workers", [])):
            process.join(timeout=0.1)
            if not process.is_alive():
                index = self._feed.progress.of_worker(worker)
                at = f"while reading sample {index}" if index != Progress.NONE else "between two samples"
                return f"Worker {worker} ended with exit code {process.exitcode} {at}"
        return "A worker"

    def _entries(self, chunk: Chunk) -> Iterator[Entry]:
        start = 0
        for place, index in enumerate(chunk.indices):
            ordinal, self.num_read = self.num_read, self.num_read + 1
            if place in chunk.reasons:
                self.skipped.append((index, chunk.reasons[place]))
                continue
            size = chunk.sizes[place]
            self._num_bytes += size
            self._num_tokens += chunk.lengths[place]
            data = chunk.samples[place] if chunk.packed is None else chunk.packed[start : start + size]
            start += size
            yield Entry(
                ordinal, index, chunk.lengths[place], chunk.label_tokens[place], size, data, chunk.packed is not None
            )


def _leave_dead_workers_to_the_reader(chunks: Any) -> None:
    """Lets the thread that reads notice a dead worker, and no other.

    torch raises it from a signal handler in the main thread, wherever that happens to be, and the other ranks would
    hear nothing of it.
    """
    if getattr(chunks, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(chunks))
        chunks._worker_pids_set = False
