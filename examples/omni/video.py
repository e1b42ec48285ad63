"""Clips: frames decoded with PyAV where it is installed (it is optional), an even number of them, two a second."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

from .images import PatchGrid, Pixels, resize
from .records import DECODING_ERRORS, UnusableRecordError

FRAMES_PER_SECOND = 2.0
MAX_FRAMES = 64


def load_video(path: Path | str, grid: PatchGrid) -> tuple[Pixels, float]:
    """Decodes a clip.

    Args:
        path: The file.
        grid: How its frames are resized; `max_pixels` counts for each frame.

    Returns:
        uint8[F, H, W, 3], F a multiple of the temporal patch (the last frame is repeated), and the seconds of a
        temporal patch.

    Raises:
        UnusableRecordError: If PyAV is missing, there is no such file, or no frame can be decoded, or frames differ
            in size.
    """
    try:
        import av  # type: ignore[import-not-found]
    except ImportError:
        raise UnusableRecordError("videos need PyAV (`pip install av`), which is not installed") from None
    if not os.path.isfile(path):
        raise UnusableRecordError(f"the file {path} does not exist")
    try:
        with av.open(str(path)) as container:
            frames = _sampled(container, grid)
    except (av.FFmpegError, *DECODING_ERRORS) as error:
        raise UnusableRecordError(f"the clip {path} cannot be decoded ({error})") from error
    if not frames:
        raise UnusableRecordError(f"the clip {path} has no frame")
    if len({frame.shape for frame in frames}) > 1:
        raise UnusableRecordError(f"the clip {path} changes the size of its frames")
    frames += [frames[-1]] * (-len(frames) % grid.temporal_size)
    return np.stack(frames), grid.temporal_size / FRAMES_PER_SECOND


def _sampled(container: object, grid: PatchGrid) -> list[Pixels]:
    """Resized frames at the sampling rate, up to the limit."""
    frames: list[Pixels] = []
    due = 0.0
    for frame in container.decode(video=0):  # type: ignore[attr-defined]
        if frame.time is not None and frame.time < due:
            continue
        due = len(frames) / FRAMES_PER_SECOND + 1 / FRAMES_PER_SECOND
        image: Image.Image = frame.to_image()
        frames.append(resize(image, grid))
        if len(frames) == MAX_FRAMES:
            break
    return frames
