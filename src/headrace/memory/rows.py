"""How are many held samples of one shape copied at once?

From where they lie, with one call for a whole batch: no pickle and no copy of a single sample is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class Layout(NamedTuple):
    """What all entries of a store have in common."""

    entry: int
    """Bytes from one to the next."""
    at: int
    """Bytes of an entry before the array's own."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of an array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Rows:
    """Held samples in a store that goes on: read them, and then ask whether they were held all the while.

    Args:
        log: the memory that the entries lie in.
        layout: of each entry.
        starts: where each sample's entry begins, a multiple of the entry's size.
        are_held: says whether all of them lie there still.
    """

    def __init__(self, log: memoryview, layout: Layout, starts: npt.NDArray[np.int64], are_held: Callable[[], bool]) -> None:
        self._log, self._layout, self._starts, self.are_held = log, layout, starts, are_held

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a sample."""
        return self._layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the samples."""
        return self._layout.dtype

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> npt.NDArray[Any]:
        """A sample as it lies in the store, read-only."""
        layout = self._layout
        start = int(self._starts[number]) + layout.at
        array = np.frombuffer(self._log[start : start + layout.nbytes], layout.dtype).reshape(layout.shape)
        array.flags.writeable = False
        return array

    def copy_to(self, out: torch.Tensor) -> None:
        """Copies all of them into a contiguous [samples, ...] tensor of their dtype, in torch's own threads."""
        layout = self._layout
        width = next(size for size in (8, 4, 2, 1) if layout.nbytes % size == 0)  # the fewest elements: rows are dealt out whole
        dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
        whole = torch.frombuffer(self._log, dtype=dtype, count=len(self._log) // layout.entry * layout.entry // width)
        rows = (len(self._log) // layout.entry, layout.nbytes // width)
        table = whole.as_strided(rows, (layout.entry // width, 1), layout.at // width)
        torch.index_select(table, 0, torch.from_numpy(self._starts // layout.entry), out=out.view(len(self), -1).view(dtype))

    def copy_one_by_one(self, out: torch.Tensor) -> None:
        """The same in the plain way."""
        rows = out.numpy()
        for number in range(len(self)):
            np.copyto(rows[number, ...], self[number])
