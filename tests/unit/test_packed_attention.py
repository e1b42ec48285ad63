from __future__ import annotations

import copy

import pytest
import torch
from tiny_omni import build_thinker, tiny_thinker_config

from orch.encoders import MropePositionIds, PackedCollator, PaddedCollator, adapter_for, use_packed_attention
from orch.encoders.packing import PACKED_ATTENTION

VOCABULARY = 64


@pytest.fixture(scope="module")
def thinker():
    return use_packed_attention(
        build_thinker(tiny_thinker_config(VOCABULARY, hidden_size=32, num_layers=3, num_mel_bins=8), torch.float64)
    )


def sample(seed, num_text, grids=(), frames=()):
    """Text around images and recordings, and what the towers are given."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, VOCABULARY, (num_text,), generator=generator)
    for grid in grids:
        ids = torch.cat([torch.tensor([3, *[5] * (grid[1] * grid[2] // 4), 4]), ids])
    for n in frames:
        ids = torch.cat([ids[:1], torch.tensor([7, *[9] * (((n - 1) // 2 - 1) // 2 + 1), 8]), ids[1:]])
    labels = torch.where(ids < 20, -100, ids)
    media = {}
    if grids:
        rows = sum(t * h * w for t, h, w in grids)
        media["pixel_values"] = torch.randn(rows, 1176, dtype=torch.float64, generator=generator)
        media["image_grid_thw"] = torch.tensor(grids)
    if frames:
        media["input_features"] = torch.randn(sum(frames), 8, dtype=torch.float64, generator=generator)
        media["audio_feature_lengths"] = torch.tensor(frames)
    return {"input_ids": ids, "labels": labels, **media}


SAMPLES = [
    sample(0, 17, grids=[(1, 4, 6)]),
    sample(1, 1),
    sample(2, 9, frames=[33, 5]),
    sample(3, 40, grids=[(1, 2, 2), (1, 6, 4)], frames=[60]),
    sample(4, 23),
]


def batch(thinker, samples, collator):
    """Collated samples with their real media, as the model itself takes them."""
    adapters = {"vision": adapter_for(thinker.model.visual), "audio": adapter_for(thinker.model.audio_tower)}
    parts = {
        name: [[adapter.llm_part(item) for item in adapter.split(one)] for one in samples]
        for name, adapter in adapters.items()
    }
    kwargs = collator(samples, parts)
    pixels = [one["pixel_values"] for one in samples if "pixel_values" in one]
    if pixels:
        kwargs["pixel_values"] = torch.cat(pixels)
        kwargs["image_grid_thw"] = torch.cat([one["image_grid_thw"] for one in samples if "pixel_values" in one])
    sounds = [item["input_features"] for one in samples for item in adapters["audio"].split(one)]
    if sounds:
        kwargs["input_features"] = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True).transpose(1, 2)
        lengths = torch.tensor([len(sound) for sound in sounds])
        kwargs["feature_attention_mask"] = torch.arange(int(lengths.max())) < lengths[:, None]
    return kwargs


def run(model, kwargs, keep=None):
    """Logits of real tokens in the order of samples, and gradients of the summed loss in fp64."""
    labels = kwargs.pop("labels")
    logits = model(**kwargs).logits
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum")
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    mask = kwargs.get("attention_mask", torch.ones_like(labels)).bool()
    zeros = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
    return logits[mask].detach(), zeros


def one_by_one(thinker, samples):
    """Each sample in a model with plain causal attention, gradients added."""
    plain = copy.deepcopy(thinker)
    plain.set_attn_implementation("sdpa")
    position_ids = MropePositionIds.of(thinker.config)
    runs = [run(plain, batch(plain, [one], PaddedCollator(0, position_ids))) for one in samples]
    gradients = [sum(of_runs) for of_runs in zip(*(gradients for _, gradients in runs), strict=True)]
    return torch.cat([logits for logits, _ in runs]), gradients


def assert_same(got, wanted):
    torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=1e-10)
    for gradient, expected in zip(got[1], wanted[1], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


def packed(thinker):
    return PackedCollator(MropePositionIds.of(thinker.config))


def test_packed_equals_one_by_one(thinker):
    assert_same(run(thinker, batch(thinker, SAMPLES, packed(thinker))), one_by_one(thinker, SAMPLES))


def test_padded_equals_one_by_one(thinker):
    collator = PaddedCollator(0, MropePositionIds.of(thinker.config))
    assert_same(run(thinker, batch(thinker, SAMPLES, collator)), one_by_one(thinker, SAMPLES))


def test_packed_equals_one_by_one_under_gradient_checkpointing(thinker):
    checkpointed = copy.deepcopy(thinker)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    kwargs = batch(checkpointed, SAMPLES, packed(thinker))
    kwargs["position_ids"] = kwargs["position_ids"][1:]  # boundaries come from `cu_seq_lens_q` alone
    assert_same(run(checkpointed, kwargs), one_by_one(thinker, SAMPLES))


def test_boundaries_follow_from_positions_that_restart(thinker):
    kwargs = batch(thinker, SAMPLES, packed(thinker))
    for key in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        del kwargs[key]
    assert_same(run(thinker, kwargs), one_by_one(thinker, SAMPLES))


def test_a_cache_does_not_make_samples_leak(thinker):
    kwargs = batch(thinker, SAMPLES, packed(thinker)) | {"use_cache": True}
    torch.testing.assert_close(run(thinker, kwargs)[0], one_by_one(thinker, SAMPLES)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("wrong", ["no boundaries and 3 rows", "default cache in sdpa"])
def test_samples_leak_where_they_must_and_the_comparison_sees_it(thinker, wrong):
    """The ways in which packing goes wrong in silence: the same comparison fails on them."""
    kwargs = batch(thinker, SAMPLES, packed(thinker))
    model = thinker
    if wrong == "no boundaries and 3 rows":
        kwargs["position_ids"] = kwargs["position_ids"][1:]
        del kwargs["cu_seq_lens_q"]
    else:
        model = copy.deepcopy(thinker)
        model.set_attn_implementation("sdpa")
        kwargs["use_cache"] = True
    difference = (run(model, kwargs)[0] - one_by_one(thinker, SAMPLES)[0]).abs().max()
    assert difference > 1e-3
    first = len(SAMPLES[0]["input_ids"])
    assert (run(model, batch(thinker, SAMPLES, packed(thinker)))[0] - one_by_one(thinker, SAMPLES)[0])[
        :first
    ].abs().max() < 1e-10


def test_no_dense_mask_is_built(thinker, monkeypatch):
    shapes = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **kwargs):
        shapes.append((query.shape[2], key.shape[2], attn_mask))
        return attention(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    lengths = [len(one["input_ids"]) for one in SAMPLES]
    kwargs = batch(thinker, SAMPLES, packed(thinker))
    for key in ("pixel_values", "image_grid_thw", "input_features", "feature_attention_mask"):
        del kwargs[key]
    run(thinker, kwargs)
    assert [(q, k) for q, k, _ in shapes] == [(n, n) for n in lengths] * 3
    assert all(mask is None for *_, mask in shapes)


def test_padding_on_the_left_and_generation_keep_the_mask(thinker):
    ids = torch.randint(20, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(5))
    left = torch.cat([torch.zeros(1, 4, dtype=torch.int64), ids], dim=1)
    mask = (torch.arange(13) >= 4).long()[None]
    with torch.no_grad():
        alone = thinker(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
        padded = thinker(input_ids=left, attention_mask=mask).logits[0, -1]
        plain = copy.deepcopy(thinker)
        plain.set_attn_implementation("sdpa")
        ours, theirs = (
            model.generate(left, attention_mask=mask, max_new_tokens=6, do_sample=False) for model in (thinker, plain)
        )
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-10)
    assert torch.equal(ours, theirs)


def test_only_the_llm_is_switched(thinker):
    assert thinker.model.language_model.config._attn_implementation == PACKED_ATTENTION
    assert thinker.model.visual.config._attn_implementation == "sdpa"
    assert thinker.model.audio_tower.config._attn_implementation == "sdpa"


def test_a_plain_llm_is_switched_whole_and_packs():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = use_packed_attention(Qwen2ForCausalLM(config).double())
    texts = [sample(seed, length) for seed, length in enumerate([5, 1, 30])]
    kwargs = PackedCollator()(texts, {})
    labels = kwargs.pop("labels")
    assert kwargs["position_ids"].shape == labels.shape
    alone = torch.cat([model(input_ids=one["input_ids"][None]).logits[0] for one in texts])
    torch.testing.assert_close(model(**kwargs).logits[0], alone, rtol=0, atol=1e-10)


def test_boundaries_that_do_not_cover_the_row_raise(thinker):
    kwargs = batch(thinker, SAMPLES, packed(thinker))
    kwargs["cu_seq_lens_q"] = kwargs["cu_seq_lens_q"][:-1]
    with pytest.raises(ValueError, match="`cu_seq_lens_q` must end at"):
        run(thinker, kwargs)


def test_first_labels_are_ignored_and_shapes_are_as_said(thinker):
    kwargs = batch(thinker, SAMPLES, packed(thinker))
    total = sum(len(one["input_ids"]) for one in SAMPLES)
    assert kwargs["input_ids"].shape == kwargs["labels"].shape == (1, total)
    assert kwargs["position_ids"].shape == (4, 1, total)
    assert (kwargs["labels"][0, kwargs["cu_seq_lens_q"][:-1].long()] == -100).all()
    assert SAMPLES[4]["labels"][0] != -100, "the sample's own labels must stay as they were"
    assert kwargs["max_length_q"] == max(len(one["input_ids"]) for one in SAMPLES)


def test_collators_refuse_what_they_cannot_collate():
    with pytest.raises(ValueError, match="`samples` must not be empty"):
        PackedCollator()([], {})
    one = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1])}
    with pytest.raises(ValueError, match="must be two vectors of one length"):
        PaddedCollator(0)([one], {})
    with pytest.raises(ValueError, match=r"`parts\['vision'\]` must have 1 lists"):
        PackedCollator()([SAMPLES[1]], {"vision": []})
