from __future__ import annotations

import numpy as np
import pytest

from orch.odb.budget import TokenBudget
from orch.odb.buffer import WindowSize


def test_packed_costs_the_sum_and_padded_the_rectangle() -> None:
    lengths = np.array([5, 2, 3], dtype=np.int64)
    assert TokenBudget(20, "packed").tokens(lengths) == 10
    assert TokenBudget(20, "padded").tokens(lengths) == 15
    assert TokenBudget(20).tokens(lengths[:0]) == 0
    assert TokenBudget(10, "packed").fits(lengths)
    assert not TokenBudget(14, "padded").fits(lengths)
    assert TokenBudget(20, "padded").fill(lengths) == 0.5


def test_a_single_sample_always_fits() -> None:
    assert TokenBudget(4).fits(np.array([9]))
    assert TokenBudget(4).capacity(9) == 1
    assert TokenBudget(20, max_samples=3).capacity(2) == 3
    assert not TokenBudget(20, max_samples=2).fits(np.array([1, 1, 1]))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [((0,), "max_tokens"), ((5, "dense"), "layout"), ((5, "packed", 0), "max_samples")],
)
def test_senseless_budgets_are_refused(arguments: tuple[object, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TokenBudget(*arguments)


def test_a_window_is_full_by_samples_and_tokens_or_by_bytes() -> None:
    size = WindowSize(num_samples=4, num_tokens=100, max_bytes=1000, max_samples=50)
    assert not size.is_full(4, 99, 10)
    assert not size.is_full(3, 500, 10)
    assert size.is_full(4, 100, 10)
    assert size.is_full(1, 1, 1000)
    assert size.is_full(50, 50, 50)
    with pytest.raises(ValueError, match="max_bytes"):
        WindowSize(4, 100, 0, 50)
