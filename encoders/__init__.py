"""Adapters: how to count, split, join and feed the encoders people use. They know nothing of ranks."""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF_NAME = {
    "adapter_for": "orch.encoders.registry",
    "QwenVisionAdapter": "orch.encoders.qwen_vl",
    "QwenOmniAudioAdapter": "orch.encoders.qwen_omni",
    "TileAdapter": "orch.encoders.tiles",
    "WhisperAdapter": "orch.encoders.whisper",
    "MropePositionIds": "orch.encoders.mrope",
    "PackedCollator": "orch.encoders.collate",
    "PaddedCollator": "orch.encoders.collate",
    "use_packed_attention": "orch.encoders.packing",
}
__all__ = sorted(_HOME_OF_NAME)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'orch.encoders' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF_NAME[name]), name)
