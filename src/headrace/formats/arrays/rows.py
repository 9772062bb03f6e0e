"""The base of sources whose records are rows of arrays, whatever file they lie in."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import BudgetError, FormatError, HeadraceError
from headrace.formats.arrays.chunks import COUNTABLE, DirectChunks, LibraryChunks, shown_array
from headrace.formats.arrays.packed import PackedInfo, PackPart, fingerprint_of_files
from headrace.formats.arrays.reader import ArrayReader, OpenArrays, OpenSource
from headrace.formats.source import Description, Map, Rows, RowSource, row_at
from headrace.io.handles import HINTS
from headrace.io.local_files import bytes_of
from headrace.io.ranges import ByteRanges
from headrace.memory.budget import format_size
from headrace.memory.limits import memory_limits, tightest

_SMALL = 64 << 20  # bytes of a row that are not compared with what is free
_MOST_BLOCKS = 1 << 28

A = TypeVar("A", bound="ArraysSource")


def layout_fingerprint(layout: list[Any]) -> str:
    """A hash of name, shape, dtype (``dtype.str``) and chunks of an array, or of several arrays."""
    return hashlib.blake2b(json.dumps(layout).encode(), digest_size=16).hexdigest()


def check_fits(nbytes: int, what: str, remedy: str) -> None:
    """Raises a BudgetError if something takes more bytes than are free."""
    limit = tightest(memory_limits())
    if nbytes > limit.headroom:
        raise BudgetError(
            f"{what} takes {format_size(nbytes)}, and {format_size(limit.headroom)} are free "
            f"({limit.name}): {remedy}"
        )


class ReadersSource(OpenSource, RowSource):
    """Records that are read from the chunks of arrays.

    Attributes:
        path: where they are, for messages.
        is_direct: True if samples are read from the files themselves, and not through another
            library.
        _cached: readers of chunks that are decoded as a whole, and worth caching.
        _tallest: rows of the tallest of these chunks; 1: there are none.
    """

    part: PackPart | None = None
    """Which part of a pack of several files it is."""

    def __init__(self, path: str, opened: OpenArrays[Any], readers: Sequence[ArrayReader]) -> None:
        super().__init__(opened)
        self.path: str = path
        self._readers = readers
        self.locating_needs_io = any(reader.chunks.needs_io for reader in readers)
        self.is_direct: bool = all(isinstance(reader.chunks, DirectChunks) for reader in readers)
        self._cached = [reader for reader in readers if reader.caches_chunks]
        self._tallest = max((reader.height for reader in self._cached), default=1)

    @abstractmethod
    def _located(self, indices: IntArray, missing: bool) -> list[ByteRanges]:
        """As `byte_ranges` or, if `missing`, `missing_ranges`, by array."""

    def row_ranges(self, indices: IntArray) -> ByteRanges | None:
        """Where each record lies, if all are stored as `read_into` writes them; else None."""
        return None

    def check(self, indices: Sequence[int], records: Rows | Sequence[Any]) -> None:
        """Raises a FormatError if a record has a wrong checksum."""

    def byte_ranges(self, indices: IntArray) -> ByteRanges:
        try:
            return ByteRanges.joined(self._located(indices, False))
        # to know it something had to be read, which failed: reading the samples will say so
        except HeadraceError:
            return ByteRanges.of([])

    def missing_ranges(self, indices: IntArray) -> list[ByteRanges]:
        try:
            return self._located(indices, True)
        except HeadraceError:  # as above
            return []

    @property
    def is_remote(self) -> bool:
        return self.is_direct and super().is_remote

    @property
    def stored_nbytes(self) -> int:
        return sum(reader.chunks.stored_nbytes for reader in self._readers)


S = TypeVar("S", bound=ReadersSource)


class ConcatSource(ReadersSource, Generic[S]):
    """The samples of some sources, one source after the other.

    Args:
        sources: one at least, with records of one kind; they share what is open and decoded.
    """

    def __init__(self, sources: Sequence[S]) -> None:
        readers = [reader for source in sources for reader in source._readers]
        super().__init__(sources[0].path, sources[0]._opened, readers)
        self.sources: list[S] = list(sources)
        self._starts = np.cumsum([0, *map(len, self.sources)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def place(self, index: int) -> tuple[int, int]:
        """The number of the source that a sample is in, and its index there."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def _parts(self, indices: Sequence[int] | IntArray) -> list[tuple[S, IntArray, list[int]]]:
        """Sources, the indices of samples in each, and their places among all that are wanted."""
        wanted = np.asarray(indices, np.int64)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        order = numbers.argsort(kind="stable")
        parts = []
        for places in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            if len(places):
                number = int(numbers[places[0]])
                inner = wanted[places] - self._starts[number]
                parts.append((self.sources[number], inner, places.tolist()))
        return parts

    def _prefetch(self, parts: Sequence[tuple[S, IntArray, list[int]]]) -> None:
        """Announces the parts of several sources, which are read next: to a server all together,
        and not file by file; to a slow disk those of local files.
        """
        if len(parts) > 1 and (self.is_remote or HINTS.are_wanted):
            each = [one for source, inner, _ in parts for one in source.missing_ranges(inner)]
            with contextlib.suppress(OSError):  # raised again where they are read
                self.files.prefetch(each, True)

    def read(self, indices: Sequence[int]) -> list[Any]:
        records: list[Any] = [None] * len(indices)
        parts = self._parts(indices)
        self._prefetch(parts)
        for source, inner, places in parts:
            for place, record in zip(places, source.read(inner.tolist()), strict=True):
                records[place] = record
        return records

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        parts = self._parts(indices)
        if self.is_remote and self._read_together(parts, rows):
            return
        self._prefetch(parts)
        for source, inner, places in parts:
            source.read_into(inner.tolist(), [row_at(rows, place) for place in places])

    def _read_together(self, parts: Sequence[tuple[S, IntArray, list[int]]], rows: Rows) -> bool:
        """Reads the rows of all sources by one call, if they are stored as they are; else False."""
        found = []
        for source, inner, _ in parts:
            ranges = source.row_ranges(inner)
            if ranges is None:
                return False
            found.append(ranges)
        outs = [[row_at(rows, place) for place in places] for _, _, places in parts]
        buffers = [bytes_of(out) for of_source in outs for out in of_source]
        self.files.read_into(ByteRanges.joined(found), buffers)
        for (source, inner, _), of_source in zip(parts, outs, strict=True):
            source.check(inner.tolist(), of_source)
        return True

    @functools.cached_property
    def is_remote(self) -> bool:
        """True if all sources are, on one server."""
        return all(source.is_remote and source.files is self.files for source in self.sources)

    def _located(self, indices: IntArray, missing: bool) -> list[ByteRanges]:
        parts = self._parts(indices)
        return [one for source, inner, _ in parts for one in source._located(inner, missing)]

    @property
    def stored_nbytes(self) -> int:
        return sum(source.stored_nbytes for source in self.sources)

    @functools.cached_property
    def array_spec(self) -> ArraySpec | None:
        spec = self.sources[0].array_spec
        return spec if all(source.array_spec == spec for source in self.sources) else None

    def use_threads(self, run: Map) -> None:
        for source in self.sources:
            source.use_threads(run)

    @property
    def block_nbytes(self) -> int:
        return max(source.block_nbytes for source in self.sources)

    def describe(self) -> Description:
        """Several files as one; where they are read in several ways, each of these."""
        parts = [source.describe() for source in self.sources]
        columns = list(parts[0].columns)
        for number, column in enumerate(columns):
            ways = [part.columns[number].read_by for part in parts if number < len(part.columns)]
            column.read_by = "; or ".join(dict.fromkeys(ways))
        stored = [part.stored for part in parts]
        return Description(
            columns,
            parts[0].facts,
            sum(part.files for part in parts),
            sum(stored) if all(stored) else 0,
        )

    @property
    def cut_nbytes(self) -> int:
        return sum(source.cut_nbytes for source in self.sources)

    def blocks_of(self, nbytes: int) -> IntArray | None:
        found = [source.blocks_of(nbytes) for source in self.sources]
        known = [sizes for sizes in found if sizes is not None]
        if len(known) == len(found):
            return np.concatenate(known).astype(np.int64)
        return None

    def fingerprint(self) -> str:
        each = [source.fingerprint() for source in self.sources]
        return fingerprint_of_files([source.part for source in self.sources], len(self), each)

    def location(self, index: int) -> str:
        number, inner = self.place(index)
        return self.sources[number].location(inner)


