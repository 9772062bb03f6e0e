"""Finds the record batches of Arrow files and streams.

An Arrow file ends with a footer that says where its record batches lie; a stream, as HuggingFace's
`datasets` writes it under the same ending, is a chain of messages, each of which says how long it
is. Both are FlatBuffers (https://flatbuffers.dev/internals), of which this module reads what it
needs; the schema, and what is in a record batch, pyarrow reads.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from headrace.errors import FormatError

MAGIC = b"ARROW1"
"""What an Arrow file begins and ends with."""
CONTINUED = b"\xff\xff\xff\xff"
"""What each message of a stream begins with, and so the stream."""
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages
_TAIL = 64 << 10  # bytes at the end of a file that are read first
_LONGEST = 256 << 20  # bytes of the metadata of a message
_MOST_ROWS = 1 << 40  # of a record batch

Read = Callable[[Sequence[tuple[int, int]]], list[bytes]]
"""Reads ranges of a file: first byte and end of each."""


class Message(NamedTuple):
    """A message of an Arrow file.

    Attributes:
        start, stop: where it lies.
        rows: of a record batch; else 0.
        is_packed: True if the buffers of a record batch are compressed; or, of a schema, if its
            numbers have another byte order than this machine.
    """

    start: int
    stop: int
    rows: int = 0
    is_packed: bool = False


class Layout(NamedTuple):
    """Where the parts of an Arrow file lie.

    Attributes:
        schema: the message with the schema.
        dictionaries: those with the values of columns that hold numbers of values.
        batches: the record batches.
    """

    schema: Message
    dictionaries: list[Message]
    batches: list[Message]


class _Table:
    """A table of a FlatBuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - struct.unpack_from("<i", data, at)[0]
        self._size = struct.unpack_from("<H", data, self._vtable)[0]

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def _place(self, field: int) -> int:
        """Where a field lies; 0: it has its default."""
        if 4 + 2 * field >= self._size:
            return 0
        offset: int = struct.unpack_from("<H", self._data, self._vtable + 4 + 2 * field)[0]
        return self._at + offset if offset else 0

    def number(self, field: int, kind: str) -> int:
        """An integer, of that kind of `struct`."""
        at = self._place(field)
        return int(struct.unpack_from(f"<{kind}", self._data, at)[0]) if at else 0

    def table(self, field: int) -> _Table | None:
        """A table inside of this one."""
        at = self._place(field)
        return _Table(self._data, at + struct.unpack_from("<I", self._data, at)[0]) if at else None

    def structs(self, field: int, layout: str) -> list[tuple[int, ...]]:
        """A vector of structs of integers."""
        at = self._place(field)
        if not at:
            return []
        at += struct.unpack_from("<I", self._data, at)[0]
        count, size = struct.unpack_from("<I", self._data, at)[0], struct.calcsize(layout)
        if at + 4 + count * size > len(self._data):
            raise FormatError("a list is longer than what it lies in")
        return [
            struct.unpack_from(layout, self._data, at + 4 + number * size)
            for number in range(count)
        ]


def layout_of(read: Read, size: int, window: int) -> Layout:
    """Where the parts of an Arrow file or stream lie.

    Args:
        read: reads ranges of the file.
        size: its bytes.
        window: bytes of a stream that are read at once to look for messages.

    Raises:
        FormatError: it is none, or a damaged one; the message does not name it.
    """
    head = read([(0, min(size, 8))])[0]
    try:
        if head.startswith(MAGIC):
            return _of_file(read, size)
        return _of_stream(read, size, window)
    except (struct.error, IndexError, OverflowError) as error:
        raise FormatError(f"its messages can't be read ({error})") from error


