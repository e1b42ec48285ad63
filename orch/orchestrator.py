"""The orchestrated loader: batches balanced for every stage, prepared one step ahead of training."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from orch.choices import Choices
from orch.comm.counts import check_seconds
from orch.comm.groups import get_global_ranks
from orch.comm.topology import Topology
from orch.cost import CostModel
from orch.micro_step import MicroStep, watch_of
from orch.prefetch import Prefetcher
from orch.prepare import Collate, to_device
from orch.producer import Ready, StepProducer
from orch.report import Report
from orch.resume import ResumePoint
from orch.setup import Setup, make_setup
from orch.watch import BATCH_KEY

DEFAULT_TIMEOUT_S = 600.0
_CLOSE_S = 2.0


class GroupLoader(Protocol):
    """What is asked of a loader: what this rank has for each micro-step, processed samples, uncollated."""

    layout: str

    def groups(self) -> Iterator[Sequence[dict[str, Any]]]:
        """A list for each micro-step, [] where this rank has no sample: its group.

        Or, if the list has `ranks`, samples of several ranks' groups, and the rank of each.
        """
        ...


class OrchestratedLoader:
    """Yields balanced batches of a loader's groups. Made by `orchestrate`.

    Attributes:
        loader: The loader that draws.
        setup: What was fixed once.
        report: Figures of all steps so far.
        micro_step: The plan of the batch yielded last; None before the first.
    """

    def __init__(self, loader: Any, setup: Setup, *, prefetch: int, timeout_s: float) -> None:
        self.loader, self.setup = loader, setup
        self.report = Report()
        self.micro_step: MicroStep | None = None
        self._prefetch, self._timeout_s = prefetch, timeout_s
        self._ahead: Prefetcher[Ready] | None = None  # of the latest iteration, until that has come to its end
        self._begin = ResumePoint()
        self._reached: ResumePoint | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._end_former_iteration()
        closing = threading.Event()
        producer = StepProducer(
            self.loader,
            self.setup,
            self.report,
            self._begin,
            lambda: ahead.num_taken if closing.is_set() else None,
            self._prefetch,
        )
        ahead = self._ahead = Prefetcher(producer, self._prefetch, closing, self._check_wait)
        self._begin = replace(self._begin, step=0)  # of the next iteration, also if this one has no batch
        self.micro_step, self._reached, is_in_use = None, producer.begin, False
        try:
            while (ready := self._next(ahead)) is not None:
                yield self._hand_over(ready)
                is_used = ready.micro_step.entered.is_set()
                if is_in_use and not is_used and not ahead.is_closed:
                    self._check_skipped(ready.micro_step)
                is_in_use = is_in_use or is_used
            self.setup.liveness.note("end of an epoch")
            self._reached = None  # the loader says where the next epoch begins
        finally:  # At the end, after `break`, and while an exception of the loop's body is on its way up.
            if self._ahead is ahead:  # not if this was iterated anew
                self.setup.liveness.pause()
                producer.leave()
                if ahead.close(min(_CLOSE_S, self._timeout_s)):
                    self._ahead = None

    def __len__(self) -> int:
        """Number of micro-steps, as the loader estimates it."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the loader draws, where it knows epochs."""
        if hasattr(self.loader, "set_epoch"):
            if getattr(self.loader, "epoch", epoch) != epoch:  # the rest of a resumed one is given up
                self._begin = replace(self._begin, step=0)
            self.loader.set_epoch(epoch)
            if self._ahead is None or self._ahead.is_closed:  # else the state is of the step that was taken
                self._reached = None

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands behind the last optimizer step; what was prepared ahead of it counts as not drawn.

        Save it beside model and optimizer; every rank saves its own.

        Raises:
            RuntimeError: If micro-steps of the current optimizer step are still to come.
            TypeError: If the loader has no `state_dict`, or cannot be resumed.
        """
        if not self.sync_gradients:
            raise RuntimeError("`state_dict` must be called where an optimizer step ends, not between micro-steps.")
        return (self._reached or self._next_epoch()).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was saved: the next iteration yields what had not been trained on, once.

        Raises:
            ValueError: If it is not such a state, or the loader refuses its own.
        """
        self._end_former_iteration()
        self._begin = ResumePoint.from_dict(state)
        self.loader.load_state_dict(self._begin.loader)
        self.micro_step = self._reached = None

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer steps after the batch yielded last; under DDP the others may run in `no_sync`."""
        return self.micro_step is None or self.micro_step.is_last

    def _next_epoch(self) -> ResumePoint:
        return ResumePoint.of(self.loader, self._begin.step, self._begin.peaks)

    def _end_former_iteration(self) -> None:
        """Waits for the background thread of the iteration before, which shares its process group with the next."""
        if self._ahead is not None and not self._ahead.close(self._timeout_s):
            raise self._explained(
                TimeoutError(f"The epoch before did not end on rank {self.setup.rank} in {self._timeout_s:.0f} s.")
            )
        self._ahead = None

    def _next(self, ahead: Prefetcher[Ready]) -> Ready | None:
        if not ahead.is_closed:
            self.setup.liveness.note("wait for a batch")
        start = time.perf_counter()
        ready = ahead.next()
        self.report.wait_ms.append(1e3 * (time.perf_counter() - start))
        return ready

    def _hand_over(self, ready: Ready) -> dict[str, Any]:
        """Moves the batch to the model's device, and tells DeepSpeed whether a step follows."""
        if ready.micro_step.index == 0:
            self.report.steps.append(ready.metrics)
        self._begin = replace(ready.resume, step=0)
        self._reached = ready.resume
        device = self.setup.device
        ready.micro_step.note_training()
        stages = {
            name: replace(batch, inputs=to_device(batch.inputs, device))
            for name, batch in ready.micro_step.stages.items()
        }
        self.micro_step = replace(ready.micro_step, stages=stages)
        if self.setup.engine.deepspeed is not None:
            self.setup.engine.deepspeed.set_gradient_accumulation_boundary(self.micro_step.is_last)
        batch = {**to_device(ready.batch, device), BATCH_KEY: self.micro_step}
        watch_of(self.setup.engine.model).await_batch(batch)
        return batch

    def _check_skipped(self, micro_step: MicroStep) -> None:
        """A batch that the model of one rank skips would leave the others in its exchanges; all may skip it."""
        micro_step.note("skip a batch")
        ranks = get_global_ranks(self.setup.engine.group)
        num_skipping = self.setup.liveness.meet(f"skip/{micro_step.step}/{micro_step.index}", ranks)
        if num_skipping < len(ranks):
            raise RuntimeError(
                f"Rank {self.setup.rank} did not run the model on its batch of step {micro_step.step}, "
                f"micro-step {micro_step.index}: all {len(ranks)} ranks must skip a batch, or none, "
                f"but {num_skipping} did."
            )

    def _check_wait(self, waited_s: float) -> None:
        if waited_s > self._timeout_s:
            raise self._explained(
                TimeoutError(
                    f"Rank {self.setup.rank} waited {waited_s:.0f} s for a batch; the limit is {self._timeout_s:.0f} s."
                )
            )

    def _explained(self, error: TimeoutError) -> Exception:
        """The same, saying what each rank does, where there are others."""
        if self.setup.topology.num_ranks == 1:
            return error
        explained = self.setup.liveness.explain(error)
        explained.__cause__ = error
        return explained


