"""Adapter of a tower in LLaVA-OneVision: a picture of any resolution is several tiles, a video a tile a frame."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from orch.encoders.items import Idle, Item, cut, tensor_of
from orch.encoders.tiles import LlavaTiles, features_of


class OnevisionTiles(LlavaTiles):
    """Images with all their tiles, and videos with all their frames, in the form of the model's processor.

    A sample's images are `pixel_values` [images, most tiles, channels, height, width] (or the tiles of all images
    alone), `image_sizes` int64[images, 2] and, where its processor gives it, `batch_num_images` int64[1]: the pictures
    of a sample with several of them are one tile each. Its videos are `pixel_values_videos` [videos, frames, channels,
    height, width]. The videos of an LLM batch need one number of frames, as the model takes them in one tensor.
    """

    keys = frozenset({"pixel_values", "image_sizes", "batch_num_images", "pixel_values_videos"})
    placeholders = ("image_token_id", "video_token_id")

    def __init__(self, encoder: Any, image_mean: Sequence[float], image_std: Sequence[float], config: Any) -> None:
        super().__init__(encoder, image_mean, image_std, config)
        self._config = config
        self._packed_tokens: dict[tuple[int, ...], int] = {}

    def split(self, sample: Mapping[str, Any]) -> list[Item]:
        """One item for each image, then one for each video."""
        videos = self._tiles(sample, "pixel_values_videos")
        clips = [] if videos is None else [{"pixel_values_videos": clip} for clip in videos.split(1)]
        return self._split_images(sample) + clips

    def _split_images(self, sample: Mapping[str, Any]) -> list[Item]:
        pixels, sizes = self._tiles(sample, "pixel_values"), tensor_of(sample, "image_sizes")
        sizes = torch.zeros(0, 2, dtype=torch.int64) if sizes is None else sizes
        given = tensor_of(sample, "batch_num_images")
        together = 1 if given is None else int(given.sum())
        if together not in (1, len(sizes)) and len(sizes):
            raise ValueError(f"`batch_num_images` must be {len(sizes)}, but is {together} instead.")
        num_tiles = [num_tiles_of(size, self._config) if together == 1 else 1 for size in sizes]
        if pixels is not None and pixels.ndim == 5 and len(pixels) == len(sizes):
            pixels = torch.cat([image[:count] for image, count in zip(pixels, num_tiles, strict=True)])
        pieces = cut("pixel_values", pixels, "image_sizes", num_tiles)
        return [
            {"pixel_values": piece, "image_sizes": size[None], "batch_num_images": torch.tensor([together])}
            for piece, size in zip(pieces, sizes, strict=True)
        ]

    def _pixels(self, item: Item) -> torch.Tensor:
        return item["pixel_values"] if "pixel_values" in item else item["pixel_values_videos"].flatten(0, 1)

    def _num_tiles(self, item: Item) -> int:
        return len(item["pixel_values"]) if "pixel_values" in item else item["pixel_values_videos"].shape[1]

    def num_tokens(self, item: Item) -> int:
        """Placeholders: pooled frames and one more for a video; for an image what the model's own packing leaves."""
        if "pixel_values_videos" in item:
            side = self._shape[1] // self._patch[0]
            return self._num_tiles(item) * (-(-side // 2)) ** 2 + 1
        key = (self._num_tiles(item), *item["image_sizes"][0].tolist())
        if key not in self._packed_tokens:
            self._packed_tokens[key] = _packed_tokens(key[0], item["image_sizes"], self._config)
        return self._packed_tokens[key]

    def llm_part(self, item: Item) -> Item:
        """An image's size and how many it came with; a video's number of frames."""
        if "pixel_values_videos" in item:
            return {"num_frames": torch.tensor([self._num_tiles(item)])}
        return {"image_sizes": item["image_sizes"], "batch_num_images": item["batch_num_images"]}

    def dummy(self) -> Item:
        """One picture of one tile, as if it were one of two."""
        size = torch.tensor([self._shape[1:]])
        return super().dummy() | {"image_sizes": size, "batch_num_images": torch.tensor([2])}

    def llm_inputs(self, parts: list[Item]) -> dict[str, Any]:
        """Sizes and numbers as they are; pixels of no tile, which make the model call the tower."""
        kwargs: dict[str, Any] = {}
        if images := [part for part in parts if "image_sizes" in part]:
            kwargs["pixel_values"] = self._no_tiles()
            kwargs["image_sizes"] = torch.cat([part["image_sizes"] for part in images])
            kwargs["batch_num_images"] = torch.tensor(_per_sample([int(part["batch_num_images"]) for part in images]))
        if frames := {int(part["num_frames"]) for part in parts if "num_frames" in part}:
            if len(frames) > 1:
                raise ValueError(
                    f"`pixel_values_videos` must have one number of frames in all samples of a batch, as the model "
                    f"takes them in one tensor, but have {sorted(frames)} instead."
                )
            num_videos = sum("num_frames" in part for part in parts)
            kwargs["pixel_values_videos"] = self._no_tiles().new_zeros(num_videos, frames.pop(), 0, 1, 1)
        return kwargs

    def calls(self, parts: list[Item]) -> list[list[int]]:
        """The model encodes all images, then all videos; kinds without an item are not called."""
        images = [position for position, part in enumerate(parts) if "image_sizes" in part]
        videos = [position for position, part in enumerate(parts) if "num_frames" in part]
        return [positions for positions in (images, videos) if positions]

    def idle(self, model: Any, parts: list[Item]) -> list[Idle]:
        """For each kind that is missing, one through projector and line break: both take part twice on every rank."""
        missing: list[Idle] = []
        video: Item = {"pixel_values_videos": super().dummy()["pixel_values"][None]}
        kinds = (("image_sizes", [self.dummy()] * 2, "image"), ("num_frames", [video], "video"))
        for key, items, kind in kinds:
            if not any(key in part for part in parts):
                inputs = self.llm_inputs([self.llm_part(item) for item in items])
                missing.append((items, functools.partial(features_of, getattr(model, f"get_{kind}_features"), inputs)))
        return missing


def num_tiles_of(size: torch.Tensor, config: Any) -> int:
    """Tiles of a picture of a size (int64[2], height and width), as the model counts them."""
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    tile = config.vision_config.image_size
    return int(image_size_to_num_patches(size, config.image_grid_pinpoints, tile))


def _packed_tokens(num_tiles: int, size: torch.Tensor, config: Any) -> int:
    """Rows that the model's own packing leaves of a picture, counted by running it on rows of width 1."""
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

    side = config.vision_config.image_size // config.vision_config.patch_size
    _, lengths = LlavaOnevisionModel.pack_image_features(
        types.SimpleNamespace(config=config),
        [torch.zeros(num_tiles, side * side, 1)],
        size,
        image_newline=torch.zeros(1),
        vision_aspect_ratio=config.vision_aspect_ratio,
    )
    return int(lengths[0])


def _per_sample(together: list[int]) -> list[int]:
    """From each image's number of images in its sample to one number a sample."""
    found, position = [], 0
    while position < len(together):
        found.append(together[position])
        position += together[position]
    return found