def concatenated(sources: Sequence[S]) -> S | ConcatSource[S]:
    """The samples of some sources, one source after the other."""
    return sources[0] if len(sources) == 1 else ConcatSource(sources)


class ArraysSource(ReadersSource):
    """The rows of one array, or of several of equal length, as records: arrays of a row's shape and
    dtype (in the file's byte order); for several names dicts of these.

    Args:
        path, opened: as `ReadersSource` has them.
        name: that of the array; or a tuple of several.
        fields: by name, what reads the rows of each.

    Attributes:
        shape, dtype: of the (first) array, rows included.
        dtypes: of each, by name.
        holds_objects: True if there are elements of any size, such as strings.
        total_bytes: of all rows, without these.
        of_samples: describes the pack, if the rows are its samples; else None.

    Raises:
        FormatError: arrays don't fit one another, or have more rows or chunks than can be counted.
        BudgetError: a row does not fit memory.
    """

    of_samples: PackedInfo | None = None

    def __init__(
        self,
        path: str,
        opened: OpenArrays[Any],
        name: str | tuple[str, ...],
        fields: Mapping[str, ArrayReader | LibraryChunks],
    ) -> None:
        readers = [field for field in fields.values() if isinstance(field, ArrayReader)]
        super().__init__(path, opened, readers)
        self.name: str | tuple[str, ...] = name
        self._fields = fields
        self._first = next(iter(fields.values()))
        self.holds_objects: bool = len(readers) < len(fields)
        self.is_direct &= not self.holds_objects
        self.shape: tuple[int, ...] = self._first.shape
        self.dtype: np.dtype[Any] = self._first.dtype
        self.dtypes: dict[str, np.dtype[Any]] = {one: field.dtype for one, field in fields.items()}
        self._grids = [
            [one, field.shape, field.dtype.str, field.extents] for one, field in fields.items()
        ]
        self._row_bytes = sum(
            math.prod(reader.shape[1:]) * reader.dtype.itemsize for reader in readers
        )
        self.total_bytes: int = self.shape[0] * self._row_bytes
        for one, field in fields.items():
            across = 1
            if isinstance(field, ArrayReader) and all(field.shape):
                across = field.chunks.grid.inner
            if field.shape[0] * across > COUNTABLE:
                raise FormatError(
                    f"{shown_array(path, one)} has shape {list(field.shape)}, more than can be "
                    "counted: the file is damaged"
                )
        if self._row_bytes > _SMALL:
            of = " of " + " and ".join(fields) if any(fields) else ""
            check_fits(
                self._row_bytes,
                f"{path}: a row{of}",
                "if the file is not damaged, pack it again in smaller samples",
            )
        if len({field.shape[0] for field in fields.values()}) > 1:
            lengths = ", ".join(f"{one!r} {field.shape[0]:,}" for one, field in fields.items())
            raise FormatError(
                f"{path}: the arrays have different numbers of rows: {lengths}: choose those that "
                "belong together"
            )

    # -- what it is

    @property
    def rows_are(self) -> str:
        """Dtype and shape of a row of each dataset, in words; "bytes" or "str" of what was packed
        as such.
        """
        if self.of_samples is not None and self.of_samples.values is not None:
            return self.of_samples.values
        return ", ".join(f"{f.dtype} {list(f.shape[1:])}" for f in self._fields.values())

    def describe(self) -> Description:
        columns = [field.describe(name or "rows") for name, field in self._fields.items()]
        return Description(columns, stored=sum(column.stored for column in columns))

    def __len__(self) -> int:
        return int(self.shape[0])

    def sizes(self) -> IntArray:
        """The size of each sample in bytes ([n] int64); 0 for objects, whose size is not known."""
        return np.full(len(self), self._row_bytes, np.int64)

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
        columns: list[list[Any]] = []
        for field in self._fields.values():
            if isinstance(field, ArrayReader):
                rows = [np.empty(field.shape[1:], field.dtype) for _ in indices]
                field.read_rows(indices, rows, self.run)
                columns.append(rows)
            else:
                columns.append(field.rows(indices))
        if isinstance(self.name, str):
            return columns[0]
        return [
            dict(zip(self._fields, record, strict=True)) for record in zip(*columns, strict=True)
        ]

    def row_ranges(self, indices: IntArray) -> ByteRanges | None:
        field = self._first
        return field.row_ranges(indices) if isinstance(field, ArrayReader) else None

    def _located(self, indices: IntArray, missing: bool) -> list[ByteRanges]:
        return [reader.span_ranges(indices, indices + 1, missing) for reader in self._readers]

    # -- blocks

    @property
    def cut_nbytes(self) -> int:
        if self._cached:
            return 0
        return self.total_bytes

    def blocks_of(self, nbytes: int) -> IntArray:
        """Of chunks that must be decoded as a whole, the rows of the tallest; else those of a
        chunk, or as many as take `nbytes`.
        """
        rows = len(self)
        height = self._tallest
        if height == 1:
            heights = [reader.height for reader in self._readers if 1 < reader.height < rows]
            height = min([max(1, nbytes // max(1, self._row_bytes)), *heights])
        count = -(-rows // height)
        if count > _MOST_BLOCKS:
            raise BudgetError(
                f"{self.path} has {count:,} blocks of {height:,} rows, too many to list: use "
                "shuffle=True, which needs no list"
            )
        return np.diff(np.append(np.arange(count) * height, rows))

    @property
    def block_nbytes(self) -> int:
        """Bytes of the decoded chunks of a block, which are cached while it is in use."""
        return sum(
            reader.chunks.nbytes * reader.inner * -(-self._tallest // reader.height)
            for reader in self._cached
        )

    def fingerprint(self) -> str:
        """A hash of names, shapes, dtypes and chunk grids."""
        return layout_fingerprint(self._grids[0] if isinstance(self.name, str) else self._grids)

    def location(self, index: int) -> str:
        names = " and ".join(filter(None, self._fields))
        return ", ".join(filter(None, [self.path, names, f"row {index}"]))


def concatenated_rows(sources: Sequence[A]) -> A | ConcatSource[A]:
    """The rows of some sources, one source after the other.

    Raises:
        FormatError: the sources have different rows.
    """
    first = sources[0]
    for other in sources:
        if other.rows_are != first.rows_are:
            raise FormatError(
                f"{other.path} and {first.path} can't be one dataset: rows of {other.rows_are} "
                f"here, and of {first.rows_are} there"
            )
    return concatenated(sources)


# -- plain values


def as_value(record: Any, encoding: str | None = "utf-8") -> Any:
    """A record in plain terms: strings as str (without an encoding bytes), compounds as dicts of
    their fields, arrays of strings as lists; numbers stay.
    """
    if isinstance(record, bytes):
        if encoding is None:
            return bytes(record)
        try:
            return bytes(record).decode(encoding)
        except UnicodeDecodeError as error:
            raise FormatError(
                f"a string is not {encoding.upper()}: {error}: for an HDF5 file pass its "
                "encoding=, or encoding=None to get bytes"
            ) from error
    if isinstance(record, str):
        return str(record)
    dtype = getattr(record, "dtype", None)
    if dtype is None:
        return record
    if dtype.names is not None:
        return {name: as_value(record[name], encoding) for name in dtype.names}
    if dtype.kind in "SUO" and isinstance(record, np.ndarray):
        if record.ndim == 0:
            return as_value(record[()], encoding)
        return [as_value(item, encoding) for item in record]
    # a field lies among the others of its compound, at any byte and with their strides: torch has
    # no such tensors
    if isinstance(record, np.ndarray):
        return np.require(record, requirements=["C", "A"])
    return record


def is_plain(dtype: np.dtype[Any]) -> bool:
    """True if `as_value` of its rows is the row itself."""
    return dtype.names is None and dtype.kind not in "SUO"


def long_doubles_in(dtype: np.dtype[Any]) -> str | None:
    """Where a dtype holds numbers of more than 64 bits: the names of the fields that lead there,
    "" for itself; None: nowhere.
    """
    if dtype.names is not None:
        fields = ((name, long_doubles_in(dtype[name])) for name in dtype.names)
        return next(
            (f"{name}.{rest}".rstrip(".") for name, rest in fields if rest is not None), None
        )
    return "" if dtype.base.char in "gG" else None
