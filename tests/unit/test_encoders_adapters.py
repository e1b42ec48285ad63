from __future__ import annotations

import pytest
import torch
from tiny_omni import build_thinker, tiny_thinker_config

from orch.encoders import adapter_for
from orch.encoders.registry import ADAPTER_METHODS

FRAMES = (3, 37, 100, 200, 333, 500)
GRIDS = ([1, 2, 2], [1, 4, 6], [3, 2, 8], [1, 10, 18], [2, 12, 4])


@pytest.fixture(scope="module")
def thinker():
    model = build_thinker(tiny_thinker_config(300, num_mel_bins=16), torch.float64)
    model.model.audio_tower.audio_bos_eos_token.requires_grad_(False)  # takes part in no forward
    return model


@pytest.fixture(scope="module")
def vision(thinker):
    return adapter_for(thinker.model.visual)


@pytest.fixture(scope="module")
def audio(thinker):
    return adapter_for(thinker.model.audio_tower)


def images(grids=GRIDS, width=1176, seed=0):
    grid = torch.tensor(grids)
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(int(grid.prod(1).sum()), width, dtype=torch.float64, generator=generator),
        "image_grid_thw": grid,
    }


def recordings(frames=FRAMES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_features": torch.randn(sum(frames), 16, dtype=torch.float64, generator=generator),
        "audio_feature_lengths": torch.tensor(frames),
    }


def case(name, vision, audio, thinker):
    if name == "vision":
        return vision, thinker.model.visual, vision.split(images())
    return audio, thinker.model.audio_tower, audio.split(recordings())


@pytest.mark.parametrize("name", ["vision", "audio"])
def test_packed_equals_one_by_one_in_outputs_and_gradients(name, vision, audio, thinker):
    adapter, encoder, items = case(name, vision, audio, thinker)
    parameters = [p for p in encoder.parameters() if p.requires_grad]

    packed = adapter.rows(encoder(**adapter.join(items)))[0]
    weight = torch.randn(packed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    packed_gradients = torch.autograd.grad((packed * weight).sum(), parameters)
    alone = torch.cat([adapter.rows(encoder(**adapter.join([item])))[0] for item in items])
    gradients = torch.autograd.grad((alone * weight).sum(), parameters)

    assert [adapter.num_rows(item) for item in items] == [
        len(adapter.rows(encoder(**adapter.join([item])))[0]) for item in items
    ]
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)
    for got, wanted in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("name", ["vision", "audio"])
def test_dummy_is_legal_and_smallest(name, vision, audio, thinker):
    adapter, encoder, items = case(name, vision, audio, thinker)
    dummy = adapter.dummy()
    assert adapter.num_rows(dummy) == 1
    assert adapter.length(dummy) <= min(adapter.length(item) for item in items)
    rows = adapter.rows(encoder(**adapter.join([dummy])))[0]
    rows.sum().backward()
    assert len(rows) == 1
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.requires_grad)
    encoder.zero_grad()
    assert adapter.split(dummy)[0].keys() == dummy.keys()


@pytest.mark.parametrize("name", ["vision", "audio"])
def test_split_gives_back_what_was_packed(name, vision, audio, thinker):
    _, _, items = case(name, vision, audio, thinker)
    sample = images() if name == "vision" else recordings()
    for key, value in sample.items():
        assert torch.equal(torch.cat([item[key] for item in items]), value)


def test_lengths_and_rows_are_those_of_the_model(vision, audio):
    assert [vision.length(item) for item in vision.split(images())] == [4, 24, 48, 180, 96]
    assert [vision.num_rows(item) for item in vision.split(images())] == [1, 6, 12, 45, 24]
    assert [audio.num_rows(item) for item in audio.split(recordings())] == [1, 9, 25, 50, 83, 125]


def test_images_come_before_videos_and_calls_say_who_is_served(vision):
    sample = images([[1, 2, 2], [1, 4, 2]])
    videos = images([[2, 2, 2]])
    sample |= {"pixel_values_videos": videos["pixel_values"], "video_grid_thw": videos["image_grid_thw"]}
    sample["video_second_per_grid"] = torch.tensor([0.5])
    parts = [vision.llm_part(item) for item in vision.split(sample)]
    assert [set(part) for part in parts] == [{"image_grid_thw"}] * 2 + [{"video_grid_thw", "video_second_per_grid"}]
    assert vision.calls(parts + parts) == [[0, 1, 3, 4], [2, 5]]
    assert vision.calls(parts[2:]) == [[0]]
    assert vision.calls([]) == []


def test_no_item_is_a_missing_key_or_an_empty_tensor(vision, audio):
    assert vision.split({}) == []
    assert vision.split({"pixel_values": torch.zeros(0, 1176), "image_grid_thw": torch.zeros(0, 3)}) == []
    assert audio.split({"input_features": torch.zeros(0, 16), "audio_feature_lengths": torch.zeros(0)}) == []
    assert vision.llm_inputs([]) == {}
    assert audio.llm_inputs([]) == {}
    assert audio.calls([]) == []


