"""Sources: numbered sets of stored records.

`Source` is the minimum that headrace needs: the number of records, the records, which of them share
a block, and a fingerprint of all. A `RowSource` also writes records that are arrays of one shape
directly into their batch. A `Locatable` source knows the byte ranges of its records, so that remote
ones can be prefetched. `Columns` are an opened container: rows of named columns, each of them a
source.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import numpy as np

from headrace.dtypes import AnyArray, ArraySpec, IntArray
from headrace.errors import FormatError
from headrace.io.files import Files
from headrace.io.ranges import ByteRanges

Rows = Sequence[AnyArray] | AnyArray
"""Arrays of one shape and dtype, or one array whose rows they are."""
Map = Callable[[Callable[[int], Any], int], list[Any]]
"""Calls a function for 0 to n - 1, perhaps in threads, and gives what it returns."""
LONGEST = 2 << 20
"""Bytes of a block, where there is much data: a long read, from a disk and from a server."""
SHORTEST = 128 << 10
"""Bytes of a block, where there is little."""
ENOUGH = 72
"""Blocks of a dataset with which 8 workers have blocks of their own: the 8 x 8 lanes of
`headrace.order.lanes`, and some more, since the last block of a shard is shorter.
"""


def row_at(rows: Rows, number: int) -> AnyArray:
    """One of several rows, to write to: of an array of numbers too, whose items are no arrays."""
    row: AnyArray = rows[number, ...] if isinstance(rows, np.ndarray) else rows[number]
    return row


def one_after_the_other(function: Callable[[int], Any], count: int) -> list[Any]:
    """Calls a function for 0 to count - 1, in this thread."""
    return [function(number) for number in range(count)]


def block_length(nbytes: int) -> int:
    """The bytes of a block of a dataset of so many stored bytes: few shards have blocks enough
    too.
    """
    return min(LONGEST, max(SHORTEST, nbytes // ENOUGH))


@dataclass(slots=True)
class Column:
    """An array or a column, how it is read, and the cost of one random sample.

    Attributes:
        name: its name; "rows" and the like where it has none.
        read_by: how it is read, and why.
        sample: dtype and shape of a sample's part of it, or a few words on it.
        total, stored: bytes of all of it, decoded and as stored; 0: unknown.
        nbytes: decoded bytes of a sample's part, on average; 0: unknown.
        chunks: number of chunks that are decoded for a sample, on average; 0: none.
        chunk: extents of a chunk.
        decoded: bytes of these chunks.
        read: approximate stored bytes that are read for a sample; 0: unknown.
    """

    name: str
    read_by: str
    sample: str = ""
    total: int = 0
    stored: int = 0
    nbytes: int = 0
    chunks: float = 0
    chunk: tuple[int, ...] = ()
    decoded: int = 0
    read: int = 0


@dataclass(slots=True)
class Description:
    """Describes opened data.

    Attributes:
        columns: the columns that make up a sample.
        facts: other facts, by name.
        files: number of files.
        stored: approximate bytes of all files; 0: unknown.
        samples, fingerprint: of the dataset.
        opens_as: the call that opens the dataset.
        held: bytes of all samples in memory; None: unknown without reading them.
        classes: number of samples of each class; None: there are no classes.
    """

    columns: list[Column] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    files: int = 1
    stored: int = 0
    samples: int = 0
    fingerprint: str = ""
    opens_as: str = ""
    held: int | None = None
    classes: dict[str, int] | None = None

    @property
    def ways(self) -> dict[str, str]:
        """How each column is read, and why; and the other facts."""
        return {column.name: column.read_by for column in self.columns} | self.facts


class Source(ABC):
    """A numbered set of records.

    A record is the stored form of one sample before decoding: the bytes of a file, or a row of an
    array.

    A source is created once, in the parent process, and travels to workers by fork or pickle. Keep
    indexes in flat arrays, and open files through a `WorkerHandle`. Several threads call `read` at
    once, unless `thread_safe` is False.
    """

    thread_safe = True
    """True if several threads may call `read` at once, and concurrently with the dataset's
    transforms. If False, mode "eager" reads with one thread, and "streaming" prefetches nothing.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def read(self, indices: Sequence[int]) -> list[Any]:
        """Returns the records of `indices`, in their order. An index may come twice.

        Raises:
            Exception: any. headrace then reads the records one by one to find and name the damaged
                one.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash of what the samples are (names, shapes), independent of where they are
        stored or when they were written.
        """

    def blocks(self) -> IntArray | None:
        """Number of consecutive samples that share each chunk, shard or file ([blocks] int64, their
        sum is `len`).

        None: each sample is stored by itself.
        """
        return None

    run: Map = staticmethod(one_after_the_other)
    """Calls a function for 0 to count - 1: work that may run in threads."""

    def use_threads(self, run: Map) -> None:
        """Sets how `run` calls functions: in threads, in a worker that has spare cores. The
        dataset calls this.
        """
        self.run = run

    @property
    def block_nbytes(self) -> int:
        """Bytes that a reader should cache for each open block, so that nothing is decoded
        twice.
        """
        return 0

    @property
    def layout_nbytes(self) -> int:
        """Decoded bytes of the largest block that is decoded as a whole, by the layout alone,
        wherever it lies; 0: blocks may be cut anywhere.
        """
        return self.block_nbytes

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of all decoded blocks, if each has so many rows that a random order should cache
        them all; else 0.
        """
        return 0

    def hold_chunks(self, nbytes: int) -> None:  # noqa: B027
        """Sets how many bytes of decoded chunks each process may cache."""

    def take_counts(self) -> Counter[str]:
        """Returns what was counted in this process since the last call, for `get_stats()`."""
        return Counter()

    def describe(self) -> Description:
        """Describes how records are read, and the cost of a random one, without reading any."""
        return Description()

    def close(self) -> None:
        """Closes what is open in this process. The next `read` opens it again. Default: closes
        every attribute that can be closed.
        """
        for attribute in vars(self).values():
            if hasattr(attribute, "close"):
                attribute.close()

    def location(self, index: int) -> str:
        """Location of a sample as readable text: a path, or a file and a row, without
        credentials.
        """
        return f"{type(self).__name__}[{index}]"


class RowSource(Source):
    """Records that can be written into rows of a batch: arrays of one shape and dtype."""

    @property
    @abstractmethod
    def array_spec(self) -> ArraySpec | None:
        """Shape and dtype of all records. None: they differ, and `read_into` can't be used."""

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        """Writes the record of each index into its array, which is C-contiguous and matches
        `array_spec`.

        Args:
            indices: indices of the samples.
            rows: one array per index, or one array [samples, ...] with a row per index.

        Default: copies of what `read` returns.

        Raises:
            Exception: as in `read`. The contents of the arrays are then undefined.
        """
        for index, row, record in zip(indices, rows, self.read(indices), strict=True):
            array = np.asarray(record)
            if (array.shape, array.dtype) != (row.shape, row.dtype):  # else NumPy would make it fit
                raise FormatError(
                    f"record {index} is {array.dtype} {list(array.shape)}, not {row.dtype} "
                    f"{list(row.shape)}"
                )
            row[...] = array


