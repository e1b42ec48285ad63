"""Stages: encoders instrumented in place, so that a model calls them as ever and gets rows routed from other ranks.

In an orchestrated micro-step each stage runs once, from a hook before the model's own forward (`orch.micro_step`); the
model's own calls of the encoder then return the rows that were routed to this rank. At any other time a stage is the
plain encoder.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

Sample = Mapping[str, Any]
Item = dict[str, torch.Tensor]
EncoderT = TypeVar("EncoderT", bound=nn.Module)

_ATTRIBUTE = "_orch_stage"
_LLM = "llm"  # what costs, plans and reports call the LLM
# Under these names wrappers hold a module; the model calls the wrapper, while orch runs the encoder itself.
_WRAPPERS = {
    "_checkpoint_wrapped_module": "have its blocks checkpointed",
    "_orig_mod": "be compiled in place, by `encoder.compile()`",
}


@runtime_checkable
class EncoderAdapter(Protocol):
    """How to count, split, join and feed one encoder. It knows nothing of ranks.

    An item is a dict of tensors under the sample's own key names: one image, clip or recording. An adapter may also
    have

    - `placeholders`: names of the model configuration's ids of tokens that stand for items; samples whose tokens and
      items disagree are then refused before anything moves. `num_tokens(item)` says how many an item has, where that
      is not its `num_rows`.
    - `row_width`: values of a row in all of its tensors, where that is not the LLM's width.
    - `unused`: names of the encoder's parameters that take part in no forward. `orch.stage` freezes them, since DDP
      would wait for their gradients.
    - `bind(config)`: given the model's configuration once the model is known, returns the adapter to use from then on.
    - `idle(model, parts)`: for models with something of their own between encoder and LLM, such as a projector, which
      every rank must run as often as the others. For each kind of item that `parts` (those of this rank's LLM batch)
      lack, a list of items and a function that takes them through it, calling the encoder once; a tensor comes back.
    """

    keys: frozenset[str]
    """Keys of a sample that belong to the items of this stage."""

    def split(self, sample: Sample) -> list[Item]:
        """The items of a sample, in the order in which the LLM consumes them; [] if it has none."""
        ...

    def length(self, item: Item) -> int:
        """Units that enter the encoder (patches, frames)."""
        ...

    def num_rows(self, item: Item) -> int:
        """Rows that leave the encoder for the LLM (tokens)."""
        ...

    def llm_part(self, item: Item) -> Item:
        """The small tensors that the LLM's side needs of an item (a grid, a length)."""
        ...

    def join(self, items: list[Item]) -> dict[str, Any]:
        """Keyword arguments of the encoder's forward for a batch of items."""
        ...

    def dummy(self) -> Item:
        """The smallest legal item."""
        ...

    def rows(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of the encoder's output that go to the LLM, each with the rows of all items in front."""
        ...

    def llm_inputs(self, parts: list[Item]) -> dict[str, Any]:
        """Keyword arguments that make the model call the encoder for these items without their media."""
        ...

    def calls(self, parts: list[Item]) -> list[list[int]]:
        """Positions of the parts that each of the model's calls of the encoder serves, in the order of the calls."""
        ...

    def output(self, rows: tuple[torch.Tensor, ...]) -> Any:
        """What the encoder's forward would return for these rows."""
        ...

    def cost(self) -> tuple[float, float, float]:
        """FLOPs per item, per unit of length and per squared unit."""
        ...


class Stage:
    """The instrument of one encoder.

    Attributes:
        name: Name of the stage.
        encoder: The encoder, calls of which come to this stage's `call`.
        adapter: How to count, split, join and feed it.
    """

    def __init__(self, encoder: nn.Module, name: str, adapter: EncoderAdapter) -> None:
        self.name = name
        self.encoder = encoder
        self.adapter = adapter
        self._compiled: Callable[..., Any] | None = encoder._compiled_call_impl
        self._routed: list[tuple[torch.Tensor, ...]] | None = None

    def encode(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Runs the encoder on a joined batch: its output tensors, rows in front."""
        assert self._routed is None, self.name
        return self.adapter.rows(self.encoder(**inputs))

    def bind(self, config: Any) -> None:
        """Tells the adapter the configuration of the model, if it asks for it."""
        if hasattr(self.adapter, "bind"):
            self.adapter = self.adapter.bind(config)

    def route(self, rows: tuple[torch.Tensor, ...], parts: Sequence[Item], num_rows: Sequence[int]) -> None:
        """Holds the rows of this rank's LLM items ready for the model's own calls."""
        pieces = [torch.split(tensor, list(num_rows)) if num_rows else () for tensor in rows]
        self._routed = [
            tuple(
                torch.cat([of_part[i] for i in positions]) if len(positions) else tensor[:0]
                for tensor, of_part in zip(rows, pieces, strict=True)
            )
            for positions in self.adapter.calls(list(parts))
        ]

    def idle(self, model: nn.Module, rows: tuple[torch.Tensor, ...], parts: Sequence[Item]) -> torch.Tensor | float:
        """0, with all in its graph that this rank's LLM batch leaves out: the rows, and what lies before the LLM."""
        unused = 0.0 if parts else 0 * sum(tensor.sum() for tensor in rows)
        calls = self.adapter.idle(model, list(parts)) if hasattr(self.adapter, "idle") else []
        held, total = self._routed, unused
        for items, call in calls:
            size = sum(map(self.adapter.num_rows, items))
            self._routed = [tuple(tensor.new_zeros(size, *tensor.shape[1:]) + unused for tensor in rows)]
            total = total + 0 * call().sum()
        self._routed = held
        return total

    def release(self) -> None:
        """Makes the encoder plain again."""
        self._routed = None

    def unserved(self) -> int:
        """How many of the model's calls are still to come."""
        return len(self._routed or [])

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the encoder: routed rows within an orchestrated micro-step, else the encoder itself.

        It stands before the encoder's hooks. Engines gather parameters there, which every rank must do equally often,
        while a model calls its encoder only on ranks whose samples have items for it.
        """
        if self._routed is None:
            return (self._compiled or self._plain_call)(*args, **kwargs)
        if not self._routed:
            raise RuntimeError(
                f"The model called the encoder of stage {self.name!r} more often than its adapter "
                f"{type(self.adapter).__name__}.calls says it would."
            )
        return self.adapter.output(self._routed.pop(0))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the encoder in place, as `nn.Module.compile` does: what it computes, not how it is served."""
        self._compiled = torch.compile(self._plain_call, *args, **kwargs)

    @property
    def _plain_call(self) -> Callable[..., Any]:
        return types.MethodType(type(self.encoder)._call_impl, self.encoder)

    def __getstate__(self) -> dict[str, Any]:
        """Copies are not compiled, as those of any module."""
        return {**self.__dict__, "_compiled": None}


def stage(encoder: EncoderT, name: str, adapter: EncoderAdapter | None = None) -> EncoderT:
    """Instruments an encoder in place as a stage, and returns it. Call it before an engine wraps the model.

    Its class, attributes, parameter names and `state_dict` stay as they are. Outside an orchestrated micro-step it
    behaves as before. Parameters that take part in no forward are frozen, where its adapter knows of any.

    Args:
        encoder: The encoder module.
        name: Name of the stage in plans and reports; not "llm", and without ":".
        adapter: How to feed it; found by the encoder's class if not given.

    Raises:
        ValueError: If the name is none that a stage may have, or the encoder is a stage already, holds BatchNorm (whose
            statistics would depend on how items are dealt), or has no known adapter.
    """
    if not isinstance(name, str) or name in ("", _LLM) or ":" in name:
        raise ValueError(f"`name` must be a text without ':', neither empty nor {_LLM!r}, but is {name!r} instead.")
    if _ATTRIBUTE in encoder.__dict__:
        raise ValueError(f"`encoder` must not be a stage yet, but is stage {stage_of(encoder).name!r} instead.")
    for path, module in encoder.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(f"`encoder` must not hold BatchNorm, but {path!r} is {type(module).__name__} instead.")
    adapter = _known_adapter(encoder) if adapter is None else adapter
    _check_adapter(adapter)
    _freeze(encoder, getattr(adapter, "unused", ()))
    instrument = Stage(encoder, name, adapter)
    object.__setattr__(encoder, _ATTRIBUTE, instrument)
    object.__setattr__(encoder, "_call_impl", instrument.call)  # what `nn.Module.__call__` calls
    object.__setattr__(encoder, "_compiled_call_impl", None)  # or else this; the instrument has it now
    object.__setattr__(encoder, "compile", instrument.compile)
    return encoder


def stage_of(encoder: nn.Module) -> Stage:
    """The stage that an encoder was made into."""
    found: Stage = encoder.__dict__[_ATTRIBUTE]
    return found


def stages_in(model: nn.Module) -> dict[str, Stage]:
    """The stages of a model by name, in the order in which its modules are registered: the order in which they run.

    Raises:
        ValueError: If two stages bear one name, or a stage is wrapped by what would see only the model's calls of it.
    """
    found: dict[str, Stage] = {}
    for path, module in model.named_modules():
        if _ATTRIBUTE in module.__dict__:
            instrument = stage_of(module)
            if must := _WRAPPERS.get(path.rpartition(".")[2]):
                raise ValueError(f"`encoder` of stage {instrument.name!r} must {must}, but is wrapped whole instead.")
            if instrument.name in found:
                raise ValueError(f"`name` of a stage must be unique, but two stages are {instrument.name!r} instead.")
            found[instrument.name] = instrument
    return found


def _known_adapter(encoder: nn.Module) -> Any:
    return importlib.import_module("orch.encoders").adapter_for(encoder)


def _freeze(encoder: nn.Module, names: Sequence[str]) -> None:
    for name, parameter in encoder.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def _check_adapter(adapter: Any) -> None:
    if isinstance(adapter, type):
        raise ValueError(f"`adapter` must be an object, but is the class {adapter.__name__} instead.")
    if missing := sorted(member for member in _protocol_members() if not hasattr(adapter, member)):
        raise ValueError(
            f"`adapter` must have {missing}, as `orch.EncoderAdapter` describes them, "
            f"but {type(adapter).__name__} lacks them instead."
        )


def _protocol_members() -> list[str]:
    return [m for m in (*EncoderAdapter.__annotations__, *vars(EncoderAdapter)) if not m.startswith("_")]
