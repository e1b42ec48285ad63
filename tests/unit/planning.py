"""Drawn steps and checks that the planner's tests share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from orch.comm.topology import Topology
from orch.lengths import ItemLengths, StepLengths
from orch.plan import StepPlan

LENGTHS = st.one_of(st.integers(0, 12), st.integers(0, 2000), st.just(30000))


def arrays(values) -> np.ndarray:
    return np.asarray(list(values), dtype=np.int64)


@st.composite
def topologies(draw, most: int = 9) -> Topology:
    num_ranks = draw(st.integers(1, most))
    if draw(st.booleans()):
        return Topology(num_ranks, draw(st.one_of(st.none(), st.integers(1, num_ranks))))
    cuts = sorted(draw(st.sets(st.integers(1, max(num_ranks - 1, 1)), max_size=num_ranks - 1)))
    return Topology(num_ranks, node_sizes=tuple(np.diff([0, *cuts, num_ranks]).tolist()))


@st.composite
def steps(draw, topology: Topology, *, most_samples: int = 24, num_stages: int = 2) -> StepLengths:
    num_micro_steps = draw(st.integers(1, 3))
    size = draw(st.integers(1, most_samples))
    ranks = st.integers(0, topology.num_ranks - 1)
    drawn = sorted(draw(st.lists(st.tuples(ranks, st.integers(0, num_micro_steps - 1)), min_size=size, max_size=size)))
    stages = {}
    for name in ("vision", "audio")[:num_stages]:
        owners = sorted(draw(st.lists(st.integers(0, size - 1), max_size=2 * most_samples)))
        lengths = arrays(draw(st.lists(LENGTHS, min_size=len(owners), max_size=len(owners))))
        stages[name] = ItemLengths(arrays(owners), lengths, lengths // 4, lengths * 3)
    llm = arrays(draw(st.lists(LENGTHS, min_size=size, max_size=size)))
    home, micro_step = arrays(rank for rank, _ in drawn), arrays(value for _, value in drawn)
    group_rank = draw(st.one_of(st.none(), st.lists(ranks, min_size=size, max_size=size)))
    return StepLengths(home, micro_step, llm, llm * 16, llm // 2, num_micro_steps, stages, group_rank)


def random_step(
    seed: int, num_ranks: int, per_rank: int, num_micro_steps: int = 1, stages: tuple[str, ...] = ("vision", "audio")
) -> StepLengths:
    """A heavy-tailed step: stages uncorrelated, `per_rank` samples for each rank and micro-step."""
    rng = np.random.default_rng(seed)
    size = num_ranks * num_micro_steps * per_rank
    home = np.repeat(np.arange(num_ranks), num_micro_steps * per_rank)
    micro_step = np.tile(np.repeat(np.arange(num_micro_steps), per_rank), num_ranks)
    llm = rng.lognormal(5.5, 0.8, size).astype(np.int64) + 8
    items = {}
    for name in stages:
        sample = np.repeat(np.arange(size), rng.choice(4, size, p=[0.4, 0.3, 0.2, 0.1]))
        length = 4 * rng.lognormal(5, 0.7, len(sample)).astype(np.int64) + 4
        items[name] = ItemLengths(sample, length, length // 4, length * 1176)
        np.add.at(llm, sample, length // 4)
    return StepLengths(home, micro_step, llm, llm * 16, llm // 2, num_micro_steps, items)


def regrouped(lengths: StepLengths, num_ranks: int, seed: int = 0) -> StepLengths:
    """The same step with each sample in the group of a rank at random, wherever it lies."""
    return replace(lengths, group_rank=np.random.default_rng(seed).integers(0, num_ranks, lengths.num_samples))


def assert_complete(lengths: StepLengths, topology: Topology, plan: StepPlan) -> None:
    """Every sample and item once; every rank with a sample in every micro-step; layouts that belong together."""
    assert len(plan.micro_steps) == lengths.num_micro_steps
    own = [part.samples[: len(part.samples) - part.num_fillers] for part in plan.micro_steps]
    assert sorted(np.concatenate(own).tolist()) == list(range(lengths.num_samples))
    for part, samples in zip(plan.micro_steps, own, strict=True):
        assert np.all(np.diff(samples) > 0)
        assert set(part.llm.rank_of_item.tolist()) == set(range(topology.num_ranks))
        np.testing.assert_array_equal(part.home.rank_of_item, lengths.home[part.samples])
        fillers = part.llm.rank_of_item[len(samples) :]
        assert not set(fillers.tolist()) & set(part.llm.rank_of_item[: len(samples)].tolist())
        assert list(part.stages) == list(lengths.stages)
    for name, items in lengths.stages.items():
        counts = np.zeros(len(items), dtype=np.int64)
        for part, samples in zip(plan.micro_steps, own, strict=True):
            stage = part.stages[name]
            np.testing.assert_array_equal(stage.home.rank_of_item, lengths.home[items.sample[stage.items]])
            expected = np.concatenate([np.flatnonzero(np.isin(items.sample, samples))])
            np.testing.assert_array_equal(stage.items[: len(expected)], expected)
            counts[expected] += 1
            rank_of_sample = dict(zip(samples.tolist(), part.llm.rank_of_item.tolist(), strict=False))
            wanted = [rank_of_sample[sample] for sample in items.sample[expected].tolist()]
            assert stage.llm.rank_of_item[: len(expected)].tolist() == wanted
            _assert_copies(items, part, stage, len(samples), len(expected))
        assert np.all(counts == 1)


def _assert_copies(items: ItemLengths, part, stage, num_samples: int, num_own: int) -> None:
    """The copies of items stand at the end and are encoded by the rank that holds their filler."""
    copies = [
        (item, rank)
        for filler, rank in zip(part.samples[num_samples:], part.llm.rank_of_item[num_samples:], strict=True)
        for item in np.flatnonzero(items.sample == filler).tolist()
    ]
    assert stage.items[num_own:].tolist() == [item for item, _ in copies]
    assert stage.llm.rank_of_item[num_own:].tolist() == [rank for _, rank in copies]
    assert stage.encode.rank_of_item[num_own:].tolist() == [rank for _, rank in copies]
