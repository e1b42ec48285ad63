from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.comm.topology import Topology
from orch.odb.budget import TokenBudget
from orch.odb.global_grouping import GlobalWindow
from orch.odb.grouping import form_groups, split_groups

LAYOUTS = ["packed", "padded"]


def fewest_groups(lengths: list[int], budget: TokenBudget) -> int:
    """The optimum, by trying every way to deal the samples to groups."""
    for count in range(1, len(lengths) + 1):
        for deal in itertools.product(range(count), repeat=len(lengths)):
            groups = [np.array([n for n, g in zip(lengths, deal, strict=True) if g == i]) for i in range(count)]
            if all(budget.fits(group) for group in groups):
                return count
    return 0


@pytest.mark.parametrize("layout", LAYOUTS)
@given(lengths=st.lists(st.integers(1, 150), max_size=80), max_samples=st.one_of(st.none(), st.integers(1, 9)))
def test_every_sample_once_within_the_budget(layout: str, lengths: list[int], max_samples: int | None) -> None:
    budget, array = TokenBudget(100, layout, max_samples), np.array(lengths, dtype=np.int64)
    groups = form_groups(array, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(budget.fits(array[group]) for group in groups)
    assert all(len(group) == 1 for group in groups if array[group].max() > 100)
    assert all(np.array_equal(a, b) for a, b in zip(groups, form_groups(array.copy(), budget), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_near_the_fewest_groups(layout: str, lengths: list[int]) -> None:
    budget = TokenBudget(10, layout)
    found, fewest = len(form_groups(np.array(lengths), budget)), fewest_groups(lengths, budget)
    assert found == fewest if layout == "padded" else 9 * found <= 11 * fewest + 36


def test_packed_groups_mix_long_and_short() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 400)
    groups = form_groups(lengths, TokenBudget(2000))
    assert len(groups) <= 1.01 * lengths.sum() / 2000 + 1
    means = np.array([lengths[group].mean() for group in groups[:-1]])
    assert means.std() < 0.15 * lengths.std()
    assert min(np.ptp(lengths[group]) for group in groups[:-1]) > 300


def test_ties_keep_the_order_of_the_window() -> None:
    assert [group.tolist() for group in form_groups(np.array([5, 5, 5, 5]), TokenBudget(10, "padded"))] == [
        [0, 1],
        [2, 3],
    ]
    assert [group.tolist() for group in form_groups(np.array([5, 5, 5, 5]), TokenBudget(10))] == [[0, 1], [2, 3]]


def test_splitting_halves_the_widest_group() -> None:
    lengths = np.array([1, 9, 2, 8, 5])
    parts = split_groups([np.array([0, 1, 2, 3]), np.array([4])], lengths, 4)
    assert [part.tolist() for part in parts] == [[1], [3], [0, 2], [4]]
    with pytest.raises(ValueError, match="num_groups"):
        split_groups([np.array([0])], lengths, 2)


def window_of(lengths: np.ndarray, num_ranks: int, layout: str, ranks_per_node: int | None = None) -> GlobalWindow:
    window = GlobalWindow(TokenBudget(16384, layout), Topology(num_ranks, ranks_per_node))
    shards = [lengths[rank::num_ranks] for rank in range(num_ranks)]
    zero = np.zeros(0, dtype=np.int64)
    window.add(
        [np.stack([np.arange(len(s)), s, s, s, s, np.zeros_like(s)], axis=1) if len(s) else zero for s in shards]
    )
    return window


def lognormal(num: int, cv: float, mean: float = 512, seed: int = 0) -> np.ndarray:
    sigma2 = np.log(1 + cv * cv)
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma2 / 2, np.sqrt(sigma2), num)
    return np.clip(drawn, 16, 16384).astype(np.int64)


@pytest.mark.parametrize(("cv", "least_fill"), [(0.5, 0.97), (1.0, 0.96), (1.6, 0.94)])
def test_global_groups_are_full_and_the_ranks_of_a_step_equal(cv: float, least_fill: float) -> None:
    window = window_of(lognormal(2048, cv), 8, "padded")
    steps = window.plan_steps(all_ended=False)
    costs = np.array([[window.budget.tokens(window.length[group]) for group in step] for step in steps])
    real = sum(int(window.length[group].sum()) for step in steps for group in step)
    assert real / (len(steps) * 8 * 16384) > least_fill
    assert (costs.max(axis=1) / costs.mean(axis=1)).mean() < 1.02


def test_the_last_steps_are_even_and_as_few_as_can_be() -> None:
    window = window_of(lognormal(1000, 1.0), 8, "padded")
    fewest = -(-len(form_groups(window.length, window.budget)) // 8)
    steps = window.plan_steps(all_ended=True)
    assert len(steps) == fewest
    assert all(len(step) == 8 and all(map(len, step)) for step in steps)
    assert sum(len(group) for step in steps for group in step) == 1000
    costs = np.array([[window.budget.tokens(window.length[group]) for group in step] for step in steps])
    assert (costs.max(axis=1) / costs.mean(axis=1)).mean() < 1.05


def test_packed_groups_stay_at_home_and_others_within_their_node() -> None:
    window = window_of(lognormal(2048, 1.0), 8, "packed")
    moved = total = 0
    for step in window.plan_steps(all_ended=False):
        for rank, group in enumerate(step):
            moved += int(window.length[group][window.rank[group] != rank].sum())
            total += int(window.length[group].sum())
    assert moved < 0.2 * total

    node = np.arange(8) // 4
    across = {}
    for ranks_per_node in (4, 8):
        padded = window_of(lognormal(2048, 1.0), 8, "padded", ranks_per_node)
        across[ranks_per_node] = sum(
            int(padded.length[group][node[padded.rank[group]] != node[rank]].sum())
            for step in padded.plan_steps(all_ended=False)
            for rank, group in enumerate(step)
        )
    assert across[4] < across[8]


def test_no_sample_waits_for_ever() -> None:
    """A sample that fills batches badly is not left until the end of the epoch."""
    window = GlobalWindow(TokenBudget(100, "padded"), Topology(2))
    odd = np.array([[0, 60, 1, 1, 0, 0]])
    rows = lambda start, n: np.stack([np.arange(start, start + n), *[np.full(n, 10)] * 4, np.zeros(n, int)], axis=1)  # noqa: E731
    window.add([np.concatenate([odd, rows(1, 39)]), rows(0, 40)])
    for num_rounds in range(20):
        steps = window.plan_steps(all_ended=False)
        gone = any(60 in window.length[group] for step in steps for group in step)
        window.remove(steps)
        if gone:
            break
        counts = np.bincount(window.rank, minlength=2)
        start = 1000 * (num_rounds + 1)
        window.add([rows(start, 40 - int(count)) for count in counts])
    assert gone
    assert num_rounds <= 12


def test_at_the_end_of_an_epoch_each_packed_group_has_its_share_of_long_samples() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, 400).astype(np.int64) + 20, 8000)
    window = window_of(lengths, 4, "packed")
    groups = [window.length[group] for step in window.plan_steps(all_ended=True) for group in step]
    assert min(int(group.max()) for group in groups) > np.percentile(lengths, 90)
    assert max(int(group.sum()) for group in groups) <= 16384
