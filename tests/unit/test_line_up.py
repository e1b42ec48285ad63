"""Which batches run at the same time, against all orders; and what plans of several micro-steps gain by it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orch.comm.topology import Topology
from orch.config import BalanceConfig
from orch.lengths import ItemLengths, StepLengths
from orch.line_up import StageLoads, line_up
from orch.plan import plan_step


def loads_of(draw, shape, least=0):
    size = shape[0] * shape[1]
    return np.array(draw(st.lists(st.integers(least, 20), min_size=size, max_size=size)), dtype=np.int64).reshape(shape)


@st.composite
def batches(draw):
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    llm = loads_of(draw, shape, least=1)
    return llm, [loads_of(draw, shape) for _ in range(draw(st.integers(0, 2)))]


def reordered(values, micro_step):
    found = np.empty_like(values)
    np.put_along_axis(found, micro_step, values, axis=1)
    return found


def all_orders(shape):
    for order in itertools.product(itertools.permutations(range(shape[1])), repeat=shape[0]):
        yield np.array(order, dtype=np.int64)


@given(batches())
def test_every_rank_runs_each_batch_once_and_no_order_waits_longer_than_that_given(case):
    llm, items = case
    stages = [StageLoads(llm, llm), *(StageLoads(item, item) for item in items)]
    found = line_up(stages[0], stages[1:])
    np.testing.assert_array_equal(np.sort(found, axis=1), np.broadcast_to(np.arange(llm.shape[1]), llm.shape))
    waited = lambda micro_step: sum(  # noqa: E731
        reordered(stage.floor, micro_step).max(axis=0).sum() / stage.mean for stage in stages
    )
    as_they_are = np.broadcast_to(np.arange(llm.shape[1]), llm.shape)
    assert waited(found) <= waited(as_they_are) + 1e-4


@given(batches())
def test_of_one_stage_no_order_is_better(case):
    llm, _ = case
    found = line_up(StageLoads(llm, llm), [])
    least = min(reordered(llm, order).max(axis=0).sum() for order in all_orders(llm.shape))
    assert reordered(llm, found).max(axis=0).sum() == least


@given(batches())
def test_items_decide_where_the_llm_is_level(case):
    llm, items = case
    for item in items[:1]:
        even = np.full_like(llm, 100)
        found = line_up(StageLoads(even, even), [StageLoads(item, item)])
        least = min(reordered(item, order).max(axis=0).sum() for order in all_orders(item.shape))
        assert reordered(item, found).max(axis=0).sum() == least


def step_of(rng, num_ranks, num_micro_steps, per_batch, share, spread):
    """A step of which a share of the samples have a picture."""
    size = num_ranks * num_micro_steps * per_batch
    home = np.repeat(np.arange(num_ranks), num_micro_steps * per_batch)
    micro_step = np.tile(np.repeat(np.arange(num_micro_steps), per_batch), num_ranks)
    owner = np.flatnonzero(rng.random(size) < share)
    patches = rng.lognormal(7.5, 0.6, len(owner)).astype(np.int64)
    llm = (1000 * rng.lognormal(0, spread, size)).astype(np.int64)
    np.add.at(llm, owner, patches // 4)
    vision = ItemLengths(owner, patches, patches // 4, patches * 1000)
    return StepLengths(home, micro_step, llm, llm * 16, llm, num_micro_steps, {"vision": vision})


def step_loads(lengths, plan, num_ranks):
    """What ranks that wait for each other in every micro-step take in all, by stage."""
    found = {"llm": 0, "vision": 0}
    vision = lengths.stages["vision"].length
    for part in plan.micro_steps:
        own = part.samples[: len(part.samples) - part.num_fillers]
        ranks = part.llm.rank_of_item[: len(own)]
        found["llm"] += int(np.bincount(ranks, lengths.llm_length[own], num_ranks).max())
        stage = part.stages["vision"]
        found["vision"] += int(np.bincount(stage.encode.rank_of_item, vision[stage.items], num_ranks).max(initial=0))
    return found


@pytest.mark.parametrize("spread", [0.02, 0.8])
@pytest.mark.parametrize("share", [0.05, 0.2, 1.0])
def test_with_micro_steps_no_stage_is_slower_than_as_drawn(share, spread):
    total = {"none": 0, "post": 0, "apart": 0}
    for seed in range(12):
        lengths, topology = step_of(np.random.default_rng(seed), 8, 4, 4, share, spread), Topology(8)
        drawn, found = (
            step_loads(lengths, plan_step(lengths, topology, BalanceConfig(mode)), 8) for mode in ("none", "post")
        )
        assert found["llm"] <= drawn["llm"]
        assert found["vision"] <= drawn["vision"]
        total["none"] += sum(drawn.values())
        total["post"] += sum(found.values())
        total["apart"] += sum(
            sum(step_loads(part, plan_step(part, topology), 8).values())
            for part in (only(lengths, index) for index in range(4))
        )
    assert total["post"] <= 0.9 * total["none"]
    assert total["post"] <= total["apart"]


def only(lengths, micro_step):
    """A step of the samples of one micro-step."""
    own = np.flatnonzero(lengths.micro_step == micro_step)
    number = np.full(lengths.num_samples, -1)
    number[own] = np.arange(len(own))
    vision = lengths.stages["vision"]
    items = number[vision.sample] >= 0
    stage = ItemLengths(
        number[vision.sample[items]], vision.length[items], vision.num_rows[items], vision.num_bytes[items]
    )
    llm = lengths.llm_length[own]
    return StepLengths(lengths.home[own], own * 0, llm, llm * 16, llm, 1, {"vision": stage})


def test_pictures_larger_than_a_share_are_encoded_at_the_same_time():
    # One for each rank, all drawn in the same micro-step; dealt by LLM length alone they come apart.
    rng = np.random.default_rng(4)
    home, micro_step = np.repeat(np.arange(8), 16), np.tile(np.repeat(np.arange(4), 4), 8)
    owner = np.flatnonzero(micro_step == 0)[::4]
    size = np.full(8, 8000)
    llm = 1000 + rng.integers(0, 40, 128)
    lengths = StepLengths(home, micro_step, llm, llm, llm, 4, {"vision": ItemLengths(owner, size, size // 4, size)})
    assert step_loads(lengths, plan_step(lengths, Topology(8)), 8)["vision"] == 8000
