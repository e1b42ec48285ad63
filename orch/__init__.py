"""orch: every GPU of a multimodal-LLM training run works all the time.

    stage               makes an encoder a stage, in place
    orchestrate         wraps a loader: batches balanced for every stage, exact losses
    OrchestratedLoader  what it returns
    odb                 module: the loader that forms batches by token budget
    encoders            module: adapters, collators, `use_packed_attention`
    EncoderAdapter      what an adapter for an encoder of your own must have
    Item                one image, clip or recording, as adapters see it
    calibrate           measures what batches cost on your device
    balance             lengths in, the rank of each item out
    lower_bounds        what no layout can beat
    plan_step           the lengths of a step in, where everything goes out
    StepLengths         the samples of a step, for `plan_step`
    ItemLengths         the items of a stage, for `StepLengths`
    BalanceConfig       how `plan_step` is to balance
    StageConfig         the same for one stage
    CostModel           what a cost model must have
    PackedCost          cost of packed batches
    PaddedCost          cost of padded batches
    RectangleFrontCost  cost of batches with a padded front end and a packed rest
    Topology            which node each rank is on
    discover_topology   the topology that ranks find together

All are imported when first used (PEP 562), so that planning alone needs no torch.
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
    "BalanceConfig": "orch.config",
    "StageConfig": "orch.config",
    "CostModel": "orch.cost",
    "PackedCost": "orch.cost",
    "PaddedCost": "orch.cost",
    "RectangleFrontCost": "orch.cost",
    "StepLengths": "orch.lengths",
    "ItemLengths": "orch.lengths",
    "balance": "orch.balancing",
    "lower_bounds": "orch.bounds",
    "Topology": "orch.comm.topology",
    "discover_topology": "orch.comm.hosts",
}
_MODULES = ("encoders", "odb")
__all__ = sorted([*_HOME_OF_NAME, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"orch.{name}")
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'orch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
