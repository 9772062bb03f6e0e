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
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from headrace.dtypes import AnyArray, ArraySpec, IntArray, distinct
from headrace.errors import FormatError
from headrace.formats import source
from headrace.formats.arrays.chunks import Chunks
from headrace.formats.arrays.reader import OpenArrays, OpenSource, visit
from headrace.formats.arrays.rows import layout_fingerprint
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.source import Description, Rows, RowSource
from headrace.formats.table.arrow import INDEX, ArrowTable
from headrace.formats.table.columns import Column, Numbers, pyarrow, storage_of, what_is
from headrace.formats.table.files import (
    TAIL,
    ParquetTable,
    TableFile,
    kind_of_table,
    table_paths,
)
from headrace.io.files import Files
from headrace.io.index import learn_indexed
from headrace.io.local_files import LocalFiles
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray

_WIDE = 8 << 10  # bytes of a row that are worth a copy by itself
_NULL = "null"
_FEW = 8  # rows of a block that are copied one by one, rather than together

Out = AnyArray | list[Any]
"""Where the values of a column go: the rows of an array, or a list."""


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
    server = files.server
    reader: Files = server or LocalFiles()
    paths = table_paths(files, shown)
    kinds = list(map(kind_of_table, paths))
    if server is not None:
        arrow = [path for path, kind in zip(paths, kinds, strict=True) if kind == "arrow"]
        learn_indexed(server, arrow, INDEX)
        server.learn(paths)
    tails = []
    for path, kind in zip(paths, kinds, strict=True):
        size = reader.version(path).size
        if not size:
            raise FormatError(f"{redact(path)} is empty (0 bytes): fetch or write it again")
        if kind == "parquet":
            tails.append((path, max(0, size - TAIL), size))
    opened: list[TableFile] = []
    each = iter(reader.read_each(ByteRanges.of(tails)))
    for path, kind in zip(paths, kinds, strict=True):
        if kind == "parquet":
            opened.append(ParquetTable(path, redact(path), reader, next(each)))
        else:
            opened.append(ArrowTable(path, redact(path), reader))
    if server is None:
        reader.close()  # each process opens what it reads
    return opened, reader


class _Blocks(Chunks):
    """The blocks of all files of a table, as chunks of a column of rows.

    Args:
        tables: the files.
        files: by which they are read.

    Attributes:
        starts: the first row of each block that has rows, and the end of the last.
        tables, table_of: the files, and the number of each block's.
        sizes: bytes of each block, decoded.
        nbytes: of the largest.
    """

    def __init__(self, tables: Sequence[TableFile], files: Files) -> None:
        self.tables = tables
        self._files = files
        rows = np.concatenate([table.rows for table in tables])
        counts = [len(table.rows) for table in tables]
        numbers = np.concatenate(list(map(np.arange, counts)))
        sizes = np.concatenate([table.nbytes for table in tables])
        filled = rows > 0
        self.starts = SharedArray(np.cumsum([0, *rows[filled]]))
        self.table_of = SharedArray(np.repeat(np.arange(len(counts)), counts)[filled])
        self.number_of = SharedArray(numbers[filled])
        self.sizes = SharedArray(sizes[filled])
        self.nbytes = int(sizes[filled].max(initial=0))

    def _at(self, block: int) -> tuple[TableFile, int]:
        return self.tables[int(self.table_of.array[block])], int(self.number_of.array[block])

    def ranges(self, blocks: Sequence[int]) -> list[ByteRanges]:
        """Where the bytes of blocks lie."""
        found = []
        for block in blocks:
            table, number = self._at(block)
            found.append(table.ranges(number))
        return found

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """First byte and bytes of the ranges of blocks."""
        ranges = self.ranges(numbers)
        views = iter(self._files.read(ByteRanges.joined(ranges)))
        return [list(zip(one.start.tolist(), views, strict=False)) for one in ranges]

    def decode(self, number: int, data: Any) -> Any:
        table, inside = self._at(number)
        return table.decode(inside, data)

    def check_cached(self, number: int) -> None:
        self._files.check(self._at(number)[0].path)


