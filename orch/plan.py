"""One step, planned: lengths in, `StepPlan` out. Pure: every rank computes the same plan from the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from orch.comm.layout import Layout, Rearrangement
from orch.comm.topology import IntArray, Topology
from orch.lengths import StepLengths

BALANCE_MODES = ("none", "pre", "llm", "post")


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """Where the items of one encoder stage go in one micro-step.

    Attributes:
        items: int64[m], ids into `StepLengths.stages[name]`; the m positions of this array are the items of the
            layouts below. Ascending, but for copies that belong to fillers, which stand at the end.
        home: The rank that drew each item.
        encode: The rank that runs the encoder on it.
        llm: The rank that holds its sample in the LLM.
    """

    items: IntArray
    home: Layout
    encode: Layout
    llm: Layout

    @property
    def to_encoder(self) -> Rearrangement:
        """Raw items, from where they were drawn to where they are encoded."""
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
        home: The rank that drew each sample.
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
        """Text and labels, from where they were drawn to where the LLM runs on them."""
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


def plan_step(lengths: StepLengths, topology: Topology, config: object) -> StepPlan:
    """Plans one step. (Under construction.)"""
    raise NotImplementedError
