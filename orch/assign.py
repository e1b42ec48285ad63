"""Decides where each sample and item goes; `orch.plan` turns the decision into layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray, Topology
from orch.config import BalanceConfig, StageConfig
from orch.dispatch import DispatchProblem, dispatch
from orch.lengths import ItemLengths, StepLengths
from orch.memory import LLM


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
        if self.config.mode != "none":
            if self.lengths.num_micro_steps > 1:
                yield self._with_encoders(*self._deal_samples_over_micro_steps())
            yield self._with_encoders(self._deal_samples_in_micro_steps(), self.lengths.micro_step)
        encode = {name: self.lengths.home[items.sample] for name, items in self.lengths.stages.items()}
        yield Assignment(self.lengths.home, self.lengths.micro_step, encode)

    def _deal_samples_over_micro_steps(self) -> tuple[IntArray, IntArray]:
        """The rank and the micro-step of each sample: int64[N] each."""
        num_micro_steps = self.lengths.num_micro_steps
        drawn_bin = self.lengths.home * num_micro_steps + self.lengths.micro_step
        everything = np.arange(self.lengths.num_samples)
        bins = self._dispatch(self._samples(everything, drawn_bin, num_micro_steps), self.config.llm)
        return bins // num_micro_steps, bins % num_micro_steps

    def _deal_samples_in_micro_steps(self) -> IntArray:
        """The rank of each sample: int64[N]."""
        rank = self.lengths.home.copy()
        for micro_step in range(self.lengths.num_micro_steps):
            chosen = np.flatnonzero(self.lengths.micro_step == micro_step)
            rank[chosen] = self._dispatch(self._samples(chosen, rank[chosen], 1), self.config.llm)
        return rank

    def _samples(self, chosen: IntArray, home: IntArray, bins_per_rank: int) -> DispatchProblem:
        llm = self.config.llm
        return DispatchProblem(
            lengths=self.lengths.llm_length[chosen],
            home=home,
            topology=self.topology,
            cost=llm.cost_model,
            bins_per_rank=bins_per_rank,
            layout=llm.layout,
            cap=self.caps[LLM],
            move_bytes=sample_bytes(self.lengths, self.config)[chosen],
        )

    def _with_encoders(self, llm_rank: IntArray, micro_step: IntArray) -> Assignment:
        """Adds the rank that encodes each item, as the mode says."""
        encode = {}
        for name, items in self.lengths.stages.items():
            if self.config.mode == "pre":
                encode[name] = llm_rank[items.sample]
            else:
                encode[name] = self.lengths.home[items.sample]
            if self.config.mode == "post":
                for value in range(self.lengths.num_micro_steps):
                    chosen = np.flatnonzero(micro_step[items.sample] == value)
                    problem = self._items(name, items, chosen, encode[name], llm_rank[items.sample])
                    encode[name][chosen] = self._dispatch(problem, self.config.stage(name))
        return Assignment(llm_rank, micro_step, encode)

    def _items(
        self, name: str, items: ItemLengths, chosen: IntArray, home: IntArray, target: IntArray
    ) -> DispatchProblem:
        stage = self.config.stage(name)
        return DispatchProblem(
            lengths=items.length[chosen],
            home=home[chosen],
            topology=self.topology,
            cost=stage.cost_model,
            layout=stage.layout,
            cap=self.caps[name],
            move_bytes=items.num_bytes[chosen],
            target=target[chosen],
            target_bytes=items.num_rows[chosen] * stage.row_bytes,
        )

    def _dispatch(self, problem: DispatchProblem, stage: StageConfig) -> IntArray:
        return dispatch(problem, stage.dispatcher_name, placement=self.config.placement)


def sample_bytes(lengths: StepLengths, config: BalanceConfig) -> IntArray:
    """Bytes that moving a sample costs: int64[N], its own and, for each item, raw or encoded, whichever is less."""
    total = lengths.num_bytes.copy()
    for name, items in lengths.stages.items():
        np.add.at(total, items.sample, np.minimum(items.num_bytes, items.num_rows * config.stage(name).row_bytes))
    return total
