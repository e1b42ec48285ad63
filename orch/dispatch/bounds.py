"""The least possible largest load of packed batches, as far as it is cheap to prove."""

from __future__ import annotations

import numpy as np

from orch.comm.topology import IntArray
from orch.dispatch.order import descending


def least_load(costs: IntArray, num_bins: int) -> int:
    """A lower bound of the largest load, whatever the layout.

    The largest of: the mean; the longest item; for every j, the j + 1 smallest of the j * num_bins + 1 largest items,
    since of so many some bin holds j + 1.

    Args:
        costs: int64[N], not negative.
        num_bins: Number of bins.
    """
    if not len(costs):
        return 0
    bound = max(-(-int(costs.sum()) // num_bins), int(costs.max()))
    if len(costs) <= num_bins:
        return bound
    falling = costs[descending(costs)]
    prefix = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(falling)])
    j = np.arange(1, (len(costs) - 1) // num_bins + 1)
    crowded = prefix[j * num_bins + 1] - prefix[j * num_bins - j]
    return max(bound, int(crowded.max()))
