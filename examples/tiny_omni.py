"""A tiny Qwen2.5-Omni Thinker with random weights: its own vision tower, audio tower and LLM, 1.8 M parameters."""

from __future__ import annotations

from typing import Any

import torch

# The ids of the special tokens, in the order in which `omni.tokenizer` adds them.
SPECIAL_TOKENS = (
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)
_ID_OF_TOKEN = {token: index for index, token in enumerate(SPECIAL_TOKENS)}


def tiny_thinker_config(
    vocab_size: int, *, hidden_size: int = 128, num_layers: int = 4, num_mel_bins: int = 128, patch_size: int = 14
) -> Any:
    """Builds the configuration.

    An image token costs two to three times in the vision tower what a token costs in the LLM, an audio token about
    as much: each stage is noticeable in a step.

    Args:
        vocab_size: Of the tokenizer, special tokens included.
        hidden_size: Width of the LLM, divisible by 16; the vision tower has half of it, the audio tower three quarters.
        num_layers: Of the LLM and of the vision tower; the audio tower has one less.
        num_mel_bins: Rows of the log-mel spectrogram.
        patch_size: Pixels per side of a patch.

    Returns:
        A `Qwen2_5OmniThinkerConfig`.
    """
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    return Qwen2_5OmniThinkerConfig(
        text_config=_text_config(vocab_size, hidden_size, num_layers),
        vision_config=_vision_config(hidden_size, num_layers, patch_size),
        audio_config=_audio_config(hidden_size, num_layers - 1, num_mel_bins),
        image_token_index=_ID_OF_TOKEN["<|image_pad|>"],
        video_token_index=_ID_OF_TOKEN["<|video_pad|>"],
        audio_token_index=_ID_OF_TOKEN["<|audio_pad|>"],
        audio_start_token_id=_ID_OF_TOKEN["<|audio_start|>"],
        audio_end_token_id=_ID_OF_TOKEN["<|audio_end|>"],
        vision_start_token_id=_ID_OF_TOKEN["<|vision_start|>"],
        vision_end_token_id=_ID_OF_TOKEN["<|vision_end|>"],
        pad_token_id=_ID_OF_TOKEN["<|pad|>"],
    )


def _text_config(vocab_size: int, hidden_size: int, num_layers: int) -> dict[str, Any]:
    head_dim = hidden_size // 4
    height = head_dim // 2 * 3 // 8
    sections = [head_dim // 2 - 2 * height, height, height]
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
    }


def _vision_config(hidden_size: int, depth: int, patch_size: int) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": hidden_size // 2,
        "intermediate_size": hidden_size * 5 // 4,
        "num_heads": 4,
        "patch_size": patch_size,
        "window_size": 8 * patch_size,
        "fullatt_block_indexes": list(range(1, depth, 2)),
        "out_hidden_size": hidden_size,
    }


def _audio_config(hidden_size: int, num_layers: int, num_mel_bins: int) -> dict[str, Any]:
    return {
        "num_mel_bins": num_mel_bins,
        "encoder_layers": num_layers,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 3 * hidden_size,
        "d_model": hidden_size * 3 // 4,
        "output_dim": hidden_size,
    }


def build_thinker(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Builds the model with weights that follow from the seed alone, whatever the dtype.

    Args:
        config: From `tiny_thinker_config`.
        dtype: Of the parameters.
        seed: Of the weights.

    Returns:
        A `Qwen2_5OmniThinkerForConditionalGeneration` in training mode.
    """
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5OmniThinkerForConditionalGeneration(config)
    for parameter in model.parameters():  # not buffers: the frequencies of the rotary embeddings stay float32
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.train()
