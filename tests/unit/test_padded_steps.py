from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.comm.topology import Topology
from orch.odb.budget import TokenBudget
from orch.odb.global_grouping import GlobalWindow
from orch.odb.grouping import Groups, form_groups
from orch.odb.padded_steps import densest_groups, mixed_steps, most_even_steps
from tests.unit.test_grouping import lognormal

NUM_RANKS, WINDOW = 8, 256


def play(lengths: np.ndarray, *, mixes_lengths: bool = False) -> list[Groups]:
    """The lengths of each rank's group in each step of an epoch."""
    world = GlobalWindow(TokenBudget(16384, "padded"), Topology(NUM_RANKS), mixes_lengths)
    shards, num_read, played = [lengths[rank::NUM_RANKS] for rank in range(NUM_RANKS)], [0] * NUM_RANKS, []
    while True:
        rows = []
        for rank, shard in enumerate(shards):
            room = WINDOW - int(np.count_nonzero(world.rank == rank))
            new = shard[num_read[rank] :][:room]
            rows.append(np.stack([num_read[rank] + np.arange(len(new)), *[new] * 4, 0 * new], axis=1))
            num_read[rank] += len(new)
        world.add(rows)
        steps = world.plan_steps(all_ended=sum(num_read) == len(lengths))
        if not steps:
            return played
        played += [[world.length[group] for group in step] for step in steps]
        world.remove(steps)


def spread(steps: list[Groups]) -> float:
    """How far the steps' mean log lengths, by tokens, lie apart."""
    everyone = [np.concatenate(step) for step in steps]
    return float(np.std([np.average(np.log(s), weights=s) for s in everyone]))


def costs_of(steps: list[Groups]) -> np.ndarray:
    return np.array([[len(group) * group.max() if len(group) else 0 for group in step] for step in steps])


@pytest.mark.parametrize(("cv", "padding", "steps_over_oracle"), [(0.5, 0.017, 1.02), (1.6, 0.03, 1.035)])
def test_an_epoch_of_padded_steps_is_full_and_even(cv: float, padding: float, steps_over_oracle: float) -> None:
    lengths = lognormal(16000, cv, mean=600)
    steps = play(lengths)
    assert sum(len(group) for step in steps for group in step) == len(lengths)
    costs = costs_of(steps)
    assert 1 - lengths.sum() / costs.sum() < padding
    assert (costs.max(axis=1) / costs.mean(axis=1)).mean() < 1.02
    oracle = -(-len(form_groups(lengths, TokenBudget(16384, "padded"))) // NUM_RANKS)
    assert len(steps) <= steps_over_oracle * oracle


def test_mixed_steps_have_long_and_short_samples_at_little_cost() -> None:
    lengths = lognormal(12000, 1.0, mean=600)
    even, mixed = play(lengths), play(lengths, mixes_lengths=True)
    assert spread(mixed) < 0.55 * spread(even)
    assert costs_of(mixed).max(axis=1).sum() < 1.05 * costs_of(even).max(axis=1).sum()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=14),
    num_groups=st.integers(1, 3),
    max_samples=st.sampled_from([None, 2]),
)
def test_the_densest_groups_are_the_best_of_all_runs(
    lengths: list[int], num_groups: int, max_samples: int | None
) -> None:
    """No as many disjoint full runs have less padding."""
    budget, array = TokenBudget(50, "padded", max_samples), np.array(lengths, dtype=np.int64)
    groups = densest_groups(array, budget, np.zeros(len(array), dtype=bool), num_groups)
    assert len({i for group in groups for i in group.tolist()}) == sum(map(len, groups))
    assert all(budget.fits(array[group]) for group in groups)
    descending = np.sort(array)[::-1]
    runs = []
    for start, longest in enumerate(descending):
        run = descending[start:][: budget.capacity(int(longest))]
        runs.append((start, start + len(run), 1 - run.sum() / (longest * budget.capacity(int(longest)))))
    found = sum(1 - array[g].sum() / (array[g].max() * budget.capacity(int(array[g].max()))) for g in groups)
    for chosen in itertools.combinations(runs, len(groups)):
        if all(a[1] <= b[0] for a, b in itertools.pairwise(chosen)):
            assert found <= sum(padding for *_, padding in chosen) + 1e-9


def test_what_is_urgent_goes_although_it_fits_badly() -> None:
    lengths = np.array([*[100] * 40, 7, 5], dtype=np.int64)
    budget, urgent = TokenBudget(1000, "padded"), np.arange(42) >= 40
    calm = densest_groups(lengths, budget, np.zeros(42, dtype=bool), 4)
    assert not any(40 in group for group in calm)
    assert {40, 41} <= {i for group in densest_groups(lengths, budget, urgent, 4) for i in group.tolist()}
    costs = np.array([100, 100, 100, 100, 30])
    steps = most_even_steps(costs, costs, np.array([False] * 4 + [True]), 2, 1)
    assert 4 in steps[0]


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(1, 30), min_size=3, max_size=9), num_ranks=st.integers(1, 3))
def test_steps_are_the_most_even_of_all_neighbours_in_cost(costs: list[int], num_ranks: int) -> None:
    array = np.array(costs, dtype=np.int64)
    num_steps = max(1, len(costs) // num_ranks // 2)
    steps = most_even_steps(array, array, np.zeros(len(array), dtype=bool), num_ranks, num_steps)
    assert len(steps) == num_steps
    assert len({int(i) for step in steps for i in step}) == num_steps * num_ranks
    descending = np.sort(array)[::-1]
    evenness = lambda values: values.sum() / (len(values) * values.max())  # noqa: E731
    found = sum(evenness(array[step]) for step in steps)
    for starts in itertools.combinations(range(len(array) - num_ranks + 1), num_steps):
        if all(b - a >= num_ranks for a, b in itertools.pairwise(starts)):
            assert found >= sum(evenness(descending[s : s + num_ranks]) for s in starts) - 1e-9


def test_mixing_deals_every_group_once() -> None:
    rng = np.random.default_rng(0)
    longest, costs = rng.integers(1, 100, 12), rng.integers(1, 100, 12)
    steps = mixed_steps(longest, costs, 3)
    assert sorted(int(i) for step in steps for i in step) == list(range(12))
    stratum = np.argsort(np.argsort(-longest, kind="stable")) // 3
    assert all(sorted(stratum[step].tolist()) == [0, 1, 2, 3] for step in steps)
    assert all(costs[i] >= costs[j] for i, j in zip(steps[0], steps[2], strict=True))