def test_disagreeing_keys_raise_and_name_the_key(vision, audio):
    sample = images()
    with pytest.raises(ValueError, match="`pixel_values` must have 352 rows"):
        vision.split(sample | {"pixel_values": sample["pixel_values"][1:]})
    with pytest.raises(ValueError, match=r"`pixel_values` must have 352 rows.*has 0"):
        vision.split({"image_grid_thw": sample["image_grid_thw"]})
    with pytest.raises(ValueError, match="`image_grid_thw` must be positive, height and width divisible by 2"):
        vision.split(images([[1, 3, 4]]))
    with pytest.raises(ValueError, match="`image_grid_thw` must have shape"):
        vision.split(sample | {"image_grid_thw": torch.ones(4)})
    with pytest.raises(ValueError, match="`video_second_per_grid` must have 0 rows"):
        vision.split({"video_second_per_grid": torch.ones(2)})
    with pytest.raises(ValueError, match="`input_features` must have 1173 rows"):
        audio.split(recordings() | {"input_features": torch.zeros(4, 16)})
    with pytest.raises(ValueError, match="`audio_feature_lengths` must be at least 3"):
        audio.split(recordings((2, 5)))


def test_uint8_pixels_are_normalised_and_frames_repeated(vision, thinker):
    pixels = torch.randint(0, 256, (4, 3, 2, 14, 14), dtype=torch.uint8)
    pixels[:, :, 1] = pixels[:, :, 0]
    grid = torch.tensor([[1, 2, 2]])
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073], dtype=torch.float64).view(3, 1, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711], dtype=torch.float64).view(3, 1, 1, 1)
    expected = ((pixels / 255.0 - mean) / std).reshape(4, -1)
    full = vision.join([{"pixel_values": pixels.reshape(4, -1), "image_grid_thw": grid}])["hidden_states"]
    frame = vision.join([{"pixel_values": pixels[:, :, 0].reshape(4, -1), "image_grid_thw": grid}])["hidden_states"]
    assert full.dtype == torch.float64
    torch.testing.assert_close(full, expected, rtol=0, atol=1e-6)
    assert torch.equal(full, frame)
    with pytest.raises(ValueError, match="`pixel_values` must have 1176 columns"):
        vision.join([{"pixel_values": pixels[:, 0].reshape(4, -1), "image_grid_thw": grid}])


def test_the_unmodified_model_takes_llm_inputs_and_output(vision, audio, thinker):
    """The towers are replaced by their rows, as a stage does it: same logits as from the real media."""
    from orch.encoders import MropePositionIds

    config = thinker.config
    sample = images([[1, 2, 4], [1, 4, 4]]) | recordings((37, 10))
    items, sounds = vision.split(sample), audio.split(sample)
    ids = [20]
    for item in items:
        ids += [3, *[config.image_token_id] * vision.num_rows(item), 4]
    for item in sounds:
        ids += [7, *[config.audio_token_id] * audio.num_rows(item), 8, 30]
    input_ids = torch.tensor(ids)
    parts = [vision.llm_part(item) for item in items]
    audio_parts = [audio.llm_part(item) for item in sounds]
    common = {"input_ids": input_ids[None], "position_ids": MropePositionIds.of(config)(input_ids, parts)[:, None]}
    mask = torch.arange(37)[None] < torch.tensor([[37], [10]])
    features = torch.zeros(2, 37, 16, dtype=torch.float64)
    features[mask] = sample["input_features"]
    real = thinker(
        **common,
        pixel_values=sample["pixel_values"],
        image_grid_thw=sample["image_grid_thw"],
        input_features=features.transpose(1, 2),
        feature_attention_mask=mask,
    ).logits

    towers = {thinker.model.visual: (vision, items), thinker.model.audio_tower: (audio, sounds)}
    inputs = vision.llm_inputs(parts) | audio.llm_inputs(audio_parts)
    assert sum(value.numel() for key, value in inputs.items() if key in ("pixel_values", "input_features")) == 0
    try:
        for tower, (adapter, of_tower) in towers.items():
            rows = adapter.rows(tower(**adapter.join(of_tower)))
            tower.forward = lambda *args, adapter=adapter, rows=rows, **kwargs: adapter.output(rows)
        routed = thinker(**common, **inputs).logits
    finally:
        for tower in towers:
            del tower.forward
    torch.testing.assert_close(routed, real, rtol=0, atol=1e-12)


def test_adapters_have_every_method_and_unknown_encoders_say_what_to_write(vision, audio):
    for adapter in (vision, audio):
        assert all(callable(getattr(adapter, method)) for method in ADAPTER_METHODS)
        assert all(cost >= 0 for cost in adapter.cost())
    with pytest.raises(ValueError, match=r"is Linear instead.*`split`.*`cost`"):
        adapter_for(torch.nn.Linear(1, 1))


def test_subclasses_are_found(thinker):
    class Mine(type(thinker.model.audio_tower)):
        pass

    assert type(adapter_for(Mine(thinker.config.audio_config))).__name__ == "QwenOmniAudioAdapter"


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_vision_towers_of_the_vl_models(family):
    tower, width = _vl_tower(family)
    adapter = adapter_for(tower)
    items = adapter.split(images([[1, 4, 4], [2, 2, 6]], width))
    packed = adapter.rows(tower(**adapter.join(items)))[0]
    alone = torch.cat([adapter.rows(tower(**adapter.join([item])))[0] for item in items])
    assert len(packed) == sum(adapter.num_rows(item) for item in items)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)
    assert adapter.cost()[1] > 0


def _vl_tower(family):
    if family == "qwen2_vl":
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig as Config
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel as Tower

        config = Config(depth=2, embed_dim=32, hidden_size=48, num_heads=2, mlp_ratio=2, patch_size=14)
    else:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig as Config
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel as Tower,
        )

        config = Config(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=48)
    return Tower(config).double(), 1176
