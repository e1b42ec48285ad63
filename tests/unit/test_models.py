"""For every family: outputs, loss and gradients of an orchestrated batch equal the plain model's, in one process."""

from __future__ import annotations

import functools

import pytest
import torch

import orch
from tests.models import (
    FAMILIES,
    Groups,
    bound_adapter,
    count_entries,
    make_model,
    make_sample,
    plain_logits,
    plain_model,
    reference,
    worst_error,
)
from tests.omni import largest_error

LAYOUTS = {"padded": ("padded", False), "packed": ("packed", True), "packed under sdpa": ("packed", False)}
AMOUNTS = ("many", "few", "none")


@pytest.fixture(autouse=True)
def one_thread():
    """Models are so small that threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@functools.cache
def samples_of(name, amount):
    """Many: items of all kinds, several of a kind; few: one item of the last kind; none: text alone."""
    kinds = list(FAMILIES[name].media)
    if amount == "many":
        chosen = [kinds, kinds[:1] * 3, [], kinds[-1:], kinds * 2]
    else:
        chosen = [[], kinds[-1:] if amount == "few" else [], []]
    return [make_sample(name, seed, some, num_text=6 + seed) for seed, some in enumerate(chosen)]


@functools.cache
def expected_of(name, amount):
    return reference(name, samples_of(name, amount))


def run(model, samples, layout):
    """The orchestrated batch of samples: its loss, and each sample's logits."""
    (batch,) = orch.orchestrate(Groups([samples]), model, layout=layout, prefetch=0)
    output = model(**batch)
    output.loss.backward()
    lengths = [len(sample["input_ids"]) for sample in samples]
    if layout == "packed":
        return output.loss.item(), output.logits[0].split(lengths)
    return output.loss.item(), [row[:length] for row, length in zip(output.logits, lengths, strict=True)]


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_plain_model(name, layout, amount):
    samples, (expected_loss, expected) = samples_of(name, amount), expected_of(name, amount)
    model = make_model(name, *LAYOUTS[layout])
    loss, logits = run(model, samples, LAYOUTS[layout][0])
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    for got, sample in zip(logits, samples, strict=True):
        torch.testing.assert_close(got, plain_logits(name, sample), rtol=0, atol=1e-11)
    assert worst_error({key: p.grad for key, p in model.named_parameters()}, expected) < 1e-8


@pytest.mark.parametrize("error_of", [largest_error, worst_error])
def test_errors_of_gradients_are_noticed(error_of):
    expected = {"large": torch.full((3,), 100.0), "small": torch.full((2,), 1e-3)}
    assert error_of(expected, expected) == 0
    assert error_of({**expected, "small": torch.zeros(2)}, expected) == 1
    assert error_of({**expected, "large": torch.full((3,), 101.0)}, expected) == pytest.approx(0.01)
    for name in expected:
        spoiled = {**expected, name: torch.cat([expected[name][1:], torch.tensor([float("nan")])])}
        assert error_of(spoiled, expected) == error_of(expected, spoiled) == float("inf")
        assert error_of({**expected, name: None}, expected) == float("inf")
        assert error_of({key: grad for key, grad in expected.items() if key != name}, expected) == float("inf")


@pytest.mark.parametrize("name", FAMILIES)
def test_media_make_a_difference(name):
    """Else the tests above would say nothing about encoders."""
    _, expected = expected_of(name, "many")
    largest = max(grad.abs().max() for grad in expected.values())
    for path in FAMILIES[name].towers.values():
        of_tower = [grad.abs().max() for key, grad in expected.items() if key.startswith(path)]
        assert all(grad.isfinite() for grad in of_tower)
        assert max(of_tower) > 1e-4 * largest
        assert sorted(of_tower)[len(of_tower) // 4] > 1e-6 * largest


@pytest.mark.parametrize("name", [name for name in FAMILIES if "video" in FAMILIES[name].media])
def test_images_and_videos_enter_the_encoder_together(name):
    """The model calls its tower twice; the stage runs it once."""
    model = make_model(name, "packed")
    entered = count_entries(model, name)
    run(model, samples_of(name, "many"), "packed")
    assert entered.pop("projector", 2) == 2
    assert entered == dict.fromkeys(FAMILIES[name].towers, 1)


@pytest.mark.parametrize(("name", "stage"), [(name, stage) for name in FAMILIES for stage in FAMILIES[name].towers])
def test_adapter_counts_as_the_encoder_does(name, stage):
    adapter, tower = bound_adapter(name, stage), plain_model(name).get_submodule(FAMILIES[name].towers[stage])
    items = [item for sample in samples_of(name, "many") for item in adapter.split(sample)]
    assert len(items) > 3
    rows = adapter.rows(tower(**adapter.join(items)))
    assert {len(tensor) for tensor in rows} == {sum(map(adapter.num_rows, items))}
    assert sum(tensor.shape[1] for tensor in rows) == getattr(adapter, "row_width", 32)
    dummy = adapter.rows(tower(**adapter.join([adapter.dummy()])))
    assert len(dummy[0]) == adapter.num_rows(adapter.dummy())
    assert adapter.length(adapter.dummy()) <= min(map(adapter.length, items))
    assert min(adapter.cost()) >= 0
    assert adapter.cost()[1] > 0


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "whisper"])
def test_a_missing_placeholder_is_refused_before_anything_moves(name):
    sample = make_sample(name, 0, list(FAMILIES[name].media))
    media = torch.isin(sample["input_ids"], torch.tensor([5, 6, 9]))
    last = int(media.nonzero()[-1])
    sample["input_ids"][last] = 20
    model = make_model(name, "packed")
    with pytest.raises(Exception, match="Sample 's0': `input_ids` must hold a placeholder for each of"):
        list(orch.orchestrate(Groups([[sample]]), model, prefetch=0))


def test_pictures_that_come_together_in_llava_onevision():
    """One tile each, beside a sample whose single picture is several tiles."""
    name, text = "llava_onevision", make_sample("llava_onevision", 1)
    ids = torch.cat([torch.full((34,), 5), text["input_ids"]])
    together = {
        "id": "together",
        "input_ids": ids,
        "labels": torch.cat([torch.full((34,), -100), text["labels"]]),
        "pixel_values": torch.randn(2, 1, 3, 8, 8, generator=torch.Generator().manual_seed(1)),
        "image_sizes": torch.tensor([[15, 8], [16, 11]]),
        "batch_num_images": torch.tensor([2]),
    }
    samples = [make_sample(name, 2, ["image"]), together, make_sample(name, 4, ["image"])]
    expected_loss, expected = reference(name, samples)
    model = make_model(name, "packed")
    loss, _ = run(model, samples, "packed")
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert worst_error({key: p.grad for key, p in model.named_parameters()}, expected) < 1e-8
