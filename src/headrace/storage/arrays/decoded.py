"""Rows that are decoded to values of another dtype after they are read, such as packed numbers
of netCDF.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.ranges import ByteRanges
from headrace.storage.arrays.reader import ArrayReader, Map
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.source import Rows, one_after_the_other, row_at

Decode = Callable[[npt.NDArray[Any]], Any]


class DecodedReader(ArrayReader):
    """Rows of another reader, decoded one by one.

    Args:
        reader: of what is stored.
        decode: a row -> an array of the same shape.
        dtype: of the latter.
    """

    def __init__(self, reader: ArrayReader, decode: Decode, dtype: np.dtype[Any]) -> None:
        self.__dict__.update(vars(reader))
        self._reader, self._decode_row, self.dtype = reader, decode, dtype
        self._raw = self._raw_rows = None
        self.how: str = f"{reader.how}, decoded to {dtype}"

    @property
    def height(self) -> int:
        return self._reader.height

    @property
    def across(self) -> int:
        return self._reader.across

    def read_rows(self, rows: Sequence[int], outs: Rows, run: Map) -> None:
        stored = [np.empty(self.shape[1:], self._reader.dtype) for _ in rows]
        self._reader.read_rows(rows, stored, run)
        for number, row in enumerate(stored):
            row_at(outs, number)[...] = self._decode_row(row)

    def gather(self, rows: IntArray, out: npt.NDArray[Any], run: Map) -> None:
        self.read_rows(rows.tolist(), out, run)

    def read_spans(self, firsts: IntArray, outs: Sequence[npt.NDArray[Any]], run: Map) -> None:
        stored = [np.empty(out.shape, self._reader.dtype) for out in outs]
        self._reader.read_spans(firsts, stored, run)
        for out, part in zip(outs, stored, strict=True):
            out[...] = self._decode_row(part)

    def byte_ranges(self, rows: IntArray) -> ByteRanges:
        return self._reader.byte_ranges(rows)

    def span_ranges(self, firsts: IntArray, ends: IntArray) -> ByteRanges:
        return self._reader.span_ranges(firsts, ends)


class DecodedObjects(LibraryRows):
    """Rows of a reader that are decoded to objects, such as strings of their characters.

    Args:
        reader: of what is stored.
        decode: a row -> an object.
        axes: of the reader's array that are left.
    """

    def __init__(self, reader: ArrayReader, decode: Decode, axes: int) -> None:
        self.shape, self.dtype, self.how = (
            reader.shape[:axes],
            np.dtype(object),
            f"{reader.how}, decoded to strings",
        )
        self._reader, self._decode = reader, decode

    def read(self, rows: Sequence[int]) -> list[Any]:
        stored = [np.empty(self._reader.shape[1:], self._reader.dtype) for _ in rows]
        self._reader.read_rows(rows, stored, one_after_the_other)
        return list(map(self._decode, stored))
