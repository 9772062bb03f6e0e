"""The pass over texts that finds where their lines and records begin.

A piece at a time, file by file: `headrace.storage.text.lines` looks for the ends of lines, and here
is known which of them end a record, where the header of a table ends, and which lines are blank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import (
    AccessError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    RemoteError,
)
from headrace.io.files import Files
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.io.sequential import Part, in_order
from headrace.storage.text import records
from headrace.storage.text.lines import (
    QUOTE,
    Newline,
    Piece,
    Pieces,
    file_pieces,
    is_blank,
    line_starts,
    looked_at,
    strip_end,
)
from headrace.storage.text.plain import Room

UTF8_MARK = b"\xef\xbb\xbf"
_SHOWN_FROM = 64 << 20  # bytes from which on progress is shown
_BEHIND = 4  # pieces of a remote text that were looked at, and are still there
_TOGETHER = 1 << 16  # records whose places are passed on at a time


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file as its lines are read."""

    files: Files
    """By which it is read: those of its plain copy are local."""
    shown: str
    """Its own path or URL."""
    path: str
    """Of the bytes: its own, or that of a plain copy."""
    begin: int
    """Where the text begins there."""
    end: int

    @property
    def is_copy(self) -> bool:
        """True if it is read through a plain copy."""
        return self.path != self.shown


class TextBytes(NamedTuple):
    """The bytes of a text while it is gone through."""

    at: Callable[[int, int], bytes]
    """A place, and how many bytes from there on."""
    pieces: Pieces


class OddQuotesError(Exception):
    """A table has a quote where the parity of quotes would misjudge: another scan must check
    that first, and go through tables twice.
    """


class Scan:
    """The pass over all files: gives the places where lines begin, and each file's end, as if all
    files were one.

    Args:
        texts: the files.
        formats: of records, of each file; none, where lines are wanted.
        newline_in: what ends a line of a file, by its number.
        codec: how bytes are decoded: encoding and errors.
        room: for what is held at once.
        bases: where each file begins, as if all were one, and the last one ends.
        checks_quotes: True if tables are gone through twice, since one of them has odd quotes.
        progress: show a progress bar; None: only on a terminal, and of much.
        delimiters: what stands between fields, of each format of tables.

    Raises:
        OddQuotesError: `checks_quotes` must be True.
    """

    def __init__(
        self,
        texts: Sequence[TextFile],
        formats: Sequence[str],
        newline_in: Callable[[int], Newline],
        codec: tuple[str, str],
        room: Room,
        bases: Sequence[int],
        checks_quotes: bool,
        progress: bool | None,
        delimiters: Mapping[str, str],
    ) -> None:
        self._delimiters = delimiters
        self._texts, self._formats, self._newline_in, self._codec = (
            texts,
            formats,
            newline_in,
            codec,
        )
        self._room, self._bases, self._checks = room, bases, checks_quotes
        self._remote = _in_order([text for text in texts if text.files.is_remote])
        self._counts: list[int] = []
        self._blank: list[IntArray] = []  # numbers of lines that are no records, file by file
        self._headers: list[list[str]] = []
        self._bar = progress_bar(
            progress,
            is_short=bases[-1] < _SHOWN_FROM,
            total=bases[-1],
            desc="finding lines",
            unit="B",
            unit_scale=True,
        )

    def __iter__(self) -> Iterator[IntArray]:
        with self._bar, contextlib.closing(self._remote):
            for number, text in enumerate(self._texts):
                try:
                    with self._opened(text) as file:
                        yield from self._file(file, number, text)
                except (RemoteError, FileChangedError, DataNotFoundError, AccessError):
                    raise
                except (OSError, EOFError) as error:
                    said = getattr(error, "strerror", None) or error
                    raise AccessError(
                        f"{redact(text.shown)} can't be read to its end: {said}"
                    ) from error
                except FormatError as error:
                    raise FormatError(f"{redact(text.shown)}: {error}") from error

    def short(self) -> list[npt.NDArray[Any]]:
        """Once the scan is through: the number of the first line of each file, and of all; for each
        line that is no record how many come before it; the headers.
        """
        first = np.concatenate([[0], np.cumsum(np.array(self._counts, np.int64))])
        blank = np.concatenate(
            [
                np.empty(0, np.int64),
                *(some + start for some, start in zip(self._blank, first, strict=False)),
            ]
        )
        headers = np.frombuffer(json.dumps(self._headers).encode(), np.uint8)
        return [first, blank - np.arange(len(blank)), headers]

    @contextlib.contextmanager
    def _opened(self, text: TextFile) -> Iterator[TextBytes]:
        if text.files.is_remote:
            sequential = _SequentialBytes(text, self._remote)
            yield TextBytes(sequential.at, sequential.pieces)
            return
        with open(text.path, "rb", buffering=0) as file:
            fd = file.fileno()
            yield TextBytes(
                lambda begin, size: os.pread(fd, size, begin), functools.partial(file_pieces, fd)
            )

    def _file(self, file: TextBytes, number: int, text: TextFile) -> Iterator[IntArray]:
        shift = self._bases[number] - text.begin
        kind = self._formats[number] if self._formats else ""
        count, last = 0, np.empty(0, np.int64)
        blank = []
        for places in self._places(file, number, text, kind):
            if kind and kind != ".json":
                joined = np.concatenate([last, places])
                blank.append(
                    np.flatnonzero(is_blank(np.diff(joined), _reader(file, joined)))
                    + max(0, count - 1)
                )
                last = joined[-1:]
            count += places.size
            yield places + shift if shift else places
        self._counts.append(count - 1)
        self._blank.append(np.concatenate([np.empty(0, np.int64), *blank]))

    def _places(
        self, file: TextBytes, number: int, text: TextFile, kind: str
    ) -> Iterator[IntArray]:
        newline = self._newline_in(number)
        if (
            text.files.is_remote
            and self._codec[0] == "utf-8"
            and file.at(0, min(3, text.end)) == UTF8_MARK
        ):
            text = replace(text, begin=3)  # of a local one it was looked at before
        if kind == ".json":
            self._headers.append([])
            self._room.check(2 * (text.end - text.begin))
            data = bytearray()
            for piece in file.pieces(text.begin, text.end):
                data += piece.data.data
            starts, ends = records.json_places(data)
            yield np.concatenate([starts, ends[-1:] if ends.size else [0]]) + text.begin
        elif kind in records.DELIMITERS:
            yield from self._without_header(
                file, self._csv_places(file, text, newline, self._delimiters[kind]), kind
            )
        else:
            self._headers.append([])
            yield from line_starts(file.pieces, text.begin, text.end, newline, watch=self._watch)

    def _watch(self, piece: npt.NDArray[np.uint8]) -> None:
        self._bar.update(piece.size)

    def _csv_places(
        self, file: TextBytes, text: TextFile, newline: Newline, delimiter: str
    ) -> Iterator[IntArray]:
        """By the parity of quotes; where a quote stands that this would misjudge, by Python's
        own reader.
        """
        check = records.QuoteCheck(delimiter)
        if self._checks:
            for piece in file.pieces(text.begin, text.end):
                check(piece.data)
            if not check.is_plain or check.count % 2:
                yield from self._csv_places_slowly(file, text, newline, delimiter)
                return
            check = records.QuoteCheck(delimiter)

        def watch(piece: npt.NDArray[np.uint8]) -> None:
            self._watch(piece)
            check(piece)
            if not check.is_plain:
                raise OddQuotesError

        yield from line_starts(file.pieces, text.begin, text.end, newline, QUOTE, watch)
        if check.count % 2:
            raise OddQuotesError

    def _csv_places_slowly(
        self, file: TextBytes, text: TextFile, newline: Newline, delimiter: str
    ) -> Iterator[IntArray]:
        at = text.begin  # the end of the line that the reader asked for last

        def lines() -> Iterator[bytes]:
            nonlocal at
            for places in line_starts(
                file.pieces, text.begin, text.end, newline, watch=self._watch
            ):
                for place in places.tolist():
                    if place > at:
                        self._room.check(place - at)
                        line, at = file.at(at, place - at), place
                        yield line

        found = [at]
        for _ in records.csv_records(lines(), delimiter):
            found.append(at)
            if len(found) == _TOGETHER:
                yield np.array(found, np.int64)
                found = []
        yield np.array(found, np.int64)

    def _without_header(
        self, file: TextBytes, stream: Iterator[IntArray], kind: str
    ) -> Iterator[IntArray]:
        last, names = np.empty(0, np.int64), None
        for places in stream:
            if names is not None:
                yield places
                continue
            joined = np.concatenate([last, places])
            last, read = joined[-1:], _reader(file, joined)
            for number in range(len(joined) - 1):
                self._room.check(int(joined[number + 1] - joined[number]))
                line = read(number)
                if line.strip(b"\r\n"):
                    try:
                        names = records.csv_row(
                            strip_end(line, None).decode(*self._codec), self._delimiters[kind]
                        )
                    except UnicodeDecodeError as error:
                        said = (
                            "a byte of the first line, which names the fields, is no "
                            f"{error.encoding} ({error.reason})"
                        )
                        raise FormatError(f"{said}; pass encoding= or errors=") from None
                    self._headers.append(names)
                    yield joined[number + 1 :]
                    break
        if names is None:
            raise FormatError("it is empty: a CSV or TSV file begins with a line of field names")


