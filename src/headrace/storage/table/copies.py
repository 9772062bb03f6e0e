"""Plain copies of tables: what has to be decoded is decoded once, to record batches in `cache_dir`
that are mapped.

A random row of a Parquet file costs the decoding of its row group; one of its plain copy is read
where it lies. The copy holds the columns that are read, has one record batch for each row group,
and is made anew where the file is another one.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.array_file import HEAD, ArrayFile, ArrayWriter, FileArrays, Unkept
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.library_errors import asking
from headrace.io.ranges import ByteRanges
from headrace.io.single_flight import found_or_built
from headrace.memory.anonymous import up
from headrace.storage.table.arrow import map_file, read_batch, unmap
from headrace.storage.table.columns import whole_array
from headrace.storage.table.files import TableFile
from headrace.storage.table.library import pyarrow

_VERSION = 2
_PATIENCE_S = 60.0  # for another process that makes the same copy, while it writes nothing

ReadBlock = Callable[[TableFile, int], list[tuple[int, memoryview]]]
"""Gives first byte and bytes of the ranges of a block."""


class CopiedTable(TableFile):
    """A table whose columns are read from its plain copy.

    Args:
        table: whose columns were chosen.
        arrays: of the copy.
    """

    is_mapped = True

    def __init__(self, table: TableFile, arrays: FileArrays) -> None:
        super().__init__(table.path, table.shown, table.schema, table.rows)
        self.kind, self.block_is, self.blocks_are = table.kind, table.block_is, table.blocks_are
        self._table, self.chosen = table, table.chosen
        self._path = arrays.path
        # `arrays` may hold the whole copy in memory
        self._spans = arrays.short[0].reshape(-1, 2).copy()
        self._maps = WorkerFiles[mmap.mmap](map_file, unmap)

    def choose(self, names: Sequence[str]) -> None:
        if tuple(names) != self.chosen.names:
            raise FormatError(
                f"{self.shown}: the plain copy holds {list(self.chosen.names)}, not {list(names)}"
            )

    @property
    def nbytes(self) -> IntArray:
        return self._table.nbytes

    def ranges(self, blocks: Sequence[int]) -> list[ByteRanges]:
        return [ByteRanges.of([])] * len(blocks)

    def read(self, block: int, held: list[tuple[int, memoryview]]) -> Any:
        start, stop = self._spans[block]
        with self._maps.reading(self._path) as whole:
            stream = memoryview(whole)[HEAD + start : HEAD + stop]
            return read_batch(
                b"", stream, pyarrow().ipc.open_stream(stream).schema, self.chosen.names
            )

    def close(self) -> None:
        """Unmaps the copy."""
        self._maps.close()


def with_copy(
    table: TableFile, files: Files, folder: str, read: ReadBlock, progress: bool | None
) -> TableFile:
    """A table that is read from its plain copy, which is found or made; the table itself, if it
    needs none, or none can be kept.

    Args:
        table: whose columns were chosen.
        files: by which it is read.
        folder: where copies are kept.
        read: reads the stored bytes of a block.
        progress: show a progress bar; None: only on a terminal.

    Raises:
        FormatError, RemoteError, OSError: a block is damaged, or can't be read.
    """
    if table.is_mapped or files.version(table.path).tag is None:
        return table
    about = {
        "version": _VERSION,
        "of": files.identity(table.path),
        "columns": list(table.kinds.items()),
    }
    kept = ArrayFile(folder, "table", about)

    def build() -> FileArrays:
        with kept.writing("u1") as writer:
            writer.short([np.array(_write(table, writer, read, progress), np.int64)])
        return kept.open()

    with Unkept(
        folder, f"the plain copy of {table.shown} is", "its blocks are decoded when they are read"
    ):
        return CopiedTable(table, found_or_built(kept, _PATIENCE_S, build))
    return table


def _write(
    table: TableFile, writer: ArrayWriter, read: ReadBlock, progress: bool | None
) -> list[tuple[int, int]]:
    """Writes each block as a stream with its own dictionaries; where each begins and ends."""
    pa, spans = pyarrow(), list[tuple[int, int]]()
    names = list(table.chosen.names)
    end = 0
    with progress_bar(
        progress,
        is_short=len(table.rows) < 100,
        total=len(table.rows),
        desc="copying tables",
        unit="block",
    ) as bar:
        for number in range(len(table.rows)):
            if not table.rows[number]:
                spans.append((end, end))  # it is never read
                continue
            stored = read(table, number)
            sink = pa.BufferOutputStream()
            with asking("pyarrow", table.where(number)):
                whole = table.read(number, stored)
                arrays = [whole_array(whole.column(name)) for name in names]
                batch = pa.RecordBatch.from_arrays(arrays, names=names)
                with pa.ipc.new_stream(sink, batch.schema) as stream:
                    stream.write_batch(batch)
            message = sink.getvalue()
            start = up(end)
            writer.write(np.zeros(start - end, np.uint8))  # buffers are to lie aligned
            writer.write(np.frombuffer(message, np.uint8))
            end = start + message.size
            spans.append((start, end))
            bar.update(1)
    return spans


def unchosen(table: TableFile) -> TableFile:
    """A copy of a table, of which other columns can be chosen."""
    return copy.copy(table._table if isinstance(table, CopiedTable) else table)
