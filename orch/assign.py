"""Decides where each sample and item goes; `orch.plan` turns the decision into layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orch.comm.topology import IntArray, Topology
from orch.config import BalanceConfig, StageConfig
from orch.dispatch import DispatchProblem, dispatch_all
from orch.lengths import StepLengths
from orch.memory import LLM
from orch.weights import SampleWeights, weigh_samples


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


@dataclass(frozen=True, slots=True, eq=False)
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

        Dealing samples over micro-steps can heap an encoder's items in one of them, which shows only when it is done;
        keeping each sample in the micro-step it was drawn for cannot.
        """
        lengths = self.lengths
        if self.config.mode != "none":
            encode = self._with_encoders(lengths.home, lengths.micro_step, preview=True).encode_rank
            weights = weigh_samples(lengths, self.config, encode, self.topology.num_ranks)
            if lengths.num_micro_steps > 1:
                yield self._with_encoders(*self._deal_samples_over_micro_steps(weights))
            yield self._with_encoders(self._deal_samples_in_micro_steps(weights), lengths.micro_step)
        encode = {name: lengths.group_rank[items.sample] for name, items in lengths.stages.items()}
        yield Assignment(lengths.group_rank, lengths.micro_step, encode)

    def _deal_samples_over_micro_steps(self, weights: SampleWeights) -> tuple[IntArray, IntArray]:
        """The rank and the micro-step of each sample: int64[N] each."""
        num_micro_steps = self.lengths.num_micro_steps
        everything = np.arange(self.lengths.num_samples)
        problem = self._samples(everything, weights, num_micro_steps, self.lengths.micro_step)
        (bins,) = self._dispatch([problem], [self.config.llm])
        return bins // num_micro_steps, bins % num_micro_steps

    def _deal_samples_in_micro_steps(self, weights: SampleWeights) -> IntArray:
        """The rank of each sample: int64[N]."""
        rank = self.lengths.home.copy()
        chosen = _by_value(self.lengths.micro_step, self.lengths.num_micro_steps)
        problems = [self._samples(own, weights, 1, np.zeros_like(own)) for own in chosen]
        for own, found in zip(chosen, self._dispatch(problems, [self.config.llm] * len(chosen)), strict=True):
            rank[own] = found
        return rank

    def _samples(
        self, chosen: IntArray, weights: SampleWeights, bins_per_rank: int, micro_step: IntArray
    ) -> DispatchProblem:
        llm = self.config.llm
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
