"""Rows of CSR matrices as records, read in place, and operations on many rows at once."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import AnyArray, ArraySpec, IntArray
from headrace.errors import FormatError
from headrace.formats import source
from headrace.formats.arrays.joined import joined_readers
from headrace.formats.arrays.reader import ArrayReader, OpenArrays
from headrace.formats.arrays.rows import ReadersSource, layout_fingerprint
from headrace.formats.source import Description
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray

# of a block: a row that begins in its last chunk ends in one more, which is decoded for it
_LEAST_CHUNKS = 2
Record = tuple[AnyArray, AnyArray]
"""Columns and values of one row."""


class CSRRows(NamedTuple):
    """Rows of a sparse matrix, one behind the other.

    In canonical form columns rise within each row, and none comes twice.

    Attributes:
        indptr: [rows + 1] int64, where each row begins in the other two, and their end.
        indices: [values] int32 or int64, the column of each value.
        values: [values] of any dtype of numbers.
    """

    indptr: IntArray
    indices: AnyArray
    values: AnyArray

    @classmethod
    def of(cls, sizes: IntArray, indices: AnyArray, values: AnyArray) -> CSRRows:
        """Rows of the given sizes ([rows])."""
        indptr = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=indptr[1:])
        return cls(indptr, indices, values)

    @classmethod
    def joined(cls, records: Sequence[Record]) -> CSRRows:
        """Joins single rows, at least one."""
        sizes = np.fromiter((len(values) for _, values in records), np.int64, len(records))
        return cls.of(
            sizes,
            np.concatenate([indices for indices, _ in records]),
            np.concatenate([values for _, values in records]),
        )

    @property
    def sizes(self) -> IntArray:
        """[rows] values of each row."""
        return np.diff(self.indptr)

    def records(self) -> list[Record]:
        """The rows one by one, over the same memory."""
        edges = self.indptr.tolist()
        return [(self.indices[a:b], self.values[a:b]) for a, b in itertools.pairwise(edges)]

    def canonical(self, columns: int) -> CSRRows:
        """The same rows in canonical form: values of one column are summed in their order, as SciPy
        does; their dtype stays.

        Args:
            columns: of the matrix.
        """
        is_wrong = self.indices[1:] <= self.indices[:-1]
        borders = self.indptr[1:-1] - 1
        is_wrong[borders[(borders >= 0) & (borders < len(is_wrong))]] = False
        if not is_wrong.any():
            return self
        row_of = np.repeat(np.arange(len(self.indptr) - 1, dtype=np.int64), self.sizes)
        keys = row_of * columns + self.indices
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        values = self.values[order]
        is_new = np.ones(len(keys), bool)
        np.not_equal(keys[1:], keys[:-1], out=is_new[1:])
        if not is_new.all():
            sums = np.zeros(int(is_new.sum()), values.dtype)
            np.add.at(sums, np.cumsum(is_new) - 1, values)
            keys = keys[is_new]
            values = sums
        row_of, indices = np.divmod(keys, columns)
        sizes = np.bincount(row_of, minlength=len(self.indptr) - 1)
        return CSRRows.of(sizes, indices.astype(self.indices.dtype), values)

    def select(self, numbers: AnyArray) -> CSRRows:
        """The values of some columns; not in canonical form where these stand in another order.

        Args:
            numbers: for each column its new number, -1 where it is left out.
        """
        indices = numbers[self.indices].astype(self.indices.dtype, copy=False)
        is_kept = indices >= 0
        if is_kept.all():
            return CSRRows(self.indptr, indices, self.values)
        kept = np.concatenate([[0], np.cumsum(is_kept)])
        return CSRRows(kept[self.indptr], indices[is_kept], self.values[is_kept])

    def scatter(self, out: AnyArray) -> None:
        """Writes rows in canonical form into a dense array.

        Args:
            out: [rows, columns] C-contiguous, of any content.
        """
        out.fill(0)
        places = np.repeat(np.arange(len(out), dtype=np.int64) * out.shape[1], self.sizes)
        places += self.indices
        out.reshape(-1)[places] = self.values


class Matrix(NamedTuple):
    """A CSR matrix in a file.

    Attributes:
        indptr: [rows + 1] int32 or int64, from 0 on and never falling.
    """

    group: str
    shape: tuple[int, int]
    indptr: AnyArray
    indices: ArrayReader
    data: ArrayReader


class SparseSource(ReadersSource):
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
        super().__init__(path, opened, [matrix.indices, matrix.data])
        self._joined = joined_readers(self._readers)
        self._value_nbytes = sum(reader.dtype.itemsize for reader in self._readers)
        self.group: str = matrix.group
        self.shape: tuple[int, int] = (matrix.shape[0], columns)
        self.stored_dtype: np.dtype[Any] = matrix.data.dtype.newbyteorder("=")
        self.dtype: np.dtype[Any] = self.stored_dtype if dtype is None else dtype
        self._width = matrix.shape[1]
        self._indptr = SharedArray(matrix.indptr)
        self._numbers = None if numbers is None else SharedArray(numbers)
        is_narrow = max(columns, self._width) <= np.iinfo(np.int32).max
        self._index_dtype = np.dtype(np.int32 if is_narrow else np.int64)
        self._of_columns = of_columns

    def __len__(self) -> int:
        return self.shape[0]

    # -- reading

    @property
    def array_spec(self) -> ArraySpec | None:
        return None

    def read(self, indices: Sequence[int]) -> list[Record]:
        return self.read_rows(np.asarray(indices, np.int64)).records()

    def read_rows(self, indices: IntArray) -> CSRRows:
        """The rows of `indices` ([n] int64), in canonical form.

        Raises:
            FormatError: a row has a column that the matrix does not have; a chunk is damaged.
            OSError: a file can't be read.
        """
        firsts, ends = self._spans(indices)
        if self.files.is_remote:  # both at once
            self.files.prefetch(self.missing_ranges(indices), True)
        arrays = [joined.read(firsts, ends, self.run) for joined in self._joined]
        columns, values = itertools.chain.from_iterable(arrays)
        if len(columns) and not 0 <= columns.min() <= columns.max() < self._width:
            raise FormatError(
                f"values lie in columns {columns.min():,} to {columns.max():,}, but the matrix "
                f"has {self._width:,} columns: the file is damaged"
            )
        columns = columns.astype(self._index_dtype, copy=False)
        values = values.astype(self.stored_dtype, copy=False)
        rows = CSRRows.of(ends - firsts, columns, values).canonical(self._width)
        if self._numbers is not None:
            rows = rows.select(self._numbers.array).canonical(self.shape[1])
        return rows._replace(values=rows.values.astype(self.dtype, copy=False))

    def _spans(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        indptr = self._indptr.array
        firsts = indptr[indices].astype(np.int64, copy=False)
        return firsts, indptr[indices + 1].astype(np.int64, copy=False)

    # -- where it lies

    def _located(self, indices: IntArray, missing: bool) -> list[ByteRanges]:
        firsts, ends = self._spans(indices)
        return [reader.span_ranges(firsts, ends, missing) for reader in self._readers]

    def sizes(self) -> IntArray:
        """[rows] int64, stored values of each row, before columns are chosen."""
        return np.diff(self._indptr.array).astype(np.int64, copy=False)

    @property
    def _count(self) -> int:
        """Values of the matrix."""
        return int(self._indptr.array[-1])

    @property
    def held_nbytes(self) -> int:
        """Bytes of all records when they are held; where columns are chosen, at most."""
        return self._count * (self._index_dtype.itemsize + self.dtype.itemsize)

    # -- blocks

    def _block_values(self, nbytes: int) -> int:
        """Values of a block: of several chunks that are decoded as a whole, or as many as take
        `nbytes`.
        """
        height = self._tallest
        if height == 1:
            return max(1, nbytes // self._value_nbytes)
        return height * max(_LEAST_CHUNKS, source.LONGEST // self._value_nbytes // height)

    @property
    def cut_nbytes(self) -> int:
        if self._cached:
            return 0
        return self._count * self._value_nbytes

    def blocks_of(self, nbytes: int) -> IntArray:
        """Rows whose first values lie in the same chunks, or the same `nbytes`."""
        numbers = self._indptr.array[:-1] // self._block_values(nbytes)
        return np.unique(numbers, return_counts=True)[1].astype(np.int64)

    @property
    def block_nbytes(self) -> int:
        values = self._block_values(0)
        return sum(
            reader.chunks.nbytes * (-(-values // reader.height) + 1) for reader in self._cached
        )

    # -- what it is

    def describe(self) -> Description:
        prefix = ""
        if self.group:
            prefix = f"{self.group}/"
        mean = self._count / max(1, len(self))
        readers = zip(("indices", "data"), self._readers, strict=True)
        columns = [reader.describe(prefix + name, [mean]) for name, reader in readers]
        found = Description(columns, stored=self.stored_nbytes)
        found.facts["rows"] = f"sparse (CSR), {mean:,.0f} of {self._width:,} values on average"
        return found

    def fingerprint(self) -> str:
        """A hash of shape, dtypes and chunks of the matrix, of the lengths of its rows, and of
        the columns that samples have.
        """
        indptr = self._indptr.array.astype("<i8").tobytes()
        hashed = hashlib.blake2b(indptr, digest_size=16).hexdigest()
        dtypes = [reader.dtype.str for reader in self._readers]
        chunks = [reader.chunks.grid.chunks for reader in self._readers]
        shape = [len(self), self._width]
        return layout_fingerprint([self.group, shape, dtypes, chunks, hashed, self._of_columns])

    def location(self, index: int) -> str:
        return f"{self.path}, {self.group or '/'}, row {index}"
