"""Samples and items as bytes, and back: what travels between ranks. No pickle.

A record is a flat dict of tensors, arrays, numbers and strings. Its bytes hold a header (names, types, shapes) and the
values, each aligned so that a received buffer can be read in place.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

ALIGNMENT = 16

_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
)  # fmt: skip
_CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(_DTYPES)}
_TENSOR, _ARRAY, _STR, _INT, _FLOAT, _BOOL = range(6)
_HEAD = struct.Struct("<IH")
_FIELD = struct.Struct("<BBBH")


def encode_record(record: Mapping[str, Any]) -> torch.Tensor:
    """The bytes of a record: uint8[n], n a multiple of 16.

    Raises:
        ValueError: If a value is neither a tensor, an array, a number nor a string; names the key and the type.
    """
    values = [_value_bytes(key, value) for key, value in record.items()]
    fields = [_field_header(key, *value[:3]) for key, value in zip(record, values, strict=True)]
    header = _HEAD.pack(_HEAD.size + sum(map(len, fields)), len(fields)) + b"".join(fields)
    offsets, end = [], _aligned(len(header))
    for _, _, _, data in values:
        offsets.append(end)
        end = _aligned(end + data.numel())
    out = torch.zeros(end, dtype=torch.uint8)
    out[: len(header)] = torch.from_numpy(np.frombuffer(bytearray(header), dtype=np.uint8))
    for offset, (_, _, _, data) in zip(offsets, values, strict=True):
        out[offset : offset + data.numel()] = data
    return out


def decode_record(data: torch.Tensor) -> dict[str, Any]:
    """The record that `encode_record` wrote; its tensors are views of `data` (uint8[n])."""
    raw = data.numpy().data
    header_bytes, num_fields = _HEAD.unpack_from(raw, 0)
    position, end, record = _HEAD.size, _aligned(header_bytes), {}
    for _ in range(num_fields):
        kind, code, ndim, name_bytes = _FIELD.unpack_from(raw, position)
        position += _FIELD.size
        name = bytes(raw[position : position + name_bytes]).decode()
        position += name_bytes
        shape = struct.unpack_from(f"<{ndim}q", raw, position)
        position += 8 * ndim
        num_bytes = int(np.prod(shape, dtype=np.int64)) * _DTYPES[code].itemsize
        record[name] = _restored(kind, data[end : end + num_bytes].view(_DTYPES[code]).view(shape))
        end = _aligned(end + num_bytes)
    return record


def _value_bytes(key: str, value: Any) -> tuple[int, torch.dtype, Sequence[int], torch.Tensor]:
    """Kind, dtype, shape and bytes (uint8[n]) of a value."""
    kind, tensor = _as_tensor(key, value)
    if tensor.dtype not in _CODE_OF_DTYPE:
        raise ValueError(f"`{key}` must have one of the dtypes {_DTYPES}, but has {tensor.dtype} instead.")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    return kind, tensor.dtype, tuple(tensor.shape), data


def _as_tensor(key: str, value: Any) -> tuple[int, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return _TENSOR, value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return _ARRAY, torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, str):
        return _STR, torch.from_numpy(np.frombuffer(bytearray(value.encode()), dtype=np.uint8))
    if isinstance(value, (bool, np.bool_)):
        return _BOOL, torch.tensor(bool(value))
    if isinstance(value, (int, np.integer)):
        return _INT, torch.tensor(int(value), dtype=torch.int64)
    if isinstance(value, (float, np.floating)):
        return _FLOAT, torch.tensor(float(value), dtype=torch.float64)
    raise ValueError(
        f"`{key}` must be a tensor, an array of numbers, a number or a string, but is {type(value).__name__} instead."
    )


def _restored(kind: int, tensor: torch.Tensor) -> Any:
    if kind == _TENSOR:
        return tensor
    if kind == _ARRAY:
        return tensor.numpy()
    if kind == _STR:
        return tensor.numpy().tobytes().decode()
    return tensor.item()


def _field_header(key: str, kind: int, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    name = key.encode()
    return (
        _FIELD.pack(kind, _CODE_OF_DTYPE[dtype], len(shape), len(name)) + name + struct.pack(f"<{len(shape)}q", *shape)
    )


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
