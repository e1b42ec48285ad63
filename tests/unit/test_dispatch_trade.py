import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.dispatch.trade import trade


def loads(values, bins, num_bins):
    return np.bincount(bins, weights=values, minlength=num_bins).astype(np.int64)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 40), st.integers(0, 60))
def test_loads_never_grow_and_no_bin_newly_exceeds_the_cap(seed, num_bins, num_items, room):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 200, num_items)
    costs = lengths * 90 + lengths**2
    bins = rng.integers(0, num_bins, num_items)
    tokens = loads(lengths, bins, num_bins)
    cap = int(np.median(tokens)) + room
    dealt = trade(costs, lengths, bins, num_bins, cap, 0)
    assert loads(costs, dealt, num_bins).max(initial=0) <= loads(costs, bins, num_bins).max(initial=0)
    after = loads(lengths, dealt, num_bins)
    assert np.all((after <= cap) | (after == tokens))


def test_full_bins_of_long_and_of_short_samples_draw_level():
    rng, imbalances = np.random.default_rng(0), []
    for _ in range(10):
        long, short = rng.integers(300, 700, 4), rng.integers(20, 90, 36)
        lengths = np.concatenate([long, short])
        bins = np.repeat([0, 1], [4, 36])
        costs = 94 * lengths * 1000 + 45 * lengths**2
        cap = int(loads(lengths, bins, 2).max())
        before = loads(costs, bins, 2)
        after = loads(costs, trade(costs, lengths, bins, 2, cap, 0), 2)
        assert after.max() / after.mean() < 1.005
        imbalances.append(before.max() / before.mean())
    assert np.mean(imbalances) > 1.05


def least(costs, lengths, cap):
    """The least largest load of two bins that keep the cap, by brute force."""
    sides = ((np.arange(1 << len(costs))[:, None] >> np.arange(len(costs))) & 1).astype(np.int64)
    fits = np.maximum(sides @ lengths, lengths.sum() - sides @ lengths) <= cap
    return int(np.maximum(sides @ costs, costs.sum() - sides @ costs)[fits].min())


def test_two_full_bins_come_close_to_the_best_there_is():
    """Most of the way from the start to the optimum, over draws; in each at least as good as the start."""
    rng, gains, best_gains = np.random.default_rng(1), [], []
    for _ in range(60):
        lengths = rng.integers(20, 700, 12)
        costs = 94 * lengths * 1000 + 45 * lengths**2 * 10
        bins = (np.cumsum(lengths) > lengths.sum() // 2).astype(np.int64)
        cap = int(loads(lengths, bins, 2).max())
        before = int(loads(costs, bins, 2).max())
        after = int(loads(costs, trade(costs, lengths, bins, 2, cap, 0), 2).max())
        optimum = least(costs, lengths, cap)
        assert optimum <= after <= before
        gains.append(before - after)
        best_gains.append(before - optimum)
    assert sum(gains) > 0.9 * sum(best_gains)


def test_it_is_a_function_of_the_numbers():
    rng = np.random.default_rng(2)
    lengths = rng.integers(20, 700, 400)
    costs, bins = lengths**2, rng.integers(0, 16, 400)
    cap = int(loads(lengths, bins, 16).max())
    first = trade(costs, lengths, bins.copy(), 16, cap, 0)
    np.testing.assert_array_equal(first, trade(costs, lengths, bins, 16, cap, 0))
    assert np.any(first != bins)
