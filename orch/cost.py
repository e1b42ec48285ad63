"""Cost models: what a batch of given lengths costs the rank that runs it.

Costs are int64, so that every rank computes the same plan bit for bit. A model's coefficients are floats in any unit
(seconds, FLOPs); before use they are rounded to integers of a common scale, and everything after that is exact.
Coefficients that are integers already are used as they are: `PackedCost()` counts tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np

from orch.comm.topology import IntArray

_REFERENCE_LENGTH = 1 << 17
_REFERENCE_COST = 1 << 44
_LARGEST_TOTAL = float(1 << 62)


@runtime_checkable
class CostModel(Protocol):
    """What dispatchers and metrics ask of a cost model."""

    def loads(self, lengths: IntArray, bin_of_item: IntArray, num_bins: int) -> IntArray:
        """Cost of the batch in each bin: int64[num_bins], 0 for an empty one."""
        ...


@runtime_checkable
class AdditiveCost(CostModel, Protocol):
    """A cost model whose batches cost the sum of their items."""

    def item_costs(self, lengths: IntArray) -> IntArray:
        """Cost of each item: int64[N]."""
        ...


def is_additive(cost: object) -> TypeGuard[AdditiveCost]:
    """Whether a cost model is an `AdditiveCost`; much faster than `isinstance`, which looks at every attribute."""
    return hasattr(cost, "item_costs")


@runtime_checkable
class PaddedLikeCost(CostModel, Protocol):
    """A cost model with rectangles: a batch of n items costs `n * slot(L) + sum(packed(l))`, L being the longest."""

    def slot_costs(self, lengths: IntArray) -> IntArray:
        """Cost of one row of a rectangle of each length: int64[N], nondecreasing in the length."""
        ...

    def packed_costs(self, lengths: IntArray) -> IntArray | None:
        """Cost of each item beside its row of the rectangle, int64[N]; None where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class PackedCost:
    """Items back to back: `n * per_item + linear * sum(l) + quadratic * sum(l^2)`.

    The quadratic term is attention that stays within each item.

    Attributes:
        per_item: Cost of an item whatever its length.
        linear: Cost of a unit of length.
        quadratic: Cost of a pair of units.

    Raises:
        ValueError: If a coefficient is negative or not finite, or all are zero.
    """

    per_item: float = 0.0
    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        _check_coefficients(self)

    def item_costs(self, lengths: IntArray) -> IntArray:
        """Cost of each item: int64[N]; an item of no length costs nothing."""
        per_item, linear, quadratic = _to_integers((self.per_item, self.linear, self.quadratic))
        return _polynomial(lengths, per_item, linear, quadratic)

    def loads(self, lengths: IntArray, bin_of_item: IntArray, num_bins: int) -> IntArray:
        """Cost of the batch in each bin: int64[num_bins]."""
        return sum_by_bin(self.item_costs(lengths), bin_of_item, num_bins)


@dataclass(frozen=True, slots=True)
class PaddedCost:
    """Items padded to the longest of their batch: `n * (per_item + linear * L + quadratic * L^2)` with `L = max(l)`.

    Attributes:
        per_item: Cost of a row whatever its length.
        linear: Cost of a unit of a row.
        quadratic: Cost of a pair of units of a row (attention over the padded row).

    Raises:
        ValueError: If a coefficient is negative or not finite, or all are zero.
    """

    per_item: float = 0.0
    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        _check_coefficients(self)

    def slot_costs(self, lengths: IntArray) -> IntArray:
        """Cost of one row of each length: int64[N]."""
        return _polynomial(lengths, *_to_integers((self.per_item, self.linear, self.quadratic)), padded=True)

    def packed_costs(self, lengths: IntArray) -> IntArray | None:
        """None: a padded batch is a rectangle and nothing else."""
        return None

    def loads(self, lengths: IntArray, bin_of_item: IntArray, num_bins: int) -> IntArray:
        """Cost of the batch in each bin: int64[num_bins]."""
        return rectangles(self.slot_costs(lengths), bin_of_item, num_bins)


