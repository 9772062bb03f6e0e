"""Arrow files and streams: record batches are mapped where they lie as they are on this machine,
else read and decoded by pyarrow.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.array_file import Arrays
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.index import IndexKind, index_of
from headrace.io.library_errors import asking
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.memory.anonymous import SharedArray
from headrace.storage.table.files import TableFile, unknown
from headrace.storage.table.library import HeldBytes, pyarrow
from headrace.storage.table.messages import Layout, Message, layout_of

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
        maps: keeps it mapped in each process; None: it is remote.

    Raises:
        FormatError: it is none, or cut short.
    """

    kind, block_is, blocks_are = "Arrow", "record batch", "record batches"

    def __init__(
        self, path: str, shown: str, files: Files, maps: WorkerFiles[mmap.mmap] | None
    ) -> None:
        self._files, self._maps = files, maps
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
        self._starts, self._stops = SharedArray(places[:, 0]), SharedArray(places[:, 1])
        self.is_packed: bool = any(batch.is_packed for batch in layout.batches)
        """True if buffers are compressed; and the bytes of schema and dictionaries."""
        self.is_mapped: bool = maps is not None and not self.is_packed
        with asking("pyarrow", shown):
            schema = pyarrow().ipc.open_stream(self._head).schema
            names = schema.names
        if len(set(names)) < len(names):
            raise FormatError(
                f"{shown} has several columns of one name: write it again with names that differ"
            )
        super().__init__(path, shown, schema, places[:, 2].copy())

    @property
    def nbytes(self) -> IntArray:
        # of compressed ones more, and nobody says how much
        stored: IntArray = self._stops.array - self._starts.array
        return np.maximum(stored, self.rows * self.fixed_nbytes) if self.is_packed else stored

    def ranges(self, blocks: Sequence[int]) -> list[ByteRanges]:
        if self.is_mapped:
            return [ByteRanges.of([])] * len(blocks)
        numbers = np.asarray(blocks, np.int64)
        starts, stops = self._starts.array[numbers], self._stops.array[numbers]
        return [
            ByteRanges.in_file(self.path, starts[at : at + 1], stops[at : at + 1])
            for at in range(len(numbers))
        ]

    def read(self, block: int, held: list[tuple[int, memoryview]]) -> Any:
        if not self.is_mapped:
            return read_batch(self._head, held[0][1], self.schema, self.chosen.names)
        assert self._maps is not None
        with self._maps.reading(self.path) as whole:
            batch = memoryview(whole)[self._starts.array[block] : self._stops.array[block]]
            return read_batch(self._head, batch, self.schema, self.chosen.names)

    def close(self) -> None:
        """Gives the mapped file back."""
        if self._maps is not None:
            self._maps.close()


def read_batch(head: bytes, batch: memoryview, schema: Any, names: Sequence[str]) -> Any:
    """A record batch of pyarrow's, whose columns lie in `batch` where they are not compressed.

    Args:
        head: the messages with the schema and all dictionaries.
        batch: the message.
        schema: of the file.
        names: of the columns that are wanted.
    """
    pa, size = pyarrow(), len(head) + len(batch)
    parts = HeldBytes(size, [(0, memoryview(head)), (len(head), batch)], _nothing_else)
    options = pa.ipc.IpcReadOptions(
        included_fields=[schema.get_field_index(name) for name in names], use_threads=False
    )
    return pa.ipc.open_stream(pa.PythonFile(parts, mode="r"), options=options).read_next_batch()


def _nothing_else(start: int, stop: int) -> memoryview:
    raise FormatError("it ends before its last message does")


def map_file(path: str) -> mmap.mmap:
    """A local file, mapped."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def unmap(whole: mmap.mmap) -> None:
    """Gives a mapped file back; while somebody still has a part of it, that happens when he is
    through.
    """
    with contextlib.suppress(BufferError):
        whole.close()
