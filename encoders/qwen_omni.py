"""Adapters of Qwen2.5-Omni's towers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from orch.encoders.items import Item, cut, tensor_of
from orch.encoders.qwen_vl import Qwen2_5VisionAdapter


class QwenOmniVisionAdapter(Qwen2_5VisionAdapter):
    """Images and videos of Qwen2.5-Omni's vision tower."""

    seconds_key = "video_second_per_grid"


class QwenOmniAudioAdapter:
    """Recordings of the audio tower of Qwen2.5-Omni.

    A sample packs its recordings in `input_features` float[frames, mel bins], and `audio_feature_lengths` int64[n]
    says how many frames each has. (The tower and the model each want another form: [mel bins, frames], and padded
    features with a mask.)

    Args:
        encoder: The tower.
    """

    keys = frozenset({"input_features", "audio_feature_lengths"})
    placeholders = ("audio_token_id",)
    unused: tuple[str, ...] = ("audio_bos_eos_token.weight",)
    min_frames = 3  # fewer leave no row after two strides of 2

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    def split(self, sample: Mapping[str, Any]) -> list[Item]:
        """One item for each recording."""
        lengths = tensor_of(sample, "audio_feature_lengths")
        lengths = torch.zeros(0, dtype=torch.int64) if lengths is None else lengths.to(torch.int64)
        if lengths.ndim != 1:
            raise ValueError(f"`audio_feature_lengths` must have shape [n], but has {list(lengths.shape)} instead.")
        if len(lengths) and int(lengths.min()) < self.min_frames:
            raise ValueError(
                f"`audio_feature_lengths` must be at least {self.min_frames} (fewer frames give no token), "
                f"but is {int(lengths.min())} instead."
            )
        features = tensor_of(sample, "input_features")
        pieces = cut("input_features", features, "audio_feature_lengths", lengths.tolist())
        return [
            {"input_features": piece, "audio_feature_lengths": row[None]}
            for piece, row in zip(pieces, lengths, strict=True)
        ]

    def length(self, item: Item) -> int:
        """Mel frames."""
        return len(item["input_features"])

    def num_rows(self, item: Item) -> int:
        """What the tower's own length function says."""
        return int(self._encoder._get_feat_extract_output_lengths(item["audio_feature_lengths"])[1])

    def llm_part(self, item: Item) -> Item:
        """The number of frames."""
        return {"audio_feature_lengths": item["audio_feature_lengths"]}

    def join(self, items: list[Item]) -> dict[str, Any]:
        """Frames of all recordings packed, mel bins first, in the tower's dtype."""
        lengths = torch.cat([item["audio_feature_lengths"] for item in items])
        return {
            "input_features": torch.cat([item["input_features"].to(self._encoder.dtype) for item in items]).T,
            "feature_lens": lengths,
            "aftercnn_lens": self._encoder._get_feat_extract_output_lengths(lengths)[0],
        }

    def dummy(self) -> Item:
        """The fewest frames that leave a row."""
        shape = (self.min_frames, self._encoder.config.num_mel_bins)
        return {
            "input_features": torch.ones(shape, dtype=self._encoder.dtype),
            "audio_feature_lengths": torch.tensor([self.min_frames]),
        }

    def rows(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The pooled, projected frames."""
        return (output.last_hidden_state,)

    def llm_inputs(self, parts: list[Item]) -> dict[str, Any]:
        """A mask of the real lengths over features of no mel bins, which take no memory."""
        if not parts:
            return {}
        lengths = torch.cat([part["audio_feature_lengths"] for part in parts])
        longest = int(lengths.max())
        frames = torch.arange(longest, device=lengths.device)
        return {
            "input_features": torch.zeros(len(parts), 0, longest, dtype=self._encoder.dtype, device=lengths.device),
            "feature_attention_mask": frames[None, :] < lengths[:, None],
        }

    def calls(self, parts: list[Item]) -> list[list[int]]:
        """One call for all recordings."""
        return [list(range(len(parts)))] if parts else []

    def output(self, rows: tuple[torch.Tensor, ...]) -> Any:
        """The tower's output. The model reads `last_hidden_state`."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(last_hidden_state=rows[0], pooler_output=rows[0])

    def cost(self) -> tuple[float, float, float]:
        """Forward FLOPs. Attention stays within chunks of fixed length, so that the whole is linear in frames."""
        config = self._encoder.config
        dim = config.d_model
        layer = 2.0 * (4 * dim**2 + 2 * dim * config.encoder_ffn_dim) + 4.0 * dim * config.n_window
        front = 2.0 * 3 * config.num_mel_bins * dim + 2.0 * 3 * dim**2 / 2
        return 0.0, front + config.encoder_layers * layer / 2 + 2.0 * dim * config.output_dim / 4, 0.0
