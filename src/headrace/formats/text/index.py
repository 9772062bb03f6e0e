"""Where the lines and records of texts begin: found by one pass, and stored in two bytes each.

The pass is vectorised and goes piece by piece, so that only the places of a few pieces are in
memory. For a large local text, threads read the next pieces and look for LFs in them, eight bytes
at a time; whatever depends on the previous piece (a CR at its end, an open quote) is done in order.
Line endings are those of Python's ``open``: LF, CR and CRLF.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import AccessError, FormatError, HeadraceError
from headrace.formats.text import records
from headrace.formats.text.plain import Room
from headrace.io import ordered
from headrace.io.array_file import ArrayFile, FileArrays, Unkept
from headrace.io.files import Files
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import Part, RemoteFiles, in_order
from headrace.memory.limits import usable_cpus
from headrace.memory.processes import read_full

PIECE = 1 << 20
THREADS = 4
"""That read ahead, at most; no more than there are cores."""
_FEW = 8  # pieces that are not worth a thread
LF, CR, QUOTE = 10, 13, 34
_UTF8_MARK = b"\xef\xbb\xbf"
_SHOWN_FROM = 64 << 20  # bytes from which on progress is shown
_BEHIND = 4  # pieces of a remote text that were looked at, and are still there


# -- arrays on disk or in memory


def kept_or_held(
    cached: ArrayFile | None,
    patience: float,
    what: str,
    dtype: str,
    make: Callable[[Callable[[npt.NDArray[Any]], None]], list[npt.NDArray[Any]]],
) -> FileArrays:
    """The arrays of a cache file, found or made; in memory without one, or if it can't be written.

    Args:
        cached: the file.
        patience: seconds that it may stay as it is while another process writes it.
        what: for a warning: "the table of lines is".
        dtype: of the long array.
        make: hands out the long array a piece at a time, and returns the short ones.
    """

    def held() -> FileArrays:
        pieces = [np.empty(0, dtype)]
        short = make(pieces.append)
        return FileArrays(np.concatenate(pieces), short)

    if cached is None:
        return held()
    instead = "they are held in memory, and made at every start"
    unkept = Unkept(os.path.dirname(cached.path), what, instead)

    def build() -> FileArrays:
        with unkept:
            with cached.writing(dtype) as writer:
                writer.short(make(writer.write))
            return cached.open()
        return held()

    return cached.found_or_built(patience, build)


# -- places


class PlacesWriter:
    """Cuts places to their low 16 bits.

    Attributes:
        carries: arrays of the numbers of the places from which on the high bits are one more.
    """

    def __init__(self) -> None:
        self.carries: list[IntArray] = [np.empty(0, np.int64)]
        self._count = 0
        self._high = 0

    def low(self, places: IntArray) -> npt.NDArray[np.uint16]:
        """The low bits of the next places; none of them is before the one that precedes it."""
        high = int(places[-1]) >> 16
        steps = np.arange(self._high + 1, high + 1) << 16
        self.carries.append(self._count + np.searchsorted(places, steps))
        self._high = high
        self._count += places.size
        return places.astype(np.uint16)


class Places:
    """Places of lines, at random. Picklable.

    Args:
        arrays: their low bits (uint16), and, as the last of the short ones, the carries.
    """

    def __init__(self, arrays: FileArrays) -> None:
        self.arrays: FileArrays = arrays

    def reach(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Some places, and for each the one that follows it.

        Args:
            numbers: [n] which, from 0; each of them there, and not the last of all.

        Returns:
            [n] int64 each.

        Raises:
            AccessError: the file is gone, or another one.
        """
        pairs = np.stack([numbers, numbers + 1], axis=1)
        low = self.arrays.rows(1, pairs.reshape(-1)).reshape(-1, 2)
        places = low + (np.searchsorted(self.arrays.short[-1], pairs, side="right") << 16)
        return places[:, 0], places[:, 1]

    def distances(self) -> IntArray:
        """From each place to the next ([places - 1] int64)."""
        low = self.arrays.long
        high = np.cumsum(np.bincount(self.arrays.short[-1], minlength=len(low)))
        found: IntArray = np.diff(low + (high << 16))
        return found


