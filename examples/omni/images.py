"""Pictures: decoded to 8-bit RGB whatever their mode, resized, cut in patches. What resizes also counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from .records import DECODING_ERRORS, UnusableRecordError

MAX_DECLARED_PIXELS = 50_000_000
# The upper end of a range of grey levels, and the factor that takes it to 8 bits.
_FLOAT_RANGES = ((1.0, 255.0), (255.0, 1.0))
_INTEGER_RANGES = ((65535.0, 255.0 / 65535.0),)
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """How pictures are cut.

    Attributes:
        max_pixels: Of a picture after resizing.
        min_pixels: Likewise; smaller pictures are enlarged.
        patch_size: Pixels per side of a patch.
        merge_size: Patches per side of a token.
        temporal_size: Frames per patch.
    """

    max_pixels: int = 128 * 28 * 28
    min_pixels: int = 4 * 28 * 28
    patch_size: int = 14
    merge_size: int = 2
    temporal_size: int = 2

    def __post_init__(self) -> None:
        if not self.factor**2 <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"`max_pixels` must be at least `min_pixels` ({self.min_pixels}), and that at least {self.factor**2}, "
                f"but is {self.max_pixels} instead."
            )

    @property
    def factor(self) -> int:
        """Pixels per side of a token."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width to resize to: multiples of `factor`, their product within the limits.

        The rule of Qwen2-VL's processor, with two repairs: no side becomes zero, and a long thin picture keeps the
        upper limit too.
        """
        h, w = (max(self.factor, round(side / self.factor) * self.factor) for side in (height, width))
        if h * w < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            h, w = (math.ceil(side * scale / self.factor) * self.factor for side in (height, width))
            height, width = h, w
        return self._shrunk(height, width) if h * w > self.max_pixels else (h, w)

    def _shrunk(self, height: int, width: int) -> tuple[int, int]:
        """Both sides scaled to the upper limit, in whole numbers, then down to multiples of `factor`."""
        area = height * width
        scaled = (math.isqrt(side * side * self.max_pixels // area) for side in (height, width))
        h, w = (max(self.factor, side // self.factor * self.factor) for side in scaled)
        longest = self.max_pixels // min(h, w) // self.factor * self.factor
        return min(h, longest), min(w, longest)


def load_image(path: Path | str, target_pixels: int) -> Image.Image:
    """Decodes the first frame of a picture to RGB.

    Args:
        path: The file.
        target_pixels: What it will be resized to: a JPEG far above is decoded at a fraction of its size.

    Raises:
        UnusableRecordError: If there is no such file, it cannot be decoded, or declares too many pixels.
    """
    try:
        with Image.open(path) as image:
            _check_declared_size(image)
            if image.format == "JPEG":
                scale = math.sqrt(target_pixels / (image.width * image.height))
                if scale < 0.5:
                    image.draft(None, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
            image.seek(0)
            return to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise UnusableRecordError(f"the file {path} does not exist") from None
    except (Image.DecompressionBombError, *DECODING_ERRORS) as error:
        raise UnusableRecordError(f"the picture {path} cannot be decoded ({error})") from error


def _check_declared_size(image: Image.Image) -> None:
    """Before anything is decoded: a few kilobytes can declare gigabytes of pixels."""
    if image.width * image.height > MAX_DECLARED_PIXELS:
        raise ValueError(f"it declares {image.width} x {image.height} pixels, above {MAX_DECLARED_PIXELS}")


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB: 16 bits and floats scaled (`convert` would clip them to white or black), alpha laid over white."""
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_to_8_bits(np.asarray(image))).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _to_8_bits(values: npt.NDArray[np.generic]) -> Pixels:
    """Grey levels by what their range says: 0 to 1, 8 bits, 16 bits; any other range is stretched."""
    grey = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(grey.min()), float(grey.max())
    is_float = np.issubdtype(values.dtype, np.floating)
    for limit, scale in _FLOAT_RANGES if is_float else _INTEGER_RANGES:
        if low >= 0 and high <= limit:
            return np.rint(grey * scale).astype(np.uint8)
    return np.rint((grey - low) * (255.0 / max(high - low, 1e-12))).astype(np.uint8)


def resize(image: Image.Image, grid: PatchGrid) -> Pixels:
    """uint8[H, W, 3], H and W as `grid.resized` says."""
    height, width = grid.resized(image.height, image.width)
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def image_patches(pixels: Pixels, grid: PatchGrid) -> tuple[Pixels, tuple[int, int, int]]:
    """Patches of one picture, as one frame: the adapter repeats it to the temporal patch.

    Args:
        pixels: uint8[H, W, 3].
        grid: How to cut.

    Returns:
        uint8[h * w, 3 * patch * patch] in the order of Qwen2-VL (the patches of a token together), and (1, h, w).
    """
    return video_patches(pixels[None], 1, grid)


def video_patches(frames: Pixels, temporal: int, grid: PatchGrid) -> tuple[Pixels, tuple[int, int, int]]:
    """Patches of frames, `temporal` of them in each.

    Args:
        frames: uint8[F, H, W, 3], F divisible by `temporal`.
        temporal: Frames per patch.
        grid: How to cut.

    Returns:
        uint8[t * h * w, 3 * temporal * patch * patch] and (t, h, w).
    """
    num_frames, height, width, channels = frames.shape
    t, h, w = num_frames // temporal, height // grid.patch_size, width // grid.patch_size
    merge, patch = grid.merge_size, grid.patch_size
    cut = frames.reshape(t, temporal, h // merge, merge, patch, w // merge, merge, patch, channels)
    # [t, rows of tokens, columns of tokens, rows and columns in a token, channel, frame, rows and columns in a patch]
    ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(ordered).reshape(t * h * w, channels * temporal * patch * patch), (t, h, w)
