"""Which samples a rank reads, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset


@dataclass(frozen=True, slots=True)
class ShardedOrder:
    """The order of a map-style data set, dealt to ranks like cards: rank r reads places r, r + W, r + 2W, ...

    Nothing is repeated to make shards equal; they differ by one sample at most.

    Attributes:
        num_samples: Samples of the data set.
        shuffle: Permute the data set anew in each epoch; all ranks draw the same permutation.
        seed: Seed of the permutations.
        rank: This rank.
        num_ranks: Ranks that share the data set.
    """

    num_samples: int
    shuffle: bool
    seed: int
    rank: int
    num_ranks: int

    def __len__(self) -> int:
        return len(range(self.rank, self.num_samples, self.num_ranks))

    def indices(self, epoch: int) -> Iterator[int]:
        """The data set's indices that this rank reads in `epoch`."""
        if not self.shuffle:
            yield from range(self.rank, self.num_samples, self.num_ranks)
            return
        generator = torch.Generator().manual_seed(self.seed + epoch)
        shard = torch.randperm(self.num_samples, generator=generator)[self.rank :: self.num_ranks].clone()
        for start in range(0, len(shard), 4096):
            yield from shard[start : start + 4096].tolist()


@dataclass(frozen=True, slots=True)
class GivenOrder:
    """The order of a sampler that the user gave; whoever gives one has sharded the data."""

    sampler: Iterable[Any]

    def __len__(self) -> int:
        if not isinstance(self.sampler, Sized):
            raise TypeError(f"{type(self.sampler).__name__} has no length.")
        return len(self.sampler)

    def indices(self, epoch: int) -> Iterator[Any]:
        """The sampler's indices, after telling it the epoch if it wants to know."""
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        for index in self.sampler:  # states hold indices, and are written as JSON
            yield index.item() if isinstance(index, (np.generic, torch.Tensor)) else index


def is_iterable(dataset: Any) -> bool:
    """Whether a data set is iterable only."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def order_of(
    dataset: Any, sampler: Any, *, shuffle: bool, seed: int, rank: int, num_ranks: int
) -> ShardedOrder | GivenOrder | None:
    """The order in which a rank reads; None for an iterable data set, which has its own.

    Raises:
        ValueError: If `sampler` and `shuffle` do not go together, or with an iterable data set.
    """
    if is_iterable(dataset):
        if sampler is not None or shuffle:
            raise ValueError("`sampler` and `shuffle` must not be given for an iterable data set, but one is.")
        return None
    if sampler is None:
        return ShardedOrder(len(dataset), shuffle, seed, rank, num_ranks)
    if shuffle:
        raise ValueError("`shuffle` must be False where a `sampler` is given, but is True instead.")
    return GivenOrder(sampler)
