"""Memory: the largest batch of each stage, as drawn and as planned, and what it may be.

Stages are named as in `StepLengths.stages`; the LLM is "llm". Sizes are tokens in the stage's own unit; a padded batch
counts its items times the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from orch.comm.counts import check_count
from orch.comm.topology import IntArray, Topology
from orch.config import BalanceConfig
from orch.cost import batch_tokens
from orch.lengths import StepLengths

if TYPE_CHECKING:
    from orch.plan import StepPlan

LLM = "llm"


def drawn_caps(
    lengths: StepLengths, topology: Topology, config: BalanceConfig, peaks: Mapping[str, int] | None = None
) -> dict[str, int | None]:
    """The most tokens a batch of each stage needs unbalanced, in this step or an earlier one (`peaks`).

    None for the encoders of mode "pre", which follow their samples.

    Raises:
        ValueError: If `peaks` names no stage of the step, or holds anything but whole numbers.
    """
    peaks = check_peaks(lengths, {} if peaks is None else peaks)
    drawn = largest_drawn(lengths, topology, config)
    follows = config.mode == "pre"
    return {n: None if follows and n != LLM else max(size, peaks.get(n, 0)) for n, size in drawn.items()}


def limited(caps: Mapping[str, int | None], config: BalanceConfig) -> dict[str, int | None]:
    """The same caps, or the `max_tokens` of a stage where this is less; None where there is neither."""
    limits = {name: (config.llm if name == LLM else config.stage(name)).max_tokens for name in caps}
    return {n: min((c for c in (cap, limits[n]) if c is not None), default=None) for n, cap in caps.items()}


def check_peaks(lengths: StepLengths, peaks: Mapping[str, int]) -> Mapping[str, int]:
    """The same, or a `ValueError` that says what is wrong with it."""
    if not isinstance(peaks, Mapping):
        raise ValueError(f"`peaks` must be a dict from stages to tokens, but is {peaks!r} instead.")
    for name, size in peaks.items():
        if name != LLM and name not in lengths.stages:
            raise ValueError(f"`peaks` must name stages of {[LLM, *lengths.stages]}, but names {name!r} instead.")
        check_count(f"peaks[{name!r}]", size, least=0)
    return peaks


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
