"""What travels with a batch, and the hooks that use it around the model's own, unmodified forward."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils._pytree import register_pytree_node

from orch.comm.all_to_all import start_exchange
from orch.comm.groups import Group
from orch.comm.layout import Exchange
from orch.comm.liveness import Liveness
from orch.loss import token_loss_sum
from orch.stages import Item, Stage, stages_in
from orch.tags import Tags
from orch.watch import BATCH_KEY, Watch

_MARK = "_orch_hooks"
_MAX_NAMED, _MAX_NAME = 8, 60


@dataclass(frozen=True, slots=True, eq=False)
class StageBatch:
    """What one stage does on this rank in one micro-step.

    Attributes:
        inputs: Keyword arguments of the encoder: its balanced batch, or a dummy.
        num_rows: Rows of the output that count; 0 for a dummy.
        exchange: This rank's view of the rearrangement of rows, encoder to LLM.
        parts: The LLM-side tensors of the items that this rank's LLM batch holds.
        part_rows: Rows of each of these items.
        moves: Whether any row of any rank changes rank.
        num_items: Items of all ranks.
        tags: Ids that travel with the rows, in the debug mode.
        tags_of_gradients: And with their gradients.
    """

    inputs: Mapping[str, Any]
    num_rows: int
    exchange: Exchange
    parts: tuple[Item, ...]
    part_rows: tuple[int, ...]
    moves: bool = True
    num_items: int = 0
    tags: Tags | None = None
    tags_of_gradients: Tags | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MicroStep:
    """The plan of one micro-step on this rank; it travels in the batch under the key "orch".

    Attributes:
        step: Number of the optimizer step.
        index: Number of the micro-step within it.
        num_micro_steps: K of this step.
        loss_scale: Factor of the summed token loss.
        num_label_tokens: T, label tokens of the whole step over all ranks.
        stages: What each stage does, by name.
        auxiliary_scale: Factor of what the model itself adds to its loss (a router's), of which engines then take the
            mean over ranks and micro-steps.
        group: Process group for encoder outputs; None for one rank.
        exchange_method: "auto", "flat", "node_wise" or "all_gather".
        liveness: Names the rank to blame when an exchange fails.
        samples: The numbers and strings of each sample of this rank's LLM batch ("id" and the like), without fillers.
        entered: Set once the model runs on the batch.
    """

    step: int
    index: int
    num_micro_steps: int
    loss_scale: float
    num_label_tokens: int
    stages: Mapping[str, StageBatch]
    auxiliary_scale: float = 1.0
    group: Group = None
    exchange_method: str = "flat"
    liveness: Liveness | None = None
    samples: tuple[Mapping[str, str | float], ...] = ()
    entered: threading.Event = field(default_factory=threading.Event)

    @property
    def is_last(self) -> bool:
        """Whether the optimizer steps after this micro-step."""
        return self.index == self.num_micro_steps - 1

    def guard(self, phase: str, stage: str) -> contextlib.AbstractContextManager[None]:
        """Around what may fail because of another rank."""
        if self.liveness is None:
            return contextlib.nullcontext()
        return self.liveness.guard(phase, step=self.step, stage=stage, training=True)

    def note(self, phase: str, stage: str | None = None) -> None:
        """Says what the training thread does from now on, so that it can be told should this rank be lost."""
        if self.liveness is not None:
            self.liveness.note(phase, step=self.step, stage=stage, training=True)

    def note_training(self) -> None:
        """Says that the model runs on this batch."""
        self.note(f"train on {describe_samples(self.samples)}")

    def mean_loss(self, loss: torch.Tensor) -> float:
        """This micro-step's share of the step's mean token loss, which is the sum over its ranks and micro-steps."""
        return float(loss.detach()) / (self.loss_scale * self.num_label_tokens) if self.loss_scale else 0.0


def _inputs_of(micro_step: MicroStep) -> tuple[list[Any], MicroStep]:
    return [dict(batch.inputs) for batch in micro_step.stages.values()], micro_step


def _with_inputs(inputs: Iterable[Any], micro_step: MicroStep) -> MicroStep:
    pairs = zip(micro_step.stages.items(), inputs, strict=True)
    return replace(micro_step, stages={name: replace(batch, inputs=values) for (name, batch), values in pairs})


# Engines that cast or move the arguments of a model (FSDP2's mixed precision) find those of the encoders too.
register_pytree_node(MicroStep, _inputs_of, _with_inputs)


class _ModelHooks:
    """Runs every stage once before the model's forward, and the exact loss after it."""

    def __init__(self, model: nn.Module) -> None:
        self.stages = stages_in(model)
        self.watch = Watch()
        self._micro_step: MicroStep | None = None
        self._labels: torch.Tensor | None = None
        self._waiting: list[tuple[Stage, nn.Module, tuple[torch.Tensor, ...], tuple[Item, ...]]] = []

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        micro_step = kwargs.pop(BATCH_KEY, None)
        if micro_step is None:
            self.watch.check_plain(kwargs.get("input_ids", args[0] if args else None), kwargs.get("labels"))
            return args, kwargs
        if list(micro_step.stages) != list(self.stages):
            raise ValueError(
                f"`batch` must be planned for the stages {list(self.stages)}, "
                f"but is for {list(micro_step.stages)} instead."
            )
        micro_step.entered.set()
        self._micro_step, self._labels = micro_step, kwargs.pop("labels", None)
        self.watch.check_planned(self._labels)
        # Rows of one stage travel while the next one computes.
        batches = [(self.stages[name], batch) for name, batch in micro_step.stages.items()]
        started = [start_stage(stage, batch, micro_step) for stage, batch in batches]
        for (stage, batch), wait in zip(batches, started, strict=True):
            rows = wait()
            with record_function("orch.merge"):
                stage.route(rows, batch.parts, batch.part_rows)
            self._waiting.append((stage, model, rows, batch.parts))
        micro_step.note_training()
        return args, kwargs

    def after_embedding(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> Any:
        """Ties what this rank has no use for into the graph, so that its backward exchanges run here too."""
        waiting, self._waiting = self._waiting, []
        with record_function("orch.merge"):
            idle = sum(stage.idle(model, rows, parts) for stage, model, rows, parts in waiting)
        return output + idle.to(output.dtype) if isinstance(idle, torch.Tensor) else None

    def after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        micro_step, labels = self._micro_step, self._labels
        unserved = [name for name, stage in self.stages.items() if stage.unserved()]
        waiting = any(not parts for *_, parts in self._waiting)
        self._micro_step, self._labels, self._waiting = None, None, []
        for stage in self.stages.values():
            stage.release()
        if micro_step is None or output is None:
            return None
        if unserved or waiting:
            raise RuntimeError(
                f"Step {micro_step.step}: the model's forward did not use what was routed to it: "
                f"stages {unserved or 'without items'}; its gradients would be wrong. "
                "Does the model's forward embed `input_ids` and call its encoders?"
            )
        if labels is not None:
            if not isinstance(output, MutableMapping):
                raise TypeError(
                    f"The model must return a dict with `logits`, but returned a {type(output).__name__} instead: "
                    "leave `return_dict` as it is."
                )
            loss = token_loss_sum(output["logits"], labels) * micro_step.loss_scale
            output["loss"] = loss + _auxiliary_loss(model, output) * micro_step.auxiliary_scale
        return output


def _auxiliary_loss(model: nn.Module, output: Any) -> torch.Tensor | float:
    """What a mixture of experts adds to its loss so that its router is balanced, as its own forward would."""
    auxiliary = output.get("aux_loss")
    if auxiliary is None:
        return 0.0
    weight: float = model.config.get_text_config().router_aux_loss_coef  # type: ignore[operator, union-attr]
    return weight * auxiliary


def start_stage(stage: Stage, batch: StageBatch, micro_step: MicroStep) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Encodes this rank's balanced batch and sends the rows on their way, straight to the LLM's layout.

    Returns:
        A function that waits for the rows of this rank's LLM batch.
    """
    micro_step.note("encode", stage.name)
    with record_function(f"orch.encode.{stage.name}"):
        rows = tuple(tensor[: batch.num_rows] for tensor in stage.encode(batch.inputs))
    if not batch.moves or micro_step.group is None:
        index = torch.from_numpy(batch.exchange.send_index[batch.exchange.recv_index]).to(rows[0].device)
        return lambda: tuple(tensor.index_select(0, index) for tensor in rows)
    method, guard = micro_step.exchange_method, functools.partial(_guard_exchange, micro_step, stage.name)
    tags = () if batch.tags is None else (batch.tags.outgoing().to(rows[0].device),)
    how: dict[str, Any] = {"method": method, "label": stage.name, "guard": guard, "seal": batch.tags_of_gradients}
    handle = start_exchange((*rows, *tags), batch.exchange, micro_step.group, **how)

    def wait() -> tuple[torch.Tensor, ...]:
        arrived = tuple(handle.wait())
        if batch.tags is not None:
            batch.tags.check(arrived[-1])
        return arrived[: len(rows)]

    return wait


@contextlib.contextmanager
def _guard_exchange(micro_step: MicroStep, stage: str, label: str) -> Iterator[None]:
    """Around a part of a stage's exchange, or of the inverse one, which comes in the midst of the backward."""
    phase = "exchange rows" if label == stage else "exchange gradients of rows"
    with micro_step.guard(phase, stage):
        yield
    if label != stage:
        micro_step.note_training()


def describe_samples(samples: Sequence[Mapping[str, Any]]) -> str:
    """The first few samples by their ids, or how many there are, for messages."""
    names = [repr(sample["id"])[:_MAX_NAME] for sample in samples if "id" in sample][:_MAX_NAMED]
    if not names:
        return f"{len(samples)} samples (give them an `id`)" if samples else "no samples"
    more = f" and {len(samples) - len(names)} more" if len(samples) > len(names) else ""
    return f"samples {', '.join(names)}{more}"


def watch_of(model: nn.Module) -> Watch:
    """What watches the calls of a model that has the hooks."""
    hooks: _ModelHooks = model.__dict__[_MARK]
    return hooks.watch


def instrument_model(model: nn.Module) -> None:
    """Installs the hooks on a model whose encoders are stages. Installing them again changes nothing."""
    if _MARK in model.__dict__:
        return
    hooks = _ModelHooks(model)
    object.__setattr__(model, _MARK, hooks)
    # After the engine's own hooks, which gather parameters (FSDP2) or begin their record of a forward (ZeRO-3).
    model.register_forward_pre_hook(hooks.before_forward, with_kwargs=True)
    model.register_forward_hook(hooks.after_forward, with_kwargs=True, always_call=True)
    model.get_input_embeddings().register_forward_hook(hooks.after_embedding)  # type: ignore[operator]