def _of_file(read: Read, size: int) -> Layout:
    tail = read([(max(0, size - _TAIL), size)])[0]
    if not tail.endswith(MAGIC) or size < 20:
        raise FormatError(
            "it does not end as an Arrow file does: it is cut short, or was never closed"
        )
    length = struct.unpack_from("<i", tail, len(tail) - 10)[0]
    if not 0 < length <= size - 18:
        raise FormatError(f"its footer would have {length:,} bytes")
    footer = (
        tail[-10 - length : -10]
        if length + 10 <= len(tail)
        else read([(size - 10 - length, size - 10)])[0]
    )
    table = _Table.root(footer)
    blocks = table.structs(3, "<qi4xq")
    heads = [(start, start + metadata) for start, metadata, _ in blocks]
    others = [
        Message(start, start + metadata + body)
        for start, metadata, body in table.structs(2, "<qi4xq")
    ]
    for start, metadata, body in [
        *blocks,
        *((one.start, 8, one.stop - one.start - 8) for one in others),
    ]:
        if not (
            start >= 8
            and 8 <= metadata <= _LONGEST
            and body >= 0
            and start + metadata + body <= size
        ):
            raise FormatError(
                f"its footer names bytes {start:,} to {start + metadata + body:,}, and it has "
                f"{size:,}"
            )
    first = next(_messages(read, 8, size, _TAIL), None)
    if first is None:
        raise FormatError("there is no message behind its first bytes")
    schema = first[1]
    batches = []
    for (start, metadata, body), head in zip(blocks, read(heads), strict=True):
        kind, message = _parsed(head, start, 8 if head.startswith(CONTINUED) else 4)
        if kind != _BATCH or message.stop > start + metadata + body:
            raise FormatError(f"there is no record batch at byte {start:,}")
        batches.append(message._replace(stop=start + metadata + body))
    return Layout(schema, others, batches)


def _of_stream(read: Read, size: int, window: int) -> Layout:
    schema: Message | None = None
    dictionaries, batches = list[Message](), list[Message]()
    for kind, message in _messages(read, 0, size, window):
        if kind == _SCHEMA and schema is None:
            schema = message
        elif kind in (_DICTIONARY, _BATCH) and schema is not None:
            (dictionaries if kind == _DICTIONARY else batches).append(message)
        else:
            raise FormatError(f"there is no message that belongs there at byte {message.start:,}")
    if schema is None:
        raise FormatError("it is empty")
    return Layout(schema, dictionaries, batches)


def _messages(read: Read, start: int, size: int, window: int) -> Iterator[tuple[int, Message]]:
    """The kind of each message, and where it lies; a stream ends with its file, or with a
    message of no bytes.
    """
    head, begin = b"", 0
    while start < size:
        if not begin <= start <= start + 8 <= begin + len(head):
            head, begin = read([(start, min(size, start + window))])[0], start
        at = 8 if head.startswith(CONTINUED, start - begin) else 4  # before Arrow 0.15
        length = struct.unpack_from("<i", head, start - begin + at - 4)[0]
        if not length:
            return
        if not 0 < length <= min(_LONGEST, size - start - at):
            if (
                not start
                and (
                    text := head[:40].decode("ascii", "replace").partition("\n")[0].rstrip()
                ).isprintable()
            ):
                raise FormatError(
                    f"it is no Arrow file, but text that begins with {text[:20]!r}: write the "
                    "table as Parquet"
                )
            raise FormatError(
                f"a message at byte {start:,} would have {length:,} bytes: it is cut short, or no "
                "Arrow file"
            )
        if start + at + length > begin + len(head):
            head, begin = read([(start, min(size, start + max(window, at + length)))])[0], start
        kind, message = _parsed(head[start - begin : start - begin + at + length], start, at)
        if message.stop > size:
            raise FormatError(
                f"a message at byte {start:,} would end at byte {message.stop:,}, and it has "
                f"{size:,}: it is cut short"
            )
        yield kind, message
        start = message.stop


def _parsed(head: bytes, start: int, at: int) -> tuple[int, Message]:
    """The kind of a message, and where it lies, of its first bytes: its length, which has `at`
    of them, and its metadata.
    """
    length = struct.unpack_from("<i", head, at - 4)[0]
    table = _Table.root(head[at : at + length])
    kind, body, record = table.number(1, "B"), table.number(3, "q"), table.table(2)
    if body < 0:
        raise FormatError(f"a message at byte {start:,} would have {body:,} bytes")
    stop = start + at + length + body
    if kind == _SCHEMA and record is not None:
        return kind, Message(start, stop, 0, record.number(0, "h") != (sys.byteorder == "big"))
    if kind != _BATCH or record is None:
        return kind, Message(start, stop)
    rows = record.number(0, "q")
    if not 0 <= rows <= _MOST_ROWS:
        raise FormatError(f"a record batch at byte {start:,} would have {rows:,} rows")
    return kind, Message(start, stop, rows, record.table(3) is not None)
