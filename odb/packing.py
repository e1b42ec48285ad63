"""Many samples as one buffer of bytes, and back.

A worker sends a chunk of samples as a single tensor: one shared-memory file instead of one for each tensor of each
sample. A packed sample stands for itself (header and values), so its bytes can travel to another rank as they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
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
_PLAIN = (bool, int, float, str)
_Field = tuple[str, str, Any, Any]


class NotPackableError(ValueError):
    """A sample is not a flat dict of tensors, arrays of numbers, numbers and strings."""


def pack_samples(samples: Sequence[Mapping[str, Any]]) -> tuple[torch.Tensor, list[int]]:
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


def unpack_sample(data: torch.Tensor) -> dict[str, Any]:
    """The sample that was packed into `data` (uint8[n]); its tensors and arrays are views of it."""
    raw = memoryview(data.numpy().data)
    header_end = _HEAD.size + _HEAD.unpack_from(raw)[0]
    position, sample = _aligned(header_end), {}
    for key, kind, dtype, shape in json.loads(bytes(raw[_HEAD.size : header_end])):
        if kind == "plain":
            sample[key] = shape
            continue
        num_bytes = _num_bytes(dtype, shape, kind)
        sample[key] = _restored(data[position : position + num_bytes], kind, dtype, shape)
        position += _aligned(num_bytes)
    return sample


def _parts_of(sample: Mapping[str, Any]) -> list[npt.NDArray[np.uint8]]:
    """Header and values of a sample, as bytes."""
    if not isinstance(sample, Mapping):
        raise NotPackableError(f"A sample must be a flat dict, but is {type(sample).__name__} instead.")
    fields: list[_Field] = []
    values: list[npt.NDArray[np.uint8]] = []
    for key, value in sample.items():
        field, data = _field_of(key, value)
        fields.append(field)
        if data is not None:
            values.append(data)
    header = json.dumps(fields, separators=(",", ":")).encode()
    head = np.frombuffer(_HEAD.pack(len(header)) + header, dtype=np.uint8)
    return [head, *values]


def _field_of(key: str, value: Any) -> tuple[_Field, npt.NDArray[np.uint8] | None]:
    if isinstance(value, torch.Tensor) and _dtype_name(value) in _TORCH_DTYPES and value.device.type == "cpu":
        flat = value.detach().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)
        return (key, "tensor", _dtype_name(value), list(value.shape)), data
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        flat_array = np.ascontiguousarray(value).reshape(-1)
        return (key, "array", value.dtype.str, list(value.shape)), flat_array.view(np.uint8)
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        value = value.item()
    if isinstance(value, _PLAIN) and isinstance(key, str):
        return (key, "plain", "", value), None
    raise NotPackableError(
        f"`{key}` must be a tensor, an array of numbers, a number or a string, but is {type(value).__name__} instead."
    )


def _dtype_name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _num_bytes(dtype: str, shape: Sequence[int], kind: str) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * (_TORCH_DTYPES[dtype].itemsize if kind == "tensor" else np.dtype(dtype).itemsize)


def _restored(data: torch.Tensor, kind: str, dtype: str, shape: Sequence[int]) -> Any:
    if kind == "array":
        return data.numpy().view(np.dtype(dtype)).reshape(shape)
    if not data.numel():
        return torch.empty(shape, dtype=_TORCH_DTYPES[dtype])
    return data.view(_TORCH_DTYPES[dtype]).view(shape)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
