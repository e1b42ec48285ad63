"""One step, planned: lengths in, `StepPlan` out. Pure: every rank computes the same plan from the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orch.assign import Assigner, Assignment
from orch.comm.counts import check_kind
from orch.comm.layout import Layout, Rearrangement
from orch.comm.topology import IntArray, Topology, check_topology_kind
from orch.config import BALANCE_MODES, BalanceConfig, StageConfig
from orch.lengths import StepLengths
from orch.memory import drawn_caps, largest_batches, limited

__all__ = ["BALANCE_MODES", "BalanceConfig", "MicroStepPlan", "StageConfig", "StagePlan", "StepPlan", "plan_step"]


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """Where the items of one encoder stage go in one micro-step.

    Attributes:
        items: int64[m], ids into `StepLengths.stages[name]`; the m positions of this array are the items of the
            layouts below. Ascending, but for copies that belong to fillers, which stand at the end.
        home: The rank that holds each item.
        encode: The rank that runs the encoder on it.
        llm: The rank that holds its sample in the LLM.
    """

    items: IntArray
    home: Layout
    encode: Layout
    llm: Layout

    @property
    def to_encoder(self) -> Rearrangement:
        """Raw items, from where they were read to where they are encoded."""
        return Rearrangement(self.home, self.encode)

    @property
    def to_llm(self) -> Rearrangement:
        """Encoder outputs, straight to where the LLM needs them."""
        return Rearrangement(self.encode, self.llm)


@dataclass(frozen=True, slots=True, eq=False)
class MicroStepPlan:
    """Where the samples of one micro-step go.

    Attributes:
        samples: int64[n], ids into `StepLengths`; ascending, then the fillers.
        num_fillers: How many of the last samples are fillers: copies of the step's smallest sample for ranks that
            would have none, with labels masked and not counted.
        home: The rank that holds each sample.
        llm: The rank that runs the LLM on it.
        stages: The plan of each encoder stage by name, in the order in which stages run.
    """

    samples: IntArray
    num_fillers: int
    home: Layout
    llm: Layout
    stages: Mapping[str, StagePlan]

    @property
    def to_llm(self) -> Rearrangement:
        """Text and labels, from where they were read to where the LLM runs on them."""
        return Rearrangement(self.home, self.llm)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The plan of one optimizer step: one `MicroStepPlan` for each of its K micro-steps."""

    micro_steps: tuple[MicroStepPlan, ...]

    def fingerprint(self) -> int:
        """A 63-bit hash of every array of the plan, which ranks compare before data moves."""
        digest = hashlib.blake2b(digest_size=8)
        for micro_step in self.micro_steps:
            arrays = [micro_step.samples, micro_step.home.rank_of_item, micro_step.llm.rank_of_item]
            for stage in micro_step.stages.values():
                arrays += [stage.items, stage.home.rank_of_item, stage.encode.rank_of_item, stage.llm.rank_of_item]
            for array in arrays:
                digest.update(len(array).to_bytes(8, "little"))
                digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return int.from_bytes(digest.digest(), "little") >> 1


def plan_step(
    lengths: StepLengths,
    topology: Topology,
    config: BalanceConfig | None = None,
    peaks: Mapping[str, int] | None = None,
) -> StepPlan:
    """Plans one step.

    The plan is a function of the numbers given: every rank that has them computes the same one.

    Memory: no stage's largest batch exceeds the largest it had as drawn, over all micro-steps, nor its `max_tokens`;
    `peaks` adds what earlier steps had as drawn, which is memory that the run needs anyway
    (but in mode "pre" encoders follow their samples, and only `max_tokens` binds them). Where balancing cannot keep
    that, samples keep the micro-step they were drawn for; where this cannot either, everything stays as drawn.

    Args:
        lengths: All samples and items of the step (`orch.StepLengths`).
        topology: Ranks and nodes (`orch.Topology`).
        config: How to balance (`orch.BalanceConfig`); None is `BalanceConfig()`, every stage on its own.
        peaks: Tokens of the largest batch as drawn in earlier steps, by stage name and "llm"; the same on all ranks.

    Returns:
        The plan, with a filler for each rank that would have no sample in a micro-step.

    Raises:
        ValueError: If an argument is of another class, there is no sample, a rank is beyond the topology, or a stage's
            `max_tokens` cannot be kept.
    """
    check_kind("lengths", lengths, StepLengths, "orch.StepLengths(home, micro_step, llm_length, ...)")
    check_topology_kind(topology)
    config = BalanceConfig() if config is None else config
    check_kind("config", config, BalanceConfig, 'orch.BalanceConfig(mode="pre")')
    if not lengths.num_samples:
        raise ValueError("`lengths` must hold at least one sample, but holds none instead.")
    for name, ranks in (("home", lengths.home), ("group_rank", lengths.group_rank)):
        if int(ranks.max()) >= topology.num_ranks:
            raise ValueError(f"`{name}` must be below {topology.num_ranks}, but reaches {ranks.max()} instead.")
    drawn = drawn_caps(lengths, topology, config, peaks)
    caps = limited(drawn, config)
    refused: list[dict[str, int]] = []
    for assignment in Assigner(lengths, topology, config, caps).candidates():
        plan = _lay_out(lengths, topology, assignment)
        refused.append(_beyond(caps, largest_batches(lengths, plan, topology, config)))
        if not refused[-1]:
            return plan
    raise ValueError(_describe_refusal([broken for broken in refused if not _beyond(drawn, broken)], caps))


