"""Adapters of the towers of Qwen3-Omni's thinker."""

from __future__ import annotations

from typing import Any

import torch

from orch.encoders.items import Item
from orch.encoders.qwen3_vl import Qwen3VisionAdapter
from orch.encoders.qwen_omni import QwenOmniAudioAdapter


class Qwen3OmniVisionAdapter(Qwen3VisionAdapter):
    """Images and videos; videos have seconds per grid."""

    seconds_key = "video_second_per_grid"


class Qwen3OmniAudioAdapter(QwenOmniAudioAdapter):
    """Recordings: packed frames, which the tower cuts into chunks (of 1 s) and convolves in a rectangle.

    The tower pads a recording's last chunk to the longest chunk of its batch, and its convolutions see the padding. So
    the last rows of a recording follow from its batch, orchestrated or not, if no recording in it lasts a whole chunk.
    """

    unused = ()
    min_frames = 1

    def num_rows(self, item: Item) -> int:
        """What the model's own length function says."""
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

        return int(_get_feat_extract_output_lengths(item["audio_feature_lengths"], self._encoder.config.n_window))

    def join(self, items: list[Item]) -> dict[str, Any]:
        """Frames of all recordings packed, mel bins first, in the tower's dtype."""
        return {
            "input_features": torch.cat([item["input_features"].to(self._encoder.dtype) for item in items]).T,
            "feature_lens": torch.cat([item["audio_feature_lengths"] for item in items]),
        }

    def cost(self) -> tuple[float, float, float]:
        """Forward FLOPs. Three convolutions of stride 2 over frames and mel bins; attention within windows."""
        config = self._encoder.config
        dim, channels, bins = config.d_model, config.downsample_hidden_size, config.num_mel_bins
        front = 2.0 * 9 * channels * (bins / 4 + channels * (bins / 16 + bins / 64)) + 2.0 * channels * bins / 64 * dim
        window = config.n_window_infer / 8
        layer = 2.0 * (4 * dim**2 + 2 * dim * config.encoder_ffn_dim) + 4.0 * dim * window
        ends = 2.0 * (dim**2 + dim * config.output_dim)
        return 0.0, front + (config.encoder_layers * layer + ends) / 8, 0.0
