"""The arrays of a key, one for each episode or one for many, and the spans of their steps that
are to be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.local.files import bytes_of
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.describe import Column


class EpisodeArrays:
    """The arrays of one key.

    Args:
        name: the key.
        row_shape, dtype: of a step; all arrays have the same.
        begins: for each episode the file that the array lies in and its first byte, if it lies
            there as it is; else (-1, -1).
        readers: what reads the others.
        reader_of: for each episode the number of its reader; -1: it has none.
        window: steps of a window of this key; None: whole episodes.
        first_rows: for each episode the row of its reader's array that is its first step; None: the
            first row.
    """

    def __init__(
        self,
        name: str,
        row_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        begins: Sequence[tuple[int, int]] | IntArray,
        readers: Sequence[ArrayReader | LibraryRows],
        reader_of: Sequence[int] | IntArray,
        window: int | None,
        first_rows: IntArray | None = None,
    ) -> None:
        self.name, self.row_shape, self.dtype, self.window = name, row_shape, dtype, window
        self.row_bytes: int = math.prod(row_shape) * dtype.itemsize
        columns = np.array(begins, np.int64).reshape(-1, 2)
        self._files, self._begins = (
            SharedArray(columns[:, 0].copy()),
            SharedArray(columns[:, 1].copy()),
        )
        self.readers: list[ArrayReader | LibraryRows] = list(readers)
        self._reader_of = SharedArray(np.array(reader_of, np.int64))
        self._first_rows = None if first_rows is None else SharedArray(first_rows)
        self.holds_objects: bool = dtype.hasobject

    def located(
        self, episodes: IntArray, firsts: IntArray, ends: IntArray
    ) -> tuple[npt.NDArray[np.bool_], IntArray, IntArray, IntArray]:
        """Which spans of steps lie in files as they are, and of these file, first byte and end."""
        begins = self._begins.array[episodes]
        is_there = begins >= 0
        begins = begins[is_there]
        return (
            is_there,
            self._files.array[episodes[is_there]],
            begins + firsts[is_there] * self.row_bytes,
            begins + ends[is_there] * self.row_bytes,
        )

    def located_nbytes(self, lengths: IntArray) -> int:
        """Bytes of the arrays that lie in files as they are, by the steps of each episode."""
        return int(lengths[self._begins.array >= 0].sum()) * self.row_bytes

    def reader_numbers(self, episodes: IntArray) -> IntArray:
        """For each of some episodes the number of its reader; -1: it has none."""
        numbers: IntArray = self._reader_of.array[episodes]
        return numbers

    def first_rows(self, episodes: IntArray) -> IntArray:
        """For each of some episodes the row of its reader's array that is its first step."""
        return (
            np.zeros(len(episodes), np.int64)
            if self._first_rows is None
            else self._first_rows.array[episodes]
        )

    @property
    def array_readers(self) -> list[ArrayReader]:
        """Those of `readers` that read numbers."""
        return [reader for reader in self.readers if isinstance(reader, ArrayReader)]

    def describe(self, way: str, steps: float) -> Column:
        """What so many steps in a row cost; `way`: by which what lies in files as it is is read."""
        ways = [reader.how for reader in self.readers]
        if (self._begins.array >= 0).any():
            ways.insert(0, way)
        sample = f"{self.dtype} {[round(steps), *self.row_shape]}"
        nbytes = int(steps * self.row_bytes)
        column = Column(self.name, "", sample, nbytes=nbytes, read=nbytes)
        if self.array_readers and not (self._begins.array >= 0).all():
            column = self.array_readers[0].describe(self.name, [steps, *self.row_shape])
        column.read_by = "; or ".join(dict.fromkeys(ways))
        return column


class PendingSteps:
    """Spans of steps that are to be read."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths, self._columns = paths, list[tuple[IntArray, IntArray, IntArray]]()
        self._buffers: list[memoryview] = []
        self.by_reader: dict[
            tuple[str, int], tuple[ArrayReader, list[int], list[npt.NDArray[Any]]]
        ] = {}

    def add(
        self,
        key: EpisodeArrays,
        episodes: IntArray,
        firsts: IntArray,
        ends: IntArray,
        outs: Sequence[npt.NDArray[Any]],
    ) -> None:
        """Adds a span of each episode, which is to be written into its array."""
        if not key.row_bytes:
            return
        is_there, *columns = key.located(episodes, firsts, ends)
        has_bytes = columns[2] > columns[1]
        self._columns.append(tuple(column[has_bytes] for column in columns))  # type: ignore[arg-type]
        self._buffers += [
            bytes_of(outs[number]) for number in np.flatnonzero(is_there)[has_bytes].tolist()
        ]
        numbers = np.flatnonzero(~is_there)
        readers, rows = (
            key.reader_numbers(episodes[numbers]),
            firsts[numbers] + key.first_rows(episodes[numbers]),
        )
        for number, at, row in zip(numbers.tolist(), readers.tolist(), rows.tolist(), strict=True):
            if outs[number].size:
                reader = key.readers[at]
                assert isinstance(reader, ArrayReader)
                group = self.by_reader.setdefault((key.name, at), (reader, [], []))
                group[1].append(row)
                group[2].append(outs[number])

    def ranges(self) -> tuple[ByteRanges, list[memoryview]]:
        """Those that lie in files as they are, and where their bytes go."""
        columns = (
            [
                np.concatenate([np.empty(0, np.int64), *parts])
                for parts in zip(*self._columns, strict=True)
            ]
            if self._columns
            else []
        )
        return (ByteRanges(self._paths, *columns) if columns else ByteRanges.of([])), self._buffers
