"""Memory: the largest batch of each stage, as drawn and as planned, and what it may be.

Stages are named as in `StepLengths.stages`; the LLM is "llm". Sizes are tokens in the stage's own unit; a padded batch
counts its items times the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from orch.comm.topology import IntArray, Topology
from orch.config import BalanceConfig
from orch.cost import batch_tokens
from orch.lengths import StepLengths

if TYPE_CHECKING:
    from orch.plan import StepPlan

LLM = "llm"


def memory_caps(
    lengths: StepLengths, topology: Topology, config: BalanceConfig, peaks: Mapping[str, int] | None = None
) -> dict[str, int | None]:
    """The most tokens a batch of each stage may hold.

    That of the largest batch as drawn, in this step or an earlier one (`peaks`), or `max_tokens` where this is less.
    In mode "pre" encoders follow their samples and know `max_tokens` alone: None where there is none.
    """
    limits = {LLM: config.llm.max_tokens} | {name: config.stage(name).max_tokens for name in lengths.stages}
    caps: dict[str, int | None] = {}
    for name, drawn in largest_drawn(lengths, topology, config).items():
        limit, drawn = limits[name], max(drawn, (peaks or {}).get(name, 0))
        if config.mode == "pre" and name != LLM:
            caps[name] = limit
        else:
            caps[name] = drawn if limit is None else min(drawn, limit)
    return caps


def largest_drawn(lengths: StepLengths, topology: Topology, config: BalanceConfig) -> dict[str, int]:
    """Tokens of the largest batch of each stage in the unbalanced step, over its micro-steps."""
    num_bins = topology.num_ranks * lengths.num_micro_steps
    drawn_bin = lengths.drawn_bin
    largest = {LLM: _largest(config.llm.layout, lengths.llm_length, drawn_bin, num_bins)}
    for name, items in lengths.stages.items():
        largest[name] = _largest(config.stage(name).layout, items.length, drawn_bin[items.sample], num_bins)
    return largest


def largest_batches(lengths: StepLengths, plan: StepPlan, topology: Topology, config: BalanceConfig) -> dict[str, int]:
    """Tokens of the largest batch of each stage in a plan, fillers included."""
    largest = dict.fromkeys([LLM, *lengths.stages], 0)
    for micro_step in plan.micro_steps:
        sizes = lengths.llm_length[micro_step.samples]
        found = _largest(config.llm.layout, sizes, micro_step.llm.rank_of_item, topology.num_ranks)
        largest[LLM] = max(largest[LLM], found)
        for name, stage in micro_step.stages.items():
            sizes = lengths.stages[name].length[stage.items]
            found = _largest(config.stage(name).layout, sizes, stage.encode.rank_of_item, topology.num_ranks)
            largest[name] = max(largest[name], found)
    return largest


def _largest(layout: str, sizes: IntArray, bin_of_item: IntArray, num_bins: int) -> int:
    return int(np.max(batch_tokens(layout, sizes, bin_of_item, num_bins), initial=0))
