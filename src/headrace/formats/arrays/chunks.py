"""The chunks of an array: where their stored bytes lie, and how these become rows.

Which of them a batch needs: `headrace.formats.arrays.reader`.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import BudgetError, FormatError
from headrace.formats.arrays.codecs import Pipeline
from headrace.io.files import Files
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.memory.lru import held_bytes

COUNTABLE = (1 << 63) - 1


class Grid(NamedTuple):
    """How an array is cut."""

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
        """Chunks that share the rows of one."""
        return math.prod(self.counts[1:])

    def place(self, number: int) -> tuple[int, ...]:
        """The coordinates of a chunk, counted in chunks."""
        number, place = int(number), list[int]()
        for count in reversed(self.counts):
            number, at = divmod(number, count)
            place.append(at)
        return tuple(reversed(place))

    def number(self, place: tuple[int, ...]) -> int:
        """The number of the chunk with those coordinates."""
        number = 0
        for at, count in zip(place, self.counts, strict=True):
            number = number * count + at
        return number

    def part(self, number: int) -> tuple[slice, ...]:
        """Where a chunk lies in the array."""
        corner = [
            place * extent for place, extent in zip(self.place(number), self.chunks, strict=True)
        ]
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


class ChunkNames(NamedTuple):
    """Names the chunks of an array for messages.

    Attributes:
        path, name: of the file or store, and of the array in it.
        grid: of the array.
    """

    path: str
    name: str
    grid: Grid

    def __call__(self, number: int) -> str:
        of = ""
        if self.name:
            of = f" of {self.name!r}"
        return f"{redact(self.path)}, chunk {self.grid.place(number)}{of}"


class ChunkIndex(ABC):
    """Where the stored bytes of an array's chunks lie. Each layout has one."""

    needs_io: bool = False
    """True if locating chunks performs requests, so that they had better be asked for in large
    numbers.
    """
    whole_files: bool = False
    """True if each chunk is a file of its own, read whole: its size is not known, and it may
    turn out to be missing.
    """

    nbytes: int | None = None
    """Bytes of all chunks as they are stored; None: nobody knows."""
    reads_files: bool = False
    """True if each chunk is a local file of its own, and is read by `read_files`, without being
    located first.
    """

    def read_files(self, numbers: Sequence[int]) -> list[bytes | None]:
        """The stored bytes of chunks; None for what was never written.

        Raises:
            FormatError: a folder lies where a file should be.
            FileChangedError: a file is another one than when the array was opened.
            OSError: one can't be read.
        """
        raise NotImplementedError

    def read_files_into(
        self, numbers: Sequence[int] | IntArray, buffers: Sequence[memoryview]
    ) -> list[int]:
        """As `read_files`, into buffers of the chunks' length: [n] bytes of each, -1 for what was
        never written; one that has another length than its buffer is not read.
        """
        raise NotImplementedError

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

    def check(self, number: int) -> None:  # noqa: B027
        """Looks whether the local file that a chunk lies in is still as it was, a
        FileChangedError if not; a server is not asked.
        """


