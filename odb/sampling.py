"""Which samples a rank reads, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch


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
        yield from self.sampler
