"""The way of a step, straight down: draw, gather lengths, plan, and for each micro-step exchange, join and collate."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from orch.comm.gather import RankFailedError, Status, gather
from orch.comm.topology import IntArray
from orch.draw import DrawnSample, draw_sample, measure
from orch.lengths import StepLengths, merge_lengths, pack_lengths
from orch.loss import loss_scale
from orch.memory import LLM
from orch.metrics import StepMetrics, step_metrics
from orch.micro_step import MicroStep, describe_samples
from orch.plan import MicroStepPlan, StepPlan, plan_step
from orch.prepare import (
    Named,
    exchange_step_parcels,
    open_step_parcels,
    parcel_tags,
    pinned_for,
    row_tags,
    stage_batch,
)
from orch.report import Report
from orch.resume import ResumePoint
from orch.setup import Setup
from orch.skips import Skips, skipped_apart
from orch.tags import Tags

_GOES_ON, _HAS_TAKEN_ALL, _LEAVES_SOME = range(3)
Groups = Iterator[Sequence[dict[str, Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A batch as the background thread leaves it.

    Attributes:
        batch: Arguments of the model's forward.
        micro_step: What travels with them.
        metrics: Of the whole step.
        resume: Where to go on once the step is done.
    """

    batch: dict[str, Any]
    micro_step: MicroStep
    metrics: StepMetrics
    resume: ResumePoint


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """What one rank has for the next step, or why it has nothing."""

    samples: list[DrawnSample]
    lengths: StepLengths
    error: BaseException | None = None

    @property
    def status(self) -> Status:
        if self.error is not None and not isinstance(self.error, RankFailedError):
            return Status.FAILED
        return Status.OK if self.lengths.num_micro_steps else Status.ENDED


