"""Reads samples that lie along another axis of an array than its first, or have their axes in
reverse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.io.ranges import ByteRanges
from headrace.sorting import distinct
from headrace.storage.arrays.chunks import Chunks, DirectChunks, Grid
from headrace.storage.arrays.reader import ArrayReader, ChunkCache, Map, pieces_of
from headrace.storage.describe import Column
from headrace.storage.source import Rows

# bytes of a sample that lie in one piece, from which on they are read by themselves
_WHOLE = 4 << 10
_BAND = 1 << 20  # bytes of an array without chunks that are read together where they are fewer


def checked_axis(axis: Any) -> int | str:
    """An axis as an argument gives it: its number, or its name.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(axis, (int, np.integer)) and not isinstance(axis, bool):
        return int(axis)
    if not isinstance(axis, str) or not axis:
        raise ConfigError(f"axis must be the number of an axis, or its name, not {axis!r}")
    return axis


def axis_number(axis: int | str, shape: Sequence[int], names: Sequence[str], where: str) -> int:
    """The number of an axis that is given by its number, from the end too, or by its name.

    Args:
        axis: the number or name.
        shape, names: of the array and its axes; "" where one has none.
        where: the array, for messages.

    Raises:
        ConfigError: there is no such axis.
    """
    if isinstance(axis, str):
        if axis not in names:
            told = ", ".join(map(repr, names)) if any(names) else "none has a name"
            raise ConfigError(
                f"axis={axis!r}: {where} has no axis of that name; its axes are: {told}"
            )
        return list(names).index(axis)
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(
            f"axis={axis}: {where} has shape {list(shape)}, and so the axes 0 to {len(shape) - 1}"
        )
    return int(axis % len(shape))


class AxisReader(ArrayReader):
    """Samples along one axis. What a sample has of each chunk is cut out of it; an array without
    chunks is read in bands.

    Args:
        chunks: of the array.
        cache, key: as `ArrayReader` has them.
        axis: along which samples lie, as the array is stored.
        is_reversed: the other axes are given in reverse, as MATLAB has them.
        in_bands: False: an array without chunks is read whole.
    """

    def __init__(
        self,
        chunks: Chunks,
        cache: ChunkCache,
        key: str,
        axis: int,
        is_reversed: bool = False,
        *,
        in_bands: bool = True,
    ) -> None:
        is_one_piece = (
            isinstance(chunks, DirectChunks)
            and chunks.is_raw
            and chunks.grid.chunks == chunks.grid.shape
        )
        banded = (
            _Bands(chunks, axis)
            if in_bands and is_one_piece and isinstance(chunks, DirectChunks)
            else chunks
        )
        super().__init__(banded, cache, key)
        self._axis, self._is_reversed = axis, is_reversed
        self._raw = self._raw_rows = None
        stored = chunks.grid.shape
        rest = (*stored[:axis], *stored[axis + 1 :])
        self.shape = (stored[axis], *(rest[::-1] if is_reversed else rest))
        self.how: str = f"{chunks.how}, along axis {axis}" if axis else chunks.how

    def describe(self, name: str, extents: Sequence[float] | None = None) -> Column:
        box = list(self.chunks.grid.shape)
        box[self._axis] = 1
        return replace(super().describe(name, box), sample=f"{self.dtype} {list(self.shape[1:])}")

    @property
    def height(self) -> int:
        return self.chunks.grid.chunks[self._axis]

    @property
    def across(self) -> int:
        counts = self.chunks.grid.counts
        return math.prod(counts) // max(1, counts[self._axis])

    def _view(self, out: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A sample's array as a box of the array that is stored."""
        return np.expand_dims(out.T if self._is_reversed else out, self._axis)

    def read_rows(self, rows: Sequence[int], outs: Rows, run: Map) -> None:
        if not len(outs) or not outs[0].size:
            return
        grid, axis = self.chunks.grid, self._axis
        corners = [
            tuple(row if one == axis else 0 for one in range(len(grid.shape))) for row in rows
        ]
        box = (*grid.shape[:axis], 1, *grid.shape[axis + 1 :])
        self._copy(
            self.chunks, pieces_of(grid, corners, box), [self._view(out) for out in outs], run
        )

    def gather(self, rows: IntArray, out: npt.NDArray[Any], run: Map) -> None:
        self.read_rows(rows.tolist(), out, run)

    def read_spans(self, firsts: IntArray, outs: Sequence[npt.NDArray[Any]], run: Map) -> None:
        for first, out in zip(firsts.tolist(), outs, strict=True):
            self.read_rows(range(first, first + len(out)), out, run)

    def byte_ranges(self, rows: IntArray) -> ByteRanges:
        grid = self.chunks.grid
        if not len(rows) or not self.chunks.is_direct:
            return ByteRanges.of([])
        places = [
            distinct(rows // self.height) if axis == self._axis else np.arange(count)
            for axis, count in enumerate(grid.counts)
        ]
        numbers = np.ravel_multi_index(np.meshgrid(*places, indexing="ij"), grid.counts)
        return self.chunks.byte_ranges(np.asarray(numbers).reshape(-1))

    def span_ranges(self, firsts: IntArray, ends: IntArray) -> ByteRanges:
        spans = [
            np.arange(first, end) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)
        ]
        return self.byte_ranges(np.concatenate([np.empty(0, np.int64), *spans]))


class _Bands(DirectChunks):
    """Parts of an array that lies in one piece, each of which lies in one piece too: what a
    sample has of it, or some rows.
    """

    def __init__(self, whole: DirectChunks, axis: int) -> None:
        shape, itemsize = whole.grid.shape, whole.dtype.itemsize
        if math.prod(shape[axis + 1 :]) * itemsize >= _WHOLE:
            chunks = (*[1] * (axis + 1), *shape[axis + 1 :])
        else:
            at = next(
                at for at in range(len(shape)) if math.prod(shape[at + 1 :]) * itemsize <= _BAND
            )
            rows = min(shape[at], max(1, _BAND // max(1, math.prod(shape[at + 1 :]) * itemsize)))
            chunks = (*[1] * at, rows, *shape[at + 1 :])
        super().__init__(
            Grid(shape, chunks),
            whole.dtype,
            whole.index,
            whole.pipeline,
            whole.files,
            where=whole.where,
            fill=whole.fill,
            how=whole.how,
        )
        self._whole = whole
        self._steps = [math.prod(shape[at + 1 :]) * itemsize for at in range(len(shape))]
        self.is_raw = False  # those at an edge are shorter

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        paths, file, start, _ = self._whole.raw_ranges(np.zeros(len(numbers), np.int64))
        begins, sizes = start.copy(), np.full(len(numbers), self.dtype.itemsize, np.int64)
        places = np.unravel_index(numbers, self.grid.counts)
        for place, extent, chunk, step in zip(
            places, self.grid.shape, self.grid.chunks, self._steps, strict=True
        ):
            begins += place * chunk * step
            sizes *= np.minimum(chunk, extent - place * chunk)
        if (start < 0).any():
            return ByteRanges(paths, file, start, start.copy())
        return ByteRanges(paths, file, begins, begins + sizes)

    def decode(self, number: int, data: Any) -> npt.NDArray[Any] | None:
        if data is None:
            return None
        extents = [cut.stop - cut.start for cut in self.grid.part(number)]
        return np.frombuffer(data[0], self.dtype).reshape(extents)
