"""Drawing: a rank's samples, taken apart into what follows the LLM and what goes to encoders, measured and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from orch.lengths import ItemLengths, StepLengths
from orch.loss import num_label_tokens
from orch.stages import EncoderAdapter, Item, Sample
from orch.unstaged import Unstaged
from orch.wire import decode_record, encode_record

_PART = "orch:part"
_TRAINABLE = (torch.int32, torch.int64)
_INTEGERS = (*_TRAINABLE, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnSample:
    """One sample, taken apart.

    Attributes:
        parcel: uint8 bytes of everything that follows the sample to the LLM.
        items: uint8 bytes of each item of each stage.
        llm_length: Tokens in the LLM.
        num_label_tokens: Tokens that are trained on.
        lengths: (length, rows) of each item of each stage.
    """

    parcel: torch.Tensor
    items: Mapping[str, Sequence[torch.Tensor]]
    llm_length: int
    num_label_tokens: int
    lengths: Mapping[str, Sequence[tuple[int, int]]]


def draw_sample(
    sample: Sample,
    adapters: Mapping[str, EncoderAdapter],
    placeholders: Mapping[str, Sequence[int]],
    unstaged: Sequence[Unstaged] = (),
) -> DrawnSample:
    """Takes a sample apart.

    Args:
        sample: A flat dict of tensors or arrays, numbers and strings, fully processed; needs `input_ids` and `labels`.
        adapters: The adapter of each stage.
        placeholders: Token ids that stand for the rows of each stage, where known.
        unstaged: Encoders that are no stages, for which the sample must have nothing.

    Raises:
        ValueError: If it is no such dict, keys are missing or disagree, or it has something for an encoder that is no
            stage; names the sample.
    """
    if not isinstance(sample, Mapping) or not all(isinstance(key, str) for key in sample):
        raise ValueError(
            f"A loader must yield lists of samples, dicts with names as keys, but one is {_shown(sample)} instead: "
            "collated batches are not lists of samples; for a `DataLoader` use `collate_fn=list`."
        )
    try:
        ids, labels = _tokens(sample, "input_ids"), _tokens(sample, "labels")
        if len(ids) != len(labels):
            raise ValueError(f"`labels` must have {len(ids)} tokens, but has {len(labels)} instead.")
        if "attention_mask" in sample and not _as_tensor(sample, "attention_mask").bool().all():
            raise ValueError(
                "`attention_mask` must be all ones, as samples come without padding, but has zeros instead."
            )
        for encoder in unstaged:
            encoder.check(sample, ids.long())
        sample = {**sample, **_widened({"input_ids": ids, "labels": labels})}
        split = {name: adapter.split(sample) for name, adapter in adapters.items()}
        media = frozenset[str]().union(*(adapter.keys for adapter in adapters.values()))
        record = {key: value for key, value in sample.items() if key not in media}
        for name, items in split.items():
            num_tokens = getattr(adapters[name], "num_tokens", adapters[name].num_rows)
            _check_placeholders(name, ids.long(), sum(map(num_tokens, items)), placeholders.get(name, ()))
            for index, item in enumerate(items):
                part = adapters[name].llm_part(item) or {"": torch.empty(0)}  # an item without a part counts too
                record |= {f"{_PART}:{name}:{index}:{k}": v for k, v in part.items()}
        return DrawnSample(
            parcel=encode_record(record),
            items={name: [encode_record(item) for item in items] for name, items in split.items()},
            llm_length=len(ids),
            num_label_tokens=num_label_tokens(labels.long()),
            lengths={
                name: [(adapters[name].length(item), adapters[name].num_rows(item)) for item in items]
                for name, items in split.items()
            },
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"Sample {sample.get('id', '(without an id)')!r}: {error}") from error


def open_parcel(parcel: torch.Tensor, stage_names: Sequence[str]) -> tuple[dict[str, Any], dict[str, list[Item]]]:
    """The sample's own keys, and the LLM-side parts of its items by stage."""
    sample: dict[str, Any] = {}
    parts: dict[str, list[Item]] = {name: [] for name in stage_names}
    for key, value in decode_record(parcel).items():
        if not key.startswith(_PART + ":"):
            sample[key] = value
            continue
        name, index, part_key = key[len(_PART) + 1 :].split(":", 2)
        if int(index) == len(parts[name]):
            parts[name].append({})
        if part_key:
            parts[name][int(index)][part_key] = value
    return sample, parts


def measure(
    groups: Sequence[Sequence[DrawnSample]], stage_names: Sequence[str], group_rank: Sequence[int]
) -> StepLengths:
    """The lengths of what one rank holds for each micro-step, and the rank whose group each sample is in."""
    samples = [sample for group in groups for sample in group]
    micro_step = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    stages = {}
    for name in stage_names:
        counts = [len(sample.items[name]) for sample in samples]
        pairs = np.array([pair for s in samples for pair in s.lengths[name]], dtype=np.int64).reshape(-1, 2)
        num_bytes = np.array([item.numel() for s in samples for item in s.items[name]], dtype=np.int64)
        stages[name] = ItemLengths(np.repeat(np.arange(len(samples)), counts), pairs[:, 0], pairs[:, 1], num_bytes)
    return StepLengths(
        home=np.zeros(len(samples), dtype=np.int64),
        micro_step=micro_step,
        llm_length=np.array([s.llm_length for s in samples], dtype=np.int64),
        num_bytes=np.array([s.parcel.numel() for s in samples], dtype=np.int64),
        num_label_tokens=np.array([s.num_label_tokens for s in samples], dtype=np.int64),
        num_micro_steps=len(groups),
        stages=stages,
        group_rank=np.array(group_rank, dtype=np.int64),
    )


def _shown(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)[:8]!r}"
    return f"a {type(value).__name__}: {str(value)[:40]!r}"


def _tokens(sample: Sample, key: str) -> torch.Tensor:
    if key not in sample:
        raise ValueError(f"`{key}` must be among the keys of a sample, but it has {sorted(sample)} instead.")
    tokens = _as_tensor(sample, key)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype not in _INTEGERS:
        raise ValueError(
            f"`{key}` must be a vector of at least one integer, but is {tuple(tokens.shape)} of {tokens.dtype} instead."
        )
    return tokens


def _as_tensor(sample: Sample, key: str) -> torch.Tensor:
    try:
        return torch.as_tensor(sample[key])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"`{key}` must be a tensor or an array of numbers, but is {_shown(sample[key])} instead."
        ) from error


def _widened(tokens: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of small integers, which models do not look up, as int64."""
    return {key: values.long() for key, values in tokens.items() if values.dtype not in _TRAINABLE}


def _check_placeholders(name: str, ids: torch.Tensor, num_tokens: int, tokens: Sequence[int]) -> None:
    if tokens:
        found = int(torch.isin(ids, torch.tensor(list(tokens))).sum())
        if found != num_tokens:
            raise ValueError(
                f"`input_ids` must hold a placeholder for each of the {num_tokens} rows of stage {name!r}, "
                f"but holds {found} instead."
            )
