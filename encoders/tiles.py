"""Adapters of towers of fixed-size tiles: CLIP, SigLIP and InternVL's, as LLaVA and InternVL use them.

A tower gives every tile the same number of rows. What lies between tower and LLM (choice of hidden states, pixel
shuffle, projector) belongs to the model and runs where the LLM is; so which hidden states to route, and how many
tokens a tile becomes, follow from the model's configuration, which `bind` gives.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from orch.encoders.items import Idle, Item, tensor_of
from orch.encoders.pixels import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD, normalised

_FORM_OF_MODEL = {
    "llava": ("orch.encoders.tiles", "LlavaTiles"),
    "internvl": ("orch.encoders.tiles", "InternVLTiles"),
    "llava_onevision": ("orch.encoders.llava_onevision", "OnevisionTiles"),
}
_PIXELS_OF_TOWER = {"siglip_vision_model": (HALF, HALF), "internvl_vision": (IMAGENET_MEAN, IMAGENET_STD)}


class TileAdapter:
    """Tiles of a tower whose model is not known: `pixel_values` [tiles, channels, height, width], an item a tile.

    The model is taken to read `last_hidden_state`, and to have transformers' `get_image_features` if anything of it
    lies between the tower and the LLM.

    Args:
        encoder: The tower.
        image_mean: Mean of each channel, for pixels of `uint8`; the usual one for its class if not given.
        image_std: Deviation of each channel, likewise.
    """

    keys = frozenset({"pixel_values"})
    placeholders: tuple[str, ...] = ()

    def __init__(
        self, encoder: Any, image_mean: Sequence[float] | None = None, image_std: Sequence[float] | None = None
    ) -> None:
        config = encoder.config
        usual = _PIXELS_OF_TOWER.get(config.model_type, (CLIP_MEAN, CLIP_STD))
        self._encoder = encoder
        self._mean, self._std = tuple(image_mean or usual[0]), tuple(image_std or usual[1])
        self._shape = (config.num_channels, *_pair(config.image_size))
        self._patch = _pair(config.patch_size)
        self._patches = (self._shape[1] // self._patch[0]) * (self._shape[2] // self._patch[1])
        self._has_class_token = config.model_type != "siglip_vision_model"
        self._layers: tuple[int, ...] = ()

    @property
    def _rows_of_tile(self) -> int:
        return self._patches + self._has_class_token

    def bind(self, config: Any) -> Any:
        """The adapter of this tower in a model of this configuration."""
        if getattr(config, "model_type", None) not in _FORM_OF_MODEL:
            return self
        module, name = _FORM_OF_MODEL[config.model_type]
        return getattr(importlib.import_module(module), name)(self._encoder, self._mean, self._std, config)

    def split(self, sample: Mapping[str, Any]) -> list[Item]:
        """One item for each tile."""
        pixels = self._tiles(sample, "pixel_values")
        return [] if pixels is None else [{"pixel_values": tile} for tile in pixels.split(1)]

    def _tiles(self, sample: Mapping[str, Any], key: str) -> torch.Tensor | None:
        """[..., channels, height, width], checked."""
        pixels = tensor_of(sample, key)
        if pixels is not None and (pixels.ndim < 4 or tuple(pixels.shape[-3:]) != self._shape):
            raise ValueError(f"`{key}` must end in the shape {list(self._shape)}, but is {list(pixels.shape)} instead.")
        return pixels

    def length(self, item: Item) -> int:
        """Patches."""
        return self._num_tiles(item) * self._patches

    def num_rows(self, item: Item) -> int:
        """The same for every tile: its patches, and the class token where there is one."""
        return self._num_tiles(item) * self._rows_of_tile

    def _num_tiles(self, item: Item) -> int:
        return len(item["pixel_values"])

    def llm_part(self, item: Item) -> Item:
        """Nothing: tiles are alike."""
        return {}

    def join(self, items: list[Item]) -> dict[str, Any]:
        """All tiles, normalised and in the tower's dtype; the hidden states that the model reads are asked for."""
        pixels = [normalised(self._pixels(item), self._encoder.dtype, self._mean, self._std) for item in items]
        chosen = {"output_hidden_states": list(self._layers)} if self._layers else {}
        return {"pixel_values": torch.cat(pixels), **chosen}

    def _pixels(self, item: Item) -> torch.Tensor:
        return item["pixel_values"]

    def dummy(self) -> Item:
        """One tile."""
        return {"pixel_values": torch.ones(1, *self._shape, dtype=self._encoder.dtype)}

    @property
    def row_width(self) -> int:
        """Values of a row in all of its tensors."""
        return int(self._encoder.config.hidden_size) * max(1, len(self._layers))

    def rows(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The last hidden state, or those that the model reads: the rows of all tiles, one tile after the other."""
        states = [output.hidden_states[layer] for layer in self._layers] or [output.last_hidden_state]
        return tuple(state.flatten(0, 1) for state in states)

    def llm_inputs(self, parts: list[Item]) -> dict[str, Any]:
        """Pixels of no tile, which make the model call the tower."""
        return {"pixel_values": self._no_tiles()} if parts else {}

    def _no_tiles(self) -> torch.Tensor:
        return torch.zeros(0, *self._shape, dtype=self._encoder.dtype, device=self._encoder.device)

    def calls(self, parts: list[Item]) -> list[list[int]]:
        """One call for all tiles."""
        return [list(range(len(parts)))] if parts else []

    def output(self, rows: tuple[torch.Tensor, ...]) -> Any:
        """The tower's output, with no other hidden states than those that the model reads."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        states = [tensor.unflatten(0, (-1, self._rows_of_tile)) for tensor in rows]
        hidden: list[torch.Tensor | None] = [None] * (self._encoder.config.num_hidden_layers + 1)
        for layer, state in zip(self._layers, states, strict=False):
            hidden[layer] = state
        return BaseModelOutputWithPooling(last_hidden_state=states[0], hidden_states=tuple(hidden))

    def idle(self, model: Any, parts: list[Item]) -> list[Idle]:
        """A tile through what the model has between tower and LLM, on a rank whose samples have none."""
        if parts or not hasattr(model, "get_image_features"):
            return []
        inputs = self.llm_inputs([self.llm_part(self.dummy())])
        return [([self.dummy()], functools.partial(features_of, model.get_image_features, inputs))]

    def cost(self) -> tuple[float, float, float]:
        """Forward FLOPs of a patch: attention is within tiles, so that the whole is linear."""
        config = self._encoder.config
        dim = config.hidden_size
        layer = 2.0 * (4 * dim**2 + 2 * dim * config.intermediate_size) + 4.0 * dim * self._rows_of_tile
        embed = 2.0 * self._shape[0] * self._patch[0] * self._patch[1] * dim
        return 0.0, embed + config.num_hidden_layers * layer, 0.0


class LlavaTiles(TileAdapter):
    """Tiles of LLaVA: it reads hidden states of chosen layers, without the class token."""

    placeholders: tuple[str, ...] = ("image_token_id",)

    def __init__(self, encoder: Any, image_mean: Sequence[float], image_std: Sequence[float], config: Any) -> None:
        super().__init__(encoder, image_mean, image_std)
        chosen = config.vision_feature_layer
        self._layers = (chosen,) if isinstance(chosen, int) else tuple(chosen)
        self._drops_first = config.vision_feature_select_strategy == "default"

    @property
    def _tokens_of_tile(self) -> int:
        return self._rows_of_tile - self._drops_first

    def num_tokens(self, item: Item) -> int:
        """Placeholders of a tile."""
        return self._num_tiles(item) * self._tokens_of_tile


class InternVLTiles(LlavaTiles):
    """Tiles of InternVL, whose pixel shuffle merges neighbouring rows. The frames of a video are tiles too."""

    def __init__(self, encoder: Any, image_mean: Sequence[float], image_std: Sequence[float], config: Any) -> None:
        super().__init__(encoder, image_mean, image_std, config)
        self._layers = () if self._layers == (-1,) else self._layers
        self._downsample = config.downsample_ratio

    @property
    def _tokens_of_tile(self) -> int:
        side = int((self._rows_of_tile - self._drops_first) ** 0.5)
        return int(side * self._downsample) ** 2


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def features_of(get: Callable[..., Any], inputs: Mapping[str, Any]) -> torch.Tensor:
    """What a `get_image_features` or `get_video_features` gives the LLM: a tensor, or a list of them, joined."""
    features = get(**inputs).pooler_output
    return features if isinstance(features, torch.Tensor) else torch.cat(list(features))
