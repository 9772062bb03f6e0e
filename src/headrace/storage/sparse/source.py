"""Rows of CSR matrices as records, read where they lie."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import FormatError
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.storage import blocks
from headrace.storage.arrays.reader import OpenArrays, Room, read_joined
from headrace.storage.arrays.rows import layout_fingerprint
from headrace.storage.concat import ConcatSource
from headrace.storage.describe import Description
from headrace.storage.source import ArraySource
from headrace.storage.sparse.matrix import Matrix
from headrace.storage.sparse.rows import CSRRows, Record

# of a block: a row that begins in its last chunk ends in one more, which is decoded for it
_LEAST_CHUNKS = 2


class SparseSource(ArraySource):
    """The rows of a CSR matrix. Records are pairs of columns (int32; int64 where there are more
    than 2^31) and values, in canonical form.

    A batch reads the spans of its rows out of `indices` together, and those out of `data`.

    Args:
        path: of the file, as messages show it.
        opened: what is open and decoded.
        matrix: in the file.
        columns: that a record may have.
        numbers: [columns of the matrix] the column of records that each becomes, -1 where it is
            left out; None: as they are.
        dtype: that values are cast to; None: that of the matrix.
        of_columns: says which columns they are, for the fingerprint.
    """

    def __init__(
        self,
        path: str,
        opened: OpenArrays[Any],
        matrix: Matrix,
        columns: int,
        numbers: npt.NDArray[np.int32] | None = None,
        dtype: np.dtype[Any] | None = None,
        of_columns: str = "",
    ) -> None:
        self.path, self.group, self.shape = path, matrix.group, (matrix.shape[0], columns)
        self.files, self._opened = opened.files, opened
        self._indices, self._data, self._chunks = matrix.indices, matrix.data, matrix.chunks
        self._width = matrix.shape[1]
        self._indptr = SharedArray(matrix.indptr)
        self._numbers = None if numbers is None else SharedArray(numbers)
        self._keeps_order = numbers is None or bool(np.all(np.diff(numbers[numbers >= 0]) > 0))
        self.stored_dtype: np.dtype[Any] = matrix.data.dtype.newbyteorder("=")
        self.dtype: np.dtype[Any] = self.stored_dtype if dtype is None else dtype
        self._index_dtype = np.dtype(
            np.int32 if max(columns, self._width) <= np.iinfo(np.int32).max else np.int64
        )
        self._of_columns = of_columns

    def __len__(self) -> int:
        return self.shape[0]

    # -- reading

    @property
    def array_spec(self) -> ArraySpec | None:
        return None

    def read(self, indices: Sequence[int]) -> list[Record]:
        return self.read_rows(np.asarray(indices, np.int64)).records()

    def read_rows(self, indices: IntArray, room: Room | None = None) -> CSRRows:
        """The rows of `indices` ([n] int64), in canonical form.

        Args:
            room: makes the arrays of columns, which are int64 then, and of values, where these can
                be read straight into one; None: columns are those of records.

        Raises:
            FormatError: a row has a column that the matrix does not have; a chunk is damaged.
            OSError: a file can't be read.
        """
        firsts, ends = self._spans(indices)
        # both at once
        if self.files.is_remote and not (self._indices.chunks.decodes or self._data.chunks.decodes):
            self.files.prefetch(
                [reader.span_ranges(firsts, ends) for reader in (self._indices, self._data)], True
            )
        of_values = room if self._numbers is None and self._data.dtype == self.dtype else None
        columns, values = read_joined(
            [self._indices, self._data], firsts, ends, self.run, [None, of_values]
        )
        rows = CSRRows.of(
            ends - firsts,
            columns,
            values if values.dtype.isnative else values.astype(self.stored_dtype),
        )
        if not rows.is_canonical(self._width):
            rows = self._in_canonical_form(rows, indices)
        if self._numbers is not None:
            rows = rows.select(self._numbers.array)
            rows = rows if self._keeps_order else rows.canonical(self.shape[1])
        columns, values = rows.indices, rows.values.astype(self.dtype, copy=False)
        if room is None:
            return CSRRows(rows.indptr, columns.astype(self._index_dtype, copy=False), values)
        np.copyto(wide := room(len(columns), np.dtype(np.int64)), columns)
        return CSRRows(rows.indptr, wide, values)

    def _in_canonical_form(self, rows: CSRRows, indices: IntArray) -> CSRRows:
        """Rows that are not; a FormatError where a column is none of the matrix."""
        if (wrong := rows.outside(self._width)) is not None:
            row, column = wrong
            raise FormatError(
                f"{self.location(int(indices[row]))}: column {column:,} is outside of the "
                f"{self._width:,} columns that the matrix has: the "
                "file is damaged"
            )
        return rows._replace(indices=rows.indices.astype(self._index_dtype, copy=False)).canonical(
            self._width
        )

    def _spans(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        indptr = self._indptr.array
        return indptr[indices].astype(np.int64, copy=False), indptr[indices + 1].astype(
            np.int64, copy=False
        )

    def read_afresh(self, indices: Sequence[int]) -> list[Any]:
        self._opened.chunks.close()
        return super().read_afresh(indices)

    # -- where it lies

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        firsts, ends = self._spans(indices)
        return ByteRanges.joined(
            [reader.span_ranges(firsts, ends) for reader in (self._indices, self._data)]
        )

    @property
    def locating_needs_io(self) -> bool:
        return any(reader.chunks.needs_io for reader in (self._indices, self._data))

    @property
    def is_remote(self) -> bool:
        return super().is_remote and all(
            reader.chunks.is_direct for reader in (self._indices, self._data)
        )

    @property
    def stored_nbytes(self) -> int:
        return sum(reader.chunks.stored_nbytes for reader in (self._indices, self._data))

    def sizes(self) -> IntArray:
        """[rows] int64, stored values of each row, before columns are chosen."""
        return np.diff(self._indptr.array).astype(np.int64, copy=False)

    @property
    def held_nbytes(self) -> int:
        """Bytes of all records when they are held; where columns are chosen, at most."""
        return int(self._indptr.array[-1]) * (self._index_dtype.itemsize + self.dtype.itemsize)

    # -- blocks

    def _block_values(self, nbytes: int) -> int:
        """Values of a block: of several chunks that are decoded as a whole, or as many as take
        `nbytes`.
        """
        of_value = self._indices.dtype.itemsize + self._data.dtype.itemsize
        heights = [
            reader.chunks.grid.chunks[0]
            for reader in (self._indices, self._data)
            if reader.caches_chunks
        ]
        if not heights:
            return max(1, nbytes // of_value)
        return max(heights) * max(_LEAST_CHUNKS, blocks.LONGEST // of_value // max(heights))

    @property
    def cut_nbytes(self) -> int:
        if self._indices.caches_chunks or self._data.caches_chunks:
            return 0
        return int(self._indptr.array[-1]) * (
            self._indices.dtype.itemsize + self._data.dtype.itemsize
        )

    def blocks_of(self, nbytes: int) -> npt.NDArray[np.int64]:
        """Rows whose first values lie in the same chunks, or the same `nbytes`."""
        return np.unique(self._indptr.array[:-1] // self._block_values(nbytes), return_counts=True)[
            1
        ].astype(np.int64)

    @property
    def block_nbytes(self) -> int:
        values, cached = (
            self._block_values(0),
            [one.chunks for one in (self._indices, self._data) if one.caches_chunks],
        )
        return sum(chunks.nbytes * (-(-values // chunks.grid.chunks[0]) + 1) for chunks in cached)

    def hold_chunks(self, nbytes: int) -> None:
        self._opened.chunks.resize(nbytes)

    # -- what it is

    def take_counts(self) -> Counter[str]:
        counts = super().take_counts()
        for reader in (self._indices, self._data):
            counts.update(reader.counts)
            reader.counts.clear()
        return counts

    def describe(self) -> Description:
        prefix = f"{self.group}/" if self.group else ""
        mean = int(self._indptr.array[-1]) / max(1, len(self))
        readers = {"indices": self._indices, "data": self._data}
        columns = [reader.describe(prefix + name, [mean]) for name, reader in readers.items()]
        stored = sum(reader.chunks.stored_nbytes for reader in readers.values())
        found = Description(columns, stored=stored)
        found.facts["rows"] = f"sparse (CSR), {mean:,.0f} of {self._width:,} values on average"
        if self._numbers is not None:
            found.facts["columns"] = (
                f"{self.shape[1]:,}, by a table of the {self._width:,} that are stored"
            )
        return found

    def fingerprint(self) -> str:
        """A hash of shape, dtypes and chunks of the matrix, of the lengths of its rows, and of
        the columns that samples have.
        """
        indptr = hashlib.blake2b(
            self._indptr.array.astype("<i8").tobytes(), digest_size=16
        ).hexdigest()
        dtypes = [reader.dtype.str for reader in (self._indices, self._data)]
        return layout_fingerprint(
            [self.group, [len(self), self._width], dtypes, self._chunks, indptr, self._of_columns]
        )

    def location(self, index: int) -> str:
        return f"{self.path}, {self.group or '/'}, row {index}"

    def close(self) -> None:
        """Closes what this process has open of this source and those that share it; decoded
        chunks are forgotten.
        """
        self._opened.close()


class JoinedRows(ConcatSource[SparseSource]):
    """The rows of several matrices, one matrix after the other."""

    def read_rows(self, indices: IntArray, room: Room | None = None) -> CSRRows:
        """As `SparseSource.read_rows`; `room` is used where all rows are of one matrix."""
        parts = self.parts_of(indices)
        with self.reading(parts):
            room = room if len(parts) == 1 else None
            found = [
                part.source.read_rows(np.asarray(part.indices, np.int64), room) for part in parts
            ]
        if len(found) == 1:
            return found[0]
        rows = CSRRows.joined([(one.indices, one.values) for one in found])
        rows = CSRRows.of(np.concatenate([one.sizes for one in found]), rows.indices, rows.values)
        return rows.take(np.argsort(np.concatenate([part.places for part in parts])))
