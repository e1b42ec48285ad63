"""The batch of a group, where the user gives no `collate_fn`: padded rows, or one packed row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from orch.odb.measure import IGNORED_LABEL

PAD_VALUES: Mapping[str, int] = {"labels": IGNORED_LABEL}
MAX_LISTED = 4


def collate_padded(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows padded at the right: `labels` with -100, all else with 0; an `attention_mask` is added if there is none.

    Tensors that differ in more than their last dimension, and strings, become lists.

    Raises:
        ValueError: If a key is in some of the samples only.
    """
    batch = {key: _joined(key, [sample[key] for sample in samples]) for key in _keys_of(samples)}
    if "input_ids" in batch and "attention_mask" not in batch:
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return batch


def collate_packed(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of all samples: token sequences end to end, `position_ids` that restart, `cu_seq_lens` of the segments.

    The first label of each sample becomes -100, or one sample's last token would be trained on the next one's first.

    Raises:
        ValueError: If a key is in some of the samples only; but for `attention_mask`, which a packed row has not.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch: dict[str, Any] = {}
    for key in _keys_of(samples, unused="attention_mask"):
        values = [_as_tensor(sample[key]) for sample in samples]
        is_sequence = all(isinstance(v, torch.Tensor) and v.shape == (n,) for v, n in zip(values, lengths, strict=True))
        if key == "labels" and is_sequence:
            values = [torch.cat([torch.full_like(v[:1], IGNORED_LABEL), v[1:]]) for v in values]
        batch[key] = torch.cat(values)[None] if is_sequence else _joined(key, values)
    batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    batch["cu_seq_lens"] = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return batch


def _keys_of(samples: Sequence[Mapping[str, Any]], unused: str | None = None) -> list[str]:
    """The keys that every sample has, but for `unused`."""
    for key in dict.fromkeys(key for sample in samples for key in sample if key != unused):
        lacking = [i for i, sample in enumerate(samples) if key not in sample]
        if lacking:
            having = [i for i, sample in enumerate(samples) if key in sample]
            raise ValueError(
                f"Samples of a batch must have the same keys, but {key!r} is in {_named(samples, having)} and not in "
                f"{_named(samples, lacking)} instead. Give it to all of them, empty where there is none, or to none; "
                "or give the loader a `collate_fn` that can do without."
            )
    return [key for key in samples[0] if key != unused]


def _named(samples: Sequence[Mapping[str, Any]], places: list[int]) -> str:
    """Samples by their `id`, or else by their place in the batch."""
    names = [repr(samples[i]["id"]) if "id" in samples[i] else f"number {i}" for i in places[:MAX_LISTED]]
    names += [f"{len(places) - MAX_LISTED} more"] * (len(places) > MAX_LISTED)
    return f"sample{'s' * (len(places) > 1)} {', '.join(names)}"


def _joined(key: str, values: list[Any]) -> Any:
    values = [_as_tensor(value) for value in values]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    shapes = [value.shape for value in values]
    if len(set(shapes)) == 1:
        return torch.stack(values)
    if len({shape[:-1] for shape in shapes}) > 1 or not shapes[0]:
        return values
    longest = max(shape[-1] for shape in shapes)
    return torch.stack([pad(v, (0, longest - v.shape[-1]), value=PAD_VALUES.get(key, 0)) for v in values])


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    is_numbers = isinstance(value, list) and value and all(isinstance(v, (int, float)) for v in value)
    return torch.tensor(value) if is_numbers or isinstance(value, (bool, int, float)) else value