class Locatable(Source):
    """Records whose byte ranges are known.

    Attributes:
        files: the files that the ranges refer to.
    """

    files: Files
    locating_needs_io: bool = False
    """True if locating records performs I/O, so that many should be located at once."""

    @abstractmethod
    def byte_ranges(self, indices: IntArray) -> ByteRanges:
        """Byte ranges of the stored records, including all of their chunks. Ranges that are left
        out are fetched when the record is read.

        Args:
            indices: [n] int64, indices of the samples.
        """

    def missing_ranges(self, indices: IntArray) -> list[ByteRanges]:
        """`byte_ranges` without the chunks that this process has decoded, in parts that are read
        one after the other.
        """
        return [self.byte_ranges(indices)]

    @property
    @abstractmethod
    def stored_nbytes(self) -> int:
        """Approximate bytes of all records as stored."""

    @property
    def cut_nbytes(self) -> int:
        """Bytes of all records, by which the length of blocks is chosen where they may be cut
        anywhere.
        """
        return self.stored_nbytes

    def blocks(self) -> IntArray | None:
        return self.blocks_of(block_length(self.cut_nbytes))

    def blocks_of(self, nbytes: int) -> IntArray | None:
        """The `blocks`, of about `nbytes` stored bytes each if they may be cut anywhere."""
        return None

    @property
    def is_remote(self) -> bool:
        """True if records are prefetched from a server by their byte ranges."""
        return self.files.is_remote

    def describe(self) -> Description:
        stored = self.stored_nbytes
        column = Column("records", self.files.explain(), read=stored // max(1, len(self)))
        spec = self.array_spec if isinstance(self, RowSource) else None
        if spec is not None:
            column.sample = f"{spec.dtype} {list(spec.shape)}"
            column.nbytes = spec.nbytes
        return Description([column], stored=stored)

    def read_afresh(self, index: int) -> Any:
        """Reads a record again that was damaged, without any cache of remote files."""
        with self.files.bypassing_cache():
            return self.read([index])[0]

    def take_counts(self) -> Counter[str]:
        return self.files.take_counts()


def is_prefetched(source: Source) -> TypeGuard[Locatable]:
    """True if the records of a source are prefetched by their byte ranges; others are read ahead
    by threads.
    """
    return isinstance(source, Locatable) and source.is_remote


class RecordsSource(Locatable):
    """Records that lie one after the other in files.

    Attributes:
        _paths: of the files.
        _first: [files + 1] the number of the first record of each file, and of all.
        _bases: [files] the byte of each that counts as its first.
    """

    _paths: list[str]
    _first: IntArray
    _bases: IntArray

    @abstractmethod
    def bounds(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Where the bytes of records begin and end in their files."""

    def __len__(self) -> int:
        return int(self._first[-1])

    def file_of(self, rows: IntArray) -> IntArray:
        """The number of the file of each record."""
        return np.searchsorted(self._first, rows, side="right") - 1

    def byte_ranges(self, indices: IntArray) -> ByteRanges:
        return ByteRanges(self._paths, self.file_of(indices), *self.bounds(indices))

    @property
    def stored_nbytes(self) -> int:
        """Bytes from the first record of each file to its last, with what lies in between."""
        filled = np.flatnonzero(np.diff(self._first))
        begins, _ = self.bounds(self._first[filled])
        _, ends = self.bounds(self._first[filled + 1] - 1)
        return int((ends - begins).sum())

    def blocks_of(self, nbytes: int) -> IntArray:
        """Number of records that begin in each range of `nbytes` of a file."""
        files = np.repeat(np.arange(len(self._paths)), np.diff(self._first))
        begins, _ = self.bounds(np.arange(len(self)))
        places = (begins - self._bases[files]) // nbytes
        is_first = (np.diff(files, prepend=-1) != 0) | (np.diff(places, prepend=-1) != 0)
        return np.diff(np.flatnonzero(is_first), append=len(files)).astype(np.int64)


def sources_of(source: Any) -> list[Any]:
    """The sources that a `ConcatSource` joins; or itself alone."""
    return getattr(source, "sources", [source])


# -- columns


class Columns(ABC):
    """An opened container: rows of named columns.

    It is opened in the parent process; its sources reach workers by fork or pickle.
    """

    names: Sequence[str]
    """Names of the columns, in order."""
    decoders: Mapping[str, str] = {}
    """For columns of encoded bytes, by name: the extension of a file with these bytes, such as
    "jpg", "json" or "txt", which selects the decoder.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def column(self, name: str) -> Source:
        """The values of one column; a `RowSource` if they are arrays of one shape and dtype."""

    def rows(self, names: Sequence[str]) -> Source:
        """Several columns, read together: a record is a dict of the values of a row."""
        return ColumnRows({name: self.column(name) for name in names})


class ColumnRows(Source):
    """Columns that are read one after the other."""

    def __init__(self, columns: Mapping[str, Source]) -> None:
        self._columns = dict(columns)
        self._first = next(iter(self._columns.values()))
        self.thread_safe = all(column.thread_safe for column in self._columns.values())

    def __len__(self) -> int:
        return len(self._first)

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        read = [column.read(indices) for column in self._columns.values()]
        return [dict(zip(self._columns, values, strict=True)) for values in zip(*read, strict=True)]

    def describe(self) -> Description:
        found = Description()
        for name, column in self._columns.items():
            described = column.describe()
            found.columns += [replace(part, name=name) for part in described.columns]
            found.stored += described.stored
        return found

    def fingerprint(self) -> str:
        said = [f"{name}:{column.fingerprint()}" for name, column in self._columns.items()]
        return hashlib.blake2b("\0".join(said).encode(), digest_size=16).hexdigest()

    def blocks(self) -> Any:
        return self._first.blocks()

    def location(self, index: int) -> str:
        return self._first.location(index)

    def close(self) -> None:
        for column in self._columns.values():
            column.close()
