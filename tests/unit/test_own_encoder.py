"""The example of an encoder of one's own: it runs, its gradients are exact, and what is missing is named."""

from __future__ import annotations

import own_encoder
import pytest
import torch

import orch
from orch.loss import num_label_tokens, token_loss_sum
from orch.stages import _protocol_members


def test_it_trains(capsys):
    own_encoder.main()
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("sizes", [[[3, 5], [], [2]], [[], []]], ids=["images", "text"])
def test_gradients_equal_those_of_the_plain_model(sizes):
    torch.manual_seed(1)
    model = own_encoder.Captioner()
    samples = [own_encoder.make_sample(of_sample) for of_sample in sizes]
    total = sum(num_label_tokens(sample["labels"]) for sample in samples)
    for sample in samples:
        logits = model(sample["input_ids"][None], sample.get("patches"), use_cache=False).logits
        (token_loss_sum(logits, sample["labels"][None]) / total).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    orch.stage(model.encoder, "vision", own_encoder.PatchAdapter())
    (batch,) = orch.orchestrate([samples], model, prefetch=0)
    model(**batch).loss.backward()
    for name, grad in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("member", _protocol_members())
def test_what_is_missing_is_named(member):
    adapter = type("Half", (), {m: 0 for m in _protocol_members() if m != member})()
    with pytest.raises(ValueError, match=rf"`adapter` must have \['{member}'\], as .*, but Half lacks them instead"):
        orch.stage(own_encoder.PatchEncoder(), "vision", adapter)


def test_a_class_is_no_adapter():
    with pytest.raises(ValueError, match="`adapter` must be an object, but is the class PatchAdapter instead"):
        orch.stage(own_encoder.PatchEncoder(), "vision", own_encoder.PatchAdapter)
