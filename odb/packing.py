"""Many samples as one buffer of bytes, and back.

A worker sends a chunk of samples as a single tensor: one shared-memory file instead of one for each tensor of each
sample. A packed sample stands for itself (header and values), so its bytes can travel to another rank as they are.
Nothing is pickled: a sample is built of tensors, arrays of numbers, numbers, strings and None, in dicts, lists and
tuples.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
_HEAD = struct.Struct("<I")
_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
_TENSOR, _ARRAY, _DICT, _LIST, _TUPLE = range(5)
_Bytes = npt.NDArray[np.uint8]


class NotPackableError(ValueError):
    """A sample holds something that is neither a tensor, an array of numbers, a number nor a string."""


def pack_samples(samples: Sequence[Any]) -> tuple[torch.Tensor, list[int]]:
    """Packs samples one behind the other.

    Returns:
        The bytes, uint8[n], and the number of bytes of each sample, a multiple of 16.

    Raises:
        NotPackableError: If a value cannot be packed; names its key and type.
    """
    parts = [_parts_of(sample) for sample in samples]
    sizes = [sum(_aligned(len(piece)) for piece in pieces) for pieces in parts]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8)
    target, position = buffer.numpy(), 0
    for pieces in parts:
        for piece in pieces:
            target[position : position + len(piece)] = piece
            position += _aligned(len(piece))
    return buffer, sizes


def unpack_sample(data: torch.Tensor) -> Any:
    """The sample that was packed into `data` (uint8[n]); its tensors and arrays are views of it."""
    raw = memoryview(data.numpy().data)
    header_end = _HEAD.size + _HEAD.unpack_from(raw)[0]
    return _Reader(data, _aligned(header_end)).read(json.loads(bytes(raw[_HEAD.size : header_end])))


def _parts_of(sample: Any) -> list[_Bytes]:
    """Header and values of a sample, as bytes."""
    values: list[_Bytes] = []
    header = json.dumps(_describe("sample", sample, values), separators=(",", ":")).encode()
    return [np.frombuffer(_HEAD.pack(len(header)) + header, dtype=np.uint8), *values]


def _describe(key: Any, value: Any, values: list[_Bytes]) -> Any:
    """How a value reads in the header; its bytes, if it has any, are appended to `values`."""
    if isinstance(value, torch.Tensor) and value.dtype in _NAMES and value.device.type == "cpu":
        flat = value.detach().contiguous().reshape(-1)
        values.append(flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8))
        return [_TENSOR, _NAMES[value.dtype], list(value.shape)]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        values.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return [_ARRAY, value.dtype.str, list(value.shape)]
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return [_DICT, list(value), [_describe(name, item, values) for name, item in value.items()]]
    if type(value) in (list, tuple):
        return [_LIST if type(value) is list else _TUPLE, [_describe(key, item, values) for item in value]]
    raise NotPackableError(
        f"`{key}` must be a tensor, an array of numbers, a number, a string, or a dict, list or tuple of these, "
        f"but is {type(value).__name__} instead."
    )


class _Reader:
    """Reads values in the order in which they were written."""

    def __init__(self, data: torch.Tensor, position: int) -> None:
        self._data, self._position = data, position

    def read(self, described: Any) -> Any:
        if not isinstance(described, list):
            return described
        kind = described[0]
        if kind == _TENSOR:
            return self._tensor(_TORCH_DTYPES[described[1]], described[2])
        if kind == _ARRAY:
            return self._array(np.dtype(described[1]), described[2])
        if kind == _DICT:
            return {name: self.read(item) for name, item in zip(described[1], described[2], strict=True)}
        items = [self.read(item) for item in described[1]]
        return items if kind == _LIST else tuple(items)

    def _tensor(self, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        data = self._take(_size(shape) * dtype.itemsize)
        return data.view(dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)

    def _array(self, dtype: np.dtype[Any], shape: list[int]) -> npt.NDArray[Any]:
        return self._take(_size(shape) * dtype.itemsize).numpy().view(dtype).reshape(shape)

    def _take(self, num_bytes: int) -> torch.Tensor:
        start = self._position
        self._position += _aligned(num_bytes)
        return self._data[start : start + num_bytes]


def _size(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