def first_from(
    places: IntArray,
    count: int | IntArray,
    begins: Callable[[IntArray], IntArray],
    low: int | IntArray = 0,
) -> IntArray:
    """The first of some records that begins at a place or behind it, for each of some places, by
    bisection.

    Args:
        places: [n] bytes or tokens.
        low, count: the records' first number, and the end of them; of each place, or of all.
        begins: gives where records begin, by their numbers; later ones begin no earlier.
    """
    lows = np.zeros(len(places), np.int64) + low
    highs = np.zeros(len(places), np.int64) + count
    while (lows < highs).any():
        middles = (lows + highs) // 2
        left = np.flatnonzero(lows < highs)
        is_before = begins(middles[left]) < places[left]
        lows[left[is_before]] = middles[left[is_before]] + 1
        highs[left[~is_before]] = middles[left[~is_before]]
    return lows


# -- lines of pieces of a text


class Piece(NamedTuple):
    """Some bytes of a file, and what can be said of them alone."""

    data: npt.NDArray[np.uint8]
    feeds: IntArray
    """The places right behind LFs."""
    has_cr: bool


def line_starts(
    pieces: Iterable[Piece],
    begin: int,
    end: int,
    lf_only: bool = False,
    delimiter: str | None = None,
) -> Iterator[IntArray]:
    """The places where the lines of a part of a file begin, and at last the place where the last
    one ends.

    So of n lines n + 1 places come, in pieces; of nothing one.

    Args:
        pieces: of the part.
        begin, end: where it begins and ends.
        lf_only: True if nothing but an LF ends a line; else a CR and CRLF do too.
        delimiter: of the fields of a table, in which no line ends between two quotes.

    Raises:
        FormatError: the last quote is never closed.
    """
    at = last = begin
    before = LF  # the last byte of the previous piece
    is_open = False  # True if a quoted field reaches to the end of what was seen
    may_open_after = np.frombuffer(f'{delimiter or ""}\n\r"'.encode(), np.uint8)
    quotes = np.empty(0, np.int64)
    yield np.array([begin], np.int64)
    for data, feeds, has_cr in pieces:
        ends = feeds
        after_cr = before == CR  # of which nobody knew yet whether an LF follows
        if not lf_only and (after_cr or has_cr):
            returns = np.flatnonzero(data[:-1] == CR) + 1
            alone = returns[data[returns] != LF]
            if after_cr and data[0] != LF:
                alone = np.concatenate([[0], alone])
            ends = np.sort(np.concatenate([feeds, alone]))
        if delimiter is not None:
            quotes = np.flatnonzero(data == QUOTE)
            opening = quotes[int(is_open) :: 2]
            preceding = np.where(opening > 0, data[opening - 1], np.uint8(before))
            if not np.isin(preceding, may_open_after).all():
                quotes = _field_quotes(data, quotes, before, is_open, may_open_after.tolist())
            ends = ends[(np.searchsorted(quotes, ends) + is_open) % 2 == 0]
            is_open = (quotes.size + is_open) % 2 == 1
        before = int(data[-1])
        if before == QUOTE and not (quotes.size and quotes[-1] == data.size - 1):
            before = 0  # it closes nothing
        if ends.size:
            places = ends + at
            last = int(places[-1])
            yield places
        at += data.size
    if is_open:
        raise FormatError(f"a quote is never closed: the record at byte {last:,} has no end")
    if last < end:  # without an end of its own, or by a CR that nothing followed
        yield np.array([end], np.int64)


