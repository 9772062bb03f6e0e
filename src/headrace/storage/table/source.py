"""The rows of Parquet and Arrow files as records: row groups and record batches are read and
decoded once for all rows of a batch.

NOTE [ from a batch's indices to the rows of tables ]

1. The block of each row is looked up in the numbers of the blocks' first rows. Each block of a
  batch is taken once.
2. Blocks that need decoding come from the cache of decoded chunks, an LRU within the memory budget.
  The bytes of the others are read, all
by one call, and decoded, in threads if there are any. A block that has yielded all its rows is
dropped, unless there is memory for all: under a block shuffle it is not needed again.
3. Record batches of local uncompressed files are not decoded: only the bytes of the rows are read,
  column by column.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import FormatError
from headrace.io.files import Files
from headrace.io.index import learn_indexed
from headrace.io.local.files import LocalFiles
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.resolve.file_set import FileSet
from headrace.memory.anonymous import SharedArray
from headrace.sorting import distinct
from headrace.storage.arrays.reader import ChunkCache, Decoded
from headrace.storage.describe import Column, Description
from headrace.storage.source import Locatable, Rows, RowSource
from headrace.storage.table.arrow import INDEX, ArrowTable
from headrace.storage.table.columns import Numbers
from headrace.storage.table.files import PARQUET_MAGIC, TABLES, Block, TableFile, table_paths
from headrace.storage.table.library import pyarrow
from headrace.storage.table.parquet import TAIL, ParquetTable

# decoded bytes of the blocks whose stored bytes are fetched from a server, and held, at once
_GROUP = 64 << 20
_LOCAL_GROUP = 16 << 20  # the same of local files, which are read into memory that is used again
_WIDE = 8 << 10  # bytes of a row that are worth a copy by itself
_FEW = 8  # rows of a block that are copied one by one, rather than together

Out = npt.NDArray[Any] | list[Any]
"""Where the values of a column go: the rows of an array, or a list."""
_Row = tuple[Block, int, int]
"""A block, the number of a row in it, and its place in what is read."""


def open_tables(files: FileSet, shown: str) -> tuple[list[TableFile], Files]:
    """The Parquet and Arrow files of a path, and by what they are read.

    Args:
        files: what the path means.
        shown: the path, for messages.

    Raises:
        FormatError: one of them is no such file, or is damaged.
        AccessError, RemoteError: one can't be read.
        ConfigError: pyarrow is not installed.
    """
    pyarrow()
    server, numbers = files.server, table_paths(files, shown)
    reader: Files = server or LocalFiles()
    paths = [files.url(number) for number in numbers]
    if server is not None:
        learn_indexed(server, [path for path in paths if not _ends_as_parquet(path)], INDEX)
        server.learn(paths)
    sizes = [reader.version(path).size for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if not size:
            raise FormatError(f"{redact(path)} is empty (0 bytes): fetch or write it again")
    are_parquet = [_is_parquet(path, reader) for path in paths]
    of_parquet = [
        (path, max(0, size - TAIL), size)
        for path, size, fits in zip(paths, sizes, are_parquet, strict=True)
        if fits
    ]
    tails = iter(reader.read_each(ByteRanges.of(of_parquet)))
    opened: list[TableFile] = []
    for path, is_parquet in zip(paths, are_parquet, strict=True):
        shown_path = redact(path)
        opened.append(
            ParquetTable(path, shown_path, reader, next(tails))
            if is_parquet
            else ArrowTable(path, shown_path, reader)
        )
    if server is None:
        reader.close()  # each process opens what it reads
    return opened, reader


def _is_parquet(path: str, files: Files) -> bool:
    """By its name, or, of a file of this machine whose name says nothing, by its first bytes."""
    if files.is_remote or TABLES.fits(path):
        return _ends_as_parquet(path)
    return files.read_joined(ByteRanges.of([(path, 0, len(PARQUET_MAGIC))])) == PARQUET_MAGIC


def _ends_as_parquet(path: str) -> bool:
    return path.partition("?")[0].lower().endswith((".parquet", ".pq"))


class TableSource(RowSource, Locatable):
    """The rows of the files of a table, one file after the other.

    Records are values of one column; or, of several, dicts of them: see `Column.values`.

    Args:
        tables: the files, one at least.
        files: by which they are read.
        names: of the columns.
        is_one: True if a record is the value of the one column.

    Raises:
        MissingNameError, FormatError: a file lacks one of the columns, or has it in another type
            than the first.
    """

    def __init__(
        self, tables: Sequence[TableFile], files: Files, names: Sequence[str], is_one: bool
    ) -> None:
        self.tables, self.files, self.names, self.is_one = list(tables), files, tuple(names), is_one
        first = self.first = next(
            (table for table in self.tables if table.rows.any()), self.tables[0]
        )
        """The first one with rows: of a table without any the types may be anything."""
        for table in self.tables:
            table.choose(self.names)
            for name in self.names if table.rows.any() and table.kinds != first.kinds else ():
                if table.kinds[name] != first.kinds[name]:
                    raise FormatError(
                        f"{table.shown} and {first.shown} can't be one table: column {name!r} is "
                        f"{table.kinds[name]} here, and "
                        f"{first.kinds[name]} there"
                    )
        rows = [table.rows for table in self.tables]
        filled = np.concatenate(rows) > 0
        self._starts = SharedArray(
            np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(rows)[filled])])
        )
        self._table_of = SharedArray(np.repeat(np.arange(len(rows)), list(map(len, rows)))[filled])
        self._number_of = SharedArray(np.concatenate([np.arange(len(one)) for one in rows])[filled])
        self._firsts = np.cumsum([0, *(int(one.sum()) for one in rows)])
        nbytes = np.concatenate([table.nbytes for table in self.tables])[filled]
        self._nbytes = SharedArray(nbytes.astype(np.int64))
        self.is_in_place: bool = all(table.is_in_place for table in self.tables)
        """True if nothing is decoded, for the files lie on this machine, and not compressed."""
        in_place = np.array([table.is_in_place for table in self.tables], bool)
        self._in_place = in_place[self._table_of.array]
        self.layout_nbytes: int = int(nbytes.max(initial=0))
        """Bytes of the largest block when it is decoded, wherever it lies."""
        self.specs: dict[str, ArraySpec | None] = {name: first.spec(name) for name in self.names}
        """Shape and dtype of the values of each column, if they are alike."""
        self._decoded = ChunkCache(0)
        # there is no room for all blocks, which the next epoch would find decoded
        self._drops_used = True
        self._counts = Counter[str]()

    # -- what it is

    def __len__(self) -> int:
        return int(self._starts.array[-1])

    def blocks(self) -> npt.NDArray[np.int64]:
        return np.diff(self._starts.array)

    @property
    def block_nbytes(self) -> int:
        return 0 if self.is_in_place else self.layout_nbytes

    @property
    def decoded_nbytes(self) -> int:
        masks = sum(
            int(table.rows.sum()) * table.mask_nbytes for table in self.tables
        )  # no part of `block_nbytes`, which lanes follow from
        return 0 if self.is_in_place else int(self._nbytes.array.sum()) + masks

    def hold_chunks(self, nbytes: int) -> None:
        self._decoded.resize(nbytes)
        self._drops_used = nbytes < self.decoded_nbytes

    @property
    def stored_nbytes(self) -> int:
        ranges = [one for table in self.tables for one in table.ranges(range(len(table.rows)))]
        return sum(int(one.nbytes.sum()) for one in ranges)

    def fingerprint(self) -> str:
        """A hash of names and types of the columns, and of the rows of each block."""
        said = [
            list(self.first.kinds.items()),
            self.is_one,
            [table.rows.tolist() for table in self.tables],
        ]
        return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()

    @contextlib.contextmanager
    def of_one_version(self) -> Iterator[list[list[Any]] | None]:
        """As `TextFilesSource.of_one_version`: each read is of the version that was found at the
        start.
        """
        of = [self.files.identity(table.path) for table in self.tables]
        yield None if any(tag is None for *_, tag in of) else of

    def location(self, index: int) -> str:
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return f"{self.tables[number].shown}, row {index - int(self._firsts[number])}"

    def describe(self) -> Description:
        read = "ranges" if self.files.is_remote else "pread"
        ways: Counter[str] = Counter()
        for table in self.tables:
            way = "of the rows" if table.is_in_place else f"+ pyarrow, a {table.block_is} at a time"
            ways[f"{table.blocks_are} of {table.kind}, {read} {way}"] += len(table.rows)
        sizes = self._nbytes.array
        column = Column("rows", "; ".join(f"{count:,} {way}" for way, count in ways.items()))
        column.sample = ", ".join(f"{name} {self.first.kinds[name]}" for name in self.names)
        column.nbytes = column.read = int(sizes.sum()) // max(1, len(self))
        if not self.is_in_place and len(sizes):
            column.chunks = 1
            column.decoded = int(np.median(sizes))
            column.read = self.stored_nbytes // len(sizes)
        facts = {"files": self.files.explain()} if self.files.is_remote else {}
        return Description([column], facts, len(self.tables), self.stored_nbytes)

    def take_counts(self) -> Counter[str]:
        counts = super().take_counts()
        counts.update(self._counts)
        self._counts.clear()
        return counts

    def close(self) -> None:
        """Closes what this process has open; decoded blocks are forgotten."""
        self._decoded.close()
        self.files.close()

    # -- reading

    @property
    def array_spec(self) -> ArraySpec | None:
        return self.specs[self.names[0]] if self.is_one else None

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        name = self.names[0]
        if isinstance(rows, np.ndarray):
            self.read_columns(indices, {name: rows})
            return
        values: list[Any] = [None] * len(rows)
        self.read_columns(indices, {name: values})
        for row, value in zip(rows, values, strict=True):
            row[...] = value

    def read(self, indices: Sequence[int]) -> list[Any]:
        columns: dict[str, Out] = {name: [None] * len(indices) for name in self.names}
        self.read_columns(indices, columns)
        if self.is_one:
            return cast(list[Any], columns[self.names[0]])
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def read_afresh(self, indices: Sequence[int]) -> list[Any]:
        self._decoded.close()
        return super().read_afresh(indices)

    def read_columns(self, indices: Sequence[int] | IntArray, outs: Mapping[str, Out]) -> None:
        """Writes the values of rows into the rows of arrays, of the shapes and dtypes in `specs`,
        or into lists.

        Args:
            indices: of the rows.
            outs: for each of some columns where its values go, as many as `indices`.

        Raises:
            FormatError: a block is damaged; a number is missing.
            OSError: a file can't be read.
        """
        rows = np.asarray(indices, np.int64)
        if not len(rows):
            return
        starts = self._starts.array
        numbers = np.searchsorted(starts, rows, side="right") - 1
        order = numbers.argsort(kind="stable")
        numbers = numbers[order]
        inner = rows[order] - starts[numbers]
        in_place = self._in_place[numbers]
        if in_place.any():
            self._take(numbers[in_place], inner[in_place], order[in_place], outs)
            numbers, inner, order = numbers[~in_place], inner[~in_place], order[~in_place]
        if not len(numbers):
            return
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        of = numbers[edges[:-1]].tolist()
        self._check({int(table) for table in self._table_of.array[of].tolist()})
        missing, few, many = list[int](), list[_Row](), list[tuple[Block, int, int]]()
        each, places = inner.tolist(), order.tolist()
        cached = self._decoded.get_many("", of)
        for at, (number, kept, first, last) in enumerate(
            zip(of, cached, edges, edges[1:], strict=False)
        ):
            if kept is None:
                missing.append(at)
                continue
            block = self._used(number, kept, last - first)
            if last - first < _FEW:
                few += [(block, each[one], places[one]) for one in range(first, last)]
            else:
                many.append((block, first, last))
        _write_rows(few, outs)
        _write_blocks(many, inner, order, outs)
        self._counts["chunk_hits"] += len(of) - len(missing)
        self._counts["chunks_decoded"] += len(missing)
        for some in self._in_groups(missing, of):
            held = self._read_blocks([of[at] for at in some])

            def work(at: int, some: list[int] = some, held: list[Any] = held) -> None:
                place, stored, held[at] = some[at], held[at], None
                number, first, last = of[place], edges[place], edges[place + 1]
                block = self._table(number).decode(int(self._number_of.array[number]), stored)
                _write_blocks([(block, first, last)], inner, order, outs)
                self._decoded.used(("", number), block, last - first if self._drops_used else 0)

            self.run(work, len(some))

    def _take(
        self, numbers: IntArray, inner: IntArray, order: IntArray, outs: Mapping[str, Out]
    ) -> None:
        """Reads rows of blocks of which only their bytes are read, sorted by block."""
        tables = self._table_of.array[numbers]
        edges = [0, *(np.flatnonzero(np.diff(tables)) + 1).tolist(), len(tables)]
        rows = np.arange(len(tables))
        taken = list[tuple[Block, int, int]]()
        for first, last in itertools.pairwise(edges):
            of = self._number_of.array[numbers[first:last]]
            block = self.tables[int(tables[first])].take(of, inner[first:last])
            taken.append((block, first, last))
            rows[first:last] -= first
        _write_blocks(taken, rows, order, outs)

    def _check(self, tables: set[int]) -> None:
        """Compares local files with what they were when they were opened; a FileChangedError, if
        they are others. A server is not asked.
        """
        if not self.files.is_remote:
            for number in tables:
                self.files.check(self.tables[number].path)

    def _table(self, number: int) -> TableFile:
        return self.tables[int(self._table_of.array[number])]

    def _used(self, number: int, held: Decoded, rows: int) -> Block:
        """A decoded block, of which so many rows are taken: it stays in the cache, if others are
        left.
        """
        if self._drops_used:
            held.left -= rows
            if held.left <= 0:
                self._decoded.drop(("", number))
        block: Block = held.chunk
        return block

    def _in_groups(self, missing: list[int], of: list[int]) -> list[list[int]]:
        """Places of blocks that are read together."""
        groups, nbytes, most = (
            list[list[int]](),
            math.inf,
            _GROUP if self.files.is_remote else _LOCAL_GROUP,
        )
        for at in missing:
            size = int(self._nbytes.array[of[at]])
            if nbytes + size > most:
                groups.append([])
                nbytes = 0
            groups[-1].append(at)
            nbytes += size
        return groups

    def _ranges(self, numbers: Sequence[int]) -> list[ByteRanges]:
        return [
            self._table(number).ranges([int(self._number_of.array[number])])[0]
            for number in numbers
        ]

    def _read_blocks(self, numbers: Sequence[int]) -> list[list[tuple[int, memoryview]]]:
        """First byte and bytes of the ranges of blocks."""
        each = self._ranges(numbers)
        views = iter(self.files.read(ByteRanges.joined(each)))
        return [
            [
                (start, view)
                for start, view in zip(one.start.tolist(), views, strict=False)
                if view is not None
            ]
            for one in each
        ]

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        if not len(indices):
            return ByteRanges.of([])
        numbers = distinct(np.searchsorted(self._starts.array, indices, side="right") - 1)
        return ByteRanges.joined(self._ranges(numbers.tolist()))

    # -- whole columns

    def column(self, name: str) -> list[Any] | npt.NDArray[Any]:
        """All values of a column, which may be one that is not read else: numbers as an array [n],
        others as a list.

        Raises:
            FormatError: a number is missing; the message says in which row.
        """
        alone = TableSource(list(map(copy.copy, self.tables)), self.files, [name], True)

        def read(rows: range) -> Out:
            spec = alone.array_spec
            out: Out = (
                [None] * len(rows)
                if spec is None
                else np.empty((len(rows), *spec.shape), spec.dtype)
            )
            alone.read_columns(rows, {name: out})
            return out

        try:
            return read(range(len(alone)))
        except FormatError as error:
            raise FormatError(
                f"{alone.location(_first_failing(read, len(alone)))}: {error}"
            ) from error


def _first_failing(read: Callable[[range], object], count: int) -> int:
    """The first of so many rows that raises a FormatError where it is read; one does."""
    first, end = 0, count
    while end - first > 1:
        middle = (first + end) // 2
        try:
            read(range(first, middle))
        except FormatError:
            end = middle
        else:
            first = middle
    return first


def _write_blocks(
    parts: Sequence[tuple[Block, int, int]],
    rows: IntArray,
    places: IntArray,
    outs: Mapping[str, Out],
) -> None:
    """Copies rows of several blocks to their places: of each block the rows from a first number
    to an end, among all `rows`.
    """
    if not parts:
        return
    those = (
        places[parts[0][1] : parts[0][2]]
        if len(parts) == 1
        else np.concatenate([places[first:last] for _, first, last in parts])
    )
    for name, out in outs.items():
        if not isinstance(out, np.ndarray):
            values = [
                value
                for block, first, last in parts
                for value in block.columns[name].values(rows[first:last])
            ]
            for place, value in zip(those.tolist(), values, strict=True):
                out[place] = value
            continue
        numbers = [
            (cast(Numbers, block.columns[name]), first, last) for block, first, last in parts
        ]
        if out[:1].nbytes < _WIDE:
            taken, at = np.empty((len(those), *out.shape[1:]), out.dtype), 0
            for column, first, last in numbers:
                column.take(rows[first:last], taken[at : (at := at + last - first)])
            out[those] = taken
            continue
        for column, first, last in numbers:
            # each is copied once
            for row, place in zip(
                rows[first:last].tolist(), places[first:last].tolist(), strict=True
            ):
                out[place] = column.view(row)


def _write_rows(rows: Sequence[_Row], outs: Mapping[str, Out]) -> None:
    """Copies rows of several blocks to their places."""
    for name, out in outs.items():
        if isinstance(out, np.ndarray):
            for block, row, place in rows:
                out[place] = block.columns[name].view(row)  # type: ignore[attr-defined]
        else:
            for block, row, place in rows:
                out[place] = block.columns[name].value(row)
