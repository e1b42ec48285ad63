"""Adapters of towers that want windows of one length: Whisper's encoder (30 s), and Qwen2-Audio's, which derives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from orch.encoders.items import Idle, Item, tensor_of


class WhisperAdapter:
    """Windows of mel frames, `input_features` [n, mel bins, frames], padded to the length that the encoder wants.

    All windows cost the same and give the same number of rows. The model is taken to read `last_hidden_state` [n,
    rows, width], and to have transformers' `get_audio_features` if anything of it lies between encoder and LLM.

    Args:
        encoder: The encoder.
    """

    keys = frozenset({"input_features"})
    placeholders: tuple[str, ...] = ()

    def __init__(self, encoder: Any) -> None:
        config = encoder.config
        self._encoder = encoder
        self._positions: int = config.max_source_positions
        self._shape = (config.num_mel_bins, self._positions * encoder.conv1.stride[0] * encoder.conv2.stride[0])

    @property
    def _rows_of_window(self) -> int:
        return self._positions

    def split(self, sample: Mapping[str, Any]) -> list[Item]:
        """One item for each window."""
        features = tensor_of(sample, "input_features")
        if features is None:
            return []
        if features.ndim != 3 or tuple(features.shape[1:]) != self._shape:
            raise ValueError(
                f"`input_features` must have shape [n, {self._shape[0]}, {self._shape[1]}], "
                f"but has {list(features.shape)} instead."
            )
        return [{"input_features": window} for window in features.split(1)]

    def length(self, item: Item) -> int:
        """Mel frames, padding included."""
        return self._shape[1]

    def num_rows(self, item: Item) -> int:
        """The same for every window."""
        return self._rows_of_window

    def llm_part(self, item: Item) -> Item:
        """Nothing: windows are alike."""
        return {}

    def join(self, items: list[Item]) -> dict[str, Any]:
        """Windows in a rectangle, in the encoder's dtype."""
        return {"input_features": torch.cat([item["input_features"] for item in items]).to(self._encoder.dtype)}

    def dummy(self) -> Item:
        """One window."""
        return {"input_features": torch.ones(1, *self._shape, dtype=self._encoder.dtype)}

    @property
    def row_width(self) -> int:
        """Values of a row."""
        return int(self._encoder.config.d_model)

    def rows(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The hidden states of all windows, one after the other."""
        return (output.last_hidden_state.flatten(0, 1),)

    def llm_inputs(self, parts: list[Item]) -> dict[str, Any]:
        """Features of no mel bins, which take no memory."""
        if not parts:
            return {}
        shape = (len(parts), 0, self._shape[1])
        return {"input_features": torch.zeros(shape, dtype=self._encoder.dtype, device=self._encoder.device)}

    def calls(self, parts: list[Item]) -> list[list[int]]:
        """One call for all windows."""
        return [list(range(len(parts)))] if parts else []

    def output(self, rows: tuple[torch.Tensor, ...]) -> Any:
        """The encoder's output."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=rows[0].unflatten(0, (-1, self._rows_of_window)))

    def idle(self, model: Any, parts: list[Item]) -> list[Idle]:
        """A window through what the model has between encoder and LLM, on a rank whose samples have none."""
        if parts or not hasattr(model, "get_audio_features"):
            return []
        inputs = self.llm_inputs([self.llm_part(self.dummy())])
        return [([self.dummy()], lambda: model.get_audio_features(**inputs).pooler_output)]

    def cost(self) -> tuple[float, float, float]:
        """Forward FLOPs of a frame: every window has the same length, so that the whole is linear."""
        config = self._encoder.config
        dim = config.d_model
        layer = 2.0 * (4 * dim**2 + 2 * dim * config.encoder_ffn_dim) + 4.0 * dim * self._positions
        front = 2.0 * 3 * config.num_mel_bins * dim + 2.0 * 3 * dim**2 / 2
        return 0.0, front + config.encoder_layers * layer / 2, 0.0


class Qwen2AudioAdapter(WhisperAdapter):
    """Recordings of Qwen2-Audio: `input_features` as Whisper's, and `feature_attention_mask` [n, frames] of real ones.

    All rows of a window are routed, padding included: the model takes them in a rectangle and masks it.
    """

    keys = frozenset({"input_features", "feature_attention_mask"})
    placeholders = ("audio_token_id",)
    min_frames = 7  # fewer give a single token, which the model takes for a placeholder that is still to be expanded

    @property
    def _rows_of_window(self) -> int:
        return self._positions // 2

    def split(self, sample: Mapping[str, Any]) -> list[Item]:
        """One item for each recording, with its real number of frames."""
        windows, mask = super().split(sample), tensor_of(sample, "feature_attention_mask")
        lengths = torch.zeros(0, dtype=torch.int64) if mask is None else mask.sum(-1, dtype=torch.int64)
        if len(lengths) != len(windows):
            raise ValueError(f"`feature_attention_mask` must have {len(windows)} rows, but has {len(lengths)} instead.")
        if len(lengths) and int(lengths.min()) < self.min_frames:
            raise ValueError(
                f"`feature_attention_mask` must have at least {self.min_frames} frames in each row, "
                f"but has {int(lengths.min())} instead."
            )
        return [w | {"audio_feature_lengths": row[None]} for w, row in zip(windows, lengths, strict=True)]

    def num_tokens(self, item: Item) -> int:
        """Placeholders: what the tower's own length function says of the real frames."""
        return int(self._encoder._get_feat_extract_output_lengths(item["audio_feature_lengths"])[1])

    def llm_part(self, item: Item) -> Item:
        """The number of frames."""
        return {"audio_feature_lengths": item["audio_feature_lengths"]}

    def join(self, items: list[Item]) -> dict[str, Any]:
        """Windows in a rectangle, and the mask that the model makes for its tower."""
        from transformers.masking_utils import create_bidirectional_mask

        lengths = torch.cat([item["audio_feature_lengths"] for item in items])
        rows = torch.arange(self._positions)[None] < ((lengths - 1) // 2 + 1)[:, None]
        mask = create_bidirectional_mask(
            config=self._encoder.config,
            inputs_embeds=torch.zeros(len(items), self._positions, 1, dtype=self._encoder.dtype),
            attention_mask=rows.to(torch.int64),
        )
        return super().join(items) | {"attention_mask": mask}

    def dummy(self) -> Item:
        """One window of the fewest real frames."""
        return super().dummy() | {"audio_feature_lengths": torch.tensor([self.min_frames])}

    def llm_inputs(self, parts: list[Item]) -> dict[str, Any]:
        """A mask of the real frames over features of no mel bins."""
        if not parts:
            return {}
        lengths = torch.cat([part["audio_feature_lengths"] for part in parts])
        frames = torch.arange(self._shape[1], device=lengths.device)
        return super().llm_inputs(parts) | {"feature_attention_mask": (frames[None] < lengths[:, None]).to(torch.int64)}

    def idle(self, model: Any, parts: list[Item]) -> list[Idle]:
        """A window through the projector, which the model's forward calls itself."""
        if parts:
            return []
        inner = getattr(model, "model", model)
        return [([self.dummy()], lambda: inner.multi_modal_projector(inner.audio_tower().last_hidden_state))]
