"""From a conversation and its decoded media to one sample: token ids, labels, patches, log-mel frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from .audio import Signal, log_mel, windows
from .images import PatchGrid, Pixels, image_patches, resize, video_patches
from .records import PLACEHOLDER, Turn, UnusableRecordError
from .tokenizer import OmniTokenizer

IGNORE_INDEX = -100
Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How samples are made.

    Attributes:
        max_length: Tokens of a sample. What is beyond is cut from the text at its end, never from a media block.
        grid: How pictures are resized and cut.
        num_mel_bins: Of the log-mel spectrogram.
    """

    max_length: int = 4096
    grid: PatchGrid = field(default_factory=PatchGrid)
    num_mel_bins: int = 128

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"`max_length` must be at least 1, but is {self.max_length} instead.")


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """What the placeholders stand for, decoded: RGB pictures, 16 kHz recordings, frames with their seconds."""

    images: Sequence[Image.Image] = ()
    recordings: Sequence[Signal] = ()
    videos: Sequence[tuple[Pixels, float]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    """Processed items by kind, and how many tokens each placeholder of the kind becomes, by block."""

    tensors: Sample
    blocks: dict[str, list[list[int]]]


def make_sample(turns: Sequence[Turn], media: Media, tokenizer: OmniTokenizer, preprocessing: Preprocessing) -> Sample:
    """Makes one sample of the data contract.

    Args:
        turns: The conversation; as many placeholders as there are media of each kind.
        media: The decoded media.
        tokenizer: For the text.
        preprocessing: Limits and sizes.

    Returns:
        `input_ids` and `labels` int64[L] (labels on the assistant's turns alone), and where there are such media
        `pixel_values` uint8[patches, 588] with `image_grid_thw` int64[n, 3], `input_features` float32[frames, bins]
        with `audio_feature_lengths` int64[n], `pixel_values_videos` uint8[patches, 1176] with `video_grid_thw` and
        `video_second_per_grid` float32[n].

    Raises:
        UnusableRecordError: If its media alone are longer than `max_length`, a recording is empty, or no label is left.
    """
    encoded = _encode(media, preprocessing)
    ids, labels, end_of_media = _tokens(turns, encoded.blocks, tokenizer)
    limit = preprocessing.max_length
    if end_of_media > limit:
        raise UnusableRecordError(f"its media end at token {end_of_media}, beyond the {limit} of `max_length`")
    ids, labels = ids[:limit], labels[:limit]
    if all(label == IGNORE_INDEX for label in labels[1:]):
        raise UnusableRecordError(f"no label is left within the {limit} tokens of `max_length`")
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), **encoded.tensors}


def _encode(media: Media, preprocessing: Preprocessing) -> _Encoded:
    parts = (
        _encode_images(media.images, preprocessing.grid),
        _encode_recordings(media.recordings, preprocessing.num_mel_bins),
        _encode_videos(media.videos, preprocessing.grid),
    )
    return _Encoded(
        {key: value for part in parts for key, value in part.tensors.items()},
        {kind: blocks for part in parts for kind, blocks in part.blocks.items()},
    )


def _encode_images(images: Sequence[Image.Image], grid: PatchGrid) -> _Encoded:
    patches = [image_patches(resize(image, grid), grid) for image in images]
    blocks = {"image": [[len(rows) // grid.merge_size**2] for rows, _ in patches]}
    if not patches:
        return _Encoded({}, blocks)
    pixels = torch.from_numpy(np.concatenate([rows for rows, _ in patches]))
    return _Encoded({"pixel_values": pixels, "image_grid_thw": torch.tensor([thw for _, thw in patches])}, blocks)


def _encode_videos(videos: Sequence[tuple[Pixels, float]], grid: PatchGrid) -> _Encoded:
    patches = [video_patches(frames, grid.temporal_size, grid) for frames, _ in videos]
    blocks = {"video": [[len(rows) // grid.merge_size**2] for rows, _ in patches]}
    if not patches:
        return _Encoded({}, blocks)
    tensors = {
        "pixel_values_videos": torch.from_numpy(np.concatenate([rows for rows, _ in patches])),
        "video_grid_thw": torch.tensor([thw for _, thw in patches]),
        "video_second_per_grid": torch.tensor([seconds for _, seconds in videos]),
    }
    return _Encoded(tensors, blocks)


def _encode_recordings(recordings: Sequence[Signal], num_mel_bins: int) -> _Encoded:
    """A recording longer than a window is several items, each a block of its own in the text."""
    if not all(map(len, recordings)):
        raise UnusableRecordError("a recording has no samples")
    features = [[log_mel(window, num_mel_bins) for window in windows(signal)] for signal in recordings]
    blocks = {"audio": [[num_audio_tokens(len(frames)) for frames in of_signal] for of_signal in features]}
    flat = [frames for of_signal in features for frames in of_signal]
    if not flat:
        return _Encoded({}, blocks)
    lengths = torch.tensor([len(frames) for frames in flat])
    return _Encoded({"input_features": torch.cat(flat), "audio_feature_lengths": lengths}, blocks)


def num_audio_tokens(num_frames: int) -> int:
    """Tokens of a window of mel frames, as Qwen2.5-Omni's tower counts: two strides of 2."""
    return ((num_frames - 1) // 2 - 1) // 2 + 1


def _tokens(
    turns: Sequence[Turn], blocks: dict[str, list[list[int]]], tokenizer: OmniTokenizer
) -> tuple[list[int], list[int], int]:
    """Ids, labels, and the position behind the last media block."""
    start, end = tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")
    sizes = {kind: iter(of_kind) for kind, of_kind in blocks.items()}
    newline = tokenizer.encode("\n")
    ids: list[int] = []
    labels: list[int] = []
    end_of_media = 0
    for turn in turns:
        ids += [start, *tokenizer.encode(f"{turn.role}\n")]
        labels += [IGNORE_INDEX] * (len(ids) - len(labels))
        for piece, is_media in _pieces(turn.content, sizes, tokenizer):
            ids += piece
            trained = turn.role == "assistant" and not is_media
            labels += piece if trained else [IGNORE_INDEX] * len(piece)
            end_of_media = len(ids) if is_media else end_of_media
        ids += [end, *newline]
        labels += [end if turn.role == "assistant" else IGNORE_INDEX, *[IGNORE_INDEX] * len(newline)]
    return ids, labels, end_of_media


def _pieces(
    content: str, sizes: dict[str, Iterator[list[int]]], tokenizer: OmniTokenizer
) -> Iterator[tuple[list[int], bool]]:
    """Ids of the text between placeholders, and of the media block in each one's place."""
    for index, piece in enumerate(PLACEHOLDER.split(content)):
        if index % 2 == 0:
            yield tokenizer.encode(piece), False
            continue
        wrapper = "audio" if piece == "audio" else "vision"
        start, end = tokenizer.special(f"<|{wrapper}_start|>"), tokenizer.special(f"<|{wrapper}_end|>")
        for size in next(sizes[piece]):
            yield [start, *[tokenizer.special(f"<|{piece}_pad|>")] * size, end], True
