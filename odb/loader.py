"""The drop-in DataLoader whose batches are formed to a token budget, after preprocessing, alike on all ranks."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup

from orch.comm.groups import get_rank, get_world_size, new_cpu_group
from orch.odb.batches import BatchBuilder, SampleBuilder
from orch.odb.budget import BatchLayout, TokenBudget
from orch.odb.collate import collate_packed, collate_padded
from orch.odb.feed import Feed, is_iterable
from orch.odb.grouping import form_groups
from orch.odb.measure import LengthFn
from orch.odb.peers import Peers
from orch.odb.pipeline import Pipeline
from orch.odb.rounds import LocalRounds, SampleBuffer
from orch.odb.sampling import GivenOrder, ShardedOrder
from orch.odb.step_info import resolve_loss_scaling
from orch.odb.window import GroupingWindow
from orch.odb.worker import Measuring

DEFAULT_BUFFER_SIZE = 512
DEFAULT_BUFFER_BYTES = 2**30
NUM_WINDOWS_AHEAD = 2
NUM_PROBES = 64


class ODBDataLoader:
    """Forms batches online to a token budget; the same number of them on every rank, no sample lost.

    Iterating yields collated batches that carry an `ODBStepInfo` (`pop_step_info`); `groups` yields the samples alone.
    Groups depend on the order of samples, never on when they arrive. All ranks must build their loaders in the same
    order, and iterate them alike. Over several ranks the loader has a CPU process group of its own, which it uses in a
    thread of its own.

    Args:
        dataset: Map-style or iterable; a sample is whatever `collate_fn` takes. `None` in a sample's place, or
            `SkipSample` raised, drops it; see `skipped`.
        token_budget: The most tokens of a batch, padding included. A longer sample goes alone.
        length_fn: Length of a processed sample; by default the number of its `input_ids`. Runs in the workers.
        layout: What a batch costs: "padded" (samples times longest) or "packed" (sum).
        loss_scaling: "exact" weights by label tokens over all ranks and micro-steps; "none" does not.
        join: Hand out every sample, ranks that run out idling; False stops all ranks when the first runs out.
        buffer_size: Samples that a rank groups at a time.
        buffer_bytes: Their size at most.
        collate_fn: Makes a batch of a list of samples; by default pads, or packs into one row.
        accumulation_steps: Micro-steps of an optimizer step, for the loss scale.
        max_length: Longer samples are dropped or refused.
        over_length: "drop" or "raise".
        max_samples: The most samples of a batch.
        label_tokens_fn: Label tokens of a sample; by default its labels that are not -100, but for the first.
        shuffle: Draw a new permutation in every epoch, the same on all ranks.
        seed: Of the permutations.
        sampler: Indices that this rank reads; without one the loader shards the data set by itself.
        shard_stream: Whether an iterable data set is divided among ranks and workers here; False if it does so itself.
        drop_last: Only False: use `join` instead.
        group: Data-parallel process group; by default the world.
        rank: Given with `world_size` if not that of `group`, e.g. 0 of 1 for a loader on one rank only.
        world_size: Number of ranks that share the data.
        batch_size: Only 1 or None: the loader forms the batches.
        pin_memory: Pin batches, where there is a GPU.
        **dataloader_kwargs: For the workers, as torch's DataLoader takes them: `num_workers`, `persistent_workers`,
            `multiprocessing_context`, `worker_init_fn`, `timeout`, `generator`. `prefetch_factor` counts samples.

    Attributes:
        skipped: Index and reason of each sample dropped in this epoch on this rank.
        num_over_budget: Samples of this epoch and rank that were longer than the budget.
        num_dropped: Samples of this rank not handed out in the last epoch, without `join`.

    Raises:
        ValueError: If an argument does not make sense; says which.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        token_budget: int,
        length_fn: LengthFn | None = None,
        layout: BatchLayout = "padded",
        loss_scaling: str | bool | None = "exact",
        join: bool = True,
        buffer_size: int | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        accumulation_steps: int = 1,
        max_length: int | None = None,
        over_length: str = "drop",
        max_samples: int | None = None,
        label_tokens_fn: LengthFn | None = None,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Any = None,
        shard_stream: bool = True,
        drop_last: bool = False,
        group: ProcessGroup | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        batch_size: int | None = 1,
        pin_memory: bool = False,
        **dataloader_kwargs: Any,
    ) -> None:
        self.budget = TokenBudget(token_budget, layout, max_samples)
        self.loss_scaling = resolve_loss_scaling(loss_scaling)
        self.buffer_size = DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size
        _check_arguments(self.buffer_size, buffer_bytes, accumulation_steps, over_length, batch_size, drop_last)
        self.dataset, self.sampler, self.collate_fn = dataset, sampler, collate_fn
        self.join, self.buffer_bytes, self.accumulation_steps = join, buffer_bytes, accumulation_steps
        self.pin_memory, self.shuffle, self.seed = pin_memory, shuffle, seed
        self.num_workers = dataloader_kwargs.get("num_workers", 0)
        self.peers = _peers(group, rank, world_size)
        self.order = _order(dataset, sampler, shuffle, seed, self.peers)
        self._feed = Feed(
            dataset,
            self.order,
            Measuring(length_fn, label_tokens_fn, max_length, over_length, packs=self.num_workers > 0),
            num_ahead=_num_ahead(self.buffer_size, self.num_workers, dataloader_kwargs.pop("prefetch_factor", None)),
            max_bytes=NUM_WINDOWS_AHEAD * buffer_bytes,
            rank=self.peers.rank,
            num_ranks=self.peers.num_ranks,
            shards_stream=shard_stream,
            **dataloader_kwargs,
        )
        self.epoch = 0
        self._pipeline: Pipeline[Any] | None = None
        self.skipped: list[tuple[Any, str]] = []
        self.num_over_budget = self.num_dropped = 0
        self._num_micro_steps: int | None = None

    @property
    def token_budget(self) -> int:
        """The most tokens of a batch."""
        return self.budget.max_tokens

    @property
    def layout(self) -> BatchLayout:
        """What a batch costs: "padded" or "packed"."""
        return self.budget.layout

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch; without it, epochs count up by themselves."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """Yields collated batches with their step info."""
        collate = self.collate_fn or (collate_packed if self.layout == "packed" else collate_padded)
        pins = self.pin_memory and torch.cuda.is_available()
        return self._start(
            BatchBuilder(collate, self.loss_scaling, self.accumulation_steps, self.peers.num_ranks, pins)
        )

    def groups(self) -> Iterator[list[Any]]:
        """Yields this rank's groups as lists of samples, `[]` for IDLE; equally many on every rank."""
        return self._start(SampleBuilder())

    def __len__(self) -> int:
        """Micro-steps of an epoch: those of the last full one, or before that an estimate from a few samples' lengths.

        Raises:
            TypeError: If the data set or the sampler has no length.
        """
        if self._num_micro_steps is None:
            self._num_micro_steps = self._estimated_micro_steps()
        return self._num_micro_steps

    def close(self) -> None:
        """Stops what runs in the background; the loader can be iterated anew."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline.join()
            self._pipeline = None

    def _start(self, builder: BatchBuilder | SampleBuilder) -> LoaderIterator:
        self.close()
        epoch, self.epoch = self.epoch, self.epoch + 1
        run, stop = self._feed.start(epoch), threading.Event()
        self.skipped = run.skipped
        buffer = SampleBuffer(run, GroupingWindow(self.budget), self.buffer_size, self.buffer_bytes)
        rounds = LocalRounds(buffer, self.peers, builder, self.join, stop, (self.seed, epoch))
        self._pipeline = Pipeline(builder.deliver(iter(rounds)), stop, run.close)
        return LoaderIterator(self._pipeline, rounds, self._note_end)

    def _note_end(self, rounds: LocalRounds, num_micro_steps: int) -> None:
        self._num_micro_steps, self.num_dropped = num_micro_steps, rounds.num_dropped
        self.num_over_budget = rounds.buffer.num_over_budget
        if self.num_over_budget:
            warnings.warn(
                f"{self.num_over_budget} samples of this epoch were longer than the token budget of "
                f"{self.token_budget}; each went alone.",
                stacklevel=3,
            )

    def _estimated_micro_steps(self) -> int:
        if self.order is None:
            raise TypeError("A loader over an iterable data set has no length before its first epoch has ended.")
        num_samples = len(self.order)
        if isinstance(self.order, ShardedOrder):
            num_samples = math.ceil(self.order.num_samples / self.peers.num_ranks)
        lengths = self._feed.probe_lengths(NUM_PROBES)
        if not len(lengths) or not num_samples:
            return num_samples
        num_groups = len(form_groups(lengths, self.budget))
        return max(1, round(num_groups * num_samples / len(lengths)))


class LoaderIterator:
    """The batches of one epoch."""

    def __init__(
        self, pipeline: Pipeline[Any], rounds: LocalRounds, note_end: Callable[[LocalRounds, int], None]
    ) -> None:
        self._pipeline, self._rounds, self._num_taken = pipeline, rounds, 0
        self._note_end: Callable[[LocalRounds, int], None] | None = note_end

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self._pipeline)
        except StopIteration:
            if self._note_end is not None:
                note_end, self._note_end = self._note_end, None
                note_end(self._rounds, self._num_taken)
            raise
        self._num_taken += 1
        return item

    def close(self) -> None:
        """Stops before the end; the other ranks are told at their next round."""
        self._pipeline.close()

    def __del__(self) -> None:
        self.close()


def _peers(group: ProcessGroup | None, rank: int | None, num_ranks: int | None) -> Peers:
    """The ranks that share the data, and a CPU group of their own."""
    if (rank is None) != (num_ranks is None):
        raise ValueError(f"`rank` and `world_size` must be given together, but are {rank} and {num_ranks} instead.")
    known_rank, known_ranks = get_rank(group), get_world_size(group)
    if rank is None or num_ranks is None:
        rank, num_ranks = known_rank, known_ranks
    if not 0 <= rank < num_ranks:
        raise ValueError(f"`rank` must be in [0, {num_ranks}), but is {rank} instead.")
    if num_ranks > 1 and (rank, num_ranks) != (known_rank, known_ranks):
        raise ValueError(
            f"`rank` and `world_size` must be those of `group` ({known_rank} of {known_ranks}) or 0 of 1, "
            f"but are {rank} of {num_ranks} instead."
        )
    return Peers(rank, num_ranks, new_cpu_group(group) if num_ranks > 1 else None)


def _order(dataset: Any, sampler: Any, shuffle: bool, seed: int, peers: Peers) -> ShardedOrder | GivenOrder | None:
    if is_iterable(dataset):
        if sampler is not None or shuffle:
            raise ValueError("`sampler` and `shuffle` must not be given for an iterable data set, but one is.")
        return None
    if sampler is not None:
        if shuffle:
            raise ValueError("`shuffle` must be False where a `sampler` is given, but is True instead.")
        return GivenOrder(sampler)
    return ShardedOrder(len(dataset), shuffle, seed, peers.rank, peers.num_ranks)


def _num_ahead(buffer_size: int, num_workers: int, prefetch_factor: int | None) -> int:
    """Samples to read ahead: two windows, or what the user asks for if that is more."""
    return max(NUM_WINDOWS_AHEAD * buffer_size, num_workers * (prefetch_factor or 0))


def _check_arguments(
    buffer_size: int,
    buffer_bytes: int,
    accumulation_steps: int,
    over_length: str,
    batch_size: int | None,
    drop_last: bool,
) -> None:
    for name, value in (
        ("buffer_size", buffer_size),
        ("buffer_bytes", buffer_bytes),
        ("accumulation_steps", accumulation_steps),
    ):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value} instead.")
    if over_length not in ("drop", "raise"):
        raise ValueError(f"`over_length` must be 'drop' or 'raise', but is {over_length!r} instead.")
    if batch_size not in (None, 1):
        raise ValueError(f"`batch_size` must be 1 or None, since the budget decides, but is {batch_size} instead.")
    if drop_last:
        raise ValueError("`drop_last` must be False (see `join`), but is True instead.")
