from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_omni import build_thinker, tiny_thinker_config

from orch.encoders import MropePositionIds, adapter_for

TEXT = 40


@functools.cache
def thinker():
    return build_thinker(tiny_thinker_config(64, hidden_size=32, num_layers=2, num_mel_bins=8))


side = st.integers(1, 5).map(lambda n: 2 * n)
image = st.tuples(st.just("image"), st.tuples(st.just(1), side, side))
video = st.tuples(st.just("video"), st.tuples(st.integers(1, 6), side, side), st.sampled_from([0.5, 1.0, 0.37, 1.7]))
audio = st.tuples(st.just("audio"), st.integers(3, 300))
text = st.tuples(st.just("text"), st.integers(1, 7))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(image, video, audio, text), min_size=1, max_size=8))
def test_equals_the_models_own_loop(elements):
    elements = [("text", 1), *elements]
    ids, parts, lengths = _sample(elements)
    model = thinker().model
    grids = {name: [part[name] for part in parts if name in part] for name in ("image_grid_thw", "video_grid_thw")}
    seconds = [part["video_second_per_grid"] for part in parts if "video_second_per_grid" in part]
    expected, _ = model.get_rope_index(
        ids[None],
        torch.cat(grids["image_grid_thw"]) if grids["image_grid_thw"] else None,
        torch.cat(grids["video_grid_thw"]) if grids["video_grid_thw"] else None,
        torch.ones_like(ids)[None],
        audio_seqlens=torch.tensor(lengths),
        second_per_grids=torch.cat(seconds) if seconds else None,
    )
    got = MropePositionIds.of(thinker().config)(ids, parts)
    assert got.dtype == torch.int64
    assert torch.equal(got, expected[:, 0])


def _sample(elements):
    """Tokens, parts (images before videos) and frames of recordings."""
    config, sounds = thinker().config, adapter_for(thinker().model.audio_tower)
    ids, parts, lengths = [], [], []
    for kind, *value in elements:
        if kind == "text":
            ids += [TEXT] * value[0]
        elif kind == "audio":
            rows = sounds.num_rows({"audio_feature_lengths": torch.tensor(value)})
            ids += [7, *[config.audio_token_id] * rows, 8]
            lengths += value
        else:
            token = config.image_token_id if kind == "image" else config.video_token_id
            ids += [3, *[token] * (int(np.prod(value[0])) // 4), 4]
            parts.append({f"{kind}_grid_thw": torch.tensor([value[0]])})
            if kind == "video":
                parts[-1]["video_second_per_grid"] = torch.tensor([value[1]])
    return torch.tensor(ids), sorted(parts, key=lambda part: "video_grid_thw" in part), lengths


def test_placeholders_that_do_not_match_raise():
    position_ids = MropePositionIds.of(thinker().config)
    with pytest.raises(ValueError, match=r"must have 1 tokens `image_token_id`.* has 2"):
        position_ids(torch.tensor([5, 5]), [{"image_grid_thw": torch.tensor([[1, 2, 2]])}])
    with pytest.raises(ValueError, match="must have 0 tokens `video_token_id`"):
        position_ids(torch.tensor([6, 1]))
