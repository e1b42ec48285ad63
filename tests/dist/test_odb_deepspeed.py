"""DeepSpeed in a plain loop on the loader: after an epoch its weights are those of one process."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
import torch
import torch._dynamo

from orch import odb
from tests.dist.test_odb import Tokens
from tests.dist.test_odb_trainer import NUM_SAMPLES, reference, steps_of, tiny_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
ACCUMULATE = 2


def train_an_epoch(grouping: str) -> tuple[list[list[int]], list[float], int]:
    """The samples of each micro-step, the weights afterwards, and the micro-steps of the last optimizer step."""
    from tests.zero import wrap_zero

    model = tiny_model()
    engine = wrap_zero(model, torch.optim.SGD(model.parameters(), lr=0.1), ACCUMULATE)
    loader = odb.ODBDataLoader(
        Tokens(NUM_SAMPLES),
        token_budget=300,
        buffer_size=16,
        shuffle=True,
        accumulation_steps=ACCUMULATE,
        grouping=grouping,
    )
    seen = []
    for batch in loader:
        info = odb.pop_step_info(batch, accumulation_divisor=ACCUMULATE)
        engine.set_gradient_accumulation_boundary(info.is_last_micro_step)
        engine.backward(engine(**batch).loss * info.loss_scale)
        engine.step()
        seen.append([] if info.is_idle else batch["input_ids"][:, 0].tolist())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return seen, weights.tolist(), info.num_micro_steps


def test_zero2_trains_each_sample_once_and_exactly() -> None:
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # here, so that forked ranks start quickly
    ranks = run_ranks(lambda: [train_an_epoch(grouping) for grouping in ("global", "local")], 2, timeout_s=150)
    for results in zip(*ranks, strict=True):
        samples = [seen for seen, *_ in results]
        assert Counter(i for seen in samples for ids in seen for i in ids) == Counter(range(NUM_SAMPLES))
        expected = reference(steps_of(samples, ACCUMULATE))
        for _, weights, _ in results:
            assert torch.allclose(torch.tensor(weights), expected, atol=2e-6)
    assert {last for results in ranks for *_, last in results} == {1, 2}, "one of the epochs ends with a short step"
