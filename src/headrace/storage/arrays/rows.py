"""The base of sources whose records are rows of arrays, whatever file they lie in."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec
from headrace.errors import BudgetError, FormatError, HeadraceError
from headrace.io.ranges import ByteRanges
from headrace.memory.budget import format_size
from headrace.memory.limits import memory_limits, tightest
from headrace.storage.arrays.chunks import COUNTABLE, DirectChunks
from headrace.storage.arrays.reader import ArrayReader, ChunkCache
from headrace.storage.source import ArraySource, Rows

BLOCK_BYTES = 2 << 20
"""Layouts without chunks, or with very large ones, are cut into blocks of about so many bytes: a long read, and still hundreds of them
stay below 2 GiB."""


_SMALL = 64 << 20  # bytes of a row that are not compared with what is free
_MOST_BLOCKS = 1 << 28


class LibraryRows(ABC):
    """Rows whose elements have any size, which only their library can read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    how: str

    @abstractmethod
    def read(self, rows: Sequence[int]) -> list[Any]:
        """The rows as the library gives them."""


class ArraysSource(ArraySource):
    """The rows of one array, or of several of equal length, as records: arrays of a row's shape and dtype (in the file's byte order);
    for several names dicts of these.

    Subclasses set the attributes.

    Attributes:
        path: where the arrays lie, in words.
        name: that of the array; or a tuple of several.
        grids: name, shape, dtype and chunks of each, as the file has them.
    """

    path: str
    name: str | tuple[str, ...]
    grids: list[list[Any]]
    _fields: Mapping[str, ArrayReader | LibraryRows]
    _chunks: ChunkCache

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.name,) if isinstance(self.name, str) else self.name

    def _check_lengths(self) -> None:
        """Can the arrays be numbered, held and joined?

        Raises:
            FormatError: they don't fit one another, or have more rows or chunks than can be counted.
            BudgetError: a row does not fit memory.
        """
        for name, field in self._fields.items():
            across = field.chunks.grid.inner if isinstance(field, ArrayReader) and all(field.shape) else 1
            if field.shape[0] * across > COUNTABLE:
                raise FormatError(f"{self.path}: {name!r} has shape {list(field.shape)}, more than can be counted: the file is damaged")
        if self._row_bytes > _SMALL and self._row_bytes > (limit := tightest(memory_limits())).headroom:
            raise BudgetError(
                f"{self.path}: a row of {' and '.join(self._names)} takes {format_size(self._row_bytes)}, and "
                f"{format_size(limit.headroom)} are free ({limit.name}): if the file is not damaged, pack it again in smaller samples"
            )
        lengths = {one: field.shape[0] for one, field in self._fields.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{one!r} {length:,}" for one, length in lengths.items())
            raise FormatError(f"{self.path}: the arrays have different numbers of rows: {said}")

    # -- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the (first) dataset, rows included."""
        return self._first.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the (first) dataset."""
        return self._first.dtype

    @property
    def _first(self) -> ArrayReader | LibraryRows:
        return self._fields[self._names[0]]

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Of each dataset, by name."""
        return {name: field.dtype for name, field in self._fields.items()}

    @property
    def is_direct(self) -> bool:
        """Are samples read from the file itself, and not through another library?"""
        return all(isinstance(f, ArrayReader) and isinstance(f.chunks, DirectChunks) for f in self._fields.values())

    @property
    def holds_objects(self) -> bool:
        """Are there elements of any size, such as strings?"""
        return any(isinstance(field, LibraryRows) for field in self._fields.values())

    @property
    def rows_are(self) -> str:
        """Dtype and shape of a row of each dataset, in words."""
        return ", ".join(f"{f.dtype} {list(f.shape[1:])}" for f in self._fields.values())

    def how(self) -> dict[str, str]:
        return {name: field.how for name, field in self._fields.items()}

    def __len__(self) -> int:
        return int(self.shape[0])

    def sizes(self) -> npt.NDArray[np.int64]:
        """The size of each sample in bytes ([n] int64); of objects nobody knows it: 0."""
        return np.full(len(self), self._row_bytes, np.int64)

    @property
    def _row_bytes(self) -> int:
        return sum(math.prod(field.shape[1:]) * field.dtype.itemsize for field in self._readers)

    @property
    def total_bytes(self) -> int:
        """The sum of all sizes."""
        return len(self) * self._row_bytes

    # -- reading

    @property
    def array_spec(self) -> ArraySpec | None:
        field = self._first
        if isinstance(self.name, str) and isinstance(field, ArrayReader) and field.dtype.isnative:
            return ArraySpec(field.shape[1:], field.dtype)
        return None

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        field = self._first
        assert isinstance(field, ArrayReader)
        field.read_rows(indices, rows, self.run)

    def read(self, indices: Sequence[int]) -> list[Any]:
        columns = [self._read_field(field, indices) for field in self._fields.values()]
        if isinstance(self.name, str):
            return columns[0]
        return [dict(zip(self._names, record, strict=True)) for record in zip(*columns, strict=True)]

    def _read_field(self, field: ArrayReader | LibraryRows, indices: Sequence[int]) -> list[Any]:
        if not isinstance(field, ArrayReader):
            return field.read(indices)
        try:
            rows = [np.empty(field.shape[1:], field.dtype) for _ in indices]
        except MemoryError as error:
            raise BudgetError(f"{self.path}: no room for {len(indices):,} rows of {format_size(self._row_bytes)} each") from error
        field.read_rows(indices, rows, self.run)
        return rows

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        try:
            return ByteRanges.joined([field.byte_ranges(indices) for field in self._readers])
        except HeadraceError:  # to know it something had to be read, which failed: reading the samples will say so
            return ByteRanges.of([])

    def row_ranges(self, indices: Sequence[int]) -> ByteRanges | None:
        return None if self.array_spec is None else self._first.row_ranges(indices)  # type: ignore[union-attr]

    @property
    def locating_needs_io(self) -> bool:
        return any(field.needs_io for field in self._readers)

    @property
    def stored_nbytes(self) -> int:
        return sum(field.chunks.stored_nbytes for field in self._readers)

    def read_afresh(self, indices: Sequence[int]) -> list[Any]:
        self._chunks.close()
        return super().read_afresh(indices)

    def take_counts(self) -> Counter[str]:
        counts = super().take_counts()
        for field in self._readers:
            counts.update(field.counts)
            field.counts.clear()
        return counts

    @property
    def _readers(self) -> list[ArrayReader]:
        return [field for field in self._fields.values() if isinstance(field, ArrayReader)]

    # -- blocks

    def blocks(self) -> npt.NDArray[np.int64]:
        rows, height = len(self), self._rows_a_block()
        count = -(-rows // height)
        if count > _MOST_BLOCKS:
            raise BudgetError(f"{self.path} has {count:,} blocks of {height:,} rows, too many to be listed: shuffle=True needs no list")
        sizes = np.full(count, height, np.int64)
        if count:
            sizes[-1] = rows - height * (count - 1)
        return sizes

    def _rows_a_block(self) -> int:
        """Of chunks that must be decoded as a whole, the rows of the tallest; else those of a chunk, or as many as are a long read."""
        readers = [field for field in self._readers if field.holds_chunks]
        if readers:
            return max(field.chunks.grid.chunks[0] for field in readers)
        long = max(1, BLOCK_BYTES // max(1, self._row_bytes))
        tall = [field.chunks.grid.chunks[0] for field in self._readers if field.is_chunked]
        return min([long, *(rows for rows in tall if rows > 1)])

    @property
    def block_nbytes(self) -> int:
        """Bytes of the decoded chunks of a block, which are held while it is in use."""
        readers = [field for field in self._readers if field.holds_chunks]
        tallest = self._rows_a_block() if readers else 1
        return sum(field.chunks.nbytes * field.chunks.grid.inner * -(-tallest // field.chunks.grid.chunks[0]) for field in readers)

    def hold_chunks(self, nbytes: int) -> None:
        self._chunks.resize(nbytes)

    def fingerprint(self) -> str:
        """A hash of names, shapes, dtypes and chunk grids."""
        said = json.dumps(self.grids[0] if isinstance(self.name, str) else self.grids)
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def location(self, index: int) -> str:
        return f"{self.path}, {' and '.join(self._names)}, row {index}"