class StepProducer:
    """Produces the batches of a run of steps; every rank's producer enters the same collectives in the same order.

    Args:
        loader: The loader that draws this rank's groups.
        setup: What the run fixed once.
        report: Where figures go.
        begin: The first step's number, and the peaks so far, which are raised step by step, the same on all ranks.
        left: Asked before each step is planned: how many batches the consumer had taken when it left; None as long as
            it has not. All ranks end when one has left.
        num_ahead: Batches that lie ready before the consumer takes them.

    Attributes:
        begin: The same with the loader's own state.
    """

    def __init__(
        self, loader: Any, setup: Setup, report: Report, begin: ResumePoint,
        left: Callable[[], int | None], num_ahead: int,
    ) -> None:  # fmt: skip
        self._loader, self._setup, self._report, self._left = loader, setup, report, left
        self._peaks = {name: begin.peaks[name] for name in (LLM, *setup.stages) if name in begin.peaks}
        self.begin = begin
        try:
            self._groups = _groups_of(loader, setup.topology.num_ranks)
            self.begin = ResumePoint.of(loader, begin.step, self._peaks)
        except Exception as error:  # told when lengths are gathered, as what fails later
            self._groups = _failing(error)
        self._drawn_to, self._names = self.begin, list(setup.stages)
        self._agreed = setup.fingerprint()
        self._skips, self._num_produced = Skips(num_ahead + 1 + setup.accumulate), 0

    def __iter__(self) -> Iterator[Ready]:
        step = self.begin.step
        while True:
            self._setup.liveness.note("draw", step=step)
            # Closing or not: the round that another rank draws from begins once all have taken the one before.
            draw = self._draw()
            lengths = self._gather_lengths(draw, self._left(), step)
            if lengths is None:
                return
            if not lengths.num_samples:  # every rank's groups of this step are empty
                continue
            plan = self._plan(lengths, step)
            metrics = step_metrics(lengths, plan, self._setup.topology, self._setup.config)
            for name, stage in metrics.stages.items():
                self._peaks[name] = max(self._peaks.get(name, 0), stage.largest_batch_before)
            resume = replace(self._drawn_to, step=step + 1, peaks=dict(self._peaks))
            for index, part in enumerate(plan.micro_steps):
                batch, micro_step = self._prepare(draw.samples, lengths, part, step, index)
                self._skips.hand_over(micro_step.entered)
                self._num_produced += 1
                yield Ready(batch, micro_step, metrics, resume)
            step += 1

    def leave(self) -> None:
        """Tells a loader that can be told that nobody waits for what is still being drawn ahead."""
        getattr(self._groups, "leave", lambda: None)()

    def _draw(self) -> _Draw:
        """What is at hand for up to K micro-steps, taken apart and measured.

        Where that fails the rest is taken all the same, as it is on the other ranks.
        """
        setup, adapters = self._setup, self._setup.adapters
        taken: list[list[DrawnSample]] = []
        ranks: list[int] = []
        groups = self._next_groups()
        try:
            for group in groups:
                if not isinstance(group, Collection):
                    raise ValueError(
                        f"A loader must yield lists of samples, but yields {group!r} instead: "
                        "for a `DataLoader` use `collate_fn=list`."
                    )
                taken.append([draw_sample(s, adapters, setup.placeholders, setup.unstaged) for s in group])
                if setup.unused_keys is not None:
                    setup.unused_keys.note(key for sample in group for key in sample)
                ranks += getattr(group, "ranks", [setup.rank] * len(group))
            return _Draw([sample for group in taken for sample in group], measure(taken, self._names, ranks))
        except Exception as error:
            with contextlib.suppress(Exception):
                deque(groups, maxlen=0)
            return self._nothing(error)

    def _next_groups(self) -> Iterator[Any]:
        """The loader's next groups, up to K.

        Notes where the loader stands behind each, since it is in the next epoch once it was asked for more than it has.
        """
        for _, group in zip(range(self._setup.accumulate), self._groups, strict=False):
            self._drawn_to = ResumePoint.of(self._loader, self.begin.step, self._peaks)
            yield group

    def _nothing(self, error: BaseException | None = None) -> _Draw:
        return _Draw([], measure([], self._names, []), error)

    def _gather_lengths(self, draw: _Draw, left: int | None, step: int) -> StepLengths | None:
        """Everyone's lengths; None once no rank has a sample left, or once this one has stopped.

        A rank that was told by its loader of another's failure leaves it to that one to say so.
        """
        start = time.perf_counter()
        leaving = _GOES_ON if left is None else _HAS_TAKEN_ALL if left == self._num_produced else _LEAVES_SOME
        own = np.array([self._agreed, leaving, step, *self._skips.told()], dtype=np.int64)
        vector = np.concatenate([own, pack_lengths(draw.lengths)])
        vectors = self._together(draw.status, draw.error, vector, "lengths", step)
        if draw.error is not None:
            raise draw.error
        self._report.gather_ms.append(1e3 * (time.perf_counter() - start))
        self._check_setups([int(v[0]) for v in vectors])
        _check_steps([int(v[2]) for v in vectors])
        lengths = merge_lengths([v[5:] for v in vectors], self._names)
        # At the end, a rank that has taken all batches has left as others come there by themselves.
        at_most = _GOES_ON if lengths.num_micro_steps else _HAS_TAKEN_ALL
        stopped = [rank for rank, v in enumerate(vectors) if v[1] > at_most]
        if leaving or not (stopped or lengths.num_micro_steps):
            return None
        if stopped:
            raise RuntimeError(
                f"Ranks {stopped} stopped iterating before step {step}, rank {self._setup.rank} did not: "
                "all ranks must leave the loop after the same batch."
            )
        self._check_skips([(int(v[3]), int(v[4])) for v in vectors], step)
        return lengths

    def _plan(self, lengths: StepLengths, step: int) -> StepPlan:
        """The plan of the step; the same on every rank, which is checked before data moves."""
        setup = self._setup
        setup.liveness.note("plan", step=step)
        start = time.perf_counter()
        with record_function("orch.plan"):
            plan = plan_step(lengths, setup.topology, setup.config, self._peaks)
        self._report.plan_ms.append(1e3 * (time.perf_counter() - start))
        own = np.array([plan.fingerprint()], dtype=np.int64)
        hashes = [int(v[0]) for v in self._together(Status.OK, None, own, "plan", step)]
        differing = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
        if differing:
            raise RuntimeError(f"Ranks {differing} computed another plan than rank 0 from the same lengths.")
        return plan

    def _prepare(
        self, drawn: list[DrawnSample], lengths: StepLengths, plan: MicroStepPlan, step: int, index: int
    ) -> tuple[dict[str, Any], MicroStep]:
        """This rank's batch of one micro-step. A failure here is every rank's."""
        setup, rank = self._setup, self._setup.rank
        tags = parcel_tags(plan, rank, step) if setup.choices.debug else None
        parcels = self._exchange(drawn, lengths, plan, step, tags)
        arrived, ready, failure = None, None, None
        try:
            arrived = open_step_parcels(parcels, plan, rank, tags)
            batch = dict(setup.collate(arrived.samples, arrived.parts))
            stages = {}
            for name, stage in plan.stages.items():
                adapter, parts = setup.stages[name].adapter, arrived.parts[name]
                num_rows = lengths.stages[name].num_rows[stage.items]
                of_rows = row_tags(plan, name, num_rows, rank, step) if setup.choices.debug else (None, None)
                stages[name] = stage_batch(
                    stage, num_rows, arrived.items[name], parts, adapter, rank, setup.topology, of_rows
                )
                batch |= adapter.llm_inputs([part for sample in parts for part in sample])
            stages = {n: replace(stage, inputs=pinned_for(stage.inputs, setup.device)) for n, stage in stages.items()}
            ready = pinned_for(batch, setup.device), self._micro_step(lengths, stages, arrived.named, step, index)
        except Exception as error:
            batch_of = "" if arrived is None else f", batch of the {describe_samples(arrived.named)}"
            failure = RuntimeError(f"step {step}, micro-step {index}{batch_of}: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._together(
            Status.OK if failure is None else Status.FAILED, failure, np.empty(0, np.int64), "prepared", step
        )
        assert ready is not None
        return ready

    def _exchange(
        self, drawn: list[DrawnSample], lengths: StepLengths, plan: MicroStepPlan, step: int, tags: Tags | None
    ) -> list[torch.Tensor]:
        """The parcels of this rank's batch."""
        setup, start = self._setup, time.perf_counter()
        how: dict[str, Any] = {"method": setup.parcel_method, "topology": setup.topology, "tags": tags}
        with setup.liveness.guard("exchange raw items", step=step), record_function("orch.exchange.raw"):
            parcels = exchange_step_parcels(drawn, lengths, plan, setup.rank, setup.parcels, **how)
        self._report.exchange_ms.append(1e3 * (time.perf_counter() - start))
        return parcels

    def _micro_step(
        self, lengths: StepLengths, stages: dict[str, Any], samples: tuple[Named, ...], step: int, index: int
    ) -> MicroStep:
        setup, num_tokens = self._setup, int(lengths.num_label_tokens.sum())
        return MicroStep(
            step=step,
            index=index,
            num_micro_steps=lengths.num_micro_steps,
            loss_scale=loss_scale(num_tokens, setup.topology.num_ranks, setup.engine.accumulation_divisor),
            num_label_tokens=num_tokens,
            auxiliary_scale=setup.engine.accumulation_divisor / lengths.num_micro_steps,
            stages=stages,
            group=setup.rows,
            exchange_method=setup.choices.exchange,
            samples=samples,
            liveness=setup.liveness,
        )

    def _together(
        self, status: Status, error: BaseException | None, values: IntArray, label: str, step: int
    ) -> list[IntArray]:
        """Goes on only if every rank does; where one failed all raise, and that one from its own error."""
        message = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            with self._setup.liveness.guard(f"gather {label}", step=step), record_function("orch.gather"):
                return gather(values, status, message, self._setup.integers, label=label).values
        except RankFailedError as failed:
            raise failed from error

    def _check_skips(self, told: list[tuple[int, int]], step: int) -> None:
        num_skipped = skipped_apart(told)
        if num_skipped is not None:
            raise RuntimeError(
                f"Before step {step}, ranks did not run the model on {num_skipped} of their batches: all must skip the "
                f"same, or none (rank {self._setup.rank} skipped {num_skipped[self._setup.rank]})."
            )

    def _check_setups(self, fingerprints: list[int]) -> None:
        differing = [rank for rank, value in enumerate(fingerprints) if value != fingerprints[0]]
        if differing:
            raise ValueError(
                f"`orch.orchestrate` must be set up alike on all ranks, but ranks {differing} differ from rank 0 "
                "instead, in version, stages, trained parts, dtypes, topology, balance, caps, accumulation, exchange; "
                f"rank {self._setup.rank} has {self._setup.describe()}."
            )


def _check_steps(steps: list[int]) -> None:
    if len(set(steps)) > 1:
        raise ValueError(
            f"All ranks must go on at the same step, but are at steps {steps} instead: "
            "load on each rank the state that it saved at the same time as the others."
        )


def _groups_of(loader: Any, num_ranks: int) -> Groups:
    """The groups of a loader: over all ranks if it forms them so, and its ranks are those that train."""
    if not hasattr(loader, "groups"):
        return iter(loader)
    is_global = getattr(loader, "grouping", "local") == "global" and loader.peers.num_ranks == num_ranks > 1
    return iter(loader.groups("global") if is_global else loader.groups())


def _failing(error: Exception) -> Groups:
    raise error
    yield
