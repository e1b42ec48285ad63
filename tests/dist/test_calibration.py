"""`orch.calibrate`: costs measured on this device, the same on every rank."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import orch
from orch import calibration
from orch.comm.alike import told
from orch.cost import PackedCost, PaddedCost
from tests.omni import make_sample, small_model
from tests.ranks import run_ranks


def samples_of(config):
    grids, frames = [(4, 4), (8, 8), (16, 16)], [40, 100, 300]
    return [make_sample(config, i, 20 + 40 * i, [grids[i % 3]], [frames[(i + 1) % 3]]) for i in range(6)]


def test_every_rank_gets_the_costs_that_rank_0_measured():
    def run():
        model = small_model(torch.float32)
        first = next(model.parameters())
        first.grad = torch.full_like(first, 7.0)
        costs = orch.calibrate(model, samples_of(model.config), num_batches=8)
        kept = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert len(kept) == 1
        assert (first.grad == 7.0).all()
        return costs

    costs, others = run_ranks(run, 2, timeout_s=120)
    assert costs == others
    assert costs.keys() == {"vision", "audio", "llm"}
    assert all(max(cost.per_item, cost.linear, cost.quadratic) > 0 for cost in costs.values())


def test_the_cost_behind_the_times_is_found_through_disturbances(monkeypatch):
    """Of eight runs of a batch seven are slowed down, by up to twice; which ones differs from batch to batch."""
    rng, runs = np.random.default_rng(0), {}

    def timed(run, batch):
        key = tuple(batch)
        runs[key] = runs.get(key, -1) + 1
        slowed = 1.0 if runs[key] % 8 == hash(key) % 8 else 1.0 + rng.random()
        return slowed * sum(0.5 + 2e-2 * length + 3e-5 * length**2 for length in batch)

    monkeypatch.setattr(calibration, "_timed", timed)
    batches = [rng.integers(10, 2000, size).tolist() for size in (1, 2, 4, 8, 16, 32)]
    cost = calibration._measured(PackedCost, batches, lambda batch: None, lambda length: length)
    assert np.allclose([cost.per_item, cost.linear, cost.quadratic], [0.5, 2e-2, 3e-5], rtol=1e-6)


@pytest.mark.parametrize("grids", [(), ((4, 4),)])
def test_a_stage_whose_items_on_rank_0_tell_nothing_has_no_cost(grids, monkeypatch):
    """None, or a lone one, whose batches are all alike; on rank 1 there are more."""
    monkeypatch.setattr(calibration, "_timed", lambda run, batch: float(len(batch)))

    def run():
        model = small_model(torch.float32)
        if dist.get_rank():
            return sorted(orch.calibrate(model, samples_of(model.config), num_batches=4))
        samples = [make_sample(model.config, i, 20 + 40 * i, grids if i == 0 else ()) for i in range(4)]
        return sorted(orch.calibrate(model, samples, num_batches=4))

    assert run_ranks(run, 2, timeout_s=120) == [["llm"], ["llm"]]


def test_costs_are_of_the_layouts_family_where_a_ranks_own_fit_failed(monkeypatch):
    monkeypatch.setattr(calibration, "_timed", lambda run, batch: float(len(batch)))

    def fails(*args):
        raise ValueError("`seconds` must grow with the batch")

    def run():
        if dist.get_rank() == 1:
            monkeypatch.setattr(calibration, "fit", fails)
        model = small_model(torch.float32)
        return orch.calibrate(model, samples_of(model.config), layout="padded", num_batches=4)

    costs, others = run_ranks(run, 2, timeout_s=120)
    assert isinstance(costs["llm"], PaddedCost)
    assert isinstance(costs["vision"], PackedCost)
    assert costs == others


def test_gradients_are_put_back_when_a_run_fails(monkeypatch):
    def fails(run, batch):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(calibration, "_timed", fails)
    model = small_model(torch.float32)
    first = next(model.parameters())
    first.grad = torch.full_like(first, 7.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        orch.calibrate(model, samples_of(model.config))
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == [
        next(name for name, _ in model.named_parameters())
    ]
    assert (first.grad == 7.0).all()


def test_no_batches_are_refused():
    model = small_model(torch.float32)
    with pytest.raises(ValueError, match="`num_batches` must be a whole number of at least 1, but is 0 instead"):
        orch.calibrate(model, samples_of(model.config), num_batches=0)


def test_all_ranks_hear_of_a_rank_without_samples():
    def run():
        model = small_model(torch.float32)
        with pytest.raises(ValueError, match="`samples` must") as caught:
            orch.calibrate(model, [] if dist.get_rank() == 1 else samples_of(model.config), num_batches=4)
        return str(caught.value)

    expected = "`samples` must have a sample on every rank, but is empty on ranks [1] instead."
    assert run_ranks(run, 2, timeout_s=120) == [expected] * 2


class OwnCost:
    """Meets `CostModel` and has no `repr`."""

    def __init__(self, rate=2):
        self.rate, self.curve = rate, (lambda length: length,)

    def item_costs(self, lengths):
        return np.asarray(lengths) * self.rate

    def loads(self, lengths, bin_of_item, num_bins):
        return np.bincount(bin_of_item, weights=self.item_costs(lengths), minlength=num_bins).astype(np.int64)


def test_a_cost_model_of_ones_own_is_alike_on_all_ranks_if_it_says_the_same():
    def run():
        model = small_model(torch.float32)
        _unlike = [object() for _ in range(1000 * dist.get_rank())]
        loader = orch.orchestrate([samples_of(model.config)], model, costs={"llm": OwnCost()}, prefetch=0)
        losses = [model(**batch).loss.item() for batch in loader]
        with pytest.raises(ValueError, match="must be set up alike") as caught:
            orch.orchestrate([], model, costs={"llm": OwnCost(2 + dist.get_rank())}, prefetch=0)
        return len(losses), str(caught.value)

    outcomes = run_ranks(run, 2, timeout_s=120)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == 1
    assert "but `costs` is {'llm': OwnCost(" in outcomes[0][1]
    assert "rate=2)} on rank 0 and {'llm': OwnCost(" in outcomes[0][1]
    assert outcomes[0][1].endswith("rate=3)} on rank 1 instead.")


def test_values_are_told_without_addresses():
    class Slotted:
        __slots__ = ("first", "own")

        def __init__(self):
            self.first, self.own = 1, self

    assert "0x" not in told({"cost": [OwnCost(), Slotted()], "of": {1, 2}, "call": len, "method": OwnCost().loads})
    assert told(Slotted()).endswith("Slotted(first=1, own=...)")
    costs = {"llm": PackedCost(), "a": None, "b": (1, "x")}
    assert told(costs) == "{'a': None, 'b': (1, 'x'), 'llm': PackedCost(per_item=0, linear=1, quadratic=0)}"
    assert told([np.int64(100), 100.0, 0.5, np.float32(0.5), True]) == "[100, 100, 0.5, 0.5, True]"
    assert told([float("inf"), float("nan"), 2**63 + 1]) == "[inf, nan, 9223372036854775809]"


def test_batches_are_of_all_kinds_and_of_short_and_long_items():
    pool = list(range(1, 41))
    batches = calibration._batches(pool, 16, lambda length: length, np.random.default_rng(0))
    assert [len(batch) for batch in batches] == [10, 20, 10, 1] * 4
    alike, lone = batches[2::4], batches[3::4]
    assert [batch[0] for batch in alike] == [1, 11, 21, 31]
    assert [batch[0] for batch in lone] == [1, 14, 27, 40]
    assert calibration._batches([7], 4, lambda length: length, np.random.default_rng(0)) == [[7]] * 4
