"""Mistakes of a training loop that would train on in silence, told where a model is called."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from orch.micro_step import MicroStep

BATCH_KEY = "orch"
_MARK = "_orch_watch"


class Watch:
    """Watches how one model is called.

    It holds no process group and no engine, so that models are copied and saved as before.
    """

    def __init__(self) -> None:
        self._awaited: tuple[dict[str, torch.Tensor], str] | None = None
        self._is_wrapped = self._in_engine = False
        self._told: set[str] = set()

    def await_batch(self, batch: Mapping[str, Any]) -> None:
        """Notes which batch is to be run on next, if it has items, which would be lost with its plan."""
        micro_step: MicroStep = batch[BATCH_KEY]
        stages = [name for name, of_stage in micro_step.stages.items() if of_stage.num_items]
        known = {key: batch[key] for key in ("input_ids", "labels") if isinstance(batch.get(key), torch.Tensor)}
        what = f"step {micro_step.step} has items of the stages {stages}"
        self._awaited = (known, what) if stages else None

    def check_plain(self, input_ids: Any, labels: Any) -> None:
        """Checks a call without a plan. On other tokens it is legal, and where no gradient is wanted.

        Args:
            input_ids: Tokens that the model was called with; None where it was given their embeddings,
            labels: and the labels.

        Raises:
            ValueError: If it is on the batch that is to be run on next.
        """
        if self._awaited is None or not torch.is_grad_enabled():
            return
        awaited, what = self._awaited
        key, given = ("labels", labels) if input_ids is None else ("input_ids", input_ids)
        if key in awaited and _are_equal(given, awaited[key]):
            raise ValueError(
                f"`{BATCH_KEY}` must be among the arguments of the model, since the batch of {what}, but is missing "
                f"instead: pass the whole batch, whose key `{BATCH_KEY}` carries the plan."
            )

    def check_planned(self, labels: torch.Tensor | None) -> None:
        """Checks a call with a plan, and warns once of each thing that makes gradients wrong in most scripts."""
        self._awaited = None
        if not torch.is_grad_enabled():
            return
        if labels is None:
            self._warn(
                "The model was called without the batch's `labels`, and gives no loss. For exact gradients a loss of "
                f"your own must be the sum of token losses times `batch['{BATCH_KEY}'].loss_scale`."
            )
        if self._is_wrapped and not self._in_engine:
            self._warn(
                "The model itself was called, not the DistributedDataParallel around it: its gradients are not "
                "averaged over the ranks. Call the engine that `orch.orchestrate` was given."
            )

    def watch_engine(self, engine: nn.Module) -> None:
        """Notes from now on whether the model is called by its engine, where this is DDP, which other calls pass by."""
        self._is_wrapped = isinstance(engine, DistributedDataParallel)
        if self._is_wrapped and _MARK not in engine.__dict__:
            object.__setattr__(engine, _MARK, self)
            engine.register_forward_pre_hook(self._enter_engine)
            engine.register_forward_hook(self._leave_engine, always_call=True)

    def _enter_engine(self, engine: nn.Module, args: Any) -> None:
        self._in_engine = True

    def _leave_engine(self, engine: nn.Module, args: Any, output: Any) -> None:
        self._in_engine = False

    def _warn(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warnings.warn(message, stacklevel=3)


def _are_equal(given: Any, awaited: torch.Tensor) -> bool:
    if not isinstance(given, torch.Tensor) or given.shape != awaited.shape:
        return False
    return torch.equal(given.to(awaited), awaited)
