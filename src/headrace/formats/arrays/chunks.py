"""The chunks of an array: where their stored bytes lie, and how these become rows.

Which of them a batch needs: `headrace.formats.arrays.reader`.
"""

from __future__ import annotations

import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.dtypes import AnyArray, IntArray
from headrace.errors import BudgetError, FormatError
from headrace.formats.arrays.codecs import Pipeline
from headrace.formats.source import Column
from headrace.io.files import Files, wrong_length
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray

COUNTABLE = (1 << 63) - 1


class Grid(NamedTuple):
    """The shape of an array, and of its chunks."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunks along each axis; none along one of no extent, whose chunks may have none
        either.
        """
        return tuple(
            -(-extent // max(1, chunk))
            for extent, chunk in zip(self.shape, self.chunks, strict=True)
        )

    @property
    def inner(self) -> int:
        """Number of chunks that share the same rows."""
        return math.prod(self.counts[1:])

    def place(self, number: int) -> tuple[int, ...]:
        """The coordinates of a chunk, counted in chunks."""
        return tuple(int(at) for at in np.unravel_index(number, self.counts))

    def part(self, number: int) -> tuple[slice, ...]:
        """Where a chunk lies in the array."""
        corner = np.multiply(self.place(number), self.chunks).tolist()
        return tuple(
            slice(at, min(at + chunk, extent))
            for at, chunk, extent in zip(corner, self.chunks, self.shape, strict=True)
        )


def shown_array(path: str, name: str) -> str:
    """An array of a file or store, as messages name it; the array in the root of a store has no
    name.
    """
    if name:
        return f"{redact(path)}: {name!r}"
    return redact(path)


class ChunkIndex(ABC):
    """Locates the stored bytes of an array's chunks; each layout has a class."""

    needs_io: bool = False
    """True if locating chunks performs requests, so that many had better be located at once."""
    nbytes: int | None = None
    """Stored bytes of all chunks; None: not known."""

    @abstractmethod
    def ranges(self, numbers: IntArray) -> ByteRanges:
        """Where chunks lie ([n] int64 numbers).

        Raises:
            FormatError: the index is damaged.
            FileChangedError: a local file is another one than when it was opened, as far as that
                shows here.
        """

    def unused_codecs(self, numbers: IntArray) -> IntArray | None:
        """[n] masks: bit i is set where codec i was not used; None: all were used for all
        chunks.
        """
        return None


class ChunkTable(ChunkIndex):
    """Locates the chunks of an array in one file by a table; a contiguous array is one chunk.

    Args:
        path: of the file which they lie in.
        table: [3, written chunks] int64 of offsets, bytes and skipped filters.
        numbers: of the chunks in `table`, sorted; None: it has all.
    """

    def __init__(
        self,
        path: str,
        table: IntArray,
        numbers: IntArray | None = None,
    ) -> None:
        self._path = path
        offsets, sizes, masks = table
        self._has_masks = bool(masks.any())
        columns = np.array([offsets, offsets + sizes, masks])
        self._numbers = None
        if numbers is not None:
            self._numbers = SharedArray(np.append(numbers, COUNTABLE))
            columns = np.append(columns, [[-1], [-1], [0]], axis=1)  # of what was never written
        self._table = SharedArray(columns[: 2 + self._has_masks])
        self.nbytes: int = int(sizes.sum())

    def _columns(self, numbers: IntArray) -> IntArray:
        """First byte, end and, where there are any, skipped filters of chunks."""
        places = numbers
        if self._numbers is not None:
            known = self._numbers.array
            places = np.searchsorted(known, numbers)
            places[known[places] != numbers] = -1
        columns: IntArray = self._table.array.take(places, axis=1)  # each contiguous
        return columns

    def ranges(self, numbers: IntArray) -> ByteRanges:
        starts, stops, *_ = self._columns(numbers)
        return ByteRanges.in_file(self._path, starts, stops)

    def unused_codecs(self, numbers: IntArray) -> IntArray | None:
        if not self._has_masks:
            return None
        masks: IntArray = self._columns(numbers)[2]
        return masks


class Chunks(ABC):
    """The chunks of one array, numbered in C order.

    Args:
        grid: shape and chunk shape.
        dtype: as stored, in its own byte order.
        how: how they are read, for people.
        fill: the value of what was never written.

    Attributes:
        nbytes: of a chunk, decoded.
    """

    is_raw = False
    """True if rows lie in their chunks as they are, and can be read by themselves."""
    decodes = True
    """True if decoding a chunk is work, so that one that will be needed again had better be
    cached.
    """
    needs_io = False
    """True if locating them performs requests."""
    is_remote = False
    """True if they are read by requests to a server, many at once."""
    width = 1
    """Arrays that share these chunks."""
    stored_nbytes = 0
    """About the stored bytes of all chunks; 0: not known."""
    extents: tuple[int, ...] | None = None
    """The extents of a chunk, as the file has them; None: it has no chunks."""

    def __init__(self, grid: Grid, dtype: np.dtype[Any], how: str, fill: Any = 0) -> None:
        self.grid: Grid = grid
        self.shape: tuple[int, ...] = grid.shape
        self.dtype: np.dtype[Any] = dtype
        self.how: str = how
        self.fill: Any = fill
        self.nbytes: int = math.prod(grid.chunks) * dtype.itemsize

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> list[Any]:
        """What `decode` needs of some chunks."""

    @abstractmethod
    def decode(self, number: int, data: Any) -> AnyArray | None:
        """A whole chunk, an edge chunk too; None: it was never written, and all its values are
        the fill value. May run in threads.
        """

    @abstractmethod
    def check_cached(self, number: int) -> None:
        """Raises a FileChangedError if the local file of a cached chunk has changed."""

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        """Where the stored bytes of chunks lie; none where only another library knows it."""
        return ByteRanges.of([])


class DirectChunks(Chunks):
    """Chunks that are read and decoded here.

    Args:
        index: where they lie.
        pipeline: the codecs.
        files: by which they are read.
        path, name: of the file or store, and of the array in it, for messages.
        fill: the value of what was never written.
        order: "C" or "F": of the elements in a chunk.
        check: called with the first byte and the stored bytes of a chunk; raises a FormatError if
            their checksum is wrong.
        required: a chunk that is missing is an error.
    """

    def __init__(
        self,
        grid: Grid,
        dtype: np.dtype[Any],
        index: ChunkIndex,
        pipeline: Pipeline,
        files: Files,
        *,
        path: str,
        name: str,
        fill: Any = 0,
        order: str = "C",
        check: Callable[[int, Any], None] | None = None,
        required: bool = False,
    ) -> None:
        way = "ranges" if files.is_remote else "pread"
        super().__init__(grid, dtype, f"{way} + {pipeline}" if pipeline else way, fill)
        self.pipeline: Pipeline = pipeline
        self.files: Files = files
        self.index: ChunkIndex = index
        self.order: str = order
        self._path = path
        self._name = name
        self._check = check
        self.required = required
        # a checksum is that of a whole chunk
        self.decodes: bool = bool(pipeline) or check is not None
        self.is_raw: bool = not self.decodes and order == "C"
        self.needs_io: bool = index.needs_io
        self.stored_nbytes = math.prod(grid.shape) * dtype.itemsize
        if index.nbytes is not None:
            self.stored_nbytes = index.nbytes
        self.is_remote: bool = files.is_remote

    def where(self, number: int) -> str:
        """A chunk in messages."""
        of = f" of {self._name!r}" if self._name else ""
        return f"{redact(self._path)}, chunk {self.grid.place(number)}{of}"

    def check_cached(self, number: int) -> None:
        if self.files.is_remote:  # each read is of one version
            return
        ranges = self.index.ranges(np.array([number], np.int64))
        if ranges.is_written[0]:
            self.files.check(ranges.paths[int(ranges.file[0])])

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        ranges = self.index.ranges(numbers)
        if self.required and not ranges.is_written.all():
            raise self._missing(int(numbers[int(np.argmin(ranges.is_written))]))
        return ranges

    def _missing(self, number: int) -> FormatError:
        return FormatError(f"{self.where(number)} is missing, and missing='error'")

    def read(self, numbers: Sequence[int]) -> list[Any]:
        wanted = np.asarray(numbers, np.int64)
        ranges = self.byte_ranges(wanted)
        stored = self.files.read(ranges)
        unused = self.index.unused_codecs(wanted) if self.decodes else None
        masks = itertools.repeat(0) if unused is None else unused.tolist()
        each = zip(stored, ranges.start.tolist(), masks, strict=False)
        return [None if data is None else (data, start, mask) for data, start, mask in each]

    def decode(self, number: int, data: Any) -> AnyArray | None:
        if data is None and self.required:
            raise self._missing(number)
        if data is None:
            return None
        stored, start, unused = data
        try:
            if self._check is not None:
                self._check(start, stored)
            flat = self.pipeline.decode(stored, self.nbytes, unused)
        except FormatError as error:
            raise type(error)(f"{self.where(number)}: {error}") from error.__cause__
        except MemoryError as error:
            raise BudgetError(
                f"{self.where(number)} takes {self.nbytes:,} bytes when it is decoded, for which "
                "there is no room"
            ) from error
        order: Any = self.order
        chunk: AnyArray = flat.view(self.dtype).reshape(self.grid.chunks, order=order)
        return chunk

    def by_row(self) -> DirectChunks:
        """The same array with one row per chunk, where rows are stored uncompressed."""
        rows = copy.copy(self)
        rows.grid = Grid(self.grid.shape, (1, *self.grid.chunks[1:]))
        rows.nbytes = self.nbytes // self.grid.chunks[0]
        rows.index = _RowIndex(self)
        return rows

    def raw_ranges(self, numbers: IntArray) -> ByteRanges:
        """Ranges of chunks that are read in parts; a FormatError if one has a wrong length."""
        ranges = self.byte_ranges(numbers)
        wrong = (ranges.stop - ranges.start != self.nbytes) & ranges.is_written
        if wrong.any() and not ranges.is_whole.all():
            at = int(np.flatnonzero(wrong)[0])
            raise wrong_length(self.where(int(numbers[at])), int(ranges.nbytes[at]), self.nbytes)
        return ranges

    def read_raw(self, ranges: ByteRanges, buffers: list[memoryview]) -> None:
        """Reads uncompressed elements into buffers; what was never written gets the fill value."""
        is_written = ranges.is_written
        written = np.flatnonzero(is_written)
        missing = np.flatnonzero(~is_written).tolist()
        there = buffers
        if missing:
            ranges = ranges.take(written)
            there = [buffers[number] for number in written.tolist()]
        absent = self.files.read_into(ranges, there)
        if absent and self.required:
            path = ranges.paths[ranges.file[absent[0]]]
            raise FormatError(f"{redact(path)} is missing, and missing='error'")
        for number in [*missing, *written[absent].tolist()]:
            np.frombuffer(buffers[number], self.dtype)[:] = self.fill


class _RowIndex(ChunkIndex):
    """Locates the rows of raw chunks, as if each row were a chunk."""

    def __init__(self, whole: DirectChunks) -> None:
        self._whole = whole

    def ranges(self, numbers: IntArray) -> ByteRanges:
        grid = self._whole.grid
        rows, columns = np.divmod(numbers, grid.inner)
        bands, within = np.divmod(rows, grid.chunks[0])
        whole = self._whole.raw_ranges(bands * grid.inner + columns)
        step = self._whole.nbytes // grid.chunks[0]
        start = np.where(whole.is_written, whole.start + within * step, -1)
        stop = np.where(whole.is_written, start + step, -1)
        return ByteRanges(whole.paths, whole.file, start, stop)


class LibraryChunks(Chunks):
    """The chunks of an array that only its library can read: numbers a chunk at a time, elements of
    any size by `rows`.
    """

    holds_objects: bool
    """True if elements have any size, such as strings."""

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return [None] * len(numbers)

    @abstractmethod
    def rows(self, rows: Sequence[int]) -> list[Any]:
        """Rows as the library gives them."""

    def describe(self, name: str) -> Column:
        """Describes what is known of the cost of a random row."""
        return Column(name, self.how, f"{self.dtype} {list(self.shape[1:])}")