@dataclass(frozen=True, slots=True)
class RectangleFrontCost:
    """A front end that needs a rectangle (convolutions), the rest packed.

    `front * n * L + n * per_item + linear * sum(l) + quadratic * sum(l^2)` with `L = max(l)`.

    Attributes:
        front: Cost of a unit of the rectangle.
        per_item: Cost of an item in the packed rest.
        linear: Cost of a unit of length in the packed rest.
        quadratic: Cost of a pair of units of one item in the packed rest.

    Raises:
        ValueError: If a coefficient is negative or not finite, or all are zero.
    """

    front: float = 1.0
    per_item: float = 0.0
    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        _check_coefficients(self)

    def _integers(self) -> tuple[int, ...]:
        return _to_integers((self.per_item, self.linear + self.front, self.quadratic, self.front, self.linear))

    def slot_costs(self, lengths: IntArray) -> IntArray:
        """Cost of one row of the front end: int64[N]."""
        return _polynomial(lengths, 0, self._integers()[3], 0, padded=True)

    def packed_costs(self, lengths: IntArray) -> IntArray | None:
        """Cost of each item in the packed rest: int64[N]."""
        per_item, _, quadratic, _, linear = self._integers()
        return _polynomial(lengths, per_item, linear, quadratic)

    def loads(self, lengths: IntArray, bin_of_item: IntArray, num_bins: int) -> IntArray:
        """Cost of the batch in each bin: int64[num_bins]."""
        packed = self.packed_costs(lengths)
        assert packed is not None
        front = rectangles(self.slot_costs(lengths), bin_of_item, num_bins)
        return front + sum_by_bin(packed, bin_of_item, num_bins)


def sum_by_bin(values: IntArray, bin_of_item: IntArray, num_bins: int) -> IntArray:
    """Sum of `values` in each bin: int64[num_bins], exact."""
    if len(values) and int(values.max()) * len(values) < 1 << 53:  # float64 sums are exact up to here, and faster
        return np.bincount(bin_of_item, weights=values, minlength=num_bins).astype(np.int64)
    total = np.zeros(num_bins, dtype=np.int64)
    np.add.at(total, bin_of_item, values)
    return total


def rectangles(slots: IntArray, bin_of_item: IntArray, num_bins: int) -> IntArray:
    """Items in each bin times the largest of their `slots`: int64[num_bins]."""
    largest = np.zeros(num_bins, dtype=np.int64)
    np.maximum.at(largest, bin_of_item, slots)
    return largest * np.bincount(bin_of_item, minlength=num_bins)


def batch_tokens(layout: str, lengths: IntArray, bin_of_item: IntArray, num_bins: int) -> IntArray:
    """Memory of the batch in each bin, in units of length: int64[num_bins].

    Args:
        layout: "packed" (sum of lengths) or "padded" (items times the longest).
        lengths: int64[N].
        bin_of_item: int64[N].
        num_bins: Number of bins.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    return (sum_by_bin if layout == "packed" else rectangles)(lengths, bin_of_item, num_bins)


def _check_coefficients(model: PackedCost | PaddedCost | RectangleFrontCost) -> None:
    values = {spec.name: getattr(model, spec.name) for spec in fields(model)}
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"`{name}` must be finite and not negative, but is {value} instead.")
    if not any(values.values()):
        raise ValueError(f"one of {', '.join(f'`{name}`' for name in values)} must be above 0, but all are 0 instead.")


def _to_integers(coefficients: tuple[float, ...]) -> tuple[int, ...]:
    """Coefficients (per item, linear, quadratic, further linear ones) rounded to integers of one scale.

    A lone coefficient becomes 1 and integers stay; others are scaled so that the longest items in use (2^17 units)
    cost 2^44, which leaves room for sums over millions of items and resolves costs of short ones.
    """
    present = {value for value in coefficients if value}
    if all(float(value).is_integer() and value < 1 << 20 for value in coefficients):
        return tuple(int(value) for value in coefficients)
    if len(present) == 1:
        return tuple(int(value > 0) for value in coefficients)
    per_item, linear, quadratic = coefficients[:3]
    scale = _REFERENCE_COST / (per_item + linear * _REFERENCE_LENGTH + quadratic * _REFERENCE_LENGTH**2)
    return tuple(round(value * scale) for value in coefficients)


def _polynomial(lengths: IntArray, per_item: int, linear: int, quadratic: int, *, padded: bool = False) -> IntArray:
    """`per_item + linear * l + quadratic * l^2` in int64, 0 where l is 0; if `padded`, a rectangle of all must fit."""
    lengths = np.asarray(lengths, dtype=np.int64)
    longest = int(lengths.max(initial=0))
    largest_total = len(lengths) * float(per_item + linear * longest + quadratic * longest**2)
    if largest_total > _LARGEST_TOTAL and not padded:  # the sum itself, where its quick bound says too little
        floats = lengths.astype(np.float64)
        largest_total = float((per_item * (lengths > 0) + floats * (linear + floats * quadratic)).sum())
    if largest_total > _LARGEST_TOTAL:
        raise ValueError(
            f"`lengths` must have costs that fit in 62 bits, but {len(lengths)} items reach {longest} instead."
        )
    costs = lengths * (linear + lengths * quadratic) if quadratic else lengths * linear
    return costs + per_item * (lengths > 0) if per_item else costs
