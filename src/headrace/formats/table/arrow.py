"""Arrow files and streams: of record batches that lie on this machine as they are in memory only
the rows are read, others are read as a whole and decoded by pyarrow.

An Arrow file ends with a footer that says where its record batches lie; a stream, as HuggingFace's
`datasets` writes it under the same ending, is a chain of messages, each of which says how long it
is. pyarrow reads the messages.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.formats.table.files import CONTINUED, MAGIC, Block, TableFile
from headrace.formats.table.in_place import Batch, StoredRows, batch_of, fits, read_batch
from headrace.formats.table.library import opened, pyarrow, zeros
from headrace.io.array_file import Arrays
from headrace.io.files import Files
from headrace.io.index import IndexKind, index_of
from headrace.io.library_errors import asking
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.memory.anonymous import SharedArray
from headrace.sorting import distinct

# bytes of a stream that are read at once to look for its messages
_LOCAL = 4 << 10
_REMOTE = 1 << 20
_TAIL = 64 << 10  # bytes at the end of a file that are read first
_LONGEST = 256 << 20  # bytes of the metadata of a message
_MOST_ROWS = 1 << 40  # of a record batch
_BLOCK = np.dtype([("start", "<i8"), ("metadata", "<i4"), ("pad", "<i4"), ("body", "<i8")])
"""Where a message lies, as the footer of a file has it."""


class _Layout(NamedTuple):
    """Where the parts of an Arrow file lie: first byte and end of the messages with the schema and
    with dictionaries ([n, 2]), and of the record batches, with their rows ([n, 3]).
    """

    heads: IntArray
    batches: IntArray


class _Scan:
    """Finds the messages of an Arrow file or stream.

    Args:
        files: by which it is read.
        path: of the file.
        window: bytes that are read at once to look for messages of a stream.
    """

    def __init__(self, files: Files, path: str, window: int) -> None:
        self._files = files
        self._path = path
        self._window = window
        self.size = files.version(path).size

    def layout(self) -> _Layout:
        """Where the parts lie.

        Raises:
            FormatError: the file is no Arrow file, or a damaged one; the message does not name it.
        """
        try:
            if self._read([(0, min(self.size, 8))])[0].startswith(MAGIC):
                return self._of_file()
            return self._of_stream()
        except (struct.error, pyarrow().ArrowException, OSError, ValueError) as error:
            raise FormatError(f"its messages can't be read ({error})") from error

    def _read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._files.read_each(
            ByteRanges.of([(self._path, start, stop) for start, stop in ranges])
        )

    def _of_file(self) -> _Layout:
        size = self.size
        tail = self._read([(max(0, size - _TAIL), size)])[0]
        if not tail.endswith(MAGIC) or size < 20:
            raise FormatError("it does not end as Arrow files do: it is cut short")
        length = int.from_bytes(tail[-10:-6], "little", signed=True)
        if not 0 < length <= size - 18:
            raise FormatError(f"its footer would have {length:,} bytes")
        if length + 10 > len(tail):
            tail = self._read([(size - 10 - length, size)])[0]
        footer = tail[-10 - length : -10]
        others = _blocks(footer, 2)
        blocks = _blocks(footer, 3)
        for block in np.concatenate([others, blocks]).tolist():
            start, metadata, _, body = block
            stop = start + metadata + body
            if not (start >= 8 and 8 <= metadata <= _LONGEST and body >= 0 and stop <= size):
                raise FormatError(
                    f"its footer names bytes {start:,} to {stop:,}, and it has {size:,}"
                )
        schema = next(self._messages(8), None)
        if schema is None:
            raise FormatError("there is no message behind its first bytes")
        heads = [(block["start"], block["start"] + block["metadata"]) for block in blocks]
        batches = []
        for block, data in zip(blocks.tolist(), self._read(heads), strict=True):
            start, metadata, _, body = block
            message = self._message(data, start)
            if message.type != "record batch" or message.body.size > body:
                raise FormatError(f"there is no record batch at byte {start:,}")
            batches.append((start, start + metadata + body, _rows(message, start)))
        ends = [(one["start"], one["start"] + one["metadata"] + one["body"]) for one in others]
        return _layout_of([schema[:2], *ends], batches)

    def _of_stream(self) -> _Layout:
        heads = list[tuple[int, int]]()
        batches = []
        for start, stop, message in self._messages(0):
            if message.type == ("dictionary" if heads else "schema"):
                heads.append((start, stop))
            elif message.type == "record batch" and heads:
                batches.append((start, stop, _rows(message, start)))
            else:
                raise FormatError(f"there is no message that belongs there at byte {start:,}")
        if not heads:
            raise FormatError("it is empty")
        return _layout_of(heads, batches)

    def _messages(self, start: int) -> Iterator[tuple[int, int, Any]]:
        """First byte, end and message of each; a stream ends with its file, or with a message of
        no bytes.
        """
        data = b""
        begin = 0
        while start < self.size:
            if not begin <= start <= start + 8 <= begin + len(data):
                data = self._read([(start, min(self.size, start + self._window))])[0]
                begin = start
            head = message_head(data[start - begin :])
            if head == 0:
                return
            if not 0 < head <= min(_LONGEST, self.size - start):
                raise FormatError(
                    f"a message at byte {start:,} would have {head:,} bytes: it is cut short, or "
                    "no Arrow file"
                )
            if start + head > begin + len(data):
                stop = min(self.size, start + max(self._window, head))
                data = self._read([(start, stop)])[0]
                begin = start
            message = self._message(data[start - begin : start - begin + head], start)
            stop = start + head + message.body.size
            yield start, stop, message
            start = stop

    def _message(self, head: bytes, start: int) -> Any:
        """A message of its metadata, with a body that is all zeros."""
        left = self.size - start - len(head)
        return pyarrow().ipc.read_message(opened([memoryview(head)], left, zeros))


def message_head(data: bytes) -> int:
    """Bytes of a message before its body, by its first eight bytes; 0: it is the end mark."""
    at = 8 if data.startswith(CONTINUED) else 4  # before Arrow 0.15
    length: int = struct.unpack_from("<i", data, at - 4)[0]
    return length and at + length


def _rows(message: Any, start: int) -> int:
    pa = pyarrow()
    rows: int = pa.ipc.read_record_batch(message, pa.schema([])).num_rows
    if not 0 <= rows <= _MOST_ROWS:
        raise FormatError(f"a record batch at byte {start:,} would have {rows:,} rows")
    return rows


def _blocks(footer: bytes, field: int) -> npt.NDArray[Any]:
    """A vector of the footer, which is a FlatBuffer (https://flatbuffers.dev/internals): pyarrow
    does not say where messages lie.
    """
    root = struct.unpack_from("<I", footer)[0]
    vtable = root - struct.unpack_from("<i", footer, root)[0]
    if 4 + 2 * field >= struct.unpack_from("<H", footer, vtable)[0]:
        return np.zeros(0, _BLOCK)
    offset = struct.unpack_from("<H", footer, vtable + 4 + 2 * field)[0]
    if not offset:
        return np.zeros(0, _BLOCK)
    at = root + offset + struct.unpack_from("<I", footer, root + offset)[0]
    return np.frombuffer(footer, _BLOCK, struct.unpack_from("<I", footer, at)[0], at + 4)


def _layout_of(heads: Sequence[Any], batches: Sequence[Any]) -> _Layout:
    return _Layout(
        np.array(heads, np.int64).reshape(-1, 2), np.array(batches, np.int64).reshape(-1, 3)
    )


def _head(files: Files, path: str, layout: _Layout) -> bytes:
    """The schema and all dictionaries: with these each record batch is a stream of its own."""
    return files.read_joined(ByteRanges.in_file(path, *layout.heads.T))


def _make_index(files: RemoteFiles, url: str) -> Arrays:
    layout = _Scan(files, url, _REMOTE).layout()
    head = np.frombuffer(_head(files, url, layout), np.uint8)
    return [layout.batches.reshape(-1), head]


INDEX = IndexKind("arrow", 2, ("<i8", "u1"), _make_index)
"""Where the record batches lie, and their rows; and the bytes of schema and dictionaries."""


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

    kind = "Arrow"
    block_is = "record batch"
    blocks_are = "record batches"

    def __init__(self, path: str, shown: str, files: Files) -> None:
        self._files = files
        try:
            if files.is_remote:
                table, head = index_of(cast(RemoteFiles, files), path, INDEX)
                self._head = head.tobytes()
                places = table.reshape(-1, 3)
            else:
                layout = _Scan(files, path, _LOCAL).layout()
                self._head = _head(files, path, layout)
                places = layout.batches
        except FormatError as error:
            raise FormatError(f"{shown} is no Arrow file, or a damaged one: {error}") from error
        self._known: _Known | None = None
        self._starts = SharedArray(places[:, 0])
        self._stops = SharedArray(places[:, 1])
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
        self.is_in_place = False
        types = [self.schema.field(name).type for name in names]
        if self._files.is_remote or not self.rows.any() or not all(map(fits, types)):
            return
        # zeros can't be decompressed
        with asking("pyarrow", self.shown), contextlib.suppress(OSError):
            self.is_in_place = self._batch(int((self.rows > 0).argmax())) is not None

    @property
    def nbytes(self) -> IntArray:
        # of compressed ones more, and nobody says how much
        stored: IntArray = self._stops.array - self._starts.array
        return np.maximum(stored, self.rows * self.fixed_nbytes)

    def ranges(self, blocks: Sequence[int]) -> list[ByteRanges]:
        if self.is_in_place:
            return [ByteRanges.of([])] * len(blocks)
        numbers = np.asarray(blocks, np.int64)[:, None]
        starts = self._starts.array[numbers]
        stops = self._stops.array[numbers]
        return [
            ByteRanges.in_file(self.path, start, stop)
            for start, stop in zip(starts, stops, strict=True)
        ]

    def read(self, block: int, held: list[tuple[int, memoryview]]) -> Any:
        return read_batch([memoryview(self._head), held[0][1]], self.schema, self.names)

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
            return self.block(list(map(stored.column, known.arrays)), len(rows), 0)

    def _learn(self, blocks: IntArray) -> _Known:
        """What is known of record batches, these among them."""
        known = self._known
        if known is None:
            first = self._plain_batch(int(blocks[0]))
            places = np.empty((2, len(self.rows), len(first.starts)), np.int64)
            known = _Known(first.arrays, places, np.zeros(len(self.rows), bool))
            self._known = known  # of threads that come here together each goes on with its own
        for number in distinct(blocks[~known.is_known[blocks]]).tolist():
            batch = self._plain_batch(number)
            known.places[:, number] = batch.starts, batch.stops
            known.is_known[number] = True
        return known

    def _plain_batch(self, number: int) -> Batch:
        batch = self._batch(number)
        if batch is None:
            raise FormatError(
                f"{self.where(number)} is compressed, and others are not: write the file again"
            )
        return batch

    def _batch(self, number: int) -> Batch | None:
        start = int(self._starts.array[number])
        stop = int(self._stops.array[number])
        data = self._read(start, min(stop, start + _LOCAL))
        head = message_head(data)
        if head > len(data):
            data = self._read(start, start + head)
        return batch_of(self._head, data[:head], start + head, stop, self.schema, self.names)

    def _read(self, start: int, stop: int) -> bytes:
        return self._files.read_joined(ByteRanges.of([(self.path, start, stop)]))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": None}
