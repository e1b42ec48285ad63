"""The drop-in DataLoader whose batches are formed to a token budget, after preprocessing, alike on all ranks."""

from __future__ import annotations

import functools
import inspect
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from orch.comm.counts import check_seconds, check_seed
from orch.comm.groups import group_of_axis
from orch.comm.topology import Topology, check_topology_kind
from orch.odb.alike import once_alike, settings_of
from orch.odb.batches import BatchBuilder, Delivery, SampleBuilder
from orch.odb.budget import BatchLayout, TokenBudget
from orch.odb.buffer import SampleBuffer
from orch.odb.collate import collate_packed, collate_padded
from orch.odb.feed import Feed
from orch.odb.global_grouping import GlobalWindow
from orch.odb.global_rounds import GlobalRounds
from orch.odb.grouping import form_groups
from orch.odb.heartbeat import DEFAULT_LOST_AFTER_S
from orch.odb.iterator import ITERATED_ANEW, LoaderIterator
from orch.odb.measure import LengthFn
from orch.odb.options import Grouping, check_arguments, take_older_names, window_size
from orch.odb.peers import join_peers, topology_of
from orch.odb.pipeline import Pipeline
from orch.odb.rounds import LocalRounds, RoundContext
from orch.odb.sampling import ShardedOrder, order_of
from orch.odb.state import Position, RoundRecord
from orch.odb.step_info import resolve_loss_scaling
from orch.odb.window import GroupingWindow
from orch.odb.worker import Measuring

DEFAULT_BUFFER_BYTES = 2**30
NUM_WINDOWS_AHEAD = 2
NUM_PROBES = 64


