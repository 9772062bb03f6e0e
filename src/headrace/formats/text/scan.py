"""The pass over texts that finds where their lines and records begin.

A piece at a time, file by file: `headrace.formats.text.lines` looks for the ends of lines, and here
is known which of them end a record, where the header of a table ends, and which lines are blank.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import (
    AccessError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    RemoteError,
)
from headrace.formats.text import records
from headrace.formats.text.lines import (
    QUOTE,
    Piece,
    file_pieces,
    is_blank,
    line_starts,
    looked_at,
)
from headrace.formats.text.plain import Room
from headrace.io.files import Files
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.io.sequential import Part, in_order

UTF8_MARK = b"\xef\xbb\xbf"
_SHOWN_FROM = 64 << 20  # bytes from which on progress is shown
_BEHIND = 4  # pieces of a remote text that were looked at, and are still there
_TOGETHER = 1 << 16  # records whose places are passed on at a time


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file as its lines are read."""

    shown: str
    """Its own path or URL."""
    path: str
    """Of the bytes: its own, or that of a plain copy."""
    head: int
    """Where its bytes begin there."""
    begin: int
    """Where the text begins there: behind a mark, of a local one."""
    end: int
    kind: str
    """The ending that says what its records are; "": its lines are wanted."""


class OddQuotesError(Exception):
    """A table has a quote where the parity of quotes would misjudge: another scan must read tables
    by Python's own reader.
    """


class Scan:
    """The pass over all files: gives the places where lines begin, and each file's end, as if all
    files were one.

    Args:
        files: by which they are read.
        texts: the files.
        bases: what is added to the places in each file for that.
        codec: how bytes are decoded: encoding and errors.
        room: for what is held at once.
        delimiters: what stands between fields, of each format of tables.
        is_slow: True if tables are read by Python's own reader, since one of them has odd quotes.
        progress: show a progress bar; None: only on a terminal, and of much.

    Attributes:
        counts: lines or records of each file, once the scan is through.
        headers: the names of the fields of each file; none of what is no table.

    Raises:
        OddQuotesError: `is_slow` must be True.
    """

    def __init__(
        self,
        files: Files,
        texts: Sequence[TextFile],
        bases: Sequence[int],
        codec: tuple[str, str],
        room: Room,
        delimiters: Mapping[str, str],
        is_slow: bool,
        progress: bool | None,
    ) -> None:
        self._files = files
        self._texts = texts
        self._bases = bases
        self._codec = codec
        self._room = room
        self._delimiters = delimiters
        self._is_slow = is_slow
        self.counts: list[int] = []
        self.headers: list[list[str]] = []
        total = sum(text.end for text in texts)
        self._bar = progress_bar(
            progress,
            is_short=total < _SHOWN_FROM,
            total=total,
            desc="finding lines",
            unit="B",
            unit_scale=True,
        )

    def __iter__(self) -> Iterator[IntArray]:
        with self._bar, contextlib.closing(self._remote_parts()) as remote:
            for text, base in zip(self._texts, self._bases, strict=True):
                try:
                    with self._opened(text, remote) as file:
                        count = -1  # the last place is the end
                        self.headers.append([])
                        for places in self._places(file, text):
                            count += places.size
                            yield places + base if base else places
                        self.counts.append(count)
                except (RemoteError, FileChangedError, DataNotFoundError, AccessError):
                    raise
                except (OSError, EOFError) as error:
                    cause = getattr(error, "strerror", None) or error
                    raise AccessError(
                        f"{redact(text.shown)} can't be read to its end: {cause}"
                    ) from error
                except FormatError as error:
                    raise FormatError(f"{redact(text.shown)}: {error}") from error

    def _places(self, file: _Bytes, text: TextFile) -> Iterator[IntArray]:
        begin = text.begin
        if self._files.is_remote and self._codec[0] == "utf-8" and file.at(0, 3) == UTF8_MARK:
            begin = 3  # a local one was looked at before
        if text.kind == ".json":
            self._room.check(2 * (text.end - begin))
            data = bytearray()
            for piece in self._pieces(file, begin, text.end):
                data += piece.data.data
            yield begin + records.json_places(data)
            return
        if text.kind not in self._delimiters:
            lf_only = text.kind == ".jsonl"  # whatever else may be white space there
            places = line_starts(self._pieces(file, begin, text.end), begin, text.end, lf_only)
        elif self._is_slow:
            places = self._slow_table(file, begin, text)
        else:
            places = self._table(file, begin, text)
        if text.kind:
            places = _without_blanks(file, places)
        if text.kind in self._delimiters:
            places = self._without_header(file, places, self._delimiters[text.kind])
        yield from places

    @contextlib.contextmanager
    def _opened(self, text: TextFile, remote: Iterator[Part]) -> Iterator[_Bytes]:
        if self._files.is_remote:
            yield _RemoteBytes(self._files, text, remote)
            return
        with open(text.path, "rb", buffering=0) as file:
            yield _Bytes(file.fileno())

    def _remote_parts(self) -> Generator[Part]:
        """The bytes of remote texts, in order."""
        if self._files.is_remote:
            whole = ByteRanges.of((text.path, 0, text.end) for text in self._texts)
            yield from in_order(cast(RemoteFiles, self._files), whole)

    def _pieces(self, file: _Bytes, begin: int, end: int) -> Iterator[Piece]:
        for piece in file.pieces(begin, end):
            self._bar.update(piece.data.size)
            yield piece

    def _table(self, file: _Bytes, begin: int, text: TextFile) -> Iterator[IntArray]:
        """By the parity of quotes."""
        check = records.QuoteCheck(self._delimiters[text.kind])

        def checked() -> Iterator[Piece]:
            for piece in self._pieces(file, begin, text.end):
                check(piece.data)
                if not check.is_plain:
                    raise OddQuotesError
                yield piece

        yield from line_starts(checked(), begin, text.end, quote=QUOTE)
        if check.count % 2:
            raise OddQuotesError

    def _slow_table(self, file: _Bytes, begin: int, text: TextFile) -> Iterator[IntArray]:
        """By Python's own reader: right for every quote."""
        ends = [begin]  # of the lines of a record

        def lines() -> Iterator[bytes]:
            pieces = self._pieces(file, begin, text.end)
            for places in line_starts(pieces, begin, text.end):
                for place in places.tolist():
                    if place > ends[-1]:
                        self._room.check(place - ends[-1])
                        line = file.at(ends[-1], place - ends[-1])
                        ends.append(place)
                        yield line

        found = [begin]
        for _ in records.csv_records(lines(), self._delimiters[text.kind]):
            del ends[:-1]
            found.append(ends[-1])
            if len(found) == _TOGETHER:
                yield np.array(found, np.int64)
                found = []
        yield np.array(found, np.int64)

    def _without_header(
        self, file: _Bytes, places: Iterator[IntArray], delimiter: str
    ) -> Iterator[IntArray]:
        first = np.empty(0, np.int64)
        for some in places:
            first = np.concatenate([first, some])
            if first.size > 1:
                break
        else:
            raise FormatError("it is empty: a CSV or TSV file begins with a line of field names")
        begin, end = first[:2].tolist()
        self._room.check(end - begin)
        try:
            line = file.at(begin, end - begin).rstrip(b"\r\n").decode(*self._codec)
        except UnicodeDecodeError as error:
            raise FormatError(
                "a byte of the first line, which names the fields, is no "
                f"{error.encoding} ({error.reason}); pass encoding= or errors="
            ) from None
        self.headers[-1] = records.csv_row(line, delimiter)
        yield first[1:]
        yield from places


