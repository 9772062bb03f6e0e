"""Holds samples that are all arrays of one shape and dtype, with eight bytes beside each, and
admits many at once.

A `SampleStore` whose entries have no pickle: an entry is the sample's index and its bytes. All are
of one size, so that none straddles the end of the log. What its NOTE [ store protocol ] says holds
here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.memory.anonymous import AnonymousMemory, up
from headrace.memory.rows import Layout
from headrace.memory.store import (
    ADMITTED,
    COUNT,
    EVICTED,
    FULL,
    HEAD,
    LAYOUT,
    MISSING,
    TAIL,
    SampleStore,
)

_INDEX = 8  # bytes of a sample's index
_ALIGNED = 2048  # bytes of a sample from which on it begins at a cache line


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """All bytes of an array, one after the other."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def row_layout(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Layout | None:
    """How arrays of a shape and dtype lie in a `RowStore`; None where they can't."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes or dtype.kind not in "biufc":
        return None
    at = 64 if nbytes >= _ALIGNED else _INDEX
    return Layout(up(at + nbytes, at), at, nbytes, shape, dtype)


class RowStore(SampleStore):
    """Caches arrays of one shape and dtype by index; what doesn't fit is refused, and nothing is
    evicted but under memory pressure.
    """

    def __init__(
        self, length: int, capacity: int, layout: Layout, memory: AnonymousMemory | None = None
    ) -> None:
        self._layout = layout
        super().__init__(length, capacity, memory=memory)

    def _open(self) -> None:
        self.capacity: int = self.capacity // self._layout.entry * self._layout.entry
        super()._open()
        self._header[LAYOUT], self._layouts[1] = 1, self._layout

    @property
    def row_nbytes(self) -> int:
        """Bytes that a sample takes when it is held, the table aside."""
        return self._layout.entry

    def fits(self, value: Any) -> bool:
        """True if a value is an array of this store's shape and dtype."""
        return (
            type(value) is np.ndarray
            and value.shape == self._layout.shape
            and value.dtype == self._layout.dtype
        )

    def get(self, index: int) -> Any:
        position = int(self._table[index]) - 1
        if position < 0:
            return MISSING
        layout, start = self._layout, position % self.capacity + self._layout.at
        data = bytearray(self._log[start : start + layout.nbytes])
        return (
            np.frombuffer(data, layout.dtype).reshape(layout.shape)
            if self._is_held(index, position)
            else MISSING
        )

    def put(self, index: int, value: Any) -> bool:
        return self.fits(value) and self.put_rows([index], [value])

    def put_rows(self, indices: Sequence[int], values: Sequence[npt.NDArray[Any]]) -> bool:
        """Holds samples, each of which `fits`; False where there is no room for all of them."""
        layout, table = self._layout, self._table
        with self._lock.held() as locked:
            if not locked:
                return False
            wanted = np.asarray(indices, np.int64)
            new = np.flatnonzero(table[wanted] == 0)  # of the others another worker was faster
            count = min(len(new), max(0, self.limit - self.nbytes) // layout.entry)
            try:
                self._append_rows(
                    wanted[new[:count]], [values[number] for number in new[:count].tolist()]
                )
            except OSError as error:  # the disk of a shared file is full
                count, self.write_error = 0, error
            if count < len(new):
                self._header[FULL] = 1
            self._after_writing()
            return count == len(new)

    def _append_rows(self, indices: npt.NDArray[np.int64], values: list[npt.NDArray[Any]]) -> None:
        head, size = int(self._header[HEAD]), self._layout.entry
        positions = head + size * np.arange(len(indices))
        if self._layout.nbytes < _ALIGNED:
            self._write_together(head, indices, values)
        else:
            for position, index, value in zip(positions.tolist(), indices, values, strict=True):
                start = self._log_at + position % self.capacity
                self._memory.write(start, memoryview(index.tobytes()))
                self._memory.write(start + self._layout.at, _bytes_of(value).data)
        self._header[HEAD] = head + size * len(indices)
        self._table[indices] = positions + 1
        self._touched[indices] = 0
        self._header[COUNT] += len(indices)
        self._header[ADMITTED] += len(indices)

    def _write_together(
        self, head: int, indices: npt.NDArray[np.int64], values: list[npt.NDArray[Any]]
    ) -> None:
        """Writes small rows by one or two calls, which a second copy is worth."""
        if not values:
            return
        layout, entries = self._layout, np.zeros((len(values), self._layout.entry), np.uint8)
        entries[:, :_INDEX] = indices[:, None].view(np.uint8)
        rows = np.concatenate(values) if layout.shape else np.array(values)
        entries[:, layout.at : layout.at + layout.nbytes] = _bytes_of(rows).reshape(
            len(values), layout.nbytes
        )
        start = head % self.capacity
        before = (self.capacity - start) // layout.entry  # entries until the end of the log
        for at, part in ((start, entries[:before]), (0, entries[before:])):
            if len(part):
                self._memory.write(self._log_at + at, part.reshape(-1).data)

    def _evict(self, spare: bool) -> None:
        tail = int(self._header[TAIL])
        index = int(np.frombuffer(self._log, np.int64, 1, tail % self.capacity)[0])
        if int(self._table[index]) == tail + 1:
            self._header[COUNT] -= 1
            self._table[index] = 0
            self._header[EVICTED] += 1
        self._header[TAIL] = tail + self._layout.entry

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_layout": self._layout}
