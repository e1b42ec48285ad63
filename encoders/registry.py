"""Which adapter serves which encoder: found by the names of its classes, imported when first used."""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF_ADAPTER = {
    "Qwen2VisionTransformerPretrainedModel": ("orch.encoders.qwen_vl", "QwenVisionAdapter"),
    "Qwen2_5_VisionTransformerPretrainedModel": ("orch.encoders.qwen_vl", "Qwen2_5VisionAdapter"),
    "Qwen2_5OmniVisionEncoder": ("orch.encoders.qwen_omni", "QwenOmniVisionAdapter"),
    "Qwen2_5OmniAudioEncoder": ("orch.encoders.qwen_omni", "QwenOmniAudioAdapter"),
    "Qwen3VLVisionModel": ("orch.encoders.qwen3_vl", "Qwen3VisionAdapter"),
    "Qwen3VLMoeVisionModel": ("orch.encoders.qwen3_vl", "Qwen3VisionAdapter"),
    "Qwen3OmniMoeVisionEncoder": ("orch.encoders.qwen3_omni", "Qwen3OmniVisionAdapter"),
    "Qwen3OmniMoeAudioEncoder": ("orch.encoders.qwen3_omni", "Qwen3OmniAudioAdapter"),
    "CLIPVisionModel": ("orch.encoders.tiles", "TileAdapter"),
    "SiglipVisionModel": ("orch.encoders.tiles", "TileAdapter"),
    "InternVLVisionModel": ("orch.encoders.tiles", "TileAdapter"),
    "WhisperEncoder": ("orch.encoders.whisper", "WhisperAdapter"),
    "Qwen2AudioEncoder": ("orch.encoders.whisper", "Qwen2AudioAdapter"),
}
ADAPTER_METHODS = (
    "split",
    "length",
    "num_rows",
    "llm_part",
    "join",
    "dummy",
    "rows",
    "llm_inputs",
    "calls",
    "output",
    "cost",
)


def known_class(encoder: Any) -> str:
    """The first name, among its class and those that it inherits from, that an adapter is known for; "" if none is."""
    return next((cls.__name__ for cls in type(encoder).__mro__ if cls.__name__ in _HOME_OF_ADAPTER), "")


def adapter_for(encoder: Any) -> Any:
    """Finds the adapter of an encoder by the names of its class and of the classes it inherits from.

    Args:
        encoder: The module, such as `model.model.visual`.

    Returns:
        An `EncoderAdapter` made for this encoder.

    Raises:
        ValueError: If none of its classes is known.
    """
    if known := known_class(encoder):
        module, name = _HOME_OF_ADAPTER[known]
        return getattr(importlib.import_module(module), name)(encoder)
    methods = ", ".join(f"`{method}`" for method in ADAPTER_METHODS)
    raise ValueError(
        f"`encoder` must be one of {', '.join(sorted(_HOME_OF_ADAPTER))}, but is {type(encoder).__name__} instead. "
        f"For another class pass an adapter: an object with `keys` and the methods {methods} of `orch.EncoderAdapter`."
    )