def _without_blanks(file: _Bytes, places: Iterator[IntArray]) -> Iterator[IntArray]:
    """Places without those of lines that hold nothing but their end: these belong to the record
    before them.
    """
    pending = np.empty(0, np.int64)
    for some in places:
        joined = np.concatenate([pending, some])
        sizes = np.diff(joined)
        blank = is_blank(sizes, lambda n, at=joined: file.at(int(at[n]), int(at[n + 1] - at[n])))  # type: ignore[misc]
        pending = joined[-1:]
        yield joined[:-1][~blank]
    yield pending


class _Bytes:
    """The bytes of a local text."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def at(self, begin: int, size: int) -> bytes:
        """Some bytes."""
        return os.pread(self._fd, size, begin)

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """A part of it, a piece at a time."""
        return file_pieces(self._fd, begin, end)


class _RemoteBytes(_Bytes):
    """The bytes of a remote text that come in order, once, and those that came last.

    Args:
        files: by which it is read.
        text: which.
        parts: of all remote texts, those of this one next.
    """

    def __init__(self, files: Files, text: TextFile, parts: Iterator[Part]) -> None:
        self._files = files
        self._text = text
        self._parts = parts
        self._behind: deque[Part] = deque(maxlen=_BEHIND)

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """From a byte of the first piece on."""
        known = list(self._behind)
        at = 0
        while at < self._text.end:
            start, part = known.pop() if known else self._next()
            at = start + len(part)
            data = np.frombuffer(part, np.uint8)[max(0, begin - start) : end - start]
            if data.size:
                yield looked_at(data)

    def _next(self) -> Part:
        part = next(self._parts)
        self._behind.append(part)
        return part

    def at(self, begin: int, size: int) -> bytes:
        """Some bytes; what has gone by, or is to come, is fetched for it."""
        end = min(begin + size, self._text.end)
        if end and not self._behind:
            self._next()
        found = []
        for first, part in self._behind:
            if begin < first + len(part) and end > first:
                found.append(part[max(0, begin - first) : end - first])
        data = b"".join(found)
        if len(data) == end - begin:
            return data
        return self._files.read_joined(ByteRanges.of([(self._text.path, begin, end)]))
