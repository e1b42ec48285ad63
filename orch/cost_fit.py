"""Where the coefficients of a cost model come from: an architecture's FLOPs, or seconds measured on the device.

A fit is floating-point work on measurements: do it on one rank and hand its result to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from orch.comm.topology import IntArray
from orch.cost import PackedCost, PaddedCost, RectangleFrontCost

Model = TypeVar("Model", PackedCost, PaddedCost, RectangleFrontCost)


def fit(model: type[Model], batches: Sequence[IntArray], seconds: Sequence[float]) -> Model:
    """Fits a cost model to measured batches by non-negative least squares.

    The constant time of a batch (launches, synchronisation) is fitted as well and left out: all ranks pay it alike.

    Args:
        model: `PackedCost`, `PaddedCost` or `RectangleFrontCost`.
        batches: The lengths of the items of each measured batch.
        seconds: The time of each batch.

    Returns:
        The model, its coefficients in seconds.

    Raises:
        ValueError: If the numbers of batches and times differ, or the times show no dependence on length.
    """
    if len(batches) != len(seconds) or not len(batches):
        raise ValueError(f"`seconds` must have one entry a batch ({len(batches)}), but has {len(seconds)} instead.")
    features = _design_matrix(model, batches)
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0  # columns differ by ten orders of magnitude; unit columns keep the fit well conditioned
    solution, _ = nnls(features / scale, np.asarray(seconds, dtype=np.float64))
    coefficients = (solution / scale)[1:]
    if not coefficients.any():
        raise ValueError("`seconds` must grow with the batch, but are constant or fall instead.")
    return model(*(float(value) for value in coefficients))


def _design_matrix(model: type[object], batches: Sequence[IntArray]) -> npt.NDArray[np.float64]:
    """A row a batch: one, for the constant time, and the batch's features."""
    return np.asarray([(1.0, *_features(model, np.asarray(batch, dtype=np.float64))) for batch in batches])


def _features(model: type[object], lengths: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """What each coefficient of the model, in the order of its fields, is multiplied with."""
    num_items, longest = float(len(lengths)), float(lengths.max(initial=0.0))
    packed = (num_items, float(lengths.sum()), float((lengths**2).sum()))
    if model is PackedCost:
        return packed
    if model is PaddedCost:
        return (num_items, num_items * longest, num_items * longest**2)
    return (num_items * longest, *packed)


def transformer_flops(
    *,
    hidden: int,
    layers: int,
    intermediate: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab: int = 0,
    gated: bool = True,
    causal: bool = True,
    window: int | None = None,
    full_attention_layers: int | None = None,
    input_width: int = 0,
    lengths_per_token: float = 1.0,
) -> PackedCost:
    """The forward FLOPs of a transformer as a packed cost (the backward is twice that and changes no ratio).

    Args:
        hidden: Width of the residual stream.
        layers: Number of layers.
        intermediate: Width of the feed-forward block (for experts: of all active experts together).
        heads: Attention heads.
        kv_heads: Key and value heads; None means `heads`.
        head_dim: Width of a head; None means `hidden // heads`.
        vocab: Size of the output projection; 0 where there is none (encoders).
        gated: Whether the feed-forward block has a gate (three matrices instead of two).
        causal: Whether attention sees only the past, which halves it.
        window: Tokens a windowed layer attends to; such layers are linear in the length.
        full_attention_layers: How many of the layers attend to everything; None means all without a window, none with.
        input_width: Inputs of the embedding of one token (patch pixels, mel bins); 0 for a table.
        lengths_per_token: Units of length for each token of the transformer (2 where a convolution halves frames).

    Returns:
        The cost of an item of l units of length.
    """
    query, keys = heads * (head_dim or hidden // heads), (kv_heads or heads) * (head_dim or hidden // heads)
    matrices = hidden * (2 * query + 2 * keys) + (3 if gated else 2) * hidden * intermediate
    full = full_attention_layers if full_attention_layers is not None else (0 if window else layers)
    attention = 4 * query / (2 if causal else 1)
    per_token = layers * 2 * matrices + 2 * hidden * (vocab + input_width) + (layers - full) * attention * (window or 0)
    return PackedCost(0.0, per_token / lengths_per_token, full * attention / lengths_per_token**2)
