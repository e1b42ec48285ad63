"""Position ids of M-RoPE, vectorised: what the models' own `get_rope_index` loop over samples for.

Text and audio tokens advance all three rows (time, height, width) by one. A picture's tokens get its frame, row and
column, counted from where it starts. Models differ in what a frame counts and in where the text goes on:

| model | time of frame f | the text after it goes on |
|---|---|---|
| Qwen2-VL | f | after the largest row or column |
| Qwen2.5-VL | f times positions per grid, truncated | after the largest row or column |
| Qwen2.5-Omni | f times seconds per grid times positions a second, truncated | after the largest of all three |
| Qwen3-VL | each frame is a picture of its own: timestamps in the text are between | after the largest row or column |
| Qwen3-Omni | as Qwen2.5-Omni, not truncated: positions are floats | after the largest of all three |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from orch.encoders.items import Item

IntArray = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class MropePositionIds:
    """Computes the position ids of one sample from its tokens and the grids of its media.

    Attributes:
        image_token_id: The placeholder of one image token.
        video_token_id: The placeholder of one video token.
        spatial_merge_size: Patches per token and side.
        per_second: Temporal positions a second; None where a frame counts 1.
        seconds_key: The part's key of a video's seconds per grid, where time is scaled.
        interval_first: Whether seconds are multiplied with positions a second before the frame's number.
        truncate: Whether a frame's time is truncated to an integer.
        frames_apart: Whether the frames of a video stand apart in the text.
        after_time: Whether what follows starts after the largest position of all, else of rows and columns.
    """

    image_token_id: int
    video_token_id: int
    spatial_merge_size: int = 2
    per_second: int | None = None
    seconds_key: str = ""
    interval_first: bool = False
    truncate: bool = True
    frames_apart: bool = False
    after_time: bool = False

    @classmethod
    def of(cls, config: Any) -> MropePositionIds:
        """Reads the numbers from a model's configuration.

        Raises:
            ValueError: If the kind of model is not known.
        """
        if config.model_type not in MROPE_MODELS:
            raise ValueError(
                f"`model` must be one of {', '.join(MROPE_MODELS)} for its M-RoPE positions to be known, "
                f"but is {config.model_type} instead. For another model pass a `collate_fn`."
            )
        chosen: dict[str, Any] = dict(_VARIANTS[config.model_type])
        if (where := chosen.pop("per_second", None)) is not None:
            chosen["per_second"] = getattr(
                config if where == "position_id_per_seconds" else config.vision_config, where
            )
        return cls(
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            spatial_merge_size=config.vision_config.spatial_merge_size,
            **chosen,
        )

    def __call__(self, input_ids: torch.Tensor, parts: Sequence[Item] = ()) -> torch.Tensor:
        """Computes one sample's positions.

        Args:
            input_ids: int64[L].
            parts: What the LLM's side knows of each item, images and videos each in their order: `image_grid_thw`
                int64[1, 3], or `video_grid_thw` int64[1, 3] and seconds per grid float[1]. Others are ignored.

        Returns:
            int64[3, L] (float32 where time is not truncated): time, height and width.

        Raises:
            ValueError: If the placeholders are not as many as the grids say.
        """
        ids = input_ids.numpy(force=True)
        images = self._blocks(ids, self.image_token_id, "image_token_id", *_grids(parts, "image_grid_thw", ""))
        grids, seconds = _grids(parts, "video_grid_thw", self.seconds_key)
        if self.frames_apart:
            seconds = np.repeat(seconds, grids[:, 0])
            grids = np.repeat(grids, grids[:, 0], axis=0)
            grids[:, 0] = 1
        videos = self._blocks(ids, self.video_token_id, "video_token_id", grids, seconds)
        blocks = _Blocks(*(np.concatenate(pair) for pair in zip(images.columns, videos.columns, strict=True)))
        positions = self._positions(len(ids), blocks)
        return torch.from_numpy(positions.astype(np.int64 if self.truncate else np.float32))

    def _blocks(self, ids: IntArray, token_id: int, name: str, grids: IntArray, seconds: Array) -> _Blocks:
        merge = self.spatial_merge_size
        grid = grids // np.array([1, merge, merge])
        tokens = np.flatnonzero(ids == token_id)
        if len(tokens) != grid.prod(axis=1).sum():
            raise ValueError(
                f"`input_ids` must have {grid.prod(axis=1).sum()} tokens `{name}`, as the grids say, "
                f"but has {len(tokens)} instead."
            )
        return _Blocks(tokens, grid, seconds)

    def _positions(self, length: int, blocks: _Blocks) -> Array:
        """[3, length]. A block's tokens stand at `base[start] + (time, row, column)`, all others at `base`."""
        offsets = self._offsets(blocks)  # [3, T]
        advance = np.ones(length, offsets.dtype)
        advance[blocks.tokens] = 0
        firsts = np.cumsum(blocks.sizes) - blocks.sizes
        if len(firsts):
            largest = offsets[0 if self.after_time else 1 :].max(axis=0)
            advance[blocks.tokens[firsts]] = np.maximum.reduceat(largest, firsts) + 1
        base = np.cumsum(advance) - advance
        positions = np.tile(base, (3, 1))
        if len(firsts):
            positions[:, blocks.tokens] = np.repeat(base[blocks.tokens[firsts]], blocks.sizes) + offsets
        return positions

    def _offsets(self, blocks: _Blocks) -> Array:
        """[3, T]: time, row and column of every token of every block."""
        sizes = blocks.sizes
        local = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        _, height, width = (np.repeat(side, sizes) for side in blocks.grid.T)
        frame, in_frame = np.divmod(local, height * width)
        time = self._time(frame, np.repeat(blocks.seconds_per_grid, sizes))
        return np.stack([time, in_frame // width, in_frame % width])

    def _time(self, frame: IntArray, seconds: Array) -> Array:
        """Time of each frame; in float32, as in the models: truncated, float64 would come out differently."""
        if self.per_second is None:
            return frame
        frames, per_second = frame.astype(np.float32), np.float32(self.per_second)
        time = frames * (per_second * seconds) if self.interval_first else frames * seconds * per_second
        return time.astype(np.int64 if self.truncate else np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Media blocks of a sample: indices of their tokens, int64[T], in rows of blocks, and B grids in tokens."""

    tokens: IntArray
    grid: IntArray  # int64[B, 3]
    seconds_per_grid: Array  # float32[B]

    @property
    def sizes(self) -> IntArray:
        return self.grid.prod(axis=1)

    @property
    def columns(self) -> tuple[Array, ...]:
        return self.tokens, self.grid, self.seconds_per_grid


_OMNI = {"per_second": "position_id_per_seconds", "seconds_key": "video_second_per_grid", "after_time": True}
_SECONDS_TS = {"per_second": "tokens_per_second", "seconds_key": "second_per_grid_ts", "interval_first": True}
_VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {},
    "qwen2_5_vl": _SECONDS_TS,
    "qwen3_vl": {"frames_apart": True},
    "qwen3_vl_moe": {"frames_apart": True},
    "qwen2_5_omni_thinker": _OMNI,
    "qwen3_omni_moe_thinker": _OMNI | {"truncate": False},
}
MROPE_MODELS = tuple(_VARIANTS)


def _grids(parts: Sequence[Item], key: str, seconds_key: str) -> tuple[IntArray, Array]:
    """Grids int64[B, 3] and seconds float32[B] (1 where there are none) of the parts with a key."""
    found = [part for part in parts if key in part]
    grids = np.array([part[key].reshape(3).tolist() for part in found], dtype=np.int64).reshape(-1, 3)
    return grids, np.array([float(part.get(seconds_key, 1.0)) for part in found], dtype=np.float32)
