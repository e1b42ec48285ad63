"""What moving a sample costs, items included: the LLM's stage is dealt with an eye on what the encoders move.

An item that leaves its rank to be encoded elsewhere sends its raw bytes there and its output back. If its sample's LLM
goes to the same rank, the output need not come back; so the encoders are dealt first, as if every sample stayed at
home, and a sample whose items left prefers the rank they went to. Then the encoders are dealt for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray
from orch.config import BalanceConfig
from orch.lengths import StepLengths


@dataclass(frozen=True, slots=True, eq=False)
class SampleWeights:
    """Where samples would like to be.

    Attributes:
        move_bytes: int64[N], bytes that leave the home rank with a sample.
        target: int64[N], the rank on which most of the output of its items is made; home where this is home.
        target_bytes: int64[N], bytes of that output.
    """

    move_bytes: IntArray
    target: IntArray
    target_bytes: IntArray


def weigh_samples(
    lengths: StepLengths, config: BalanceConfig, encode: Mapping[str, IntArray], num_ranks: int
) -> SampleWeights:
    """Weighs the samples of a step.

    Args:
        lengths: The step.
        config: Its mode says what follows a sample: raw items ("pre"), outputs ("llm"), or the lesser ("post").
        encode: For each stage int64[M], the rank that encodes each item if samples stay at home.
        num_ranks: Number of ranks.
    """
    target, target_bytes = _where_outputs_are(lengths, config, encode, num_ranks)
    move_bytes = lengths.num_bytes.copy()
    for name, items in lengths.stages.items():
        output = items.num_rows * config.stage(name).row_bytes
        follows = {"pre": items.num_bytes, "llm": output}.get(config.mode, np.minimum(items.num_bytes, output))
        at_home = encode[name] == lengths.home[items.sample]
        np.add.at(move_bytes, items.sample[at_home], follows[at_home])
    return SampleWeights(move_bytes, target, target_bytes)


def _where_outputs_are(
    lengths: StepLengths, config: BalanceConfig, encode: Mapping[str, IntArray], num_ranks: int
) -> tuple[IntArray, IntArray]:
    """For each sample the rank other than its home on which most output is made, and its bytes; else home and 0."""
    target, target_bytes = lengths.home.copy(), np.zeros(lengths.num_samples, dtype=np.int64)
    keys, sizes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for name, items in lengths.stages.items():
        away = np.flatnonzero(encode[name] != lengths.home[items.sample])
        keys.append(items.sample[away] * num_ranks + encode[name][away])
        sizes.append(items.num_rows[away] * config.stage(name).row_bytes)
    pairs, index = np.unique(np.concatenate(keys), return_inverse=True)
    total = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(total, index, np.concatenate(sizes))
    order = np.lexsort((pairs, total))  # the last entry of each sample wins: the largest
    target[pairs[order] // num_ranks] = pairs[order] % num_ranks
    target_bytes[pairs[order] // num_ranks] = total[order]
    return target, target_bytes
