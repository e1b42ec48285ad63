"""What runs in the DataLoader's workers: reads, measures and packs single samples, a chunk at a time."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from orch.odb.errors import SampleFailure, SkipSample
from orch.odb.measure import EmptySampleError, LengthFn, default_label_tokens, measured_length
from orch.odb.packing import NotPackableError, pack_samples

STREAM_CHUNK_SIZE = 16
_END = object()
_LEAVE_OUT = "raise `odb.SkipSample` in the data set to leave it out"
_LEAVE_OUT_OF_STREAM = "give None in its place to leave it out"


@dataclass(frozen=True, slots=True)
class Measuring:
    """How a sample is measured and when it is refused.

    Attributes:
        length_fn: Length of a sample; None counts `input_ids`.
        label_tokens_fn: Label tokens of a sample; None counts its `labels`, or its length where it has none.
        max_length: Longer samples are refused; None for no limit.
        over_length: "drop" skips a refused sample, "raise" stops with an error.
        packs: Send samples as bytes where they can be packed.
    """

    length_fn: LengthFn | None = None
    label_tokens_fn: LengthFn | None = None
    max_length: int | None = None
    over_length: str = "drop"
    packs: bool = True

    def measure(self, sample: Any) -> tuple[int, int]:
        """Length and number of label tokens.

        Raises:
            SkipSample: If the sample has length 0, or is too long and `over_length` is "drop".
            ValueError: If the sample is too long otherwise, or its length is no length.
        """
        try:
            length = measured_length(sample, self.length_fn)
        except EmptySampleError as error:
            raise SkipSample("its length is 0") from error
        if self.max_length is not None and length > self.max_length:
            text = f"its length {length} is above `max_length` {self.max_length}"
            raise SkipSample(text) if self.over_length == "drop" else ValueError(text)
        count = self.label_tokens_fn(sample) if self.label_tokens_fn else default_label_tokens(sample)
        return length, length if count is None else int(count)


@dataclass(slots=True)
class Chunk:
    """Samples on their way from a worker.

    Attributes:
        indices: The dataset's index of each sample (its position in the stream of an iterable data set).
        lengths: The length of each sample; 0 for a skipped one.
        label_tokens: The label tokens of each.
        samples: The samples that are not packed: all of them, or none. None for a skipped one.
        packed: The samples as bytes, or None.
        sizes: Bytes of each sample; 0 for a skipped one.
        reasons: Why a sample was skipped, by its place in the chunk.
        failure: What ended the chunk early; stands behind its samples.
    """

    indices: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    label_tokens: list[int] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    packed: torch.Tensor | None = None
    sizes: list[int] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    failure: SampleFailure | None = None

    def add(self, index: int, sample: Any, measuring: Measuring) -> None:
        """Measures and adds a sample, or notes that it is skipped."""
        if sample is None:
            raise SkipSample
        length, label_tokens = measuring.measure(sample)
        self._append(index, length, label_tokens, sample)

    def add_skipped(self, index: int, reason: str) -> None:
        """Notes a sample that cannot be used."""
        self.reasons[len(self.indices)] = reason
        self._append(index, 0, 0, None)

    def _append(self, index: int, length: int, label_tokens: int, sample: Any) -> None:
        self.indices.append(index)
        self.lengths.append(length)
        self.label_tokens.append(label_tokens)
        self.samples.append(sample)

    def pack(self) -> None:
        """Replaces the samples by their bytes, if all of them can be packed."""
        usable = [i for i in range(len(self.samples)) if i not in self.reasons]
        self.sizes = [0] * len(self.samples)
        try:
            packed, sizes = pack_samples([self.samples[i] for i in usable])
        except NotPackableError:
            for i in usable:
                self.sizes[i] = _rough_bytes(self.samples[i])
            return
        for i, size in zip(usable, sizes, strict=True):
            self.sizes[i] = size
        self.packed, self.samples = packed, []


def _rough_bytes(value: Any) -> int:
    """Bytes of the tensors and arrays in a sample that cannot be packed."""
    if isinstance(value, Mapping):
        return sum(map(_rough_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_rough_bytes, value))
    return int(getattr(value, "nbytes", 64))


def _finish(chunk: Chunk, measuring: Measuring) -> Chunk:
    if measuring.packs:
        chunk.pack()
    else:
        chunk.sizes = [0 if sample is None else _rough_bytes(sample) for sample in chunk.samples]
    return chunk


class Progress:
    """Which sample each worker is at, in shared memory, so that a dead worker's can be named."""

    NONE = -1

    def __init__(self, num_workers: int) -> None:
        self._current = torch.full((max(1, num_workers),), self.NONE, dtype=torch.int64).share_memory_()

    def note(self, index: Any) -> None:
        """Says which sample this worker begins; NONE when it waits."""
        info = torch.utils.data.get_worker_info()
        if info is not None and isinstance(index, int):
            self._current[info.id] = index

    def of_worker(self, worker: int) -> int:
        """The sample at which a worker is, or NONE."""
        return int(self._current[worker])


