"""From samples to the arguments of a model: packed in one row, or padded to a rectangle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from orch.encoders.items import Item

IGNORE_INDEX = -100
PositionIds: TypeAlias = Callable[[torch.Tensor, Sequence[Item]], torch.Tensor]


def text_position_ids(input_ids: torch.Tensor, parts: Sequence[Item] = ()) -> torch.Tensor:
    """int64[L]: counting from 0, for LLMs whose positions have one dimension."""
    return torch.arange(len(input_ids), device=input_ids.device)


@dataclass(frozen=True, slots=True)
class PackedCollator:
    """All samples in one row, each with positions of its own.

    Attributes:
        position_ids: A sample's tokens and parts to its positions: int64[L], or int64[3, L] for M-RoPE
            (`MropePositionIds`), to which the row of text positions is added, without which samples would leak.
    """

    position_ids: PositionIds = text_position_ids

    def __call__(
        self, samples: Sequence[Mapping[str, Any]], parts: Mapping[str, Sequence[Sequence[Item]]]
    ) -> dict[str, Any]:
        """Packs.

        Args:
            samples: Each with `input_ids` int64[L] and `labels` int64[L].
            parts: By stage, for each sample what the adapters' `llm_part` gave for its items.

        Returns:
            `input_ids` and `labels` int64[1, total] (the first label of each sample is ignored: it would be
            predicted from the sample before), `position_ids` int64[1, total] or int64[4, 1, total], boundaries as
            `cu_seq_lens_q` and `cu_seq_lens_k` int32[n + 1], `max_length_q` and `max_length_k`, `use_cache=False`.
        """
        rows = _rows(samples)
        lengths = [len(ids) for ids, _ in rows]
        labels = torch.cat([labels for _, labels in rows])
        boundaries = torch.tensor([0, *lengths]).cumsum(0)
        labels[boundaries[:-1]] = IGNORE_INDEX
        offsets = boundaries.to(torch.int32)
        positions = [
            _with_text_row(self.position_ids(ids, items))
            for (ids, _), items in zip(rows, _parts_of_samples(parts, len(rows)), strict=True)
        ]
        return {
            "input_ids": torch.cat([ids for ids, _ in rows])[None],
            "labels": labels[None],
            "position_ids": torch.cat(positions, dim=-1).unsqueeze(-2),
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
            "use_cache": False,
        }


@dataclass(frozen=True, slots=True)
class PaddedCollator:
    """One sample a row, padded on the right to the longest.

    Attributes:
        pad_token_id: What tokens are padded with.
        position_ids: As in `PackedCollator`; M-RoPE keeps its 3 rows here.
    """

    pad_token_id: int
    position_ids: PositionIds = text_position_ids

    def __call__(
        self, samples: Sequence[Mapping[str, Any]], parts: Mapping[str, Sequence[Sequence[Item]]]
    ) -> dict[str, Any]:
        """Pads.

        Args:
            samples: Each with `input_ids` int64[L] and `labels` int64[L].
            parts: By stage, for each sample what the adapters' `llm_part` gave for its items.

        Returns:
            `input_ids`, `labels` and `attention_mask` int64[n, L], `position_ids` int64[n, L] or int64[3, n, L],
            `use_cache=False`.
        """
        rows = _rows(samples)
        longest = max(len(ids) for ids, _ in rows)
        positions = [
            _padded(self.position_ids(ids, items), longest, 0)
            for (ids, _), items in zip(rows, _parts_of_samples(parts, len(rows)), strict=True)
        ]
        return {
            "input_ids": torch.stack([_padded(ids, longest, self.pad_token_id) for ids, _ in rows]),
            "labels": torch.stack([_padded(labels, longest, IGNORE_INDEX) for _, labels in rows]),
            "attention_mask": torch.stack([_padded(torch.ones_like(ids), longest, 0) for ids, _ in rows]),
            "position_ids": torch.stack(positions, dim=-2),
            "use_cache": False,
        }


def _rows(samples: Sequence[Mapping[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each sample, checked."""
    if not samples:
        raise ValueError("`samples` must not be empty, but is instead.")
    rows = [(torch.as_tensor(sample["input_ids"]), torch.as_tensor(sample["labels"])) for sample in samples]
    for ids, labels in rows:
        if not len(ids) or ids.shape != labels.shape or ids.ndim != 1:
            raise ValueError(
                f"`input_ids` and `labels` must be two vectors of one length, at least 1, but have shapes "
                f"{list(ids.shape)} and {list(labels.shape)} instead."
            )
    return rows


def _parts_of_samples(parts: Mapping[str, Sequence[Sequence[Item]]], num_samples: int) -> list[list[Item]]:
    """The parts of all stages, for each sample."""
    for name, of_samples in parts.items():
        if len(of_samples) != num_samples:
            raise ValueError(f"`parts[{name!r}]` must have {num_samples} lists, but has {len(of_samples)} instead.")
    return [[part for of_samples in parts.values() for part in of_samples[i]] for i in range(num_samples)]


def _with_text_row(positions: torch.Tensor) -> torch.Tensor:
    """int64[L] as it is; int64[3, L] to int64[4, L] with text positions first."""
    if positions.ndim == 1:
        return positions
    text = torch.arange(positions.shape[-1], device=positions.device)
    return torch.cat([text[None], positions])


def _padded(row: torch.Tensor, length: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(row, (0, length - row.shape[-1]), value=value)
