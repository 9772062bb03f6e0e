"""Arrow files and streams: of record batches that lie on this machine as they are in memory only
the rows are read, others are read as a whole and decoded by pyarrow.

A stream, as HuggingFace's `datasets` writes it, is a chain of messages, each of which says how long
it is; an Arrow file is such a chain between a magic number and a footer, which says where each
begins: those of a file are read at once. pyarrow reads the messages. The metadata of a
record batch says where the buffers of each column lie. They stay in the file
(https://arrow.apache.org/docs/format/Columnar.html), from which the bytes of rows are read by their
positions, and become arrays of pyarrow's. Nothing is mapped: if somebody cuts the file short while
it is read, that is an error, and no signal that ends the process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import AnyArray, IntArray, distinct
from headrace.errors import FormatError
from headrace.formats.table.columns import Column, inner_types, opened, pyarrow, what_is, zeros
from headrace.formats.table.files import CONTINUED, MAGIC, TAIL, TableFile
from headrace.io.array_file import Arrays
from headrace.io.files import Files
from headrace.io.index import IndexKind, index_of
from headrace.io.library_errors import asking
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray

# bytes that are read at once to look for messages
_LOCAL = 4 << 10
_REMOTE = 1 << 20
_LONGEST = 256 << 20  # bytes of the metadata of a message
_MOST_ROWS = 1 << 40  # of a record batch
_BLOCK = np.dtype([("start", "<i8"), ("metadata", "<i4"), ("pad", "<i4"), ("body", "<i8")])
"""Where a message lies, as the footer of a file has it."""


# -- messages


def scanned(files: Files, path: str, base: int = 0, size: int | None = None) -> Arrays:
    """First byte, that of the body, end and rows of each record batch ([4 n]); and the bytes of
    the schema and of all dictionaries, with which each record batch is a stream of its own.

    Args:
        files, path: of the file.
        base, size: where the table begins in it, and its bytes; None: up to its end.

    Raises:
        FormatError: the file is no Arrow file, or a damaged one; the message does not name it.
    """
    if size is None:
        size = files.version(path).size
    heads = list[tuple[int, int]]()
    batches = []
    pa = pyarrow()
    try:
        for start, begin, message in _messages(files, path, base, size):
            stop = begin + message.body.size
            if message.type == ("dictionary" if heads else "schema"):
                heads.append((start, stop))
            elif message.type == "record batch" and heads:
                rows = pa.ipc.read_record_batch(message, pa.schema([])).num_rows
                if not 0 <= rows <= _MOST_ROWS:
                    raise FormatError(f"a record batch at byte {start:,} would have {rows:,} rows")
                batches.append((base + start, base + begin, base + stop, rows))
            else:
                raise FormatError(f"the message at byte {start:,} does not belong there")
    except (struct.error, pa.ArrowException, OSError, ValueError, EOFError) as error:
        raise FormatError(f"its messages can't be read ({error})") from error
    if not heads:
        raise FormatError("it is empty")
    ranges = [(path, base + start, base + stop) for start, stop in heads]
    head = files.read_joined(ByteRanges.of(ranges))
    return [np.array(batches, np.int64).reshape(-1), np.frombuffer(head, np.uint8)]


def _messages(files: Files, path: str, base: int, size: int) -> Iterator[tuple[int, int, Any]]:
    """First byte, that of the body, and each message, with a body that is all zeros: of a file
    those that its footer names; of a stream all, up to its end, or to a message of no bytes.
    """
    window = _REMOTE if files.is_remote else _LOCAL

    def read(start: int, stop: int) -> bytes:
        return files.read_joined(ByteRanges.of([(path, base + start, base + min(size, stop))]))

    begin = start = 0
    data = read(0, window)
    if data.startswith(MAGIC):
        tail = read(max(0, size - TAIL), size)
        end = size - 10 - int.from_bytes(tail[-10:-6], "little", signed=True)
        if not tail.endswith(MAGIC) or not 8 < end < size - 10:
            raise FormatError("it does not end as Arrow files do: it is cut short")
        footer = tail[end - size : -10] if size - end <= len(tail) else read(end, size - 10)
        yield from _named_messages(files, path, base, footer, data, end)
        return
    while start < size:
        if not begin <= start <= start + 8 <= begin + len(data):
            data = read(start, start + window)
            begin = start
        head = _message_head(data[start - begin :])
        if head == 0:
            return
        if not 0 < head <= min(_LONGEST, size - start):
            raise FormatError(
                f"a message at byte {start:,} would have {head:,} bytes: it is cut short, or no "
                "Arrow file"
            )
        if start + head > begin + len(data):
            data = read(start, start + max(window, head))
            begin = start
        metadata = memoryview(data)[start - begin : start - begin + head]
        message = pyarrow().ipc.read_message(opened([metadata], size - start - head, zeros))
        yield start, start + head, message
        start += head + message.body.size


def _named_messages(
    files: Files, path: str, base: int, footer: bytes, data: bytes, end: int
) -> Iterator[tuple[int, int, Any]]:
    """As `_messages`, of the first one and those that the footer of a file names, read at once.

    Args:
        files, path, base: see `scanned`.
        footer: see `_blocks`.
        data: the first bytes of the file.
        end: where the messages end.
    """
    blocks = np.concatenate([_blocks(footer, 2), _blocks(footer, 3)])  # dictionaries, batches
    places = [(8, _message_head(data[8:16]))]
    places += zip(blocks["start"].tolist(), blocks["metadata"].tolist(), strict=True)
    for start, head in places:
        if not 8 <= start <= start + head <= end or not 8 <= head <= _LONGEST:
            raise FormatError(f"its footer names a message of {head:,} bytes at byte {start:,}")
    ranges = [(path, base + start, base + start + head) for start, head in places]
    found = files.read_each(ByteRanges.of(ranges))
    for (start, head), metadata in zip(places, found, strict=True):
        rest = opened([memoryview(metadata)], end - start - head, zeros)
        message = pyarrow().ipc.read_message(rest)
        yield start, start + head, message


def _blocks(footer: bytes, field: int) -> AnyArray:
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


def _message_head(data: bytes) -> int:
    """Bytes of a message before its body, by its first eight bytes; 0: it is the end mark."""
    at = 8 if data.startswith(CONTINUED) else 4  # before Arrow 0.15
    length: int = struct.unpack_from("<i", data, at - 4)[0]
    return length and at + length


INDEX = IndexKind("arrow", 3, ("<i8", "u1"), scanned)
"""Where the record batches lie, and their rows; and the bytes of schema and dictionaries."""


def _read_batch(parts: Sequence[memoryview], schema: Any, names: Sequence[str]) -> Any:
    """A record batch of pyarrow's, whose columns lie in `parts` where they are not compressed.

    Args:
        parts: of a stream, one after the other: the messages with the schema and all dictionaries,
            and the record batch.
        schema: of the stream.
        names: of the columns that are wanted.

    Raises:
        Exception: whatever pyarrow makes of a damaged one.
    """
    ipc = pyarrow().ipc
    numbers = [schema.get_field_index(name) for name in names]
    options = ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
    return ipc.open_stream(opened(parts), options=options).read_next_batch()


# -- files


class ArrowTable(TableFile):
    """An Arrow file ("Feather"), or a stream under the same ending, as HuggingFace's `datasets`
    writes it.

    Args:
        path, shown: see `TableFile`.
        files: by which it is read.
        index: says where its record batches lie.

    Raises:
        FormatError: it is none, or cut short.
    """

    kind = "Arrow"
    block_is = "record batch"
    blocks_are = "record batches"

    def __init__(self, path: str, shown: str, files: Files, index: IndexKind = INDEX) -> None:
        self._files = files
        try:
            if files.is_remote:
                table, head = index_of(files, path, index)
            else:
                table, head = index.make(files, path)
        except FormatError as error:
            raise FormatError(f"{shown} is not an Arrow file, or is damaged: {error}") from error
        self._head: bytes = head.tobytes()
        places = table.reshape(-1, 4)
        self._known: tuple[list[Any], IntArray] | None = None
        self._places = SharedArray(places[:, :3])
        with asking("pyarrow", shown):
            schema = pyarrow().ipc.open_stream(self._head).schema
        super().__init__(path, shown, schema, places[:, 3].copy())

    def choose(self, names: Sequence[str]) -> None:
        super().choose(names)
        start, _, stop = self._places.array.T
        # of compressed ones more, and nobody says how much
        self.nbytes = np.maximum(stop - start, self.rows * self.fixed_nbytes)
        self._known = None
        self.is_in_place = False
        types = [self.schema.field(name).type for name in names]
        if self._files.is_remote or not self.rows.any() or not all(map(_fits, types)):
            return
        with asking("pyarrow", self.shown), contextlib.suppress(OSError, FormatError):
            self._buffers(int((self.rows > 0).argmax()))
            self.is_in_place = True

    def ranges(self, block: int) -> ByteRanges:
        if self.is_in_place:
            return ByteRanges.of([])
        start, _, stop = self._places.array[block].tolist()
        return ByteRanges.of([(self.path, start, stop)])

    def read(self, block: int, held: list[tuple[int, memoryview]]) -> Any:
        return _read_batch([memoryview(self._head), held[0][1]], self.schema, self.names)

    def take(self, blocks: IntArray, rows: IntArray) -> dict[str, Column]:
        """Rows of record batches that lie as they are in memory.

        Args:
            blocks: [n] the record batch of each.
            rows: [n] its number in that.

        Raises:
            FormatError: the file is damaged.
            FileChangedError, OSError: it can't be read, or is another one.
        """
        with asking("pyarrow", self.shown):
            arrays, places = self._learn(blocks)
            stored = _StoredRows(self._files, self.path, places[:, :, blocks])
            ones = np.ones_like(rows)
            return self.columns_of([stored.spans(like, rows, ones) for like in arrays])

    def _learn(self, blocks: IntArray) -> tuple[list[Any], IntArray]:
        """Arrays of pyarrow's with the types and dictionaries of the columns, whose values are
        never looked at; and where the buffers of record batches, these among them, begin and end
        ([2, buffers, batches], see `_buffers`; -2: nobody has looked).
        """
        if self._known is None:
            arrays, places = self._buffers(int(blocks[0]))
            self._known = arrays, np.full((*places.shape, len(self.rows)), -2)
        known = self._known  # of threads that come here together each goes on with its own
        places = known[1]
        # the last place that another thread writes: then it has written all of them
        for number in distinct(blocks[places[1, -1, blocks] == -2]).tolist():
            places[:, :, number] = self._buffers(number)[1]
        return known

    def _buffers(self, number: int) -> tuple[list[Any], IntArray]:
        """The columns of a record batch as arrays of pyarrow's, whose values are all zeros, and
        where their buffers begin and end in the file ([2, buffers], in the order of the format, all
        columns one after the other; -1: there is none).

        Raises:
            FormatError: pyarrow makes others of them, since they are compressed or of another byte
                order.
            Exception: whatever pyarrow makes of a damaged one, or of zeros that it decompresses.
        """
        start, begin, stop = self._places.array[number].tolist()
        metadata = self._files.read_joined(ByteRanges.of([(self.path, start, begin)]))
        body = zeros(0, max(1, stop - begin))
        parts = [memoryview(self._head), memoryview(metadata), body[: stop - begin]]
        batch = _read_batch(parts, self.schema, self.names)
        arrays = [batch.column(name) for name in self.names]
        shift = begin - pyarrow().py_buffer(body).address
        places = []
        for array in arrays:
            array.validate()  # that buffers are as long as so many rows need
            for buffer in array.buffers():
                if buffer is None or not buffer.size:
                    places.append((-1, -1))
                    continue
                at = buffer.address + shift
                if not begin <= at <= at + buffer.size <= stop:
                    raise FormatError(
                        f"{self.where(number)} is compressed, and others are not: write the file "
                        "again"
                    )
                places.append((at, at + buffer.size))
        return arrays, np.array(places, np.int64).reshape(-1, 2).T

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": None}


# -- rows of record batches that are not compressed


def _fits(kind: Any) -> bool:
    """True if rows of a type can be read without the others of their record batch."""
    pa = pyarrow()
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        return what_is(kind) in ("text", "bytes")
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return False
    return all(map(_fits, inner_types(kind)))


class _StoredRows:
    """Reads rows of the record batches of a file, a column after the other.

    Of each row a span of items is read of each buffer: one of its own column, of lists as many as
    it has of that of their items, and so on.

    Args:
        files: by which it is read.
        path: of the file.
        places: [2, buffers, n] where the buffers of the record batch of each row begin and end.
    """

    def __init__(self, files: Files, path: str, places: IntArray) -> None:
        self._files = files
        self._path = path
        self._starts, self._stops = places
        self._buffers = iter(range(len(self._starts)))

    def spans(self, like: Any, begins: IntArray, lengths: IntArray) -> Any:
        """The items of spans of the next column, or of one inside, one span after the other, as an
        array of pyarrow's.

        Args:
            like: an array of the column's, that says its type, and has its dictionary.
            begins, lengths: [n] of the span of each row.

        Raises:
            FormatError: the file is damaged.
            FileChangedError, OSError: the file can't be read, or is another one.
        """
        pa = pyarrow()
        kind = like.type
        if isinstance(like, pa.ExtensionArray):
            return pa.ExtensionArray.from_storage(kind, self.spans(like.storage, begins, lengths))
        count = int(lengths.sum())
        what = what_is(kind)
        if what == "null":
            next(self._buffers)
            return pa.nulls(count)
        buffers = [self._valid(begins, lengths)]
        children = []
        if what == "struct":
            for number in range(kind.num_fields):
                children.append(self.spans(like.field(number), begins, lengths))
        elif what == "fixed":
            size = kind.list_size
            children.append(self.spans(like.values, begins * size, lengths * size))
        elif pa.types.is_dictionary(kind):
            buffers.append(self._numbers(kind.index_type, begins, lengths))
            codes = pa.Array.from_buffers(kind.index_type, count, buffers)
            return pa.DictionaryArray.from_arrays(codes, like.dictionary, safe=False)
        elif what == "number" or pa.types.is_fixed_size_binary(kind):
            buffers.append(self._numbers(kind, begins, lengths))
        else:
            offsets, firsts, ends = self._offsets(kind, begins, lengths)
            buffers.append(pa.py_buffer(offsets))
            if what == "list":
                children.append(self.spans(like.values, firsts, ends - firsts))
            else:
                buffers.append(pa.py_buffer(self._joined(next(self._buffers), firsts, ends)))
        return pa.Array.from_buffers(kind, count, buffers, children=children)

    # -- the buffers of columns, in the order of the format

    def _valid(self, begins: IntArray, lengths: IntArray) -> Any:
        """Bits that are 0 where there is no value; None: there are all."""
        buffer = next(self._buffers)
        has_bits = self._starts[buffer] >= 0
        if not has_bits.any():
            return None
        bits = np.ones(int(lengths.sum()), np.uint8)
        bits[np.repeat(has_bits, lengths)] = self._bits(buffer, begins, lengths * has_bits)
        return pyarrow().py_buffer(np.packbits(bits, bitorder="little"))

    def _offsets(
        self, kind: Any, begins: IntArray, lengths: IntArray
    ) -> tuple[AnyArray, IntArray, IntArray]:
        """Offsets of lists, texts or bytes one behind the other; and where those of each span
        begin and end in the file.
        """
        dtype = np.dtype(np.int64 if str(kind).startswith("large") else np.int32)
        width = dtype.itemsize
        filled = lengths > 0
        counts = lengths + filled
        data = self._joined(next(self._buffers), begins * width, (begins + counts) * width)
        offsets = np.frombuffer(data, dtype).astype(np.int64)
        if (lengths == 1).all():  # rows of the column itself
            firsts, ends = offsets.reshape(-1, 2).T
            sizes = ends - firsts
        else:
            last = np.cumsum(counts)[filled] - 1  # of each span that is not empty
            firsts = np.zeros_like(begins)
            ends = np.zeros_like(begins)
            firsts[filled] = offsets[last - lengths[filled]]
            ends[filled] = offsets[last]
            sizes = np.delete(np.diff(offsets), last[:-1])
        if firsts.min(initial=0) < 0 or sizes.min(initial=0) < 0:
            raise FormatError("a value would end before it begins: the file is damaged")
        made = np.zeros(len(sizes) + 1, dtype)
        np.cumsum(sizes, out=made[1:])
        return made, firsts, ends

    def _numbers(self, kind: Any, begins: IntArray, lengths: IntArray) -> Any:
        """The numbers of spans, or bytes of a fixed size."""
        buffer = next(self._buffers)
        if pyarrow().types.is_boolean(kind):
            bits = self._bits(buffer, begins, lengths)
            return pyarrow().py_buffer(np.packbits(bits, bitorder="little"))
        width = kind.byte_width
        data = self._joined(buffer, begins * width, (begins + lengths) * width)
        return pyarrow().py_buffer(data)

    def _bits(self, buffer: int, begins: IntArray, lengths: IntArray) -> npt.NDArray[np.uint8]:
        firsts = begins // 8
        ends = np.where(lengths > 0, -(-(begins + lengths) // 8), firsts)
        data = np.frombuffer(self._joined(buffer, firsts, ends), np.uint8)
        bits = np.unpackbits(data, bitorder="little")
        nbytes = ends - firsts
        starts = 8 * (np.cumsum(nbytes) - nbytes) + begins % 8  # of each span among the bits
        inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return bits[np.repeat(starts, lengths) + inside]

    def _joined(self, buffer: int, begins: IntArray, ends: IntArray) -> bytes:
        """Bytes of a buffer, one range after the other."""
        filled = ends > begins
        if not filled.any():
            return b""
        first = np.maximum(self._starts[buffer], 0)
        stops = first + ends
        if ((stops > self._stops[buffer]) & filled).any():
            raise FormatError("a row lies outside of its record batch: the file is damaged")
        return self._files.read_joined(ByteRanges.in_file(self._path, first + begins, stops))
