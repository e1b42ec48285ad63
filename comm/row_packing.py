"""How the rows of several tensors lie beside each other in one row of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowPacking:
    """How the rows of several tensors lie beside each other in one row of bytes."""

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> RowPacking:
        """That of these tensors, [n, ...] each."""
        return cls(tuple(tensor.dtype for tensor in tensors), tuple(tensor.shape[1:] for tensor in tensors))

    @property
    def widths(self) -> list[int]:
        """Bytes of a row of each tensor."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [math.prod(shape) * dtype.itemsize for shape, dtype in pairs]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all of them together."""
        return sum(self.widths)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Uint8[n, row_bytes]; a single tensor is not copied."""
        num_rows = len(tensors[0])
        flat = [tensor.reshape(num_rows, math.prod(shape)) for tensor, shape in zip(tensors, self.shapes, strict=True)]
        return flat[0].view(torch.uint8) if len(flat) == 1 else torch.cat([t.view(torch.uint8) for t in flat], dim=1)

    def _aligned(self, piece: Tensor) -> Tensor:
        """Where a tensor of any dtype can be; one of few rows counts as contiguous wherever in the buffer it begins."""
        return piece.contiguous() if len(self.shapes) == 1 else piece.clone(memory_format=torch.contiguous_format)

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The rows of each tensor, [n, ...]; a single tensor is not copied."""
        pieces = torch.split(buffer, self.widths, dim=1)
        return [
            self._aligned(piece).view(dtype).reshape(len(buffer), *shape)
            if piece.shape[1]
            else buffer.new_empty((len(buffer), *shape), dtype=dtype)
            for piece, dtype, shape in zip(pieces, self.dtypes, self.shapes, strict=True)
        ]
