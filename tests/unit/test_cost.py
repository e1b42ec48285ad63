from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.cost import AdditiveCost, PackedCost, PaddedCost, PaddedLikeCost, RectangleFrontCost, batch_tokens
from orch.cost_fit import fit, transformer_flops
from tests.unit.planning import arrays

MODELS = (
    PackedCost(),
    PackedCost(2.0, 3.0, 1.0),
    PackedCost(1e-4, 3.7e-7, 2.2e-12),
    PaddedCost(),
    PaddedCost(1.0, 2.0, 3.0),
    PaddedCost(0.0, 1.5e9, 2.1e5),
    RectangleFrontCost(2.0, 5.0, 1.0, 1.0),
    RectangleFrontCost(0.25, 0.0, 0.1, 1e-5),
)


def reference(model, lengths: list[int]) -> float:
    """The documented formula, in plain Python."""
    present = [length for length in lengths if length]
    n, longest = len(lengths), max(lengths, default=0)
    if isinstance(model, PaddedCost):
        return n * (model.per_item + model.linear * longest + model.quadratic * longest**2) if longest else 0.0
    packed = sum(model.per_item + model.linear * length + model.quadratic * length**2 for length in present)
    return packed + (model.front * n * longest if isinstance(model, RectangleFrontCost) else 0.0)


@settings(deadline=None)
@pytest.mark.parametrize("model", MODELS)
@given(batches=st.lists(st.lists(st.integers(0, 4000), max_size=5), min_size=1, max_size=4))
def test_loads_follow_the_formula_up_to_one_scale(model, batches):
    lengths = arrays(length for batch in batches for length in batch)
    bins = arrays(index for index, batch in enumerate(batches) for _ in batch)
    loads = model.loads(lengths, bins, len(batches))
    unit = model.loads(arrays([131072]), arrays([0]), 1)[0] / reference(model, [131072])
    expected = np.array([reference(model, batch) for batch in batches]) * unit
    np.testing.assert_allclose(loads, expected, rtol=2e-3, atol=8 * len(lengths) + 1)
    assert loads.dtype == np.int64


@pytest.mark.parametrize("model", MODELS)
def test_kinds(model):
    assert isinstance(model, AdditiveCost) == isinstance(model, PackedCost)
    assert isinstance(model, PaddedLikeCost) != isinstance(model, PackedCost)


def test_default_costs_count_tokens():
    lengths, bins = arrays([3, 5, 0, 7]), arrays([0, 0, 1, 2])
    assert PackedCost().loads(lengths, bins, 4).tolist() == [8, 0, 7, 0]
    assert PackedCost(linear=2.7e9).loads(lengths, bins, 4).tolist() == [8, 0, 7, 0]
    assert PaddedCost().loads(lengths, bins, 4).tolist() == [10, 0, 7, 0]
    assert batch_tokens("packed", lengths, bins, 4).tolist() == [8, 0, 7, 0]
    assert batch_tokens("padded", lengths, bins, 4).tolist() == [10, 0, 7, 0]


def test_costs_are_exact_integers_far_beyond_floats():
    costs = PackedCost(0.0, 1.0, 3.0).item_costs(arrays([2**28 + 1]))
    assert costs.tolist() == [(2**28 + 1) + 3 * (2**28 + 1) ** 2]


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e12])
def test_the_unit_of_coefficients_does_not_matter(scale):
    lengths = arrays(range(1, 3000, 7))
    expected = PackedCost(0.3, 1.7, 1e-4).item_costs(lengths)
    found = PackedCost(0.3 * scale, 1.7 * scale, 1e-4 * scale).item_costs(lengths)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_one_long_item_among_many_short_ones_fits_unless_padded():
    lengths = arrays([1 << 20] + [100] * 5000)
    costs = PackedCost(0.0, 1.5e9, 1.1e5).item_costs(lengths)
    assert costs.min() > 0
    assert int(costs[0]) < sum(map(int, costs)) == int(costs.sum()) < 1 << 62
    with pytest.raises(ValueError, match="`lengths` must have costs that fit in 62 bits"):
        PackedCost(0.0, 1.5e9, 1.1e5).item_costs(arrays([1 << 20] * 5001))
    with pytest.raises(ValueError, match="`lengths` must have costs that fit in 62 bits"):
        PaddedCost(0.0, 1.5e9, 1.1e5).slot_costs(lengths)  # a rectangle of all would not


def test_bad_coefficients_raise():
    with pytest.raises(ValueError, match=r"`linear` must be finite and not negative, but is -1\.0 instead"):
        PackedCost(linear=-1.0)
    with pytest.raises(ValueError, match="`quadratic` must be finite"):
        PaddedCost(quadratic=float("nan"))
    with pytest.raises(ValueError, match="must be above 0, but all are 0 instead"):
        RectangleFrontCost(0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="must have costs that fit in 62 bits"):
        PackedCost(0.0, 1.0, 1.0).item_costs(arrays([2**32]))


@pytest.mark.parametrize(
    "truth", [PackedCost(2e-5, 3e-7, 5e-12), PaddedCost(1e-5, 3e-7, 5e-11), RectangleFrontCost(2e-7, 1e-5, 3e-7, 5e-12)]
)
def test_a_fit_finds_the_coefficients_behind_the_measurements(truth):
    rng = np.random.default_rng(0)
    batches = [rng.integers(1, 20000, rng.integers(1, 30)) for _ in range(200)]
    seconds = [0.01 + reference(truth, batch.tolist()) for batch in batches]
    found = fit(type(truth), batches, seconds)
    for name in truth.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-4), name


def test_a_fit_without_measurements_or_trend_raises():
    with pytest.raises(ValueError, match="`seconds` must have one entry a batch"):
        fit(PackedCost, [arrays([1])], [])
    with pytest.raises(ValueError, match="`seconds` must grow with the batch"):
        fit(PackedCost, [arrays([1]), arrays([2])], [1.0, 1.0])


def test_flops_of_a_known_transformer():
    """Qwen2.5-7B: 7.07e9 matrix parameters besides the input embedding, so 14.1 GFLOPs a token."""
    cost = transformer_flops(
        hidden=3584, layers=28, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064
    )
    assert cost.linear == pytest.approx(2 * 7.07e9, rel=0.01)
    assert cost.quadratic == 28 * 2 * 3584
    windowed = transformer_flops(
        hidden=1280, layers=32, intermediate=3420, heads=16, causal=False, window=64, full_attention_layers=4
    )
    assert windowed.quadratic == 4 * 4 * 1280
    full = transformer_flops(hidden=1280, layers=32, intermediate=3420, heads=16, causal=False)
    assert windowed.linear - full.linear == 28 * 4 * 1280 * 64
