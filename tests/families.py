"""Very small models of every family that is served, and items for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCAB, BINS, TILE = 64, 8, 8
START, END, IMAGE, VIDEO, SOUND_START, SOUND_END, AUDIO = 3, 4, 5, 6, 7, 8, 9
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LLM, QWEN = TEXT | {"model_type": "llama"}, TEXT | {"model_type": "qwen2"}
MTEXT = TEXT | {"rope_parameters": MROPE}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
PATCHES = {"depth": 2, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
GATED = PATCHES | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
DEEP = GATED | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
WINDOWED = GATED | {"window_size": 8, "fullatt_block_indexes": [1]}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TILES = TOWER | {"image_size": TILE, "patch_size": 2}
SOUND = {"num_mel_bins": BINS, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16}

Media = tuple[list[int], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        build: Makes the model.
        towers: The paths of the encoders by stage name.
        media: For each kind a function (model, generator, size from 0) to the tokens of an item and its tensors.
        plain: A sample's keys to arguments of the model, beside `input_ids`.
    """

    build: Callable[[], nn.Module]
    towers: Mapping[str, str]
    media: Mapping[str, Callable[..., Media]]
    plain: Callable[[dict[str, Any]], dict[str, Any]]


def patches(grid: list[int], rng: torch.Generator, kind: str) -> dict[str, torch.Tensor]:
    key = "pixel_values" if kind == "image" else "pixel_values_videos"
    pixels = torch.randn(grid[0] * grid[1] * grid[2], 3 * 2 * 4, generator=rng)
    return {key: pixels, f"{kind}_grid_thw": torch.tensor([grid])}