class ODBDataLoader:
    """Forms batches online to a token budget; the same number of them on every rank, no sample lost.

    Iterating yields collated batches that carry an `ODBStepInfo` (`pop_step_info`); `groups` yields the samples alone.
    Groups depend on the order of samples, never on when they arrive. All ranks must build their loaders in the same
    order, set them up alike, which is checked as an epoch begins, and iterate them alike, one iterator at a time. Over
    several ranks the loader has a CPU process group of its own, which it uses in a thread of its own.

    Args:
        dataset: Map-style or iterable; a sample is whatever `collate_fn` takes. `None` in a sample's place, or
            `SkipSample` raised, drops it, as does a length of 0; see `skipped`.
        token_budget: The most tokens of a batch, padding included. A longer sample goes alone.
        length_fn: Length of a processed sample; by default the number of its `input_ids`. Runs in the workers.
        layout: What a batch costs: "padded" (samples times longest) or "packed" (sum).
        loss_scaling: "exact" weights by label tokens over all ranks and micro-steps; "none" does not.
        grouping: "global" groups over the samples of all ranks, which travel to the rank of their group (if
            orchestrated, straight to where they run); "local" has each rank group its own.
        mixes_lengths: With padded global grouping, give each step long and short groups, at 1-5 % more waiting.
        join: Hand out every sample, ranks that run out idling. False stops all together once the first has handed out
            its quota, all samples of its own (with global grouping: once there are fewer samples than ranks).
        buffer_size: Samples that a rank groups at a time; by default at least 256, and enough for 16 batches.
        buffer_bytes: Their size at most.
        collate_fn: Makes a batch of a list of samples; by default pads, or packs into one row. Not for an
            orchestrated loader: `orch.orchestrate` takes another.
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
        topology: Which ranks share a node, so that samples travel within; by default as the launcher says.
        group: Data-parallel process group, or that axis of a `DeviceMesh` (`mesh["dp"]`); by default the world.
        rank: Given with `world_size` if not that of `group`, e.g. 0 of 1 for a loader on one rank only.
        world_size: Number of ranks that share the data.
        lost_after_s: A rank that is silent for so long counts as lost. One that is late, but alive, is waited for;
            once this rank has left an epoch, for the others to leave it, 20 times as long.
        batch_size: Only 1 or None: the loader forms the batches.
        pin_memory: Pin batches, where there is a GPU.
        prefetch_factor: Samples that each worker reads ahead, if more than two windows are wanted.
        **dataloader_kwargs: For the workers, as torch's DataLoader takes them: `num_workers`, `persistent_workers`,
            `multiprocessing_context`, `worker_init_fn`, `timeout`, `generator`; and the names of
            `online-dynamic-batching`, see `orch.odb.compat`.

    Attributes:
        skipped: Index and reason of each sample dropped in this epoch on this rank.
        num_over_budget: Samples of this epoch and rank that were longer than the budget.
        num_dropped: Samples that this rank had read, but not handed out, when its last epoch ended without `join`.

    Raises:
        ValueError: If an argument does not make sense; says which.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        token_budget: int | None = None,
        length_fn: LengthFn | None = None,
        layout: BatchLayout = "padded",
        loss_scaling: str | bool | None = "exact",
        grouping: Grouping = "global",
        mixes_lengths: bool = False,
        join: bool | None = None,
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
        topology: Topology | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        lost_after_s: float = DEFAULT_LOST_AFTER_S,
        batch_size: int | None = 1,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        flags = {"shuffle": shuffle, "mixes_lengths": mixes_lengths, "shard_stream": shard_stream}
        flags["pin_memory"] = pin_memory
        num_workers = dataloader_kwargs.get("num_workers", 0)
        counts = seed, num_workers, prefetch_factor
        check_arguments(grouping, accumulation_steps, max_length, over_length, batch_size, drop_last, *counts, **flags)
        check_seconds("lost_after_s", lost_after_s)
        if topology is not None:
            check_topology_kind(topology)
        current = {"token_budget": token_budget, "loss_scaling": loss_scaling, "join": join, "buffer_size": buffer_size}
        named = take_older_names(dataloader_kwargs, inspect.signature(ODBDataLoader).parameters, **current)
        self.budget, self.grouping = TokenBudget(named["token_budget"], layout, max_samples), grouping
        self.loss_scaling = resolve_loss_scaling(named["loss_scaling"])
        self.window_size = window_size(named["token_budget"], named["buffer_size"], buffer_bytes)
        self.dataset, self.sampler, self.collate_fn = dataset, sampler, collate_fn
        self.join, self.mixes_lengths = bool(named["join"]), mixes_lengths
        self.accumulation_steps, self.pin_memory = accumulation_steps, pin_memory
        self.shuffle, self.seed, self.num_workers = shuffle, int(seed), num_workers
        self.shard_stream = shard_stream
        group = group_of_axis(group)
        self.peers = join_peers(group, rank, world_size, lost_after_s)
        found = topology_of(self.peers, group)  # in any case, since ranks tell each other
        self.topology = topology or found
        self.order = order_of(
            dataset, sampler, shuffle=shuffle, seed=self.seed, rank=self.peers.rank, num_ranks=self.peers.num_ranks
        )
        self._feed = Feed(
            dataset,
            self.order,
            Measuring(length_fn, label_tokens_fn, max_length, over_length, packs=self.num_workers > 0),
            num_ahead=max(NUM_WINDOWS_AHEAD * self.window_size.num_samples, self.num_workers * (prefetch_factor or 0)),
            tokens_ahead=NUM_WINDOWS_AHEAD * self.window_size.num_tokens,
            max_bytes=NUM_WINDOWS_AHEAD * buffer_bytes,
            rank=self.peers.rank,
            num_ranks=self.peers.num_ranks,
            shards_stream=shard_stream,
            **dataloader_kwargs,
        )
        self.epoch = self.num_over_budget = self.num_dropped = 0
        self.skipped: list[tuple[Any, str]] = []
        self._pipeline: Pipeline[Delivery] | None = None
        self._num_micro_steps: int | None = None
        self._resumed: RoundRecord | None = None
        self._position = Position(RoundRecord(0))

    @property
    def token_budget(self) -> int:
        """The most tokens of a batch."""
        return self.budget.max_tokens

    @property
    def layout(self) -> BatchLayout:
        """What a batch costs: "padded" or "packed"."""
        return self.budget.layout

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch; without it, epochs count up by themselves.

        The rest of a resumed epoch is not given up for its own number. Within an epoch, `state_dict` still says where
        that one stands.

        Raises:
            ValueError: If it is no whole number, or below 0.
        """
        check_seed("epoch", epoch)
        epoch = int(epoch)
        if self._resumed is not None and self._resumed.epoch != epoch:
            self._resumed = None
        self.epoch = epoch
        if self._resumed is None and self._position.is_between:
            self._position = Position(RoundRecord(epoch))  # another, which an iteration that was left does not move

    def __iter__(self) -> Iterator[Any]:
        """Yields collated batches with their step info."""
        collate = self.collate_fn or (collate_packed if self.layout == "packed" else collate_padded)
        pins = self.pin_memory and torch.cuda.is_available()
        builder = BatchBuilder(collate, self.loss_scaling, self.accumulation_steps, self.peers.num_ranks, pins)
        return self._start(builder, self.grouping, exchanges=True)

    def groups(self, grouping: Grouping = "local") -> Iterator[list[Any]]:
        """Yields this rank's groups as lists of samples, `[]` for IDLE; equally many on every rank.

        Args:
            grouping: "local" yields groups within the budget. "global" yields, for each micro-step, what this rank has
                at hand of all ranks' groups; `ranks` of that list says in whose group each sample is. Moved there, they
                are the groups, within the budget, that iterating with global grouping gives.
        """
        return self._start(SampleBuilder(), grouping, exchanges=False)

    def __len__(self) -> int:
        """Micro-steps of an epoch: those of the last full one, or before that an estimate from a few samples' lengths.

        Raises:
            TypeError: If the data set or the sampler has no length.
        """
        if self._num_micro_steps is None:
            self._num_micro_steps = self._estimated_micro_steps()
        return self._num_micro_steps

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's epoch stands, behind the last batch taken; every rank saves its own.

        Save a file per rank: `register_for_checkpointing` (Accelerate), `client_state` (DeepSpeed) keep rank 0's alone.
        With accumulation, save where an optimizer step ends. A sampler of your own must yield the same indices again.

        Raises:
            TypeError: If the data set is iterable: samples that wait in the window cannot be read again.
        """
        if self.order is None:
            raise TypeError("`dataset` must be map-style for `state_dict`, but is iterable instead.")
        return (self._resumed or self._position.record).to_dict(self._fingerprint())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was saved: the next iteration hands out what had not been handed out, once.

        Raises:
            ValueError: If it was saved by another rank, on another number of ranks, or over other data.
        """
        self._resumed = RoundRecord.from_dict(state, self._fingerprint())
        self.epoch, self._position = self._resumed.epoch, Position(self._resumed)

    def close(self) -> None:
        """Stops what runs in the background; the loader can be iterated anew.

        Raises:
            RankLostError: If a rank is gone, without which the others cannot stop together.
            RuntimeError: If others do not leave the epoch that this rank has left.
        """
        self._close()

    def _close(self, why: str = "") -> None:
        """As `close`; `why` is raised to who goes on with the iterator."""
        self._position.is_between = True
        if self._pipeline is None:
            return
        self._pipeline.close(why)
        limit_s = self.peers.patience_s
        deadline = time.monotonic() + limit_s
        while not self._pipeline.join(min(1.0, limit_s)):
            self.peers.check()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Rank {self.peers.rank} left an epoch of the loader that other ranks are still in after "
                    f"{limit_s:g} s: all ranks must take the same number of batches before they go on."
                )
        self._pipeline = None

    def _start(self, builder: BatchBuilder | SampleBuilder, grouping: Grouping, *, exchanges: bool) -> LoaderIterator:
        self._close(ITERATED_ANEW)
        begin = self._resumed or RoundRecord(self.epoch)
        begin.check_way(is_exchanged=exchanges or grouping == "local")
        self.epoch, self._resumed = begin.epoch + 1, None
        run, stop = self._feed.start(begin), threading.Event()
        self.skipped, self._position = run.skipped, Position(begin, is_between=False)
        buffer = SampleBuffer(run, self.window_size, longer_than=self.token_budget)
        seeds = (self.seed, begin.epoch if self.shuffle else 0)
        context = RoundContext(buffer, self.peers, builder, self.join, stop, seeds, begin)
        rounds: LocalRounds | GlobalRounds = LocalRounds(context, GroupingWindow(self.budget), begin.num_rounds)
        if grouping == "global":
            window = GlobalWindow(self.budget, self.topology, self.mixes_lengths)
            rounds = GlobalRounds(context, window, exchanges, begin.num_rounds)
        settings = settings_of(self, begin, grouping, is_collated=exchanges)
        deliveries = builder.deliver(once_alike(settings, self.peers, rounds))
        self._pipeline = Pipeline(deliveries, stop, run.close, self.peers.check)
        return LoaderIterator(self._pipeline, self._position, functools.partial(self._note_end, rounds, self._position))

    def _note_end(self, rounds: LocalRounds | GlobalRounds, position: Position, num_micro_steps: int) -> None:
        """Takes down what is known at the end of an epoch."""
        position.record = RoundRecord(self.epoch)
        if rounds.context.resumed is None or not rounds.context.resumed.num_rounds:
            self._num_micro_steps = num_micro_steps
        self.num_dropped = rounds.num_dropped
        self.num_over_budget = rounds.context.buffer.num_over_budget
        if self.num_over_budget:
            warnings.warn(
                f"{self.num_over_budget} samples of this epoch were longer than the token budget of "
                f"{self.token_budget}; each went alone.",
                stacklevel=3,
            )

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same where a state is loaded."""
        num_samples = self.order.num_samples if isinstance(self.order, ShardedOrder) else None
        return {
            "num_ranks": self.peers.num_ranks,
            "rank": self.peers.rank,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": num_samples,
        }

    def _estimated_micro_steps(self) -> int:
        if self.order is None:
            raise TypeError("A loader over an iterable data set has no length before an epoch has ended.")
        num_samples = len(self.order)
        if isinstance(self.order, ShardedOrder):
            num_samples = math.ceil(self.order.num_samples / self.peers.num_ranks)
        lengths = self._feed.probe_lengths(NUM_PROBES)
        if not len(lengths):
            return num_samples
        return math.ceil(len(form_groups(lengths, self.budget)) * num_samples / len(lengths))