class TableSource(OpenSource, RowSource):
    """The rows of the files of a table, one file after the other.

    Records are values of one column; or, of several, dicts of them: see `Column.values`.

    Args:
        tables: the files, one at least.
        files: by which they are read.
        names: of the columns; a str: records are the values of that one.

    Raises:
        MissingNameError, FormatError: a file lacks one of the columns, or has it in another type
            than the first.
    """

    def __init__(
        self, tables: Sequence[TableFile], files: Files, names: str | Sequence[str]
    ) -> None:
        super().__init__(OpenArrays(files))
        self.tables: list[TableFile] = list(tables)
        self.is_one: bool = isinstance(names, str)
        self.names = (names,) if isinstance(names, str) else tuple(names)
        filled = [table for table in self.tables if table.rows.any()]
        for table in self.tables:
            table.choose(self.names)
        nulls = [list(table.kinds.values()).count(_NULL) for table in filled or self.tables]
        first = self.first = (filled or self.tables)[nulls.index(min(nulls))]
        """The first one with rows, and with types: without values a column may be anything."""
        for table in filled:
            for name in self.names:
                is_missing = table.kinds[name] == _NULL and first.spec(name) is None
                if table.kinds[name] != first.kinds[name] and not is_missing:
                    raise FormatError(
                        f"{table.shown} and {first.shown} can't be one table: column {name!r} is "
                        f"{table.kinds[name]} here, and {first.kinds[name]} there"
                    )
        self._blocks = _Blocks(self.tables, files)
        self._firsts = np.cumsum([0, *(int(table.rows.sum()) for table in self.tables)])
        self._in_place = np.array([table.is_in_place for table in self.tables], bool)
        self.is_in_place: bool = all(table.is_in_place for table in filled)
        """True if nothing is decoded, for the files lie on this machine, and not compressed."""
        self.specs: dict[str, ArraySpec | None] = {name: first.spec(name) for name in self.names}
        """Shape and dtype of the values of each column, if they are alike."""
        # there is no room for all blocks, which the next epoch would find decoded
        self._drops_used = True

    # -- what it is

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def blocks(self) -> IntArray:
        return np.diff(self._blocks.starts.array)

    @property
    def block_nbytes(self) -> int:
        if self.is_in_place:
            return 0
        return self._blocks.nbytes

    @property
    def layout_nbytes(self) -> int:
        return self._blocks.nbytes

    @property
    def decoded_nbytes(self) -> int:
        if self.is_in_place:
            return 0
        # the bits that say which values are there are no part of `block_nbytes`, from which lanes
        # follow
        specs = [spec for spec in self.specs.values() if spec is not None]
        masks = sum(-(-math.prod(spec.shape) // 8) for spec in specs)
        return int(self._blocks.sizes.array.sum()) + len(self) * masks

    def hold_chunks(self, nbytes: int) -> None:
        super().hold_chunks(nbytes)
        self._drops_used = nbytes < self.decoded_nbytes

    @property
    def stored_nbytes(self) -> int:
        ranges = self._blocks.ranges(range(len(self.blocks())))
        return sum(int(one.nbytes.sum()) for one in ranges)

    def fingerprint(self) -> str:
        """A hash of names and types of the columns, and of the rows of each block."""
        rows = [table.rows.tolist() for table in self.tables]
        return layout_fingerprint([list(self.first.kinds.items()), self.is_one, rows])

    @contextlib.contextmanager
    def of_one_version(self) -> Iterator[list[list[Any]] | None]:
        """As `TextFilesSource.of_one_version`: each read is of the version that was found at the
        start.
        """
        identities = [self.files.identity(table.path) for table in self.tables]
        is_known = all(identity[-1] is not None for identity in identities)
        yield identities if is_known else None

    def location(self, index: int) -> str:
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return f"{self.tables[number].shown}, row {index - int(self._firsts[number])}"

    def describe(self) -> Description:
        read = "ranges" if self.files.is_remote else "pread"
        ways: dict[str, None] = {}
        for table in self.tables:
            way = "of the rows" if table.is_in_place else f"+ pyarrow, a {table.block_is} at a time"
            ways[f"{table.blocks_are} of {table.kind}, {read} {way}"] = None
        sizes = self._blocks.sizes.array
        column = source.Column("rows", "; ".join(ways))
        column.sample = ", ".join(f"{name} {self.first.kinds[name]}" for name in self.names)
        column.nbytes = column.read = int(sizes.sum()) // max(1, len(self))
        if not self.is_in_place and len(sizes):
            column.chunks = 1
            column.decoded = int(np.median(sizes))
            column.read = self.stored_nbytes // len(sizes)
        facts = {"files": self.files.explain()} if self.files.is_remote else {}
        return Description([column], facts, len(self.tables), self.stored_nbytes)

    # -- reading

    @property
    def array_spec(self) -> ArraySpec | None:
        if self.is_one:
            return self.specs[self.names[0]]
        return None

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        if isinstance(rows, np.ndarray):
            self.read_columns(indices, {self.names[0]: rows})
        else:
            super().read_into(indices, rows)

    def read(self, indices: Sequence[int]) -> list[Any]:
        columns: dict[str, Out] = {name: [None] * len(indices) for name in self.names}
        self.read_columns(indices, columns)
        if self.is_one:
            return cast(list[Any], columns[self.names[0]])
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

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
        starts = self._blocks.starts.array
        numbers = np.searchsorted(starts, rows, side="right") - 1
        places = numbers.argsort(kind="stable")
        numbers = numbers[places]
        inner = rows[places] - starts[numbers]
        tables = self._blocks.table_of.array[numbers]
        is_decoded = ~self._in_place[tables]
        for first, last in _runs(tables):
            table = self.tables[int(tables[first])]
            if not is_decoded[first]:
                some = slice(first, last)
                columns = table.take(self._blocks.number_of.array[numbers[some]], inner[some])
                _write(columns, np.arange(last - first), places[some], outs)
            elif not self.files.is_remote:  # a server is not asked
                self.files.check(table.path)
        if is_decoded.any():
            self._visit(numbers[is_decoded], inner[is_decoded], places[is_decoded], outs)

    def _visit(
        self, numbers: IntArray, rows: IntArray, places: IntArray, outs: Mapping[str, Out]
    ) -> None:
        """Writes rows of blocks that are decoded, sorted by block."""
        runs = _runs(numbers)
        blocks = numbers[[first for first, _ in runs]].tolist()
        used = [0] * len(runs)
        if self._drops_used:
            used = [last - first for first, last in runs]

        row_of = rows.tolist()
        place_of = places.tolist()

        def use(at: int, block: Any) -> None:
            first, last = runs[at]
            columns: dict[str, Any] = block.content
            if last - first >= _FEW:
                _write(columns, rows[first:last], places[first:last], outs)
                return
            for name, out in outs.items():
                column = columns[name]
                value = column.value if isinstance(out, list) else column.view
                for one in range(first, last):
                    out[place_of[one]] = value(row_of[one])

        visit(self._blocks, self._opened.chunks, "", blocks, used, use, self.run)

    def byte_ranges(self, indices: IntArray) -> ByteRanges:
        starts = self._blocks.starts.array
        numbers = distinct(np.searchsorted(starts, indices, side="right") - 1)
        return ByteRanges.joined(self._blocks.ranges(numbers.tolist()))

    # -- whole columns

    def column(self, name: str) -> list[Any] | AnyArray:
        """All values of a column, which may be one that is not read else: numbers as an array [n],
        others as a list.

        Raises:
            FormatError: a number is missing; the message says in which row.
        """
        alone = TableSource(list(map(copy.copy, self.tables)), self.files, name)
        spec = alone.array_spec

        def read(rows: range) -> Out:
            out: Out = [None] * len(rows)
            if spec is not None:
                out = np.empty((len(rows), *spec.shape), spec.dtype)
            alone.read_columns(rows, {name: out})
            return out

        rows = range(len(alone))
        try:
            return read(rows)
        except FormatError as error:
            while len(rows) > 1:  # the first row that can't be read
                half = rows[: len(rows) // 2]
                try:
                    read(half)
                    rows = rows[len(half) :]
                except FormatError:
                    rows = half
            raise FormatError(f"{alone.location(rows[0])}: {error}") from error

    def targets(self, name: str) -> tuple[Any, list[str]]:
        """A column as targets, and the names of their classes: those of dictionary-encoded texts
        become numbers, in the sorted order of the texts.

        Raises:
            MissingNameError: there is no such column.
            FormatError: a value is missing; the message says in which row.
        """
        values = self.column(name)
        for row, value in enumerate(values if isinstance(values, list) else ()):
            if value is None:
                raise FormatError(f"{self.location(row)}: column {name!r} has no target (null)")
        kind = self.first.schema.field(name).type
        if what_is(kind) != "text" or not pyarrow().types.is_dictionary(storage_of(kind)):
            return values, self.first.classes(name)
        classes = sorted(set(values))
        numbers = {text: number for number, text in enumerate(classes)}
        return np.array([numbers[text] for text in values], np.int64), classes


def _runs(numbers: IntArray) -> list[tuple[int, int]]:
    """Where runs of equal numbers begin and end."""
    if not len(numbers):
        return []
    edges = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    return list(itertools.pairwise([0, *edges.tolist(), len(numbers)]))


def _write(
    columns: Mapping[str, Column], rows: IntArray, places: IntArray, outs: Mapping[str, Out]
) -> None:
    """Copies rows of a block to their places."""
    for name, out in outs.items():
        column = columns[name]
        if isinstance(out, list):
            for place, value in zip(places.tolist(), column.values(rows), strict=True):
                out[place] = value
            continue
        assert isinstance(column, Numbers)
        if out[:1].nbytes < _WIDE:
            out[places] = column.take(rows)
            continue
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            out[place] = column.view(row)
