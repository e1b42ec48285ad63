"""Adapter of Qwen3-VL's vision tower: beside the merged tokens it gives features of inner layers to the LLM."""

from __future__ import annotations

from typing import Any

import torch

from orch.encoders.pixels import HALF
from orch.encoders.qwen_vl import QwenVisionAdapter


class Qwen3VisionAdapter(QwenVisionAdapter):
    """Images and videos of Qwen3-VL's tower (deepstack). Time is told by timestamps in the text, not by seconds."""

    mean = std = HALF

    @property
    def row_width(self) -> int:
        """Values of a row in all of its tensors."""
        return self._num_mergers() * self._width(0)

    def rows(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The merged tokens, then the features of each deepstack layer."""
        return (output.pooler_output, *output.deepstack_features)

    def output(self, rows: tuple[torch.Tensor, ...]) -> Any:
        """The tower's output, with a list of deepstack features."""
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        return BaseModelOutputWithDeepstackFeatures(
            last_hidden_state=rows[0], pooler_output=rows[0], deepstack_features=list(rows[1:])
        )

    def _feed_forward_values(self, dim: int) -> int:
        return 2 * dim * int(self._encoder.config.intermediate_size)

    def _num_mergers(self) -> int:
        return 1 + len(self._encoder.config.deepstack_visual_indexes)

    def _width(self, dim: int) -> int:
        return int(self._encoder.config.out_hidden_size)
