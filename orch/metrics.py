"""What a plan is worth: imbalance, memory and bytes moved, per stage, as drawn and as planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from orch.comm.layout import Layout
from orch.comm.topology import IntArray, Topology
from orch.config import BalanceConfig, StageConfig
from orch.cost import CostModel, is_additive
from orch.dispatch.bounds import least_load
from orch.lengths import StepLengths
from orch.memory import LLM, largest_batches, largest_drawn
from orch.plan import MicroStepPlan, StepPlan


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Bytes that change rank.

    Attributes:
        intra_node: Between ranks of one node.
        inter_node: Between nodes.
    """

    intra_node: int = 0
    inter_node: int = 0

    def __add__(self, other: MovedBytes) -> MovedBytes:
        return MovedBytes(self.intra_node + other.intra_node, self.inter_node + other.inter_node)


@dataclass(frozen=True, slots=True)
class StageMetrics:
    """One stage in one step.

    Imbalance is the time that ranks take when they wait for each other at every micro-step, over the time they would
    take if loads were equal: the sum over micro-steps of the largest load over the sum of the mean loads. It is 1
    where there is no load. Fillers add to the largest load and not to the mean.

    Attributes:
        imbalance_before: As drawn.
        imbalance_after: As planned.
        bound: What no layout of the plan's micro-steps can beat, at least 1: the longest item of each over the mean
            load; with additive costs also what few items of like length leave uneven (`least_load`).
        num_items: Samples (of the LLM) or items, without fillers.
        largest_batch_before: Tokens of the largest batch as drawn.
        largest_batch_after: Tokens of the largest batch as planned, fillers included.
        moved: Bytes moved for this stage: raw items to their encoder and outputs to the LLM; for the LLM, the
            samples without their items.
    """

    imbalance_before: float
    imbalance_after: float
    bound: float
    num_items: int
    largest_batch_before: int
    largest_batch_after: int
    moved: MovedBytes


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """All stages in one step.

    Attributes:
        stages: By name; the LLM is "llm" and comes last.
    """

    stages: Mapping[str, StageMetrics]

    @property
    def moved(self) -> MovedBytes:
        """Bytes moved by all stages together."""
        return sum((stage.moved for stage in self.stages.values()), MovedBytes())


def step_metrics(
    lengths: StepLengths, plan: StepPlan, topology: Topology, config: BalanceConfig | None = None
) -> StepMetrics:
    """Measures a plan against the step as drawn.

    Args:
        lengths: The step.
        plan: Its plan, of any mode.
        topology: Ranks and nodes.
        config: The costs; its mode is not looked at.
    """
    config = config or BalanceConfig()
    before, after = largest_drawn(lengths, topology, config), largest_batches(lengths, plan, topology, config)
    stages = {}
    for name in [*lengths.stages, LLM]:
        stage = config.llm if name == LLM else config.stage(name)
        loads = _Loads.of(name, stage, lengths, plan, topology.num_ranks)
        num_items = lengths.num_samples if name == LLM else len(lengths.stages[name])
        moved = sum((_moved(name, stage, lengths, part, topology) for part in plan.micro_steps), MovedBytes())
        stages[name] = StageMetrics(
            loads.drawn, loads.planned, loads.bound, num_items, before[name], after[name], moved
        )
    return StepMetrics(stages)


@dataclass(frozen=True, slots=True)
class _Loads:
    """Imbalance as drawn and as planned, and the least there is."""

    drawn: float
    planned: float
    bound: float

    @classmethod
    def of(cls, name: str, stage: StageConfig, lengths: StepLengths, plan: StepPlan, num_ranks: int) -> _Loads:
        sizes, sample = lengths.llm_length, np.arange(lengths.num_samples)
        if name != LLM:
            sizes, sample = lengths.stages[name].length, lengths.stages[name].sample
        largest, mean, least = 0.0, 0.0, 0.0
        for part in plan.micro_steps:
            items, layout, num_own = _batch(name, lengths, part)
            cost, ranks = stage.cost_model, layout.rank_of_item
            own_mean = float(cost.loads(sizes[items[:num_own]], ranks[:num_own], num_ranks).mean())
            largest += float(cost.loads(sizes[items], ranks, num_ranks).max())
            mean += own_mean
            least += max(own_mean, _least(cost, sizes[items[:num_own]], num_ranks))
        drawn = stage.cost_model.loads(sizes, lengths.drawn_bin[sample], num_ranks * lengths.num_micro_steps)
        drawn = drawn.reshape(num_ranks, lengths.num_micro_steps)
        return cls(imbalance(drawn), largest / mean if mean else 1.0, least / mean if mean else 1.0)


def _least(cost: CostModel, sizes: IntArray, num_ranks: int) -> float:
    if is_additive(cost):
        return least_load(cost.item_costs(sizes), num_ranks)
    return float(cost.loads(sizes, np.arange(len(sizes)), len(sizes)).max(initial=0))


def imbalance(loads: IntArray) -> float:
    """Largest load over mean load, 1 where there is none.

    Args:
        loads: int64[ranks] or int64[ranks, micro-steps]; with micro-steps, sums over them of largest and of mean.
    """
    mean = float(loads.mean(axis=0).sum())
    return float(loads.max(axis=0).sum()) / mean if mean else 1.0


def moved_bytes(source: Layout, target: Layout, sizes: IntArray, topology: Topology) -> MovedBytes:
    """Bytes of the items whose rank changes from one layout to the other; `sizes` are their bytes, int64[N]."""
    moves = np.flatnonzero(source.rank_of_item != target.rank_of_item)
    sizes, node = sizes[moves], topology.node_of_rank
    crosses = node[source.rank_of_item[moves]] != node[target.rank_of_item[moves]]
    inter = int(sizes[crosses].sum())
    return MovedBytes(int(sizes.sum()) - inter, inter)


def _batch(name: str, lengths: StepLengths, part: MicroStepPlan) -> tuple[IntArray, Layout, int]:
    """Items of a stage in a micro-step, the ranks that run them, and how many are not fillers' (they come first)."""
    num_own = len(part.samples) - part.num_fillers
    if name == LLM:
        return part.samples, part.llm, num_own
    stage = part.stages[name]
    sample = lengths.stages[name].sample
    copies = part.num_fillers * int(np.count_nonzero(sample == part.samples[-1])) if part.num_fillers else 0
    return stage.items, stage.encode, len(stage.items) - copies


def _moved(name: str, stage: StageConfig, lengths: StepLengths, part: MicroStepPlan, topology: Topology) -> MovedBytes:
    if name == LLM:
        return moved_bytes(part.home, part.llm, lengths.num_bytes[part.samples], topology)
    items, plan = lengths.stages[name], part.stages[name]
    raw = moved_bytes(plan.home, plan.encode, items.num_bytes[plan.items], topology)
    rows = items.num_rows[plan.items] * stage.row_bytes
    return raw + moved_bytes(plan.encode, plan.llm, rows, topology)