class ChunkDataset(Dataset):
    """A map-style data set seen a chunk at a time: an item is a list of indices, its value a `Chunk`."""

    def __init__(self, dataset: Any, measuring: Measuring, progress: Progress) -> None:
        self.dataset, self.measuring, self.progress = dataset, measuring, progress

    def __getitem__(self, indices: Sequence[Any]) -> Chunk:
        chunk = self._read(indices)
        self.progress.note(Progress.NONE)
        return _finish(chunk, self.measuring)

    def _read(self, indices: Sequence[Any]) -> Chunk:
        chunk = Chunk()
        for index in indices:
            self.progress.note(index)
            try:
                chunk.add(index, self.dataset[index], self.measuring)
            except SkipSample as skip:
                chunk.add_skipped(index, skip.reason)
            except Exception as error:
                chunk.failure = SampleFailure.of(f"Sample {index}", error, _LEAVE_OUT)
                break
        return chunk


class ChunkStream(IterableDataset):
    """An iterable data set seen a chunk at a time.

    With `shards`, each worker of each rank reads the whole stream and keeps every n-th sample, so that a data set that
    knows nothing of workers and ranks loses and repeats nothing. The data set is then shown no worker information:
    one that divides itself among workers would be divided twice.
    """

    def __init__(
        self, dataset: Iterable[Any], measuring: Measuring, *, rank: int, num_ranks: int, shards: bool
    ) -> None:
        self.dataset, self.measuring = dataset, measuring
        self.rank, self.num_ranks, self.shards = rank, num_ranks, shards
        self.chunk_size = STREAM_CHUNK_SIZE
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._info: Any = None

    def set_epoch(self, epoch: int) -> None:
        """Tells the data set which epoch comes next, if it wants to know; persistent workers hear of it too."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Chunk]:
        info = self._info = torch.utils.data.get_worker_info() or self._info  # A persistent worker is shown it once.
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        stride, start = (num_workers * self.num_ranks, worker * self.num_ranks + self.rank) if self.shards else (1, 0)
        if self.shards and info:
            torch_worker._worker_info = None
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(int(self._epoch))
        yield from self._chunks(start, stride)

    def _chunks(self, start: int, stride: int) -> Iterator[Chunk]:
        chunk, position, stream = Chunk(), -1, iter(self.dataset)
        while chunk.failure is None:
            position += 1
            try:
                sample = _read_next(stream)
                if sample is _END:
                    break
                if position % stride == start:
                    chunk.add(position, sample, self.measuring)
            except SkipSample as skip:
                if position % stride == start:
                    chunk.add_skipped(position, skip.reason)
            except Exception as error:
                chunk.failure = SampleFailure.of(f"Sample {position} of the stream", error, _LEAVE_OUT_OF_STREAM)
            if len(chunk.indices) >= self.chunk_size:
                yield _finish(chunk, self.measuring)
                chunk = Chunk()
        if chunk.indices or chunk.failure:
            yield _finish(chunk, self.measuring)


def _read_next(stream: Iterator[Any]) -> Any:
    """The next sample of a stream; `_END` behind the last.

    Raises:
        SkipSample: If the stream skips this sample, and can go on.
        RuntimeError: If it was raised in a generator of the stream, which cannot.
    """
    try:
        return next(stream, _END)
    except SkipSample as skip:
        if not _ends_a_generator(skip, stream):
            raise
        raise RuntimeError(
            "`SkipSample` must be raised outside of a generator, which it ends for good, but was raised in one "
            f"instead ({skip.reason}). Yield None in the sample's place, or skip it in an iterator with a `__next__`."
        ) from skip


def _ends_a_generator(skip: SkipSample, stream: Iterator[Any]) -> bool:
    """Whether the stream, or one that it reads from, is a generator that `skip` went through.

    One that served a single sample only does not count.
    """
    frames = [frame for frame, _ in traceback.walk_tb(skip.__traceback__)][1:]
    in_generator = [bool(frame.f_code.co_flags & inspect.CO_GENERATOR) for frame in frames]
    if any(in_generator[:1]):  # Called by `next`, or by what is written in C in between, as `map`.
        return True
    sources = [value for value in getattr(stream, "__dict__", {}).values() if isinstance(value, GeneratorType)]
    return any(in_generator) and any(source.gi_frame is None for source in sources)