def _beyond(caps: Mapping[str, int | None], sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that are above the cap of their stage."""
    return {name: size for name, size in sizes.items() if (cap := caps[name]) is not None and size > cap}


def _describe_refusal(refused: Sequence[Mapping[str, int]], caps: Mapping[str, int | None]) -> str:
    """What to allow for the plan that comes nearest to what is allowed."""
    nearest = min(refused, key=lambda broken: (len(broken), max(size / (caps[n] or 1) for n, size in broken.items())))
    needs = " and ".join(f"{size} of stage {name!r}, which allows {caps[name]}" for name, size in nearest.items())
    return f"No plan for this step was found that keeps `max_tokens`: the nearest needs {needs}. Allow as much."


def _lay_out(lengths: StepLengths, topology: Topology, assignment: Assignment) -> StepPlan:
    filler = _smallest_sample(lengths)
    micro_steps = range(lengths.num_micro_steps)
    return StepPlan(tuple(_lay_out_one(lengths, topology, assignment, filler, value) for value in micro_steps))


def _lay_out_one(
    lengths: StepLengths, topology: Topology, assignment: Assignment, filler: int, micro_step: int
) -> MicroStepPlan:
    """One micro-step; ranks without a sample get the filler."""
    own = (assignment.micro_step == micro_step).nonzero()[0]
    llm_rank = assignment.llm_rank[own]
    idle = (np.bincount(llm_rank, minlength=topology.num_ranks) == 0).nonzero()[0]
    samples = np.concatenate([own, np.full(len(idle), filler, dtype=np.int64)])
    return MicroStepPlan(
        samples=samples,
        num_fillers=len(idle),
        home=Layout(lengths.home[samples], topology.num_ranks),
        llm=Layout(np.concatenate([llm_rank, idle]), topology.num_ranks),
        stages={
            name: _lay_out_stage(lengths, topology, assignment, name, filler, idle, micro_step)
            for name in lengths.stages
        },
    )


def _lay_out_stage(
    lengths: StepLengths,
    topology: Topology,
    assignment: Assignment,
    name: str,
    filler: int,
    idle: IntArray,
    micro_step: int,
) -> StagePlan:
    """One stage of one micro-step; an idle rank encodes the items of its filler itself."""
    sample = lengths.stages[name].sample
    own = (assignment.micro_step[sample] == micro_step).nonzero()[0]
    copied = np.flatnonzero(sample == filler) if len(idle) else own[:0]
    items = np.concatenate([own, np.tile(copied, len(idle))])
    host = np.repeat(idle, len(copied))
    ranks = topology.num_ranks
    return StagePlan(
        items=items,
        home=Layout(lengths.home[sample[items]], ranks),
        encode=Layout(np.concatenate([assignment.encode_rank[name][own], host]), ranks),
        llm=Layout(np.concatenate([assignment.llm_rank[sample[own]], host]), ranks),
    )


def _smallest_sample(lengths: StepLengths) -> int:
    """The sample that fillers copy: of those without items, else of all, the shortest that is not empty.

    Ties go to the first. Every sample is part of some batch as drawn, so a rank that holds a filler and nothing else
    needs no more memory than the unbalanced step did.
    """
    has_items = np.zeros(lengths.num_samples, dtype=bool)
    for items in lengths.stages.values():
        has_items[items.sample] = True
    return int(np.lexsort((lengths.llm_length, has_items, lengths.llm_length == 0))[0])
