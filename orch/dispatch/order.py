"""Sorting by keys, stably and fast.

numpy sorts 16-bit integers by radix, and plain integers ten times faster than it sorts stably by key. So keys are
packed into one integer, which is sorted 16 bits at a time, or together with the positions where it is long. The result
is the same in any case.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from orch.comm.topology import IntArray

_SMALL = 512  # below this, one call is faster than cheap work in many
_DIGIT = 16  # bits that numpy sorts by radix
_FEW_DIGITS = 2  # so many passes are faster than one sort of integers that hold the positions too
_MOST_BITS = 63


def ascending(*keys: IntArray) -> IntArray:
    """Positions in rising order of the keys, the first key being the most significant; ties by position: int64[N]."""
    size = len(keys[0])
    if size < _SMALL:
        return keys[0].argsort(kind="stable") if len(keys) == 1 else np.lexsort(keys[::-1])
    lows = [int(key.min()) for key in keys]
    widths = [(int(key.max()) - low).bit_length() for key, low in zip(keys, lows, strict=True)]
    width, bits = sum(widths), size.bit_length()
    if width > _MOST_BITS:
        rest = ascending(*keys[1:]) if len(keys) > 1 else np.arange(size, dtype=np.int64)
        return rest[np.argsort(keys[0][rest], kind="stable")]
    packed = keys[0] - lows[0]
    for key, low, bits_of_key in zip(keys[1:], lows[1:], widths[1:], strict=True):
        packed = (packed << bits_of_key) | (key - low)
    if width > _FEW_DIGITS * _DIGIT and width + bits <= _MOST_BITS:
        return np.sort((packed << bits) | np.arange(size)) & ((1 << bits) - 1)
    order = np.argsort(packed.astype(np.uint16), kind="stable")
    for shift in range(_DIGIT, width, _DIGIT):
        order = order[np.argsort((packed >> shift)[order].astype(np.uint16), kind="stable")]
    return order


def descending(values: IntArray) -> IntArray:
    """Positions by falling value, ties by position: int64[N]."""
    return ascending(-values)


def starts_run(values: IntArray) -> npt.NDArray[np.bool_]:
    """For sorted values, whether each differs from the one before it: bool[N], true for the first."""
    starts = np.empty(len(values), dtype=np.bool_)
    starts[:1] = True
    np.not_equal(values[1:], values[:-1], out=starts[1:])
    return starts


def run_starts(values: IntArray) -> IntArray:
    """For sorted values, the position at which the run of each one's equals starts: int64[N]."""
    starts = np.arange(len(values))
    starts *= starts_run(values)
    return np.maximum.accumulate(starts)
