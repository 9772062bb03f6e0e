"""What are the chunks of an array, where do their bytes lie, and how do they become rows?

Which of them a batch needs: `headrace.storage.arrays.reader`.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import BudgetError, FormatError
from headrace.io.ranges import ByteRanges
from headrace.io.stretches import Files, Places, Stretch, places_of, read_stretches
from headrace.storage.arrays.codecs import Pipeline


class Grid(NamedTuple):
    """How an array is cut."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-extent // chunk) for extent, chunk in zip(self.shape, self.chunks, strict=True))

    @property
    def inner(self) -> int:
        """Chunks that share the rows of one."""
        return math.prod(self.counts[1:])

    def place(self, number: int) -> tuple[int, ...]:
        """The coordinates of a chunk, counted in chunks."""
        return tuple(int(i) for i in np.unravel_index(number, self.counts))


class Chunks(ABC):
    """The chunks of one array, numbered in C order.

    Args:
        grid: shape and chunk shape.
        dtype: as stored, in its own byte order.
        how: by what path they are read, in words.
    """

    def __init__(self, grid: Grid, dtype: np.dtype[Any], how: str) -> None:
        self.grid: Grid = grid
        self.dtype: np.dtype[Any] = dtype
        self.how: str = how
        self.nbytes: int = math.prod(grid.chunks) * dtype.itemsize

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> list[Any]:
        """What `decode` needs of some chunks."""

    @abstractmethod
    def decode(self, number: int, data: Any) -> npt.NDArray[Any] | None:
        """A whole chunk, an edge chunk too; None: it was never written, and all its values are the fill value. May run in threads."""

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all chunks as they are stored, about; 0: nobody knows where they lie."""
        return 0

    decodes = True
    """Is decoding a chunk work, so that one that will be needed again had better be held?"""

    def fill_value(self) -> Any:
        """What stands where nothing was written."""
        return 0

    def check_held(self, number: int) -> None:  # noqa: B027
        """Looks whether a chunk that is held decoded lies in a local file as it was.

        Raises:
            FileChangedError: the file is another one.
        """


class DirectChunks(Chunks):
    """Chunks that are read and decoded here.

    Args:
        stretches: numbers of chunks -> where each lies, None where it was never written.
        pipeline: the codecs.
        files: what is open.
        fill: the value of what was never written.
        order: "C" or "F": of the elements in a chunk.
        where: the number of a chunk -> its name for messages.
        check: compares stored bytes with what is known of them, and raises a FormatError.
        as_files: stretches are whole files, of unknown size, and may turn out to be missing.
        required: one that is missing is an error.
    """

    def __init__(
        self,
        grid: Grid,
        dtype: np.dtype[Any],
        stretches: Callable[[Sequence[int]], list[Stretch | None]],
        pipeline: Pipeline,
        files: Files,
        *,
        fill: Any = 0,
        order: str = "C",
        where: Callable[[int], str] = str,
        how: str = "",
        check: Callable[[Stretch, Any], None] | None = None,
        as_files: bool = False,
        required: bool = False,
    ) -> None:
        way = "ranges" if files.is_remote else "pread"
        super().__init__(grid, dtype, how or (f"{way} + {pipeline}" if pipeline else way))
        self.pipeline: Pipeline = pipeline
        self.files: Files = files
        self.stretches: Callable[[Sequence[int]], list[Stretch | None]] = stretches
        self.order: str = order
        self.where: Callable[[int], str] = where
        self._fill = fill
        self._check, self._as_files, self._required = check, as_files, required
        self.decodes: bool = bool(pipeline)

    def fill_value(self) -> Any:
        return self._fill

    def check_held(self, number: int) -> None:
        if not self.files.is_remote:
            self.stretches([number])

    @property
    def stored_nbytes(self) -> int:
        known: int | None = getattr(self.stretches, "nbytes", None)
        return math.prod(self.grid.shape) * self.dtype.itemsize if known is None else known

    @property
    def is_raw(self) -> bool:
        """Do rows lie in their chunks as they are, and can they be read by themselves?"""
        return not self.pipeline and self.order == "C" and not self._as_files

    def read(self, numbers: Sequence[int]) -> list[Any]:
        stretches = self.stretches(numbers)
        found = zip(stretches, read_stretches(stretches, self.files), strict=True)
        return [None if stretch is None or data is None else (stretch, data) for stretch, data in found]

    def decode(self, number: int, data: Any) -> npt.NDArray[Any] | None:
        if data is None and self._required:
            raise FormatError(f"{self.where(number)} is missing, and missing='error'")
        if data is None:
            return None
        stretch, stored = data
        try:
            if self._check is not None:
                self._check(stretch, stored)
            flat = self.pipeline.decode(stored, self.nbytes, stretch.skipped)
        except FormatError as error:
            raise type(error)(f"{self.where(number)}: {error}") from error.__cause__
        except MemoryError as error:
            raise BudgetError(f"{self.where(number)} takes {self.nbytes:,} bytes when it is decoded, for which there is no room") from error
        return flat.view(self.dtype).reshape(self.grid.chunks, order=self.order)  # type: ignore[call-overload,no-any-return]

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        """Where the stored bytes of chunks lie."""
        find = getattr(self.stretches, "places", None)
        found: Places = places_of(self.stretches(numbers.tolist())) if find is None else find(numbers)
        return found.ranges()

    def by_row(self) -> DirectChunks:
        """The same array with one row a chunk, which can be had where elements lie as they are."""
        grid = Grid(self.grid.shape, (1, *self.grid.chunks[1:]))
        return DirectChunks(grid, self.dtype, _ByRow(self), self.pipeline, self.files, fill=self._fill, where=self.where, how=self.how)

    def raw_places(self, numbers: npt.NDArray[np.int64]) -> Places:
        """Where chunks lie of which parts are read: each must have all its bytes.

        Raises:
            FormatError: one has not.
        """
        if isinstance(self.stretches, _ByRow):
            return self.stretches.places(numbers)
        find = getattr(self.stretches, "places", None)
        found: Places = places_of(self.stretches(numbers.tolist())) if find is None else find(numbers)
        wrong = (found.nbytes != self.nbytes) & (found.offsets >= 0)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            name, nbytes = self.where(int(numbers[at])), int(found.nbytes[at])
            raise FormatError(f"{name}: it has {nbytes:,} bytes, not {self.nbytes:,}: the file is damaged")
        return found


class _ByRow:
    """Where the rows of chunks lie whose elements lie as they are."""

    def __init__(self, whole: DirectChunks) -> None:
        self._whole, self._height, self._inner = whole, whole.grid.chunks[0], whole.grid.inner
        self._row_bytes = whole.nbytes // self._height

    def places(self, numbers: npt.NDArray[np.int64]) -> Places:
        height, inner = self._height, self._inner
        if inner == 1:
            chunks, within = np.divmod(numbers, height)
        else:
            rows, columns = np.divmod(numbers, inner)
            bands, within = np.divmod(rows, height)
            chunks = bands * inner + columns
        found = self._whole.raw_places(chunks)
        offsets = found.offsets + within * self._row_bytes
        offsets[found.offsets < 0] = -1
        return Places(found.paths, found.files, offsets, np.full(len(numbers), self._row_bytes))

    def __call__(self, numbers: Sequence[int]) -> list[Stretch | None]:
        return self.places(np.asarray(numbers, np.int64)).stretches()


class LibraryChunks(Chunks):
    """Chunks that another library reads.

    Args:
        load: slices, one an axis and inside of the array, -> that part of it.
        how: which library, and why.
        fill: the value of what was never written.
        check: slices -> nothing; raises a FileChangedError where that part lies in a file that was changed.
    """

    def __init__(
        self,
        grid: Grid,
        dtype: np.dtype[Any],
        load: Callable[[tuple[slice, ...]], npt.NDArray[Any]],
        how: str,
        fill: Any = 0,
        check: Callable[[tuple[slice, ...]], None] | None = None,
    ) -> None:
        super().__init__(grid, dtype, how)
        self._load, self._fill, self._check = load, fill, check

    def fill_value(self) -> Any:
        return self._fill

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return list(numbers)

    def decode(self, number: int, data: Any) -> npt.NDArray[Any] | None:
        return self._load(self._part(number))

    def check_held(self, number: int) -> None:
        if self._check is not None:
            self._check(self._part(number))

    def _part(self, number: int) -> tuple[slice, ...]:
        corner = [place * extent for place, extent in zip(self.grid.place(number), self.grid.chunks, strict=True)]
        ends = [min(a + c, s) for a, c, s in zip(corner, self.grid.chunks, self.grid.shape, strict=True)]
        return tuple(itertools.starmap(slice, zip(corner, ends, strict=True)))