def grid_image(model: Any, rng: torch.Generator, size: int) -> Media:
    grid = [1, 4, 4 + 2 * size]
    return [START, *[IMAGE] * (grid[1] * grid[2] // 4), END], patches(grid, rng, "image")


def grid_video(model: Any, rng: torch.Generator, size: int, seconds: str = "", apart: bool = False) -> Media:
    grid = [2 + size, 2, 4]
    tensors = patches(grid, rng, "video") | ({seconds: torch.tensor([0.5 + 0.25 * size])} if seconds else {})
    if apart:
        return [token for frame in range(grid[0]) for token in (20 + frame, START, VIDEO, VIDEO, END)], tensors
    return [START, *[VIDEO] * (2 * grid[0]), END], tensors


def tile_image(model: Any, rng: torch.Generator, size: int, tokens: int) -> Media:
    return [IMAGE] * tokens * (1 + size), {"pixel_values": torch.randn(1 + size, 3, TILE, TILE, generator=rng)}


def one_tile(model: Any, rng: torch.Generator, size: int, tokens: int) -> Media:
    return tile_image(model, rng, 0, tokens)


def any_size_image(model: Any, rng: torch.Generator, size: int) -> Media:
    """A picture of 1 by 1, 2 by 1 or 2 by 2 tiles, cropped to its shape; as many tokens as the plain model makes."""
    height, width = [(8, 8), (15, 8), (16, 11)][size]
    pixels = torch.randn(2 + size + size // 2, 3, TILE, TILE, generator=rng)
    sizes = torch.tensor([[height, width]])
    with torch.no_grad():
        features = model.get_image_features(pixels.double(), sizes).pooler_output
    return [IMAGE] * len(features[0]), {"pixel_values": pixels, "image_sizes": sizes}


def tile_video(model: Any, rng: torch.Generator, size: int) -> Media:
    return [VIDEO] * (3 * 4 + 1), {"pixel_values_videos": torch.randn(1, 3, 3, TILE, TILE, generator=rng)}


def window(model: Any, rng: torch.Generator, size: int) -> Media:
    """A recording of some frames in a window of 32."""
    frames = 9 + 7 * size
    features = torch.randn(1, BINS, 32, generator=rng)
    mask = (torch.arange(32) < frames).long()[None]
    num_tokens = ((frames - 1) // 2 + 1 - 2) // 2 + 1
    return [SOUND_START, *[AUDIO] * num_tokens], {"input_features": features, "feature_attention_mask": mask}


def whole_window(model: Any, rng: torch.Generator, size: int) -> Media:
    return [AUDIO] * 16, {"input_features": torch.randn(1, BINS, 32, generator=rng)}


def frames(model: Any, rng: torch.Generator, size: int, of_sizes: tuple[tuple[int, int], ...]) -> Media:
    """Packed frames of a recording for the Omnis, of one of some (number of frames, number of tokens)."""
    length, num_tokens = of_sizes[size]
    features = torch.randn(length, BINS, generator=rng)
    tensors = {"input_features": features, "audio_feature_lengths": torch.tensor([length])}
    return [SOUND_START, *[AUDIO] * num_tokens, SOUND_END], tensors


def typed(sample: dict[str, Any]) -> dict[str, Any]:
    """What Qwen-VL's own positions need: the type of each token."""
    ids = sample["input_ids"]
    return sample | {"mm_token_type_ids": ((ids == IMAGE).long() + 2 * (ids == VIDEO))[None]}


def masked_frames(sample: dict[str, Any]) -> dict[str, Any]:
    """What the Omnis want: padded features and a mask."""
    if "input_features" not in sample:
        return sample
    lengths = sample.pop("audio_feature_lengths")
    pieces = sample["input_features"].split(lengths.tolist())
    padded = nn.utils.rnn.pad_sequence(pieces, batch_first=True).transpose(1, 2)
    mask = (torch.arange(padded.shape[-1])[None] < lengths[:, None]).long()
    return sample | {"input_features": padded, "feature_attention_mask": mask}


class WhisperLlama(nn.Module):
    """A model of one's own around Whisper's encoder, in transformers' manner."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM, WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        self.config = LlamaConfig(**TEXT)
        self.encoder = WhisperEncoder(WhisperConfig(**SOUND, max_source_positions=16))
        self.projector = nn.Linear(16, 32)
        self.llm = LlamaForCausalLM(self.config)

    def get_input_embeddings(self) -> nn.Module:
        return self.llm.get_input_embeddings()

    def get_audio_features(self, input_features: torch.Tensor) -> Any:
        output = self.encoder(input_features)
        output.pooler_output = self.projector(output.last_hidden_state)
        return output

    def forward(self, input_ids: torch.Tensor, input_features: torch.Tensor | None = None, **kwargs: Any) -> Any:
        embeds = self.get_input_embeddings()(input_ids)
        if input_features is not None:
            rows = self.get_audio_features(input_features).pooler_output
            embeds = embeds.masked_scatter((input_ids == AUDIO)[..., None], rows)
        return self.llm(inputs_embeds=embeds, **kwargs)


def of(name: str, module: str, config: str, **kwargs: Any) -> Callable[[], nn.Module]:
    """A function that builds a model of transformers from the names of its classes."""

    def build() -> nn.Module:
        import importlib

        home = f"transformers.models.{module}"
        modeling = importlib.import_module(f"{home}.modeling_{module}")
        configuration = importlib.import_module(f"{home}.configuration_{module}")
        return getattr(modeling, name)(getattr(configuration, config)(**kwargs))

    return build


VISUAL = {"vision": "model.visual"}
TILED = {"vision": "model.vision_tower"}
BOTH = {"vision": "model.visual", "audio": "model.audio_tower"}
short_frames = functools.partial(frames, of_sizes=((9, 2), (37, 9), (50, 12)))
long_frames = functools.partial(frames, of_sizes=((100, 13), (109, 15), (230, 30)))  # a second or more: see the adapter
scaled_video = functools.partial(grid_video, seconds="video_second_per_grid")
FAMILIES = {
    "qwen2_vl": Family(
        of("Qwen2VLForConditionalGeneration", "qwen2_vl", "Qwen2VLConfig", text_config=MTEXT,
           vision_config=PATCHES | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, **IDS),
        VISUAL, {"image": grid_image, "video": grid_video}, typed,
    ),
    "qwen2_5_vl": Family(
        of("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "Qwen2_5_VLConfig", text_config=MTEXT,
           vision_config=WINDOWED | {"tokens_per_second": 4}, **IDS),
        VISUAL, {"image": grid_image, "video": functools.partial(grid_video, seconds="second_per_grid_ts")}, typed,
    ),
    "qwen3_vl": Family(
        of("Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3VLConfig", text_config=MTEXT,
           vision_config=DEEP, **IDS),
        VISUAL, {"image": grid_image, "video": functools.partial(grid_video, apart=True)}, typed,
    ),
    "qwen3_vl_moe": Family(
        of("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "Qwen3VLMoeConfig", text_config=MTEXT | EXPERTS,
           vision_config=DEEP, **IDS),
        VISUAL, {"image": grid_image, "video": functools.partial(grid_video, apart=True)}, typed,
    ),
    "qwen2_5_omni": Family(
        of("Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni", "Qwen2_5OmniThinkerConfig", text_config=MTEXT,
           vision_config=WINDOWED, audio_config=SOUND | {"output_dim": 32, "n_window": 8},
           image_token_index=IMAGE, video_token_index=VIDEO, audio_token_index=AUDIO,
           vision_start_token_id=START, vision_end_token_id=END,
           audio_start_token_id=SOUND_START, audio_end_token_id=SOUND_END),
        BOTH, {"image": grid_image, "video": scaled_video, "audio": short_frames}, masked_frames,
    ),
    "qwen3_omni": Family(
        of("Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe", "Qwen3OmniMoeThinkerConfig",
           text_config=MTEXT | EXPERTS,
           vision_config=DEEP, audio_config=SOUND | {"downsample_hidden_size": 4, "output_dim": 32},
           audio_token_id=AUDIO, audio_start_token_id=SOUND_START, **IDS),
        BOTH, {"image": grid_image, "video": scaled_video, "audio": long_frames}, masked_frames,
    ),
    "llava_clip": Family(
        of("LlavaForConditionalGeneration", "llava", "LlavaConfig", text_config=LLM, image_token_index=IMAGE,
           vision_config=TILES | {"model_type": "clip_vision_model"}),
        TILED, {"image": functools.partial(one_tile, tokens=16)}, dict,
    ),
    "llava_siglip": Family(
        of("LlavaForConditionalGeneration", "llava", "LlavaConfig", text_config=QWEN, image_token_index=IMAGE,
           vision_config=TILES | {"model_type": "siglip_vision_model"}, vision_feature_layer=[-2, -1],
           vision_feature_select_strategy="full"),
        TILED, {"image": functools.partial(one_tile, tokens=16)}, dict,
    ),
    "llava_onevision": Family(
        of("LlavaOnevisionForConditionalGeneration", "llava_onevision", "LlavaOnevisionConfig", text_config=QWEN,
           image_token_index=IMAGE, video_token_index=VIDEO, image_grid_pinpoints=[[8, 8], [16, 8], [16, 16]],
           vision_config=TILES | {"model_type": "siglip_vision_model", "vision_use_head": False}),
        TILED, {"image": any_size_image, "video": tile_video}, dict,
    ),
    "internvl": Family(
        of("InternVLForConditionalGeneration", "internvl", "InternVLConfig", text_config=QWEN, image_token_id=IMAGE,
           vision_config=TILES),
        TILED, {"image": functools.partial(tile_image, tokens=4)}, dict,
    ),
    "qwen2_audio": Family(
        of("Qwen2AudioForConditionalGeneration", "qwen2_audio", "Qwen2AudioConfig", text_config=QWEN,
           audio_config=SOUND | {"model_type": "qwen2_audio_encoder", "max_source_positions": 16},
           audio_token_index=AUDIO),
        {"audio": "model.audio_tower"}, {"audio": window}, dict,
    ),
    "whisper": Family(WhisperLlama, {"audio": "encoder"}, {"audio": whole_window}, dict),
}  # fmt: skip
