"""Decides where each sample and item goes; `orch.plan` turns the decision into layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from orch.comm.topology import IntArray, Topology
from orch.config import BalanceConfig, StageConfig
from orch.dispatch import DispatchProblem, dispatch_all
from orch.lengths import StepLengths
from orch.line_up import StageLoads, line_up
from orch.memory import LLM
from orch.weights import SampleWeights, weigh_samples

_LEVEL = 64  # a step load within 1/64 of what it would be without any waiting is as good


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Where everything of a step goes.

    Attributes:
        llm_rank: int64[N], the rank that runs the LLM on each sample.
        micro_step: int64[N], the micro-step in which it does.
        encode_rank: For each stage int64[M], the rank that encodes each item.
    """

    llm_rank: IntArray
    micro_step: IntArray
    encode_rank: Mapping[str, IntArray]


@dataclass(frozen=True, eq=False)
class Assigner:
    """Balances one step.

    Attributes:
        lengths: The step.
        topology: Ranks and nodes.
        config: How to balance.
        caps: The most tokens a batch of each stage may hold; None for no cap.
    """

    lengths: StepLengths
    topology: Topology
    config: BalanceConfig
    caps: Mapping[str, int | None]

    def candidates(self) -> Iterator[Assignment]:
        """Assignments to try, the best first; the last, as drawn, needs the memory of the unbalanced step.

        Dealing samples over micro-steps can heap an encoder's items in one of them, which takes memory and time and
        shows only when it is done; keeping each sample in the micro-step it was drawn for cannot.
        """
        if self.config.mode != "none":
            if self.lengths.num_micro_steps > 1:
                yield from self._over_micro_steps()
            yield self._with_encoders(self._ranks_in_micro_steps, self.lengths.micro_step)
        yield self._as_drawn()

    @cached_property
    def _weights(self) -> SampleWeights:
        lengths = self.lengths
        encode = self._with_encoders(lengths.home, lengths.micro_step, preview=True).encode_rank
        return weigh_samples(lengths, self.config, encode, self.topology.num_ranks)

    @cached_property
    def _ranks_in_micro_steps(self) -> IntArray:
        """The rank of each sample, where each keeps its micro-step: int64[N]."""
        rank = self.lengths.home.copy()
        chosen = _by_value(self.lengths.micro_step, self.lengths.num_micro_steps)
        problems = [self._samples(own, 1, np.zeros_like(own)) for own in chosen]
        for own, found in zip(chosen, self._dispatch(problems, [self.config.llm] * len(chosen)), strict=True):
            rank[own] = found
        return rank

    def _over_micro_steps(self) -> Iterator[Assignment]:
        """With samples dealt over micro-steps too.

        If all stages are dealt, then only where the LLM gains more than by keeping micro-steps, and no stage is slower
        than as drawn. What lines up batches takes the least time, but may take more memory.
        """
        lengths, num_micro_steps = self.lengths, self.lengths.num_micro_steps
        problem = self._samples(np.arange(lengths.num_samples), num_micro_steps, lengths.micro_step)
        (bins,) = self._dispatch([problem], [self.config.llm])
        if self.config.mode != "post":
            yield self._with_encoders(bins // num_micro_steps, bins % num_micro_steps)
            return
        lined_up, drawn = self._lined_up(problem, bins), self._step_loads(self._as_drawn())
        load, level = problem.step_load(lined_up), int(problem.loads(bins).sum()) // self.topology.num_ranks
        if load > level + level // _LEVEL:
            keeping = self._ranks_in_micro_steps * num_micro_steps + lengths.micro_step
            if problem.step_load(keeping) <= load:
                return
        for found in (bins,) if (lined_up == bins).all() else (lined_up, bins):
            assignment = self._with_encoders(found // num_micro_steps, found % num_micro_steps)
            if all(load <= drawn[name] for name, load in self._step_loads(assignment).items()):
                yield assignment

    def _lined_up(self, problem: DispatchProblem, bins: IntArray) -> IntArray:
        """The bin of each sample, each rank's batches in the order in which large samples and items line up."""
        shape = self.topology.num_ranks, self.lengths.num_micro_steps
        llm, stages = problem.loads(bins).reshape(shape), []
        for name, items in self.lengths.stages.items():
            cost, bin_of_item = self.config.stage(name).cost_model, bins[items.sample]
            total, largest = cost.loads(items.length, bin_of_item, problem.num_bins), np.zeros_like(llm).ravel()
            np.maximum.at(largest, bin_of_item, cost.loads(items.length, np.arange(len(items)), len(items)))
            stages.append(StageLoads(total.reshape(shape), largest.reshape(shape)))
        micro_step = line_up(StageLoads(llm, llm), stages).ravel()
        return bins - bins % shape[1] + micro_step[bins]

    def _step_loads(self, assignment: Assignment) -> dict[str, int]:
        """Of the LLM and each stage, the cost of the costliest rank of each micro-step, in all."""
        num_ranks, num_micro_steps = self.topology.num_ranks, self.lengths.num_micro_steps

        def step_load(stage: StageConfig, lengths: IntArray, ranks: IntArray, micro_step: IntArray) -> int:
            bins = ranks * num_micro_steps + micro_step
            loads = stage.cost_model.loads(lengths, bins, num_ranks * num_micro_steps)
            return int(loads.reshape(num_ranks, num_micro_steps).max(axis=0).sum())

        llm = self.config.llm, self.lengths.llm_length, assignment.llm_rank, assignment.micro_step
        return {LLM: step_load(*llm)} | {
            name: step_load(
                self.config.stage(name), items.length, assignment.encode_rank[name], assignment.micro_step[items.sample]
            )
            for name, items in self.lengths.stages.items()
        }

    def _as_drawn(self) -> Assignment:
        lengths = self.lengths
        encode = {name: lengths.group_rank[items.sample] for name, items in lengths.stages.items()}
        return Assignment(lengths.group_rank, lengths.micro_step, encode)

    def _samples(self, chosen: IntArray, bins_per_rank: int, micro_step: IntArray) -> DispatchProblem:
        llm, weights = self.config.llm, self._weights
        return DispatchProblem(
            lengths=self.lengths.llm_length[chosen],
            home=self.lengths.home[chosen] * bins_per_rank + micro_step,
            topology=self.topology,
            cost=llm.cost_model,
            bins_per_rank=bins_per_rank,
            layout=llm.layout,
            slack=self.config.slack,
            cap=self.caps[LLM],
            move_bytes=weights.move_bytes[chosen],
            target=weights.target[chosen] * bins_per_rank + micro_step,
            target_bytes=weights.target_bytes[chosen],
            group_bin=self.lengths.group_rank[chosen] * bins_per_rank + micro_step,
        )

    def _with_encoders(self, llm_rank: IntArray, micro_step: IntArray, *, preview: bool = False) -> Assignment:
        """Adds the rank that encodes each item, as the mode says.

        A preview leaves alone the stages whose dispatcher does not look at where samples go.
        """
        lengths = self.lengths
        start = {"pre": llm_rank, "llm": lengths.group_rank, "post": lengths.home}[self.config.mode]
        encode = {name: start[items.sample] for name, items in lengths.stages.items()}
        if self.config.mode != "post":
            return Assignment(llm_rank, micro_step, encode)
        parts = [
            (name, own)
            for name, items in lengths.stages.items()
            if not (preview and self.config.stage(name).dispatcher_name != "local")
            for own in _by_value(micro_step[items.sample], lengths.num_micro_steps)
        ]
        problems = [replace(self._items(name, own, llm_rank), rough=preview) for name, own in parts]
        found = self._dispatch(problems, [self.config.stage(name) for name, _ in parts])
        for (name, own), ranks in zip(parts, found, strict=True):
            encode[name][own] = ranks
        return Assignment(llm_rank, micro_step, encode)

    def _items(self, name: str, chosen: IntArray, llm_rank: IntArray) -> DispatchProblem:
        stage, items = self.config.stage(name), self.lengths.stages[name]
        sample = items.sample[chosen]
        return DispatchProblem(
            lengths=items.length[chosen],
            home=self.lengths.home[sample],
            topology=self.topology,
            cost=stage.cost_model,
            layout=stage.layout,
            slack=self.config.slack,
            cap=self.caps[name],
            move_bytes=items.num_bytes[chosen],
            target=llm_rank[sample],
            target_bytes=items.num_rows[chosen] * stage.row_bytes,
            group_bin=self.lengths.group_rank[sample],
        )

    def _dispatch(self, problems: Sequence[DispatchProblem], stages: Sequence[StageConfig]) -> list[IntArray]:
        dispatchers = [stage.dispatcher_name for stage in stages]
        return dispatch_all(problems, dispatchers, placement=self.config.placement)


def _by_value(values: IntArray, num_values: int) -> list[IntArray]:
    """The positions of each value from 0 on, ascending: a list of `num_values` int64 arrays."""
    return [np.flatnonzero(values == value) for value in range(num_values)]
