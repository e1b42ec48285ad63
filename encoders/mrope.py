"""Position ids of M-RoPE, vectorised: what a Qwen2.5-Omni Thinker's `get_rope_index` loops over tokens for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from orch.encoders.items import Item

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MropePositionIds:
    """Computes the position ids of one sample from its tokens and the grids of its media.

    Text and audio tokens advance all three rows by one. A picture's tokens get its frame, row and column, counted
    from where it starts, and what follows starts after the largest of them.

    Attributes:
        image_token_id: The placeholder of one image token.
        video_token_id: The placeholder of one video token.
        spatial_merge_size: Patches per token and side.
        position_id_per_seconds: Temporal positions a second.
    """

    image_token_id: int
    video_token_id: int
    spatial_merge_size: int = 2
    position_id_per_seconds: int = 25

    @classmethod
    def of(cls, config: Any) -> MropePositionIds:
        """Reads the numbers from a Thinker's configuration."""
        return cls(
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            spatial_merge_size=config.vision_config.spatial_merge_size,
            position_id_per_seconds=config.position_id_per_seconds,
        )

    def __call__(self, input_ids: torch.Tensor, parts: Sequence[Item] = ()) -> torch.Tensor:
        """Computes one sample's positions.

        Args:
            input_ids: int64[L].
            parts: What the LLM's side knows of each item, images and videos each in their order: `image_grid_thw`
                int64[1, 3], or `video_grid_thw` int64[1, 3] and `video_second_per_grid` float[1]. Others are ignored.

        Returns:
            int64[3, L]: time, height and width.

        Raises:
            ValueError: If the placeholders are not as many as the grids say.
        """
        ids = input_ids.numpy(force=True)
        blocks = _join(
            _blocks(ids, self.image_token_id, "image_token_id", _image_grids(parts), self.spatial_merge_size),
            _blocks(ids, self.video_token_id, "video_token_id", _video_grids(parts), self.spatial_merge_size),
        )
        return torch.from_numpy(_positions(len(ids), blocks, self.position_id_per_seconds))


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Media blocks of a sample: indices of their tokens, int64[T], in rows of blocks, and B grids in tokens."""

    tokens: IntArray
    grid: IntArray  # int64[B, 3]
    seconds_per_grid: npt.NDArray[np.float32]  # float32[B]

    @property
    def sizes(self) -> IntArray:
        return self.grid.prod(axis=1)


_Grids = tuple[IntArray, npt.NDArray[np.float32]]


def _image_grids(parts: Sequence[Item]) -> _Grids:
    grids = [part["image_grid_thw"].reshape(3).tolist() for part in parts if "image_grid_thw" in part]
    return np.array(grids, dtype=np.int64).reshape(-1, 3), np.ones(len(grids), np.float32)


def _video_grids(parts: Sequence[Item]) -> _Grids:
    videos = [part for part in parts if "video_grid_thw" in part]
    grids = [part["video_grid_thw"].reshape(3).tolist() for part in videos]
    seconds = [float(part["video_second_per_grid"]) for part in videos]
    return np.array(grids, dtype=np.int64).reshape(-1, 3), np.array(seconds, dtype=np.float32)


def _blocks(ids: IntArray, token_id: int, name: str, grids: _Grids, merge: int) -> _Blocks:
    grid = grids[0] // np.array([1, merge, merge])
    tokens = np.flatnonzero(ids == token_id)
    if len(tokens) != grid.prod(axis=1).sum():
        raise ValueError(
            f"`input_ids` must have {grid.prod(axis=1).sum()} tokens `{name}`, as the grids say, "
            f"but has {len(tokens)} instead."
        )
    return _Blocks(tokens, grid, grids[1])


def _join(images: _Blocks, videos: _Blocks) -> _Blocks:
    return _Blocks(
        np.concatenate([images.tokens, videos.tokens]),
        np.concatenate([images.grid, videos.grid]),
        np.concatenate([images.seconds_per_grid, videos.seconds_per_grid]),
    )


def _positions(length: int, blocks: _Blocks, per_second: int) -> IntArray:
    """int64[3, length]. A block's tokens stand at `base[start] + (frame, row, column)`, all others at `base`."""
    offsets = _offsets(blocks, per_second)  # int64[3, T]
    advance = np.ones(length, np.int64)
    advance[blocks.tokens] = 0
    firsts = np.cumsum(blocks.sizes) - blocks.sizes
    if len(firsts):
        advance[blocks.tokens[firsts]] = np.maximum.reduceat(offsets.max(axis=0), firsts) + 1
    base = np.cumsum(advance) - advance
    positions = np.tile(base, (3, 1))
    if len(firsts):
        positions[:, blocks.tokens] = np.repeat(base[blocks.tokens[firsts]], blocks.sizes) + offsets
    return positions


def _offsets(blocks: _Blocks, per_second: int) -> IntArray:
    """int64[3, T]: frame (in temporal positions), row and column of every token of every block."""
    sizes = blocks.sizes
    local = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    _, height, width = (np.repeat(side, sizes) for side in blocks.grid.T)
    frame, in_frame = np.divmod(local, height * width)
    # float32, as in the model: a frame's time is truncated, and float64 would truncate differently.
    seconds = frame.astype(np.float32) * np.repeat(blocks.seconds_per_grid, sizes)
    time = (seconds * np.float32(per_second)).astype(np.int64)
    return np.stack([time, in_frame // width, in_frame % width])
