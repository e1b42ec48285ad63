"""Positions of every M-RoPE model equal those of its own `get_rope_index`; LLMs that pack keep samples apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.encoders import MropePositionIds
from orch.encoders.backbone import PACKABLE, collator_for
from orch.encoders.mrope import MROPE_MODELS
from orch.encoders.packing import use_packed_attention
from tests.families import AUDIO, END, IMAGE, SOUND_END, SOUND_START, START, TEXT, VIDEO
from tests.models import plain_model

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni", "qwen3_omni")
side = st.integers(1, 5).map(lambda n: 2 * n)
image = st.tuples(st.just("image"), st.tuples(st.just(1), side, side))
video = st.tuples(
    st.just("video"), st.tuples(st.integers(1, 6), side, side), st.sampled_from([0.5, 1.0, 0.37, 1.7, 2.0001])
)
audio = st.tuples(st.just("audio"), st.integers(1, 4))
text = st.tuples(st.just("text"), st.integers(1, 7))
samples = st.lists(st.one_of(image, video, audio, text), min_size=1, max_size=8)


def tokens_and_parts(elements, apart, seconds_key):
    """Tokens and parts, images before videos; a recording of n tokens lasts 100 n / 13 frames or so."""
    ids, parts = [40], []
    for kind, *value in elements:
        if kind == "text":
            ids += [40] * value[0]
        elif kind == "audio":
            ids += [SOUND_START, *[AUDIO] * value[0], SOUND_END]
        else:
            frames, rows, columns = value[0]
            in_frame = [IMAGE if kind == "image" else VIDEO] * (rows * columns // 4)
            ids += [41, START, *in_frame, END] * frames if apart else [START, *in_frame * frames, END]
            parts.append({f"{kind}_grid_thw": torch.tensor([value[0]])})
            if kind == "video" and seconds_key:
                parts[-1][seconds_key] = torch.tensor([value[1]])
    return torch.tensor(ids), sorted(parts, key=lambda part: "video_grid_thw" in part)


def own_positions(name, ids, parts, elements):
    """The model's own, [3, L]."""
    grids = {
        key: torch.cat(found) if (found := [part[key] for part in parts if key in part]) else None
        for key in ("image_grid_thw", "video_grid_thw")
    }
    seconds = [value for part in parts for key, value in part.items() if "second" in key]
    seconds = torch.cat(seconds) if seconds else None
    if "omni" not in name:
        types = ((ids == IMAGE).long() + 2 * (ids == VIDEO))[None]
        return plain_model(name).model.get_rope_index(ids[None], types, **grids, second_per_grid_ts=seconds)[0][:, 0]
    lengths = torch.tensor([frames_of(name, value[0]) for kind, *value in elements if kind == "audio"])
    model = plain_model(name) if name == "qwen3_omni" else plain_model(name).model
    args = {"attention_mask": torch.ones_like(ids)[None], "audio_seqlens": lengths, "second_per_grids": seconds}
    return model.get_rope_index(ids[None], **grids, **args)[0][:, 0]


def frames_of(name, num_tokens):
    """Frames that give so many tokens."""
    return 8 * num_tokens if name == "qwen3_omni" else 4 * num_tokens


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=100)
@given(elements=samples)
def test_positions_equal_the_models_own(name, elements):
    positions = MropePositionIds.of(plain_model(name).config)
    ids, parts = tokens_and_parts(elements, positions.frames_apart, positions.seconds_key)
    expected = own_positions(name, ids, parts, elements)
    got = positions(ids, parts)
    if name == "qwen3_omni":  # the model adds fractions up in float32, token by token
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
    else:
        assert torch.equal(got, expected)


def test_every_kind_of_positions_is_tested():
    tested = {plain_model(name).config.model_type for name in MODELS}
    assert tested == set(MROPE_MODELS)


def test_unknown_positions_are_refused():
    config = plain_model("qwen2_vl").config
    config.model_type = "other_vl"
    try:
        with pytest.raises(ValueError, match=r"`model` must be one of qwen2_vl, .* but is other_vl instead"):
            collator_for(plain_model("qwen2_vl"), "padded")
    finally:
        config.model_type = "qwen2_vl"


def language_model(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {} if kind == "gpt2" else {key: value for key, value in TEXT.items() if key != "pad_token_id"}
    given |= {"qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}}.get(kind, {})
    given |= {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}}.get(kind, {})
    config = AutoConfig.for_model(kind, **given, **({"sliding_window": None} if kind in ("mistral", "phi3") else {}))
    config.pad_token_id = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    if kind == "qwen3_moe":
        model.set_experts_implementation("eager")
    return model.double()


TEXT_ONLY = tuple(kind for kind in PACKABLE if not kind.startswith("qwen") or kind in ("qwen2", "qwen3", "qwen3_moe"))


@pytest.mark.parametrize("attention", ["sdpa", "packed"])
@pytest.mark.parametrize("kind", TEXT_ONLY)
def test_packed_samples_do_not_see_each_other(kind, attention):
    """The LLMs of M-RoPE models are tested with their models."""
    model = language_model(kind)
    ids = torch.arange(12, 28)
    samples = [{"input_ids": part, "labels": part} for part in (ids[:7], ids[7:])]
    alone = torch.cat([model(input_ids=part["input_ids"][None], use_cache=False).logits for part in samples], dim=1)
    batch = collator_for(model, "packed")(samples, {})
    batch.pop("labels")
    packed = (use_packed_attention(model) if attention == "packed" else model)(**batch).logits
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-6)  # rotary embeddings are computed in float32


@pytest.mark.parametrize("kind", ["opt", "gpt2", "mamba", "lfm2"])
def test_packing_is_refused_where_samples_may_see_each_other(kind):
    from types import SimpleNamespace

    config = SimpleNamespace(model_type=kind, pad_token_id=0)
    config.get_text_config = lambda: config
    with pytest.raises(ValueError, match=f"`layout` must be 'padded' for an LLM of kind '{kind}'.*but is 'packed'"):
        collator_for(SimpleNamespace(config=config), "packed")
    assert collator_for(SimpleNamespace(config=config), "padded").pad_token_id == 0


def test_packed_attention_is_refused_with_sliding_windows():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gemma3_text", **TEXT, sliding_window=4, layer_types=["sliding_attention"] * 2)
    with pytest.raises(ValueError, match=r"`model` must have an LLM of full attention, but has \['sliding_att"):
        use_packed_attention(AutoModelForCausalLM.from_config(config))
