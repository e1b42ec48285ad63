"""Encoders that were left plain: a sample with items for one is refused, since they would not reach the model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from orch.stages import Sample, Stage


@dataclass(frozen=True, slots=True)
class Unstaged:
    """An encoder with a known adapter that is no stage.

    Attributes:
        path: Its path in the model.
        kind: Its class.
        name: What its stage would usually be called.
        keys: Keys of a sample that are for it, and for no stage.
        tokens: Ids of tokens that stand for its items, and for those of no stage.
    """

    path: str
    kind: str
    name: str
    keys: frozenset[str]
    tokens: tuple[int, ...]

    def check(self, sample: Sample, ids: torch.Tensor) -> None:
        """Refuses a sample (tokens int64[L]) that has something for this encoder.

        Raises:
            ValueError: If it has; names what it has, the encoder, and the line to write.
        """
        held = [f"`{key}`" for key in sorted(self.keys) if _has_rows(sample.get(key))]
        num_tokens = int(torch.isin(ids, torch.tensor(self.tokens)).sum()) if self.tokens else 0
        if held or num_tokens:
            what = " and ".join(held) or f"{num_tokens} placeholders in `input_ids`"
            otherwise = "; if it takes no part, leave them out of the samples" if held else ""
            raise ValueError(
                f"{what} must have a stage that takes them, but `model.{self.path}` ({self.kind}) is no stage instead: "
                f'call `orch.stage(model.{self.path}, "{self.name}")` before an engine wraps the model'
                f"{otherwise}."
            )


def unstaged_encoders(
    model: nn.Module, stages: Mapping[str, Stage], placeholders: Mapping[str, Sequence[int]]
) -> tuple[Unstaged, ...]:
    """The encoders of a model that adapters are known for, outside its stages (by name, with their placeholders)."""
    registry = importlib.import_module("orch.encoders.registry")
    inside = {module for stage in stages.values() for module in stage.encoder.modules()}
    found = {path: module for path, module in model.named_modules() if module not in inside}
    return tuple(
        _unstaged(model, path, module, stages, placeholders)
        for path, module in found.items()
        if registry.known_class(module)
    )


def _unstaged(
    model: Any, path: str, encoder: nn.Module, stages: Mapping[str, Stage], placeholders: Mapping[str, Sequence[int]]
) -> Unstaged:
    registry = importlib.import_module("orch.encoders.registry")
    backbone = importlib.import_module("orch.encoders.backbone")
    adapter = registry.adapter_for(encoder)
    if hasattr(adapter, "bind"):
        adapter = adapter.bind(model.config)
    taken = {token for tokens in placeholders.values() for token in tokens}
    tokens = set(backbone.placeholder_ids(model, adapter)) - taken
    return Unstaged(
        path=path,
        kind=registry.known_class(encoder),
        name="audio" if "input_features" in adapter.keys else "vision",
        keys=adapter.keys - frozenset[str]().union(*(stage.adapter.keys for stage in stages.values())),
        # A stage whose own tokens are not known may have any.
        tokens=tuple(sorted(tokens)) if all(placeholders.values()) else (),
    )


def _has_rows(value: Any) -> bool:
    """Whether it is a tensor or an array with something in it; one without rows means the same as a missing key."""
    shape: Sequence[int] = getattr(value, "shape", ())
    return len(shape) > 0 and shape[0] > 0
