"""An order cut short, or repeated, to a given number of samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.order.base import Order
from headrace.order.epoch import EpochOrder, pass_epoch


class ResizedOrder(Order):
    """The first `n` positions of an order; beyond its end it begins again, each time in another order (`pass_epoch`).

    Args:
        order: of all samples.
        n: positions of an epoch; 0 if there are no samples.
    """

    def __init__(self, order: EpochOrder, n: int) -> None:
        super().__init__(n if order.n else 0, order.seed, order.epoch, order.global_batch)
        self.shuffle: bool | str = order.shuffle
        self._order = order
        self.repeats: bool = self.n > order.n
        self._begin()

    def _begin(self) -> None:
        self._order = self._order.with_epoch(self.epoch)
        self._last: tuple[int, EpochOrder] = 0, self._order  # the pass that was asked last: a block shuffle makes a table for each

    def _indices(self, positions: IntArray) -> IntArray:
        if not self.repeats:
            return self._order[positions]
        passes, places = np.divmod(positions, self._order.n)
        out = np.empty_like(positions)
        for number in np.unique(passes).tolist():
            if self._last[0] != number:
                self._last = number, self._order.with_epoch(pass_epoch(self.epoch, number))
            chosen = passes == number
            out[chosen] = self._last[1][places[chosen]]
        return out

    def stretches(self) -> IntArray | None:
        return None if self.repeats else self._order.stretches()

    def parameters(self) -> dict[str, Any]:
        return {**self._order.parameters(), "num_samples": self.n}

    def __repr__(self) -> str:
        return f"ResizedOrder({self._order!r}, {self.n})"