def _field_quotes(
    data: npt.NDArray[np.uint8],
    quotes: IntArray,
    before: int,
    is_open: bool,
    may_open_after: list[int],
) -> IntArray:
    """Of the quotes of a table those that open or close a field: others stand within a field that
    is not quoted.

    Args:
        data, quotes: bytes, and where there are quotes.
        before: the byte before them.
        is_open: True if they begin within a quoted field.
        may_open_after: what a field begins behind, and a quote, which closes and may open again.
    """
    found = []
    closed = -1  # where a field was closed last
    for place in quotes.tolist():
        preceding = int(data[place - 1]) if place else before
        if is_open:
            closed = place
        elif preceding not in may_open_after or (preceding == QUOTE and closed != place - 1):
            continue
        is_open = not is_open
        found.append(place)
    return np.array(found, np.int64)


class _Buffer:
    """Room for a piece, and for what is found out about its bytes: used again and again, since
    fresh memory costs more than looking.
    """

    def __init__(self, size: int) -> None:
        self._bytes = bytearray(size)
        self._is_feed = np.zeros(-(-size // 8) * 8, bool)
        self._has_feed = np.empty(-(-size // 8), bool)

    def read(self, fd: int, at: int, size: int) -> Piece:
        """The bytes from a place in a file."""
        with memoryview(self._bytes) as whole:
            done = read_full(fd, [whole[:size]], at)
            if done < size:
                raise EOFError(f"it ends at byte {at + done:,} and not at {at + size:,}")
        has_cr = self._bytes.find(CR, 0, size) >= 0
        return self.piece(np.frombuffer(self._bytes, np.uint8, size), has_cr)

    def piece(self, data: npt.NDArray[np.uint8], has_cr: bool) -> Piece:
        """Finds the LFs: first the words of eight bytes that have one, then where in its word it
        stands.
        """
        words = -(-data.size // 8)
        is_feed = self._is_feed[: 8 * words]
        is_feed[data.size :] = False
        np.equal(data, LF, out=is_feed[: data.size])
        by_word = is_feed.view(np.uint64)
        np.not_equal(by_word, 0, out=self._has_feed[:words])
        chosen = np.flatnonzero(self._has_feed[:words])
        inside = np.flatnonzero(by_word.take(chosen).view(bool))
        feeds = (chosen.take(inside >> 3) << 3) + (inside & 7) + 1
        return Piece(data, feeds, has_cr)


def local_pieces(fd: int, begin: int, end: int) -> Iterator[Piece]:
    """A part of a file, a piece at a time, each of which holds until the next is asked for.

    Raises:
        EOFError: the file is shorter.
    """
    starts = range(begin, end, PIECE)
    threads = 0
    if len(starts) >= _FEW:
        threads = min(THREADS, usable_cpus())
    buffers = [_Buffer(min(PIECE, end - begin)) for _ in range(max(1, 2 * threads))]
    if not threads:
        for at in starts:
            yield buffers[0].read(fd, at, min(PIECE, end - at))
        return
    with ThreadPoolExecutor(threads, "headrace-lines") as pool:
        tasks = (
            (at, pool.submit(buffers[number % len(buffers)].read, fd, at, min(PIECE, end - at)))
            for number, at in enumerate(starts)
        )
        # when all are taken the next one's buffer is that of the first
        with contextlib.closing(ordered.in_order(tasks, len(buffers))) as pieces:
            yield from (piece for _, piece in pieces)


# -- the pass over all texts


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file as its lines are read."""

    shown: str
    """Its own path or URL."""
    path: str
    """Of the bytes: its own, or that of a plain copy."""
    head: int
    """Where its bytes begin there."""
    end: int
    kind: str
    """The ending that says what its records are; "": its lines are wanted."""


class Scan:
    """The pass over all files: gives the places where lines begin, and each file's end, as if all
    files were one.

    Args:
        files: by which they are read.
        texts: the files.
        codec: how bytes are decoded: encoding and errors.
        room: for what is held at once.
        delimiters: what stands between fields, of each format of tables.
        progress: show a progress bar; None: only on a terminal, and of much.

    Attributes:
        counts: lines or records of each file, once the pass is through.
        headers: the names of the fields of each file; none of what is no table.
    """

    def __init__(
        self,
        files: Files,
        texts: Sequence[TextFile],
        codec: tuple[str, str],
        room: Room,
        delimiters: Mapping[str, str],
        progress: bool | None,
    ) -> None:
        self._files = files
        self._texts = texts
        self._codec = codec
        self._room = room
        self._delimiters = delimiters
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
        base = 0
        with self._bar, contextlib.closing(self._remote_parts()) as remote:
            for text in self._texts:
                try:
                    with self._opened(text, remote) as file:
                        count = -1  # the last place is the end
                        self.headers.append([])
                        for places in self._places(file, text):
                            count += places.size
                            yield places + base
                        self.counts.append(count)
                except FormatError as error:
                    raise FormatError(f"{redact(text.shown)}: {error}") from error
                except HeadraceError:
                    raise
                except (OSError, EOFError) as error:
                    cause = getattr(error, "strerror", None) or error
                    raise AccessError(
                        f"{redact(text.shown)} can't be read to its end: {cause}"
                    ) from error
                base += text.end

    def _remote_parts(self) -> Generator[Part]:
        """The bytes of remote texts, in order."""
        if self._files.is_remote:
            whole = ByteRanges.of((text.path, 0, text.end) for text in self._texts)
            yield from in_order(cast(RemoteFiles, self._files), whole)

    @contextlib.contextmanager
    def _opened(self, text: TextFile, remote: Iterator[Part]) -> Iterator[_Bytes]:
        if self._files.is_remote:
            yield _RemoteBytes(self._files, text, remote)
            return
        with open(text.path, "rb", buffering=0) as file:
            yield _Bytes(file.fileno())

    def _pieces(self, file: _Bytes, begin: int, end: int) -> Iterator[Piece]:
        for piece in file.pieces(begin, end):
            self._bar.update(piece.data.size)
            yield piece

    def _places(self, file: _Bytes, text: TextFile) -> Iterator[IntArray]:
        begin = text.head
        if self._codec[0] == "utf-8" and file.at(begin, 3) == _UTF8_MARK:
            begin += 3
        pieces = self._pieces(file, begin, text.end)
        delimiter = self._delimiters.get(text.kind)
        if text.kind == ".json":
            self._room.check(2 * (text.end - begin))
            data = bytearray()
            for piece in pieces:
                data += piece.data.data
            yield begin + records.json_places(data)
        elif delimiter is not None:
            places = line_starts(pieces, begin, text.end, delimiter=delimiter)
            yield from self._without_header(file, _without_blanks(file, places), delimiter)
        elif text.kind:  # JSON Lines: whatever else may be white space there
            yield from _without_blanks(file, line_starts(pieces, begin, text.end, lf_only=True))
        else:
            yield from line_starts(pieces, begin, text.end)

    def _without_header(
        self, file: _Bytes, places: Iterator[IntArray], delimiter: str
    ) -> Iterator[IntArray]:
        first = np.empty(0, np.int64)
        while first.size < 2:
            some = next(places, None)
            if some is None:
                raise FormatError(
                    "it is empty: a CSV or TSV file begins with a line of field names"
                )
            first = np.concatenate([first, some])
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
        stays = np.ones(sizes.size, bool)
        for number in np.flatnonzero(sizes <= 2).tolist():
            line = file.at(int(joined[number]), int(sizes[number]))
            stays[number] = bool(line.strip(b"\r\n"))
        pending = joined[-1:]
        if stays.any():
            yield joined[:-1][stays]
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
        return local_pieces(self._fd, begin, end)


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
                yield _Buffer(data.size).piece(data, bool((data == CR).any()))

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
