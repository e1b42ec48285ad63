"""What it takes to run items elsewhere than where they start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orch.comm.topology import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """What it takes to run each item in a place: nothing in one, less in another, else all.

    Attributes:
        free: int64[N], the place in which it takes nothing; -1 where there is none.
        cheap: int64[N], the place in which it takes `cheap_price`; -1 where there is none.
        cheap_price: int64[N].
        price: int64[N], what it takes in any other place.
        rate: What moving a cost of 1 usually takes.
        place_of_bin: int64[bins], where bins are not places but lie in them.
    """

    free: IntArray
    cheap: IntArray
    cheap_price: IntArray
    price: IntArray
    rate: float
    place_of_bin: IntArray | None = None

    def of(self, items: IntArray, bins: IntArray) -> IntArray:
        """What it takes to run each of the items (positions) in the bin beside it."""
        places = bins if self.place_of_bin is None else self.place_of_bin[bins]
        dear = np.where(self.cheap[items] == places, self.cheap_price[items], self.price[items])
        return np.where(self.free[items] == places, 0, dear)

    def taken(self, items: IntArray) -> Prices:
        """Those of the items at these positions."""
        free, cheap, cheap_price, price = self.free, self.cheap, self.cheap_price, self.price
        return Prices(free[items], cheap[items], cheap_price[items], price[items], self.rate, self.place_of_bin)
