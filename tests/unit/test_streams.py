"""Iterable data sets on one rank: how they are divided among workers, and what may be skipped in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from orch import odb
from tests.dist.test_odb import read_groups

NUM_SAMPLES = 40


def sample(index: int) -> dict[str, Any]:
    if index in (5, NUM_SAMPLES - 1):
        raise odb.SkipSample(f"picture {index} is broken")
    return {"input_ids": torch.full((4,), index)}


class Stream(IterableDataset):
    def __init__(self, samples: Callable[[], Iterator[Any]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return self.samples()


class Wrapped:
    """An iterator that is no generator, over another."""

    def __init__(self, samples: Iterator[Any], make: Callable[[Any], Any]) -> None:
        self.samples, self.make = samples, make

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.make(next(self.samples))


def generator() -> Iterator[dict[str, Any]]:
    for index in range(NUM_SAMPLES):
        yield sample(index)


def in_a_generator(index: int) -> dict[str, Any]:
    return next(sample(i) for i in [index])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_persistent_workers_divide_every_epoch_of_a_stream(num_workers: int) -> None:
    stream = Stream(lambda: iter([{"input_ids": torch.full((4,), i)} for i in range(100)]))
    loader = odb.ODBDataLoader(stream, token_budget=64, num_workers=num_workers, persistent_workers=True)
    for _ in range(3):
        assert sorted(i for group in read_groups(loader) for i in group) == list(range(100))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "samples",
    [
        generator,
        lambda: (sample(i) for i in range(NUM_SAMPLES)),
        lambda: map(dict, generator()),
        lambda: itertools.chain(generator(), iter([{"input_ids": torch.ones(4)}] * 9)),
        lambda: Wrapped(generator(), dict),
    ],
    ids=["generator", "expression", "map", "chain", "wrapped"],
)
def test_a_skip_that_ends_a_generator_does_not_end_the_epoch_in_silence(
    samples: Callable[[], Iterator[Any]], num_workers: int
) -> None:
    loader = odb.ODBDataLoader(Stream(samples), token_budget=16, num_workers=num_workers)
    with pytest.raises(RuntimeError, match=r"Sample 5 of the stream(.|\n)*picture 5 is broken(.|\n)*[Yy]ield None"):
        read_groups(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "samples",
    [
        lambda: map(sample, range(NUM_SAMPLES)),
        lambda: Wrapped(iter(range(NUM_SAMPLES)), sample),
        lambda: Wrapped((i for i in range(NUM_SAMPLES)), sample),
        lambda: Wrapped(iter(range(NUM_SAMPLES)), in_a_generator),
    ],
    ids=["map", "class", "over a generator", "in a generator of one sample"],
)
def test_iterators_go_on_behind_a_skip(samples: Callable[[], Iterator[Any]], num_workers: int) -> None:
    loader = odb.ODBDataLoader(Stream(samples), token_budget=16, num_workers=num_workers)
    seen = sorted(i for group in read_groups(loader) for i in group)
    assert seen == [i for i in range(NUM_SAMPLES) if i not in (5, NUM_SAMPLES - 1)]
    assert sorted(loader.skipped) == [(i, f"picture {i} is broken") for i in (5, NUM_SAMPLES - 1)]


def test_a_generator_yields_none_in_place_of_a_sample() -> None:
    loader = odb.ODBDataLoader(Stream(lambda: (None if i == 5 else sample(i) for i in range(20))), token_budget=16)
    assert sorted(i for group in read_groups(loader) for i in group) == [i for i in range(20) if i != 5]
    assert [index for index, _ in loader.skipped] == [5]