class Chunks(ABC):
    """The chunks of one array, numbered in C order.

    Args:
        grid: shape and chunk shape.
        dtype: as stored, in its own byte order.
        how: by what path they are read, in words.
        fill: the value of what was never written.

    Attributes:
        nbytes: of a chunk, decoded.
    """

    is_direct = False
    """True if they are read and decoded here, and not by another library."""
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

    def __init__(self, grid: Grid, dtype: np.dtype[Any], how: str, fill: Any = 0) -> None:
        self.grid: Grid = grid
        self.dtype: np.dtype[Any] = dtype
        self.how: str = how
        self.fill: Any = fill
        self.nbytes: int = math.prod(grid.chunks) * dtype.itemsize

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> list[Any]:
        """What `decode` needs of some chunks."""

    @abstractmethod
    def decode(self, number: int, data: Any) -> npt.NDArray[Any] | None:
        """A whole chunk, an edge chunk too; None: it was never written, and all its values are
        the fill value. May run in threads.
        """

    @abstractmethod
    def check_cached(self, number: int) -> None:
        """Looks whether a chunk that is cached decoded lies in a local file as it was; a
        FileChangedError if not.
        """

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        """Where the stored bytes of chunks lie; none where only another library knows it."""
        return ByteRanges.of([])

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all chunks as they are stored, about; 0: nobody knows where they lie."""
        return 0


class DirectChunks(Chunks):
    """Chunks that are read and decoded here.

    Args:
        index: where they lie.
        pipeline: the codecs.
        files: by which they are read.
        fill: the value of what was never written.
        order: "C" or "F": of the elements in a chunk.
        where: names chunks for messages.
        check: first byte and stored bytes of a chunk -> nothing; raises a FormatError where the
            bytes are not what is known of them.
        required: a chunk that is missing is an error.
    """

    is_direct = True

    def __init__(
        self,
        grid: Grid,
        dtype: np.dtype[Any],
        index: ChunkIndex,
        pipeline: Pipeline,
        files: Files,
        *,
        where: ChunkNames,
        fill: Any = 0,
        order: str = "C",
        how: str = "",
        check: Callable[[int, Any], None] | None = None,
        required: bool = False,
    ) -> None:
        way = "ranges" if files.is_remote else "pread"
        super().__init__(grid, dtype, how or (f"{way} + {pipeline}" if pipeline else way), fill)
        self.pipeline: Pipeline = pipeline
        self.files: Files = files
        self.index: ChunkIndex = index
        self.order: str = order
        self.where: ChunkNames = where
        self._check, self._required = check, required
        # a checksum is that of a whole chunk
        self.decodes: bool = bool(pipeline) or check is not None
        self.is_raw: bool = not self.decodes and order == "C" and not index.whole_files
        self.reads_files: bool = index.reads_files
        self.needs_io: bool = index.needs_io
        self.is_remote: bool = files.is_remote

    def check_cached(self, number: int) -> None:
        self.index.check(number)

    @property
    def stored_nbytes(self) -> int:
        known = self.index.nbytes
        if known is None:
            return math.prod(self.grid.shape) * self.dtype.itemsize
        return known

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        ranges = self.index.ranges(numbers)
        if self._required and not ranges.is_written.all():
            raise self._missing(int(numbers[int(np.argmin(ranges.is_written))]))
        return ranges

    def _missing(self, number: int) -> FormatError:
        return FormatError(f"{self.where(number)} is missing, and missing='error'")

    def read(self, numbers: Sequence[int]) -> list[Any]:
        if self.reads_files:
            return [
                None if data is None else (data, 0, 0) for data in self.index.read_files(numbers)
            ]
        wanted = np.asarray(numbers, np.int64)
        ranges = self.byte_ranges(wanted)
        return self.as_read(wanted, ranges, self.files.read(ranges))

    def as_read(self, numbers: IntArray, ranges: ByteRanges, stored: Sequence[Any]) -> list[Any]:
        """What `decode` needs, of the stored bytes of chunks."""
        unused = self.index.unused_codecs(numbers) if self.decodes else None
        masks = itertools.repeat(0) if unused is None else unused.tolist()
        each = zip(stored, ranges.start.tolist(), masks, strict=False)
        return [None if data is None else (data, start, mask) for data, start, mask in each]

    def decode(self, number: int, data: Any) -> npt.NDArray[Any] | None:
        if data is None and self._required:
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
        return flat.view(self.dtype).reshape(self.grid.chunks, order=self.order)  # type: ignore[call-overload,no-any-return]

    def by_row(self) -> DirectChunks:
        """The same array with one row a chunk, where rows lie in their chunks as they are."""
        if self.is_raw and self.grid.chunks[0] > 1:
            return _RawRows(self)
        return self

    def raw_ranges(self, numbers: IntArray) -> ByteRanges:
        """Where chunks lie of which parts are read: each must have all its bytes."""
        ranges = self.byte_ranges(numbers)
        wrong = (ranges.stop - ranges.start != self.nbytes) & ranges.is_written
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise self._wrong_length(int(numbers[at]), int(ranges.nbytes[at]))
        return ranges

    def read_raw_files(
        self, numbers: Sequence[int] | IntArray, buffers: Sequence[memoryview]
    ) -> list[int]:
        """Fills a buffer with each chunk, as it lies in its file.

        Returns:
            Which of the buffers belong to chunks that were never written.

        Raises:
            FormatError: a file is not as long as a chunk; one is missing, and must not be.
            Exception: see `ChunkIndex.read_files`.
        """
        missing = []
        for at, size in enumerate(self.index.read_files_into(numbers, buffers)):
            if size == self.nbytes:
                continue
            if size >= 0:
                raise self._wrong_length(int(numbers[at]), size)
            if self._required:
                raise self._missing(int(numbers[at]))
            missing.append(at)
        return missing

    def _wrong_length(self, number: int, nbytes: int) -> FormatError:
        return FormatError(
            f"{self.where(number)}: it has {nbytes:,} bytes, not {self.nbytes:,}: the file is "
            "damaged"
        )


class _RawRows(DirectChunks):
    """The rows of chunks whose elements lie as they are, as chunks of one row."""

    def __init__(self, whole: DirectChunks) -> None:
        grid = Grid(whole.grid.shape, (1, *whole.grid.chunks[1:]))
        super().__init__(
            grid,
            whole.dtype,
            whole.index,
            whole.pipeline,
            whole.files,
            where=whole.where,
            fill=whole.fill,
            how=whole.how,
        )
        self._whole, self._height, self._inner = whole, whole.grid.chunks[0], grid.inner
        self.reads_files = False  # but parts of them

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        height, inner = self._height, self._inner
        if inner == 1:
            chunks, within = np.divmod(numbers, height)
        else:
            rows, columns = np.divmod(numbers, inner)
            bands, within = np.divmod(rows, height)
            chunks = bands * inner + columns
        paths, file, start, stop = self._whole.raw_ranges(chunks)
        is_written = start >= 0
        start = start + within * self.nbytes
        stop = start + self.nbytes
        if not is_written.all():
            start[~is_written] = stop[~is_written] = -1
        return ByteRanges(paths, file, start, stop)

    def raw_ranges(self, numbers: IntArray) -> ByteRanges:
        return self.byte_ranges(numbers)


class Rechunked(Chunks):
    """Chunks of an array that are made of those of another one, which have the same numbers."""

    def __init__(
        self, whole: Chunks, grid: Grid, dtype: np.dtype[Any], how: str, fill: Any
    ) -> None:
        super().__init__(grid, dtype, how, fill)
        self.whole: Chunks = whole
        self.is_direct: bool = whole.is_direct
        self.decodes: bool = whole.decodes
        self.needs_io: bool = whole.needs_io
        self.is_remote: bool = whole.is_remote

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return self.whole.read(numbers)

    def check_cached(self, number: int) -> None:
        self.whole.check_cached(number)

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        return self.whole.byte_ranges(numbers)

    @property
    def stored_nbytes(self) -> int:
        return self.whole.stored_nbytes


class Views:
    """Decoded chunks of several arrays that have the same rows.

    Attributes:
        views: of a chunk of each, contiguous.
        nbytes: of all.
    """

    __slots__ = ("nbytes", "views")

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        self.views: list[memoryview] = list(map(memoryview, arrays))  # type: ignore[arg-type]
        self.nbytes: int = sum(array.nbytes for array in arrays)

    def __len__(self) -> int:
        return len(self.views[0])


class AlignedChunks(Chunks):
    """The chunks of several 1-D arrays that have the same rows, as `Views` of one chunk each."""

    def __init__(self, arrays: Sequence[Chunks]) -> None:
        first = arrays[0]
        super().__init__(first.grid, first.dtype, first.how)
        self._arrays = arrays
        self.decodes: bool = first.decodes
        self.nbytes = sum(one.nbytes for one in arrays)

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """What `decode` needs, by one read where the same files hold all arrays."""
        direct = [
            one for one in self._arrays if isinstance(one, DirectChunks) and not one.reads_files
        ]
        if len(direct) < max(2, len(self._arrays)) or len({id(one.files) for one in direct}) > 1:
            return list(zip(*[one.read(numbers) for one in self._arrays], strict=True))
        wanted = np.asarray(numbers, np.int64)
        ranges = [one.byte_ranges(wanted) for one in direct]
        stored = iter(direct[0].files.read(ByteRanges.joined(ranges)))
        each = [
            one.as_read(wanted, its, list(itertools.islice(stored, len(numbers))))
            for one, its in zip(direct, ranges, strict=True)
        ]
        return list(zip(*each, strict=True))

    def decode(self, number: int, data: Any) -> Any:
        arrays = []
        for chunks, stored in zip(self._arrays, data, strict=True):
            array = chunks.decode(number, stored)
            if array is None:
                array = np.full(chunks.grid.chunks, chunks.fill, chunks.dtype)
            # one that lies among what was read with it would keep all of that
            if self.decodes and held_bytes(array) > array.nbytes:
                array = array.copy()
            arrays.append(np.ascontiguousarray(array))
        return Views(arrays)

    def check_cached(self, number: int) -> None:
        for one in self._arrays:
            one.check_cached(number)


class LibraryArray(Protocol):
    """An array as another library reads it."""

    def __call__(self, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        """The part that lies inside of slices, one an axis."""

    def check(self, part: tuple[slice, ...]) -> None:
        """Compares the local files that a part lies in with what they were when the array was
        opened; else a FileChangedError.
        """


class LibraryChunks(Chunks):
    """Chunks of an array that another library reads."""

    def __init__(
        self, grid: Grid, dtype: np.dtype[Any], array: LibraryArray, how: str, fill: Any = 0
    ) -> None:
        super().__init__(grid, dtype, how, fill)
        self._array = array

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return list(map(self.grid.part, numbers))

    def decode(self, number: int, data: Any) -> npt.NDArray[Any] | None:
        return self._array(data)

    def check_cached(self, number: int) -> None:
        self._array.check(self.grid.part(number))
