"""Rows of sparse matrices as arrays, and what is done to many of them at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray

Record = tuple[npt.NDArray[Any], npt.NDArray[Any]]
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
    indices: npt.NDArray[Any]
    values: npt.NDArray[Any]

    @classmethod
    def of(cls, sizes: IntArray, indices: npt.NDArray[Any], values: npt.NDArray[Any]) -> CSRRows:
        """Rows of so many values each ([rows])."""
        indptr = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=indptr[1:])
        return cls(indptr, indices, values)

    @classmethod
    def joined(cls, records: Sequence[Record]) -> CSRRows:
        """Rows that are there one by one; one at least."""
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

    def take(self, order: IntArray) -> CSRRows:
        """Some of the rows, in another order."""
        sizes = self.sizes[order]
        indptr = np.concatenate([[0], np.cumsum(sizes)])
        places = np.repeat(self.indptr[order] - indptr[:-1], sizes) + np.arange(indptr[-1])
        return CSRRows(indptr, self.indices[places], self.values[places])

    def cast(self, indices: np.dtype[Any], values: np.dtype[Any] | None = None) -> CSRRows:
        """The same rows with other dtypes."""
        return CSRRows(
            self.indptr,
            self.indices.astype(indices, copy=False),
            self.values.astype(values or self.values.dtype, copy=False),
        )

    def outside(self, columns: int) -> tuple[int, int] | None:
        """The first row with a column that a matrix of so many does not have, and that column;
        None: there is none.
        """
        indices = self.indices
        if not len(indices) or (indices.min() >= 0 and indices.max() < columns):
            return None
        at = int(np.argmax((indices < 0) | (indices >= columns)))
        return int(np.searchsorted(self.indptr, at, side="right")) - 1, int(indices[at])

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

    def select(self, numbers: npt.NDArray[Any]) -> CSRRows:
        """The values of some columns; not in canonical form where these stand in another order.

        Args:
            numbers: for each column its new number, -1 where it is left out; int32 or int64.
        """
        indices = numbers[self.indices]
        is_kept = indices >= 0
        if is_kept.all():
            return CSRRows(self.indptr, indices, self.values)
        kept = np.concatenate([[0], np.cumsum(is_kept)])
        return CSRRows(kept[self.indptr], indices[is_kept], self.values[is_kept])

    def scatter(self, out: npt.NDArray[Any]) -> None:
        """Writes rows in canonical form into a dense array.

        Args:
            out: [rows, columns] C-contiguous, of any content.
        """
        out.fill(0)
        places = np.repeat(np.arange(len(out), dtype=np.int64) * out.shape[1], self.sizes)
        places += self.indices
        out.reshape(-1)[places] = self.values
