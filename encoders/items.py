"""Items of a sample: cut out of its packed tensors, with errors that name the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

Item: TypeAlias = dict[str, torch.Tensor]
Idle: TypeAlias = tuple[list[Item], Callable[[], torch.Tensor]]
"""Items that a rank has no need of, and the call of what its model has between encoder and LLM that they go through."""


def tensor_of(sample: Mapping[str, Any], key: str) -> torch.Tensor | None:
    """The tensor of a key; None for a missing key and for one without rows, which mean the same: no item."""
    value = sample.get(key)
    if value is None:
        return None
    tensor = torch.as_tensor(value)
    return tensor if tensor.ndim and len(tensor) else None


def cut(data_key: str, data: torch.Tensor | None, sizes_key: str, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """Cuts packed rows into the pieces of each item.

    Args:
        data_key: The key of the rows.
        data: Their tensor, or None if there are none.
        sizes_key: The key that the sizes follow from.
        sizes: Rows of each item.

    Returns:
        One view for each item.

    Raises:
        ValueError: If the rows are not as many as the sizes say, or an item has none.
    """
    num_rows = 0 if data is None else len(data)
    if num_rows != sum(sizes):
        raise ValueError(
            f"`{data_key}` must have {sum(sizes)} rows, as `{sizes_key}` says, but has {num_rows} instead."
        )
    if data is None:
        return ()
    if min(sizes) < 1:
        raise ValueError(f"`{sizes_key}` must give every item at least 1 row, but gives {min(sizes)} instead.")
    return torch.split(data, sizes)
