"""`orch.calibrate`: costs measured on this device, the same on every rank."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import orch
from orch import calibration
from orch.cost import PackedCost
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
    """Of four runs of a batch three are slowed down, by up to twice; which ones differs from batch to batch."""
    rng, runs = np.random.default_rng(0), {}

    def timed(run, batch):
        key = tuple(batch)
        runs[key] = runs.get(key, -1) + 1
        slowed = 1.0 if runs[key] % 4 == hash(key) % 4 else 1.0 + rng.random()
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
