"""Adapters of fixed-size tiles and windows: what they count and what they refuse."""

from __future__ import annotations

import pytest
import torch

from orch.encoders.registry import adapter_for
from tests.families import TILE
from tests.models import bound_adapter, make_sample, plain_logits, plain_model, unused_parameters


@pytest.fixture
def onevision():
    return bound_adapter("llava_onevision", "vision")


def test_rows_and_tokens_of_a_tile():
    counted = {}
    for name in ("llava_clip", "llava_siglip", "internvl"):
        adapter = bound_adapter(name, "vision")
        counted[name] = adapter.num_rows(adapter.dummy()), adapter.num_tokens(adapter.dummy())
    assert counted == {"llava_clip": (17, 16), "llava_siglip": (16, 16), "internvl": (17, 4)}


def test_pictures_that_come_together_are_a_tile_each(onevision):
    pixels, sizes = torch.randn(2, 3, 3, TILE, TILE), torch.tensor([[15, 8], [16, 11]])
    apart = onevision.split({"pixel_values": pixels[:1], "image_sizes": sizes[:1]})
    together = {"pixel_values": pixels[:, :1], "image_sizes": sizes, "batch_num_images": torch.tensor([2])}
    items = onevision.split(together)
    assert [len(item["pixel_values"]) for item in apart] == [3]
    assert [len(item["pixel_values"]) for item in items] == [1, 1]
    assert [onevision.num_tokens(item) for item in items] == [17, 17]  # 16 and the line break
    kwargs = onevision.llm_inputs([onevision.llm_part(item) for item in [*apart, *items, *apart]])
    assert kwargs["batch_num_images"].tolist() == [1, 2, 1]


def test_tokens_of_any_size_are_those_that_the_model_makes(onevision):
    sample = make_sample("llava_onevision", 2, ["image", "video"])
    assert [onevision.num_tokens(item) for item in onevision.split(sample)] == [
        int((sample["input_ids"] == 5).sum()),
        int((sample["input_ids"] == 6).sum()),
    ]
    plain_logits("llava_onevision", sample)  # raises if they are not


def test_videos_of_different_lengths_cannot_be_in_one_batch(onevision):
    parts = [{"num_frames": torch.tensor([frames])} for frames in (3, 5)]
    with pytest.raises(
        ValueError, match=r"`pixel_values_videos` must have one number of frames.*have \[3, 5\] instead"
    ):
        onevision.llm_inputs(parts)


def test_what_does_not_fit_is_refused(onevision):
    tiles, audio = bound_adapter("llava_clip", "vision"), bound_adapter("qwen2_audio", "audio")
    one, few = torch.tensor([[8, 8]]), (torch.arange(32) < 6).long()[None]
    with pytest.raises(ValueError, match=r"`pixel_values` must end in the shape \[3, 8, 8\], but is \[1, 3, 8, 9\]"):
        tiles.split({"pixel_values": torch.zeros(1, 3, 8, 9)})
    with pytest.raises(ValueError, match="`pixel_values` must have 5 rows, as `image_sizes` says, but has 2"):
        onevision.split({"pixel_values": torch.zeros(2, 3, 8, 8), "image_sizes": torch.tensor([[16, 16]])})
    with pytest.raises(ValueError, match="`batch_num_images` must be 1, but is 2"):
        onevision.split({"pixel_values": torch.zeros(2, 3, 8, 8), "image_sizes": one, "batch_num_images": [2]})
    with pytest.raises(ValueError, match=r"`input_features` must have shape \[n, 8, 32\], but has \[1, 8, 30\]"):
        audio.split({"input_features": torch.zeros(1, 8, 30)})
    with pytest.raises(ValueError, match="`feature_attention_mask` must have 1 rows, but has 0"):
        audio.split({"input_features": torch.zeros(1, 8, 32)})
    with pytest.raises(ValueError, match="`feature_attention_mask` must have at least 7 frames in each row, but has 6"):
        audio.split({"input_features": torch.zeros(1, 8, 32), "feature_attention_mask": few})


def test_pixels_of_uint8_are_normalised():
    adapter = bound_adapter("llava_siglip", "vision")
    pixels = torch.randint(0, 256, (2, 3, TILE, TILE), dtype=torch.uint8)
    joined = adapter.join(adapter.split({"pixel_values": pixels}))["pixel_values"]
    torch.testing.assert_close(joined, (pixels.double() / 255 - 0.5) / 0.5, rtol=0, atol=1e-12)


def test_a_tower_in_a_model_of_ones_own_gives_its_last_hidden_state():
    tower = plain_model("llava_siglip").model.vision_tower
    adapter = adapter_for(tower).bind(object())
    items = adapter.split({"pixel_values": torch.randn(2, 3, TILE, TILE)})
    (rows,) = adapter.rows(tower(**adapter.join(items)))
    assert rows.shape == (32, 16)
    assert adapter.output((rows,)).last_hidden_state.shape == (2, 16, 16)
    assert adapter.idle(torch.nn.Identity(), []) == []


def test_what_takes_part_in_no_forward_is_the_end_of_the_tower():
    """The model reads an inner layer: DDP and the like want the rest frozen, with orch as without."""
    assert all("layers.1." in key or "post_layernorm" in key for key in unused_parameters("llava_clip"))
    assert unused_parameters("internvl") == set()