def _reader(file: TextBytes, places: IntArray) -> Callable[[int], bytes]:
    return lambda number: file.at(int(places[number]), int(places[number + 1] - places[number]))


class _SequentialBytes:
    """The bytes of a text that come in order, and those that came last.

    Args:
        text: which, remote.
        parts: of all texts, those of this one next.
    """

    def __init__(self, text: TextFile, parts: Iterator[Part]) -> None:
        self._text, self._size = text, text.end
        self._parts, self._is_begun = parts, False
        self._behind: deque[Part] = deque(maxlen=_BEHIND)

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """From a byte of the first piece on; when they are asked for a second time they are
        fetched again.
        """
        if self._is_begun:
            self._parts = _in_order([self._text])
            self._behind.clear()
        self._is_begun = True
        known, at = [*self._behind], 0
        while at < self._size:
            start, part = known.pop() if known else self._next()
            data = np.frombuffer(part, np.uint8)[max(0, begin - start) : end - start]
            at = start + len(part)
            if data.size:
                yield looked_at(data)

    def _next(self) -> Part:
        part = next(self._parts)
        self._behind.append(part)
        return part

    def at(self, begin: int, size: int) -> bytes:
        """Some bytes; what has gone by, or is to come, is fetched for it."""
        if size and not self._behind:
            self._next()
        found = []
        for first, part in self._behind:
            start, stop = max(begin, first), min(begin + size, first + len(part))
            if start < stop:
                found.append(part[start - first : stop - first])
        data = b"".join(found)
        return (
            data
            if len(data) == size
            else self._text.files.read_joined(
                ByteRanges.of([(self._text.path, begin, begin + size)])
            )
        )


def _in_order(texts: Sequence[TextFile]) -> Generator[Part]:
    """The bytes of remote texts of one server, in order."""
    if texts:
        yield from in_order(
            cast(RemoteFiles, texts[0].files),
            ByteRanges.of((text.path, 0, text.end) for text in texts),
        )
