"""Pixels: stored as `uint8`, or normalised already."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# The means and deviations of channels in transformers' processors.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


def normalised(pixels: torch.Tensor, dtype: torch.dtype, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Pixels as an encoder takes them.

    Args:
        pixels: [n, channels, ...]; integers from 0 to 255, or floating point, which is left as it is.
        dtype: Of the encoder.
        mean: Of each channel, after scaling to 0 to 1.
        std: Deviation of each channel, likewise.

    Returns:
        The same shape in `dtype`.
    """
    if pixels.is_floating_point():
        return pixels.to(dtype)
    scaled = pixels.to(torch.promote_types(dtype, torch.float32)) / 255
    shape = (1, len(mean), *[1] * (pixels.ndim - 2))
    return ((scaled - scaled.new_tensor(mean).view(shape)) / scaled.new_tensor(std).view(shape)).to(dtype)
