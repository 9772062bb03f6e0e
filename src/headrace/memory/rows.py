"""Copies many cached samples of one shape by one call.

From where they lie, with one call for a whole batch: no pickle and no copy of a single sample is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)


class ArraySpec(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Layout(NamedTuple):
    """What all entries of a store have in common."""

    entry: int
    """Bytes from one to the next."""
    at: int
    """Bytes of an entry before the array's own."""
    nbytes: int
    """Bytes of an array."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def table(self, log: memoryview) -> npt.NDArray[Any]:
        """All entries of a log as one array [entries, ...], read-only."""
        inner = np.empty(self.shape, self.dtype).strides
        shape = (len(log) // self.entry, *self.shape)
        table: npt.NDArray[Any] = np.ndarray(shape, self.dtype, log, self.at, (self.entry, *inner))
        table.flags.writeable = False
        return table


class Rows:
    """Held samples in a store that goes on: read them, and then ask whether they were held all the while.

    Args:
        log: the memory that the entries lie in.
        layout: of each entry.
        starts: where each sample's entry begins, a multiple of the entry's size.
        are_held: says whether all of them lie there still.
    """

    def __init__(self, log: memoryview, layout: Layout, starts: npt.NDArray[np.int64], are_held: Callable[[], bool]) -> None:
        self._log, self._layout = log, layout
        self.are_held: Callable[[], bool] = are_held
        self._places = starts // layout.entry
        self._whole: npt.NDArray[Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a sample."""
        return self._layout.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the samples."""
        return self._layout.dtype

    @property
    def spec(self) -> ArraySpec:
        """Of each sample."""
        return ArraySpec(self._layout.shape, self._layout.dtype)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> npt.NDArray[Any]:
        """A sample as it lies in the store, read-only; as an array, of whatever shape."""
        if self._whole is None:  # not where all are copied by one call
            self._whole = self._layout.table(self._log)
        sample: npt.NDArray[Any] = self._whole[self._places[number], ...]
        return sample

    def copy_to(self, out: torch.Tensor) -> None:
        """Copies all of them into a contiguous [samples, ...] tensor of their dtype by one call, in torch's own threads."""
        layout = self._layout
        dtype = next(d for d in _WIDE if layout.nbytes % d.itemsize == 0)  # the fewest elements: torch deals rows out whole
        width, rows = dtype.itemsize, len(self._log) // layout.entry
        whole = torch.frombuffer(self._log, dtype=dtype, count=rows * layout.entry // width)
        table = whole.as_strided((rows, layout.nbytes // width), (layout.entry // width, 1), layout.at // width)
        flat = out.view(len(self), -1)
        torch.index_select(table, 0, torch.from_numpy(self._places), out=flat if out.dtype == dtype else flat.view(dtype))
