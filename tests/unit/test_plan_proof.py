"""The bounds that the planner's benchmark measures against must be bounds."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.comm.topology import Topology
from orch.config import BalanceConfig, StageConfig
from orch.dispatch.bounds import least_load
from orch.lengths import ItemLengths, StepLengths
from tests.benchmark.plan_proof import least_step_bytes, proven_load
from tests.unit.planning import arrays


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([4, 6, 14, 26]), min_size=1, max_size=8), st.integers(1, 3))
def test_the_proven_load_is_between_the_cheap_bound_and_the_optimum(costs, num_bins):
    layouts = itertools.product(range(num_bins), repeat=len(costs))
    optimum = min(int(np.bincount(layout, weights=costs).max()) for layout in layouts)
    bound = least_load(arrays(costs), num_bins)
    assert bound <= proven_load(arrays(costs), num_bins, bound, sum(costs)) <= optimum


def test_it_proves_what_the_cheap_bound_does_not_see():
    """Under 14 no 4 fits beside a 10, so that two bins hold the tens and the fours need one bin and a third."""
    costs = arrays([10, 10, 4, 4, 4, 4])
    assert least_load(costs, 3) == 12
    assert proven_load(costs, 3, 12, 18) == 14


TWO_NODES = Topology(2, 1)
ROW_BYTES = 3
CONFIG = BalanceConfig("post", stages={"vision": StageConfig(row_bytes=ROW_BYTES)})


def a_step(samples, items):
    """Samples are (home, length, bytes), items are (sample, length, rows, bytes); both ascend."""
    home, length, num_bytes = map(arrays, zip(*samples, strict=True))
    vision = ItemLengths(*map(arrays, zip(*items, strict=True)))
    return StepLengths(home, home * 0, length, num_bytes, length, 1, {"vision": vision})


def layouts_of(home, length):
    """All layouts on two ranks whose loads are up to 1.01 times the bound."""
    most = least_load(length, 2) * 1.01
    every = (np.array(ranks) for ranks in itertools.product(range(2), repeat=len(home)))
    return [ranks for ranks in every if np.bincount(ranks, weights=length, minlength=2).max() <= most]


def bytes_between(step, llm, encode):
    """Bytes that cross the two nodes: text, raw items, encoder outputs."""
    items = step.stages["vision"]
    text = step.num_bytes[llm != step.home].sum()
    raw = items.num_bytes[encode != step.home[items.sample]].sum()
    return text + raw + items.num_rows[encode != llm[items.sample]].sum() * ROW_BYTES


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_layout_within_the_loads_moves_fewer_bytes_than_the_least_of_a_step(data):
    sample = st.tuples(st.integers(0, 1), st.integers(1, 3), st.integers(0, 9))
    samples = data.draw(st.lists(sample, min_size=2, max_size=5))
    item = st.tuples(st.integers(0, len(samples) - 1), st.integers(1, 3), st.integers(0, 4), st.integers(0, 20))
    step = a_step(sorted(samples), sorted(data.draw(st.lists(item, min_size=1, max_size=5))))
    items = step.stages["vision"]
    moved = [
        bytes_between(step, llm, encode)
        for llm in layouts_of(step.home, step.llm_length)
        for encode in layouts_of(items.sample, items.length)
    ]
    least = sum(least_step_bytes(step, TWO_NODES, CONFIG).values())
    assert all(least <= value for value in moved)


def test_the_least_of_a_step_is_what_a_surplus_that_leaves_together_moves():
    step = a_step([(0, 10, 5), (0, 10, 5), (1, 0, 5)], [(0, 4, 9, 100), (1, 4, 9, 100)])
    assert least_step_bytes(step, TWO_NODES, CONFIG) == {"vision": 100, "llm": 5}
    assert bytes_between(step, arrays([1, 0, 1]), arrays([1, 0])) == 105
