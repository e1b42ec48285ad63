"""Adapters of Qwen2.5-Omni's towers; the vision adapter serves the towers of Qwen2-VL and Qwen2.5-VL too.

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

# The mean and deviation of CLIP's training pictures, which the processors of Qwen's VL models use.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
_SMALLEST_NUM_FRAMES = 3  # fewer mel frames leave no row after two strides of 2


class QwenVisionAdapter:
    """Images and videos of the vision towers of Qwen2.5-Omni, Qwen2.5-VL and Qwen2-VL.

    An image is `pixel_values` [patches, values] and `image_grid_thw` int64[1, 3]; a video is `pixel_values_videos`,
    `video_grid_thw` and `video_second_per_grid` float[1]. The LLM consumes all images before all videos.

    Args:
        encoder: The tower.
        image_mean: Mean of each channel, for pixels of `uint8`.
        image_std: Deviation of each channel, likewise.
    """

    keys = frozenset(
        {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "video_second_per_grid"}
    )
    placeholders = ("image_token_id", "video_token_id")

    def __init__(
        self, encoder: Any, image_mean: Sequence[float] = IMAGE_MEAN, image_std: Sequence[float] = IMAGE_STD
    ) -> None:
        config = encoder.config
        self._encoder = encoder
        self._merge: int = config.spatial_merge_size
        self._channels: int = getattr(config, "in_channels", 3)
        self._temporal: int = config.temporal_patch_size
        self._patch_area: int = config.patch_size**2
        self._mean, self._std = tuple(image_mean), tuple(image_std)

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
        seconds = tensor_of(sample, "video_second_per_grid")
        num_seconds = 0 if seconds is None else len(seconds)
        if num_seconds not in (0, len(grid)):
            raise ValueError(f"`video_second_per_grid` must have {len(grid)} rows, but has {num_seconds} instead.")
        seconds = torch.ones(len(grid)) if seconds is None else seconds
        return [
            {"pixel_values_videos": piece, "video_grid_thw": row[None], "video_second_per_grid": second[None]}
            for piece, row, second in zip(pieces, grid, seconds, strict=True)
        ]

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
        dtype = self._encoder.dtype
        values = pixels.reshape(len(pixels), self._channels, width // frame, self._patch_area)
        if not values.is_floating_point():
            scaled = values.to(torch.promote_types(dtype, torch.float32)) / 255
            shape = (1, self._channels, 1, 1)
            values = (scaled - scaled.new_tensor(self._mean).view(shape)) / scaled.new_tensor(self._std).view(shape)
        expanded = values.to(dtype).expand(-1, -1, self._temporal, -1)
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
        if seconds := [part["video_second_per_grid"] for part in parts if "video_second_per_grid" in part]:
            kwargs["video_second_per_grid"] = torch.cat(seconds)
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
        hidden, merged = _feed_forward_values(config, dim), dim * self._merge**2
        linear = 2.0 * depth * (4 * dim**2 + hidden) + 4.0 * dim * window_patches * (depth - num_full)
        embed = 2.0 * self._channels * self._temporal * self._patch_area * dim
        out = config.out_hidden_size if full is not None else config.hidden_size
        merger = 2.0 * (merged**2 + merged * out) / self._merge**2
        return 0.0, linear + embed + merger, 4.0 * dim * num_full


class QwenOmniAudioAdapter:
    """Recordings of the audio tower of Qwen2.5-Omni.

    A sample packs its recordings in `input_features` float[frames, mel bins], and `audio_feature_lengths` int64[n]
    says how many frames each has. (The tower and the model each want another form: [mel bins, frames], and padded
    features with a mask.)

    Args:
        encoder: The tower.
    """

    keys = frozenset({"input_features", "audio_feature_lengths"})
    placeholders = ("audio_token_id",)

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    def split(self, sample: Mapping[str, Any]) -> list[Item]:
        """One item for each recording."""
        lengths = tensor_of(sample, "audio_feature_lengths")
        lengths = torch.zeros(0, dtype=torch.int64) if lengths is None else lengths.to(torch.int64)
        if lengths.ndim != 1:
            raise ValueError(f"`audio_feature_lengths` must have shape [n], but has {list(lengths.shape)} instead.")
        if len(lengths) and int(lengths.min()) < _SMALLEST_NUM_FRAMES:
            raise ValueError(
                f"`audio_feature_lengths` must be at least {_SMALLEST_NUM_FRAMES} (fewer frames give no token), "
                f"but is {int(lengths.min())} instead."
            )
        features = tensor_of(sample, "input_features")
        pieces = cut("input_features", features, "audio_feature_lengths", lengths.tolist())
        return [
            {"input_features": piece, "audio_feature_lengths": row[None]}
            for piece, row in zip(pieces, lengths, strict=True)
        ]

    def length(self, item: Item) -> int:
        """Mel frames."""
        return len(item["input_features"])

    def num_rows(self, item: Item) -> int:
        """What the tower's own length function says."""
        return int(self._encoder._get_feat_extract_output_lengths(item["audio_feature_lengths"])[1])

    def llm_part(self, item: Item) -> Item:
        """The number of frames."""
        return {"audio_feature_lengths": item["audio_feature_lengths"]}

    def join(self, items: list[Item]) -> dict[str, Any]:
        """Frames of all recordings packed, mel bins first, in the tower's dtype."""
        lengths = torch.cat([item["audio_feature_lengths"] for item in items])
        return {
            "input_features": torch.cat([item["input_features"].to(self._encoder.dtype) for item in items]).T,
            "feature_lens": lengths,
            "aftercnn_lens": self._encoder._get_feat_extract_output_lengths(lengths)[0],
        }

    def dummy(self) -> Item:
        """The fewest frames that leave a row."""
        shape = (_SMALLEST_NUM_FRAMES, self._encoder.config.num_mel_bins)
        return {
            "input_features": torch.ones(shape, dtype=self._encoder.dtype),
            "audio_feature_lengths": torch.tensor([_SMALLEST_NUM_FRAMES]),
        }

    def rows(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The pooled, projected frames."""
        return (output.last_hidden_state,)

    def llm_inputs(self, parts: list[Item]) -> dict[str, Any]:
        """A mask of the real lengths over features of no mel bins, which take no memory."""
        if not parts:
            return {}
        lengths = torch.cat([part["audio_feature_lengths"] for part in parts])
        longest = int(lengths.max())
        frames = torch.arange(longest, device=lengths.device)
        return {
            "input_features": torch.zeros(len(parts), 0, longest, dtype=self._encoder.dtype, device=lengths.device),
            "feature_attention_mask": frames[None, :] < lengths[:, None],
        }

    def calls(self, parts: list[Item]) -> list[list[int]]:
        """One call for all recordings."""
        return [list(range(len(parts)))] if parts else []

    def output(self, rows: tuple[torch.Tensor, ...]) -> Any:
        """The tower's output. The model reads `last_hidden_state`."""
        return _output(rows[0])

    def cost(self) -> tuple[float, float, float]:
        """Forward FLOPs. Attention stays within chunks of fixed length, so that the whole is linear in frames."""
        config = self._encoder.config
        dim = config.d_model
        layer = 2.0 * (4 * dim**2 + 2 * dim * config.encoder_ffn_dim) + 4.0 * dim * config.n_window
        front = 2.0 * 3 * config.num_mel_bins * dim + 2.0 * 3 * dim**2 / 2
        return 0.0, front + config.encoder_layers * layer / 2 + 2.0 * dim * config.output_dim / 4, 0.0


def _pixels(item: Item) -> torch.Tensor:
    return item["pixel_values"] if "pixel_values" in item else item["pixel_values_videos"]


def _grid_of(item: Item) -> torch.Tensor:
    return item["image_grid_thw"] if "image_grid_thw" in item else item["video_grid_thw"]


def _feed_forward_values(config: Any, dim: int) -> int:
    """Weights of a block's feed-forward part: gated with `intermediate_size`, or plain with `mlp_ratio`."""
    if hasattr(config, "mlp_ratio"):
        return int(2 * dim * dim * config.mlp_ratio)
    return 3 * dim * int(config.intermediate_size)


def _output(rows: torch.Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(last_hidden_state=rows, pooler_output=rows)
