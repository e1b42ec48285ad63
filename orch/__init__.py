"""orch: every GPU of a multimodal-LLM training run works all the time.

The names below are imported when first used (PEP 562), so that planning alone needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME_OF_NAME = {
    "stage": "orch.stages",
    "EncoderAdapter": "orch.stages",
    "Item": "orch.stages",
    "orchestrate": "orch.orchestrator",
    "OrchestratedLoader": "orch.orchestrator",
    "calibrate": "orch.calibration",
    "plan_step": "orch.plan",
    "StepLengths": "orch.lengths",
    "ItemLengths": "orch.lengths",
    "balance": "orch.balancing",
    "lower_bounds": "orch.bounds",
    "Topology": "orch.comm.topology",
    "discover_topology": "orch.comm.hosts",
}
__all__ = sorted([*_HOME_OF_NAME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'orch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF_NAME[name]), name)
