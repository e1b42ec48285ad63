"""What is measured of one processed sample: its length and its label tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

LengthFn = Callable[[Any], int]
IGNORED_LABEL = -100


class EmptySampleError(ValueError):
    """A sample has length 0: it holds nothing to train on, but its length is known."""


def default_length(sample: Any) -> int:
    """Number of `input_ids` of a sample.

    Raises:
        ValueError: If the sample has none; says what to do.
    """
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        found = sorted(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(f"A sample must have `input_ids` unless `length_fn` is given, but has {found} instead.")
    ids = sample["input_ids"]
    return int(ids.shape[-1]) if isinstance(ids, (torch.Tensor, np.ndarray)) else len(ids)


def default_label_tokens(sample: Any) -> int | None:
    """Number of labels of a sample that a causal language model is trained on; None if it has no `labels`.

    Labels of -100 do not count, nor does the first one of a sequence: models predict each token from those before it.
    A single label (classification) counts as one.
    """
    if not isinstance(sample, Mapping) or sample.get("labels") is None:
        return None
    labels = sample["labels"]
    array = labels.numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if array.size == 1 and array.ndim <= 1:
        return int(array.reshape(-1)[0] != IGNORED_LABEL)
    return int(np.count_nonzero(array[..., 1:] != IGNORED_LABEL))


def measured_length(sample: Any, length_fn: LengthFn | None) -> int:
    """The length of a sample.

    Raises:
        EmptySampleError: If it is 0.
        ValueError: If it is missing, not a whole number, or below 0.
    """
    length = (length_fn or default_length)(sample)
    if isinstance(length, (torch.Tensor, np.ndarray)) and getattr(length, "ndim", 1) == 0:
        length = length.item()
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
        raise ValueError(f"The length of a sample must be a whole number, but is {length!r} instead.")
    if length < 1:
        text = f"The length of a sample must be at least 1, but is {length} instead."
        raise EmptySampleError(text) if length == 0 else ValueError(text)
    return int(length)
