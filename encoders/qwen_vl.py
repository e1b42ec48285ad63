"""Adapters of the vision towers of Qwen2-VL and Qwen2.5-VL; other Qwen towers derive from them.

Pixels travel as they are stored. The adapter takes patches of `uint8`, which it scales and normalises with the
processor's mean and deviation when it joins them, and patches of floating point, which it takes as normalised. A
picture may be stored as one frame (rows of channels * patch * patch values): it is repeated to the temporal patch
when joined, so that the copy does not travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from orch.encoders.items import Item, cut, tensor_of
from orch.encoders.pixels import CLIP_MEAN, CLIP_STD, normalised


class QwenVisionAdapter:
    """Images and videos of Qwen2-VL's tower.

    An image is `pixel_values` [patches, values] and `image_grid_thw` int64[1, 3]; a video is `pixel_values_videos` and
    `video_grid_thw`, and for models that scale time a float[1] under `seconds_key`, 1 if the sample has none. The
    LLM consumes all images before all videos.

    Args:
        encoder: The tower.
        image_mean: Mean of each channel, for pixels of `uint8`.
        image_std: Deviation of each channel, likewise.
    """

    placeholders = ("image_token_id", "video_token_id")
    seconds_key: str | None = None
    mean: Sequence[float] = CLIP_MEAN
    std: Sequence[float] = CLIP_STD

    def __init__(
        self, encoder: Any, image_mean: Sequence[float] | None = None, image_std: Sequence[float] | None = None
    ) -> None:
        config = encoder.config
        grids = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"}
        self.keys = frozenset(grids | ({self.seconds_key} if self.seconds_key else set()))
        self._encoder = encoder
        self._merge: int = config.spatial_merge_size
        self._channels: int = getattr(config, "in_channels", 3)
        self._temporal: int = config.temporal_patch_size
        self._patch_area: int = config.patch_size**2
        self._mean, self._std = tuple(image_mean or self.mean), tuple(image_std or self.std)

    def split(self, sample: Mapping[str, Any]) -> list[Item]:
        """One item for each image, then one for each video."""
        return self._split_images(sample) + self._split_videos(sample)

    def _split_images(self, sample: Mapping[str, Any]) -> list[Item]:
        grid = self._grid(sample, "image_grid_thw")
        pieces = cut("pixel_values", tensor_of(sample, "pixel_values"), "image_grid_thw", grid.prod(1).tolist())
        return [{"pixel_values": pixels, "image_grid_thw": row[None]} for pixels, row in zip(pieces, grid, strict=True)]

    def _split_videos(self, sample: Mapping[str, Any]) -> list[Item]:
        grid = self._grid(sample, "video_grid_thw")
        pixels = tensor_of(sample, "pixel_values_videos")
        pieces = cut("pixel_values_videos", pixels, "video_grid_thw", grid.prod(1).tolist())
        seconds = self._seconds(sample, len(grid))
        return [
            {"pixel_values_videos": piece, "video_grid_thw": row[None], **second}
            for piece, row, second in zip(pieces, grid, seconds, strict=True)
        ]

    def _seconds(self, sample: Mapping[str, Any], num_videos: int) -> list[Item]:
        """For each video its seconds per grid, if the model scales time."""
        key = self.seconds_key
        if key is None:
            return [{}] * num_videos
        seconds = tensor_of(sample, key)
        if seconds is None:
            seconds = torch.ones(num_videos)
        if len(seconds) != num_videos:
            raise ValueError(f"`{key}` must have {num_videos} rows, but has {len(seconds)} instead.")
        return [{key: second[None]} for second in seconds]

    def _grid(self, sample: Mapping[str, Any], key: str) -> torch.Tensor:
        """int64[n, 3], checked: frames, rows and columns of patches, the last two divisible by the merge."""
        grid = tensor_of(sample, key)
        if grid is None:
            return torch.zeros(0, 3, dtype=torch.int64)
        if grid.ndim != 2 or grid.shape[1] != 3:
            raise ValueError(f"`{key}` must have shape [n, 3], but has {list(grid.shape)} instead.")
        if grid.min() < 1 or (grid[:, 1:] % self._merge).any():
            raise ValueError(
                f"`{key}` must be positive, height and width divisible by {self._merge}, "
                f"but is {grid.tolist()} instead."
            )
        return grid.to(torch.int64)

    def length(self, item: Item) -> int:
        """Patches."""
        return len(_pixels(item))

    def num_rows(self, item: Item) -> int:
        """Patches over the merged area."""
        return int(_grid_of(item).prod()) // self._merge**2

    def llm_part(self, item: Item) -> Item:
        """The grid, and a video's seconds per grid."""
        return {key: value for key, value in item.items() if not key.startswith("pixel_values")}

    def join(self, items: list[Item]) -> dict[str, Any]:
        """Patches of all items packed, normalised and in the tower's dtype; the grids beside them."""
        return {
            "hidden_states": torch.cat([self._normalised(_pixels(item)) for item in items]),
            "grid_thw": torch.cat([_grid_of(item) for item in items]),
        }

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """[patches, channels * temporal * patch * patch] in the tower's dtype."""
        width = pixels.shape[1]
        frame = self._channels * self._patch_area
        if width not in (frame, frame * self._temporal):
            raise ValueError(
                f"`pixel_values` must have {frame * self._temporal} columns, or {frame} for one frame, "
                f"but has {width} instead."
            )
        values = pixels.reshape(len(pixels), self._channels, width // frame, self._patch_area)
        values = normalised(values, self._encoder.dtype, self._mean, self._std)
        expanded = values.expand(-1, -1, self._temporal, -1)
        return expanded.reshape(len(pixels), frame * self._temporal)

    def dummy(self) -> Item:
        """One merged token: a grid of 1 by merge by merge."""
        size = self._merge**2
        pixels = torch.ones(size, self._channels * self._temporal * self._patch_area, dtype=self._encoder.dtype)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, self._merge, self._merge]])}

    def rows(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The merged tokens."""
        return (output.pooler_output,)

    def llm_inputs(self, parts: list[Item]) -> dict[str, Any]:
        """Grids as they are; pixels of zero rows, which make the model call the tower."""
        kwargs: dict[str, Any] = {}
        width = self._channels * self._temporal * self._patch_area
        for key, grid_key in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
            grids = [part[grid_key] for part in parts if grid_key in part]
            if grids:
                kwargs[grid_key] = torch.cat(grids)
                kwargs[key] = torch.zeros(0, width, dtype=self._encoder.dtype, device=grids[0].device)
        if seconds := [part[self.seconds_key] for part in parts if self.seconds_key in part]:
            kwargs[str(self.seconds_key)] = torch.cat(seconds)
        return kwargs

    def calls(self, parts: list[Item]) -> list[list[int]]:
        """The model encodes all images, then all videos; kinds without an item are not called."""
        by_kind = [
            [position for position, part in enumerate(parts) if key in part]
            for key in ("image_grid_thw", "video_grid_thw")
        ]
        return [positions for positions in by_kind if positions]

    def output(self, rows: tuple[torch.Tensor, ...]) -> Any:
        """The tower's output. Models read `pooler_output` alone."""
        return _output(rows[0])

    def cost(self) -> tuple[float, float, float]:
        """Forward FLOPs. A block with full attention costs the square of the frame, a windowed one of its window."""
        config = self._encoder.config
        depth, dim = config.depth, getattr(config, "embed_dim", None) or config.hidden_size
        full = getattr(config, "fullatt_block_indexes", None)
        num_full = depth if full is None else len([index for index in full if index < depth])
        window_patches = (getattr(config, "window_size", 0) or 0) ** 2 // self._patch_area
        linear = 2.0 * depth * (4 * dim**2 + self._feed_forward_values(dim))
        linear += 4.0 * dim * window_patches * (depth - num_full)
        embed = 2.0 * self._channels * self._temporal * self._patch_area * dim
        merged = dim * self._merge**2
        mergers = 2.0 * self._num_mergers() * (merged**2 + merged * self._width(dim)) / self._merge**2
        return 0.0, linear + embed + mergers, 4.0 * dim * num_full

    def _feed_forward_values(self, dim: int) -> int:
        return int(2 * dim * dim * self._encoder.config.mlp_ratio)

    def _num_mergers(self) -> int:
        return 1

    def _width(self, dim: int) -> int:
        """Of a row that leaves."""
        return int(self._encoder.config.hidden_size)


class Qwen2_5VisionAdapter(QwenVisionAdapter):  # noqa: N801
    """Images and videos of Qwen2.5-VL's tower: gated feed-forward parts; videos have seconds per grid."""

    seconds_key = "second_per_grid_ts"

    def _feed_forward_values(self, dim: int) -> int:
        return 3 * dim * int(self._encoder.config.intermediate_size)

    def _width(self, dim: int) -> int:
        return int(self._encoder.config.out_hidden_size)


def _pixels(item: Item) -> torch.Tensor:
    return item["pixel_values"] if "pixel_values" in item else item["pixel_values_videos"]


def _grid_of(item: Item) -> torch.Tensor:
    return item["image_grid_thw"] if "image_grid_thw" in item else item["video_grid_thw"]


def _output(rows: torch.Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(last_hidden_state=rows, pooler_output=rows)