def orchestrate(
    loader: Any,
    engine: nn.Module,
    *,
    balance: str = "post",
    dispatcher: str | None = None,
    accumulate: int | None = None,
    topology: Topology | None = None,
    max_tokens: int | None = None,
    slack: float = 0.0,
    costs: Mapping[str, CostModel] | None = None,
    collate_fn: Collate | None = None,
    layout: str | None = None,
    exchange: str = "auto",
    group: dist.ProcessGroup | DeviceMesh | None = None,
    prefetch: int = 1,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> OrchestratedLoader:
    """Wraps a loader so that every stage of the model gets balanced batches, and losses are exact.

    Each batch is a dict of arguments for the engine's forward. Its plan travels in it; the loss that comes out is the
    sum of token losses, scaled so that gradients are those of one process over all samples of the step. Every rank
    must call this at the same point, and leave its loop after the same batch.

    Args:
        loader: An `ODBDataLoader`, whose own grouping says what "as drawn" means: the groups that it gives by itself.
            Or any iterable of groups (lists of processed samples), in equal or unequal counts, such as a `DataLoader`
            with `collate_fn=list`. A `collate_fn` of an `ODBDataLoader` does not run.
        engine: What trains: DDP, a DeepSpeed engine, or the model itself, whose gradients are then yours to average
            over the ranks. Its encoders are stages (`orch.stage`).
        balance: "post": every stage on its own; "llm": the LLM alone; "pre": whole samples before the step; "none".
        dispatcher: How packed stages are dealt (`orch.dispatch.DISPATCHERS`); the best for each stage if not given.
        accumulate: K, micro-steps of an optimizer step; read from DeepSpeed, 1 otherwise. Their losses add up to that
            of the step: do not divide them by K.
        topology: Ranks and nodes, taken at your word; if not given, ranks tell each other the names of their hosts,
            which are held against what the launcher says.
        max_tokens: The most tokens the LLM's batch of a rank may hold; never more than unbalanced in any case.
        slack: By what share the load of packed stages may exceed the least possible one, from 0 to 1. With 0.01 plans
            are made sooner and less crosses nodes, which pays where these are joined by a slow link.
        costs: What batches cost by stage name and "llm", e.g. from `orch.calibrate`; FLOPs for what is not given.
        collate_fn: `collate_fn(samples, parts)` to arguments of the model; found by the model if not given. `samples`
            are those of this rank's LLM batch, fillers included, without their items; `parts`, by stage, what the
            adapter keeps of the items of each. The one found is `orch.encoders.backbone.collator_for(model, layout)`.
        layout: "packed" or "padded" samples in the LLM; the loader's if not given, else "packed".
        exchange: How items and encoder outputs travel: "flat"; "node_wise", collected inside the node before they
            cross; "auto", the one predicted to be faster each time; "all_gather" as a baseline for the outputs.
        group: The data-parallel group, or that axis of a `DeviceMesh` (`mesh["dp"]`), where tensor- or
            sequence-parallel peers share a rank's samples and so its plan; DDP's own or the world if not given.
        prefetch: Batches prepared ahead in a background thread; 0 prepares in the training thread.
        timeout_s: Seconds after which a wait raises.

    Raises:
        ValueError: If a choice is unknown or out of range, or contradicts the engine.
    """
    check_seconds("timeout_s", timeout_s)
    if collate_fn is None and hasattr(loader, "groups") and getattr(loader, "collate_fn", None) is not None:
        warnings.warn(
            "`collate_fn` of the loader does not run once it is orchestrated, as samples change ranks before they are "
            "collated: give `orch.orchestrate` one, which takes `(samples, parts)`.",
            stacklevel=2,
        )
    choices = Choices(
        layout=layout or str(getattr(loader, "layout", "packed")),
        balance=balance,
        dispatcher=dispatcher,
        accumulate=accumulate,
        topology=topology,
        max_tokens=max_tokens,
        slack=slack,
        costs=costs,
        exchange=exchange,
        prefetch=prefetch,
    )
    setup = make_setup(engine, choices, collate_fn=collate_fn, group=group, timeout_s=timeout_s)
    return OrchestratedLoader(loader, setup, prefetch=prefetch, timeout_s=timeout_s)
