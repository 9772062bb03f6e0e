"""Arrow files and streams: of record batches that lie on this machine as they are in memory only
the rows are read, others are read as a whole and decoded by pyarrow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

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
from headrace.storage.table.in_place import Batch, StoredRows, batch_of, fits
from headrace.storage.table.library import pyarrow, read_batch
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


class _Known(NamedTuple):
    """What is known of the record batches of a file.

    Attributes:
        arrays: of pyarrow's, which say what columns are like: see `Batch`.
        places: [2, batches, buffers] where the buffers of record batches begin and end.
        is_known: [batches] of which.
    """

    arrays: list[Any]
    places: IntArray
    is_known: npt.NDArray[np.bool_]


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
        self._known: _Known | None = None
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
        self._known = None
        is_plain = not self._files.is_remote and not self.is_packed
        self.is_in_place = is_plain and all(fits(self.schema.field(name).type) for name in names)

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
        return read_batch([memoryview(self._head), held[0][1]], self.schema, self.chosen.names)

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
            known = self._learn(blocks)
            starts, stops = known.places[:, blocks]
            stored = StoredRows(self._files, self.path, rows, starts.T, stops.T)
            columns = dict[str, Column]()
            for name, array in zip(self.chosen.names, known.arrays, strict=True):
                columns[name] = stored.column(name, array, self.chosen.shapes.get(name))
            return Block(columns, len(rows), 0)

    def _learn(self, blocks: IntArray) -> _Known:
        """What is known of record batches, these among them."""
        known = self._known
        if known is None:
            first = self._batch(int(blocks[0]))
            places = np.empty((2, len(self.rows), len(first.starts)), np.int64)
            known = _Known(first.arrays, places, np.zeros(len(self.rows), bool))
            self._known = known  # of threads that come here together each goes on with its own
        for number in distinct(blocks[~known.is_known[blocks]]).tolist():
            batch = self._batch(number)
            known.places[:, number] = batch.starts, batch.stops
            known.is_known[number] = True
        return known

    def _batch(self, number: int) -> Batch:
        start, stop = int(self._starts.array[number]), int(self._stops.array[number])
        begin = self._read(start, min(stop, start + _LOCAL))
        at = 8 if begin.startswith(CONTINUED) else 4  # before Arrow 0.15
        body = start + at + struct.unpack_from("<i", begin, at - 4)[0]
        metadata = begin[: body - start]
        if body - start > len(begin):
            metadata = self._read(start, body)
        return batch_of(self._head, metadata, body, stop, self.schema, self.chosen.names)

    def _read(self, start: int, stop: int) -> bytes:
        return self._files.read_joined(ByteRanges.of([(self.path, start, stop)]))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": None}
