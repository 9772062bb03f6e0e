"""Arrow files and streams: of record batches that lie on this machine as they are in memory only
the rows are read, others are read as a whole and decoded by pyarrow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.array_file import Arrays
from headrace.io.files import Files
from headrace.io.index import IndexKind, index_of
from headrace.io.library_errors import asking
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.memory.anonymous import SharedArray
from headrace.sorting import distinct
from headrace.storage.table.columns import Column
from headrace.storage.table.files import Block, TableFile, unknown
from headrace.storage.table.in_place import Batch, StoredRows, batch_of, fits, nothing_else
from headrace.storage.table.library import HeldBytes, pyarrow
from headrace.storage.table.messages import CONTINUED, Layout, Message, layout_of

# bytes of a stream that are read at once to look for its messages
_LOCAL, _REMOTE = 4 << 10, 1 << 20


def _layout(files: Files, path: str, window: int) -> Layout:
    def read(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return files.read_each(ByteRanges.of([(path, start, stop) for start, stop in ranges]))

    return layout_of(read, files.version(path).size, window)


def _make_index(files: RemoteFiles, url: str) -> Arrays:
    layout = _layout(files, url, _REMOTE)
    messages = [layout.schema, *layout.dictionaries, *layout.batches]
    head = np.frombuffer(_head(files, url, layout), np.uint8)
    return [
        np.array([len(layout.dictionaries)], np.int64),
        np.array(messages, np.int64).reshape(-1),
        head,
    ]


def _head(files: Files, path: str, layout: Layout) -> bytes:
    """The schema and all dictionaries: with these each record batch is a stream of its own."""
    heads = [
        (path, message.start, message.stop) for message in (layout.schema, *layout.dictionaries)
    ]
    return b"".join(files.read_each(ByteRanges.of(heads)))


INDEX = IndexKind("arrow", 1, ("<i8", "<i8", "u1"), _make_index)
"""How many dictionaries there are; and of the schema, these and all record batches where they lie,
their rows, and whether they are compressed; and the bytes of schema and dictionaries.
"""


class ArrowTable(TableFile):
    """An Arrow file ("Feather"), or a stream under the same ending, as HuggingFace's `datasets`
    writes it.

    Args:
        path, shown: see `TableFile`.
        files: by which it is read.

    Raises:
        FormatError: it is none, or cut short.
    """

    kind, block_is, blocks_are = "Arrow", "record batch", "record batches"

    def __init__(self, path: str, shown: str, files: Files) -> None:
        self._files = files
        try:
            if files.is_remote:
                count, table, head = index_of(cast(RemoteFiles, files), path, INDEX)
                self._head = head.tobytes()
                messages = [
                    Message(row[0], row[1], row[2], bool(row[3]))
                    for row in table.reshape(-1, 4).tolist()
                ]
                layout = Layout(
                    messages[0], messages[1 : 1 + int(count[0])], messages[1 + int(count[0]) :]
                )
            else:
                layout = _layout(files, path, _LOCAL)
                self._head = _head(files, path, layout)
        except FormatError as error:
            raise unknown(shown, "Arrow", error) from error
        places = np.array([batch[:3] for batch in layout.batches], np.int64).reshape(-1, 3)
        self._arrays: list[Any]
        self._known: IntArray
        self._are_known: npt.NDArray[np.bool_]
        self._starts, self._stops = SharedArray(places[:, 0]), SharedArray(places[:, 1])
        self.is_packed: bool = any(batch.is_packed for batch in (layout.schema, *layout.batches))
        """True if buffers are compressed, or of another byte order."""
        with asking("pyarrow", shown):
            schema = pyarrow().ipc.open_stream(self._head).schema
            names = schema.names
        if len(set(names)) < len(names):
            raise FormatError(
                f"{shown} has several columns of one name: write it again with names that differ"
            )
        super().__init__(path, shown, schema, places[:, 2].copy())

    def choose(self, names: Sequence[str]) -> None:
        super().choose(names)
        vars(self).update(self._nothing_known())
        is_plain = not self._files.is_remote and not self.is_packed
        self.is_in_place = is_plain and all(fits(self.schema.field(name).type) for name in names)

    def _nothing_known(self) -> dict[str, Any]:
        """The state before any record batch was read: arrays that say what columns are like, where
        the buffers of some record batches lie, and of which.
        """
        known, are_known = np.empty((2, 0, 0), np.int64), np.zeros(len(self.rows), bool)
        return {"_arrays": [], "_known": known, "_are_known": are_known}

    @property
    def nbytes(self) -> IntArray:
        # of compressed ones more, and nobody says how much
        stored: IntArray = self._stops.array - self._starts.array
        return np.maximum(stored, self.rows * self.fixed_nbytes) if self.is_packed else stored

    def ranges(self, blocks: Sequence[int]) -> list[ByteRanges]:
        if self.is_in_place:
            return [ByteRanges.of([])] * len(blocks)
        numbers = np.asarray(blocks, np.int64)
        starts, stops = self._starts.array[numbers], self._stops.array[numbers]
        return [
            ByteRanges.in_file(self.path, starts[at : at + 1], stops[at : at + 1])
            for at in range(len(numbers))
        ]

    def read(self, block: int, held: list[tuple[int, memoryview]]) -> Any:
        """As in `TableFile`: columns lie in what is held, where they are not compressed."""
        pa, batch = pyarrow(), held[0][1]
        size, head = len(self._head) + len(batch), memoryview(self._head)
        parts = HeldBytes(size, [(0, head), (len(head), batch)], nothing_else)
        options = pa.ipc.IpcReadOptions(
            included_fields=[self.schema.get_field_index(name) for name in self.chosen.names],
            use_threads=False,
        )
        stream = pa.ipc.open_stream(pa.PythonFile(parts, mode="r"), options=options)
        return stream.read_next_batch()

    def take(self, blocks: IntArray, rows: IntArray) -> Block:
        """Rows of record batches that lie as they are in memory.

        Args:
            blocks: [n] the record batch of each.
            rows: [n] its number in that.

        Raises:
            FormatError: the file is damaged.
            FileChangedError, OSError: it can't be read, or is another one.
        """
        with asking("pyarrow", self.shown):
            places = self._places(blocks)
            stored = StoredRows(self._files, self.path, rows, places[0].T, places[1].T)
            columns = dict[str, Column]()
            for name, array in zip(self.chosen.names, self._arrays, strict=True):
                columns[name] = stored.column(name, array, self.chosen.shapes.get(name))
            return Block(columns, len(rows), 0)

    def _places(self, blocks: IntArray) -> IntArray:
        """[2, n, buffers] where the buffers of record batches begin and end."""
        unknown_yet = blocks[~self._are_known[blocks]]
        for number in distinct(unknown_yet).tolist():
            batch = self._batch(number)
            if not self._are_known.any():
                self._arrays = batch.arrays
                self._known = np.empty((2, len(self.rows), len(batch.starts)), np.int64)
            self._known[:, number] = batch.starts, batch.stops
            self._are_known[number] = True
        return self._known[:, blocks]

    def _batch(self, number: int) -> Batch:
        start, stop = int(self._starts.array[number]), int(self._stops.array[number])
        begin = self._read(start, min(stop, start + _LOCAL))
        at = 8 if begin.startswith(CONTINUED) else 4  # before Arrow 0.15
        body = start + at + struct.unpack_from("<i", begin, at - 4)[0]
        metadata = begin[: body - start]
        if body - start > len(begin):
            metadata = self._read(start, body)
        return batch_of(self._head, metadata, (body, stop), self.chosen.names)

    def _read(self, start: int, stop: int) -> bytes:
        return self._files.read_joined(ByteRanges.of([(self.path, start, stop)]))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **self._nothing_known()}
