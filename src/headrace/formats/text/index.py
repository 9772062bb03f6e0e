"""Finds where the lines and records of texts begin, in one pass, and stores two bytes for each.

The pass is vectorised and reads one piece after the other, so that only a few pieces are in memory.
Threads read the next pieces of local texts and look for LFs in them. What depends on the previous
piece (a CR at its end, an open quote) is done in order. Line endings are those of Python's
``open``: LF, CR and CRLF.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from headrace.display import progress_bar
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import AccessError, FormatError, HeadraceError
from headrace.formats.text import records
from headrace.formats.text.plain import check_room
from headrace.io import ordered
from headrace.io.array_file import ArrayFile, Arrays, FileArrays, unkept
from headrace.io.files import Files
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles, in_order
from headrace.memory.budget import MemoryBudget
from headrace.memory.limits import usable_cpus

PIECE = 1 << 20
THREADS = 4
"""Maximum number of threads that read ahead, with at most one for each core."""
LF, CR, QUOTE = 10, 13, 34
_UTF8_MARK = b"\xef\xbb\xbf"
_SHOWN_FROM = 64 << 20  # bytes from which on progress is shown


# -- arrays on disk or in memory


Take = Callable[[AnyArray], None]
"""Receives a long array, a piece at a time."""
Make = Callable[[Take], tuple[str, Arrays]]
"""Hands out a long array, and returns the smallest dtype that fits its values, and the short
arrays.
"""


def kept_or_held(
    cached: ArrayFile | None,
    patience: float,
    what: str,
    dtype: str,
    make: Make,
    budget: MemoryBudget | None = None,
) -> FileArrays:
    """The arrays of a cache file, found or made; in memory without one, or if it can't be written.

    Args:
        cached: the file.
        patience: seconds that it may stay as it is while another process writes it.
        what: their name in messages, in the plural.
        dtype: of the long array as it is handed out.
        make: makes the arrays.
        budget: for what is held in memory. None: it is small.

    Raises:
        BudgetError: the arrays don't fit the budget.
    """

    def held() -> FileArrays:
        pieces = [np.empty(0, dtype)]
        reserved = None if budget is None else budget.reserve(0, what)

        def take(piece: AnyArray) -> None:
            pieces.append(piece)
            if reserved is not None:  # in pieces, and as one array
                reserved.resize(reserved.nbytes + 2 * piece.nbytes)

        smallest, short = make(take)
        long = np.concatenate(pieces, dtype=smallest, casting="unsafe")
        if reserved is not None:
            reserved.resize(long.nbytes + short[0].nbytes)
        return FileArrays(long, short, reserved=reserved)

    if cached is None:
        return held()
    folder = os.path.dirname(cached.path)

    def build() -> FileArrays:
        with unkept(folder, f"{what} are", "they are held in memory, and made at every start"):
            with cached.writing(dtype) as writer:
                smallest, short = make(writer.write)
                if smallest != dtype:
                    writer.narrow(smallest)
                writer.short(short)
            return cached.open()
        return held()

    return cached.found_or_built(patience, build)


# -- places


def split_places(
    stream: Iterable[IntArray], take: Callable[[npt.NDArray[np.uint16]], None]
) -> IntArray:
    """Cuts places to their low 16 bits.

    Args:
        stream: the places, some at a time, in ascending order.
        take: receives the low bits.

    Returns:
        The numbers of the places from which on the high bits are one more.
    """
    carries: list[IntArray] = [np.empty(0, np.int64)]
    count = 0
    high = 0
    for places in stream:
        steps = np.arange(high + 1, (int(places[-1]) >> 16) + 1) << 16
        carries.append(count + np.searchsorted(places, steps))
        high += len(steps)
        count += len(places)
        take(places.astype(np.uint16))
    return np.concatenate(carries)


def places_in(table: FileArrays, numbers: IntArray) -> tuple[IntArray, IntArray]:
    """Some places, and for each the one that follows it.

    Args:
        table: their low bits (uint16), and, as the last of the short arrays, the carries.
        numbers: [n] numbers of places, from 0; none is that of the last place.

    Returns:
        [n] int64 each.

    Raises:
        AccessError: the file is gone, or another one.
    """
    pairs = np.stack([numbers, numbers + 1], axis=1)
    low = table.rows(1, pairs.reshape(-1)).reshape(-1, 2)
    places = low + (np.searchsorted(table.short[-1], pairs, side="right") << 16)
    return places[:, 0], places[:, 1]


def first_from(
    places: IntArray,
    count: int | IntArray,
    begins: Callable[[IntArray], IntArray],
    low: int | IntArray = 0,
) -> IntArray:
    """The first record that begins at each of some places, or behind it, by bisection.

    Args:
        places: [n] bytes or tokens.
        low, count: the first number of the records, and the end of the numbers; for all places, or
            for each.
        begins: returns where records begin, by their numbers; later ones begin no earlier.
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
    """Some bytes of a file, and what they show without the bytes around them."""

    start: int
    """Where they begin in the file."""
    data: npt.NDArray[np.uint8]
    feeds: IntArray
    """The places right behind LFs, in the piece."""
    has_cr: bool


def line_starts(
    pieces: Iterable[Piece], end: int, are_records: bool = False, delimiter: str | None = None
) -> Iterator[IntArray]:
    """The places where the lines of a file begin, and at last the place where the last one ends.

    So of n lines n + 1 places come, in pieces; of nothing one.

    Args:
        pieces: of the file.
        end: where it ends.
        are_records: True if lines that hold nothing but their end are no lines, but part of the one
            before; and, without a delimiter, nothing but an LF ends a line. Else a CR and CRLF do
            too.
        delimiter: of the fields of a table, in which no line ends between two quotes.

    Raises:
        FormatError: the last quote is never closed.
    """
    last = None  # where the line begins whose end was not seen
    before = LF  # the last byte of the previous piece
    is_open = False  # True if a quoted field reaches to the end of what was seen
    may_open_after = np.frombuffer(f'{delimiter or ""}\n\r"'.encode(), np.uint8)
    quotes = np.empty(0, np.int64)
    for start, data, feeds, has_cr in pieces:
        if last is None:
            last = start
        if not data.size:
            continue
        ends = feeds
        after_cr = before == CR  # of which nobody knew yet whether an LF follows
        if (delimiter is not None or not are_records) and (after_cr or has_cr):
            is_end = data == LF
            is_end[:-1] |= (data[:-1] == CR) & (data[1:] != LF)
            ends = np.flatnonzero(is_end) + 1
            if after_cr and data[0] != LF:
                ends = np.concatenate([[0], ends])
        if delimiter is not None:
            quotes = np.flatnonzero(data == QUOTE)
            opening = quotes[int(is_open) :: 2]
            preceding = np.where(opening > 0, data[opening - 1], np.uint8(before))
            if not np.isin(preceding, may_open_after).all():
                quotes = _field_quotes(data, quotes, before, is_open, may_open_after.tolist())
            ends = ends[(np.searchsorted(quotes, ends) + is_open) % 2 == 0]
            is_open = (quotes.size + is_open) % 2 == 1
        if ends.size:
            starts = np.concatenate([[last - start], ends[:-1]])
            last = start + int(ends[-1])
            if are_records:
                starts = starts[~_are_blank(data, starts, ends, before)]
            if starts.size:
                yield start + starts
        before = int(data[-1])
        if before == QUOTE and not (quotes.size and quotes[-1] == data.size - 1):
            before = 0  # it closes nothing
    if is_open:
        raise FormatError(f"a quote is never closed: the record at byte {last:,} has no end")
    # without an end of its own, or by a CR that nothing followed
    if last is not None and last < end and not (are_records and before == CR and last == end - 1):
        yield np.array([last], np.int64)
    yield np.array([end], np.int64)


def _are_blank(
    data: npt.NDArray[np.uint8], starts: IntArray, ends: IntArray, before: int
) -> npt.NDArray[np.bool_]:
    """Which lines hold nothing but their end: an LF, a CR or both.

    Args:
        data: bytes of a piece.
        starts, ends: of the lines that end there; the first one may begin in a previous piece.
        before: the byte before the piece.
    """
    sizes = ends - starts
    are_blank: npt.NDArray[np.bool_] = sizes == 1
    for number in np.flatnonzero((sizes == 2) & (ends > 0)).tolist():
        at = int(ends[number]) - 2
        are_blank[number] = (data[at] if at >= 0 else before) == CR
    return are_blank


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


def _piece(start: int, buffer: bytes | bytearray, size: int) -> Piece:
    """The first `size` bytes of a buffer, which begin at `start` in their file.

    To find LFs, first the groups of sixteen bytes that have one are searched, since `flatnonzero`
    is slow where few of very many are true.
    """
    data = np.frombuffer(buffer, np.uint8, size)
    is_feed = data == LF
    groups = np.zeros(-(-size // 16), "<u2")  # a bit for each byte
    groups.view(np.uint8)[: -(-size // 8)] = np.packbits(is_feed, bitorder="little")
    found = np.flatnonzero(groups != 0)
    if 2 * found.size > groups.size:
        feeds = np.flatnonzero(is_feed) + 1
    else:
        bits = groups[found]
        places = [np.empty(0, np.int64)]
        while found.size:
            others = bits & (bits - np.uint16(1))
            lowest = (bits ^ others).astype(np.float64)
            # the exponent of a float that is a power of two tells which bit that is
            places.append(16 * found + (lowest.view(np.int64) >> 52) - 1022)
            left = np.flatnonzero(others)
            found = found[left]
            bits = others[left]
        feeds = np.sort(np.concatenate(places), kind="stable")
    return Piece(start, data, feeds, buffer.find(CR, 0, size) >= 0)


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
    delimiter: str | None
    """What stands between the fields of a table. None: it is no table."""


@dataclass
class Scan:
    """One pass over all texts, which finds the places where lines begin, and the end of each file,
    as if all files were one.

    Attributes:
        files: by which they are read.
        texts: the files.
        codec: how bytes are decoded: encoding and errors.
        budget: for what is held at once.
        progress: show a progress bar; None: only on a terminal, and of much.
        counts: lines or records of each file that was read.
        headers: the names of the fields of each file; none of what is no table.
    """

    files: Files
    texts: Sequence[TextFile]
    codec: tuple[str, str]
    budget: MemoryBudget | None
    progress: bool | None
    counts: list[int] = field(default_factory=list)
    headers: list[list[str]] = field(default_factory=list)

    def table(self, take: Take) -> tuple[str, Arrays]:
        """The table of `LinesSource`: its long array are the low bits of places; its short ones are
        the number of the first line of each file and the count of all, the headers as JSON, and the
        carries.
        """
        self.counts.clear()  # of a table that could not be written
        self.headers.clear()
        carries = split_places(self._all_places(), take)
        first = np.cumsum([0, *self.counts], dtype=np.int64)
        headers = np.frombuffer(json.dumps(self.headers).encode(), np.uint8)
        return "<u2", [first, headers, carries]

    def _all_places(self) -> Iterator[IntArray]:
        base = 0
        total = sum(text.end for text in self.texts)
        bar = progress_bar(
            self.progress,
            is_short=total < _SHOWN_FROM,
            total=total,
            desc="finding lines",
            unit="B",
            unit_scale=True,
        )
        with bar, contextlib.closing(self._all_pieces(bar)) as pieces:
            for text in self.texts:
                count = -1  # the last place is the end
                self.headers.append([])
                try:
                    for places in self._places(text, pieces):
                        count += places.size
                        yield places + base
                except FormatError as error:
                    raise FormatError(f"{redact(text.shown)}: {error}") from error
                except HeadraceError:
                    raise
                except OSError as error:
                    cause = error.strerror or error
                    raise AccessError(
                        f"{redact(text.shown)} can't be read to its end: {cause}"
                    ) from error
                self.counts.append(count)
                base += text.end

    def _all_pieces(self, bar: Any) -> Generator[Piece]:
        """The bytes of all texts, in order."""
        whole = ByteRanges.of((text.path, text.head, text.end) for text in self.texts)
        if self.files.is_remote:
            for start, part in in_order(cast(RemoteFiles, self.files), whole):
                bar.update(len(part))
                yield _piece(start, bytes(part), len(part))
            return
        threads = min(THREADS, usable_cpus())
        ranges = whole.split(PIECE)[0].each()
        # reused: when all are taken, the next piece takes the place of the first
        buffers = itertools.cycle([bytearray(PIECE) for _ in range(2 * threads)])
        with ThreadPoolExecutor(threads, "headrace-lines") as pool:
            tasks = (
                (path, pool.submit(self._read, path, start, stop, buffer))
                for (path, start, stop), buffer in zip(ranges, buffers, strict=False)
            )
            with contextlib.closing(ordered.in_order(tasks, 2 * threads)) as read:
                for _, piece in read:
                    bar.update(piece.data.size)
                    yield piece

    def _read(self, path: str, start: int, stop: int, buffer: bytearray) -> Piece:
        part = memoryview(buffer)[: stop - start]
        self.files.read_into(ByteRanges.of([(path, start, stop)]), [part])
        return _piece(start, buffer, len(part))

    def _pieces(self, text: TextFile, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Those of one text, without the mark of UTF-8, which the first piece holds whole."""
        at = text.head
        while at < text.end:
            piece = next(pieces)
            if (
                at == text.head
                and self.codec[0] == "utf-8"
                and piece.data[:3].tobytes() == _UTF8_MARK
            ):
                _, data, feeds, has_cr = piece
                piece = Piece(at + 3, data[3:], feeds - 3, has_cr)
            at = piece.start + piece.data.size
            yield piece

    def _places(self, text: TextFile, pieces: Iterator[Piece]) -> Iterator[IntArray]:
        pieces = self._pieces(text, pieces)
        if text.kind == ".json":
            check_room(2 * (text.end - text.head), self.budget)
            data = bytearray()
            for piece in pieces:
                data += piece.data.data
            yield text.end - len(data) + records.json_places(data)
        elif text.delimiter is None:
            yield from line_starts(pieces, text.end, bool(text.kind))
        else:
            yield from self._without_header(pieces, text.end, text.delimiter)

    def _without_header(
        self, pieces: Iterator[Piece], end: int, delimiter: str
    ) -> Iterator[IntArray]:
        header = self.headers[-1]
        head = bytearray()  # what came before the header's end was known

        def noted() -> Iterator[Piece]:
            for piece in pieces:
                if not header:
                    head.extend(piece.data.data)
                    check_room(len(head), self.budget)
                yield piece

        first = np.empty(0, np.int64)
        for places in line_starts(noted(), end, True, delimiter):
            if header:
                yield places
                continue
            first = np.concatenate([first, places])
            if first.size > 1:
                line = head.lstrip(b"\r\n")[: first[1] - first[0]].rstrip(b"\r\n")
                try:
                    header += records.csv_row(line.decode(*self.codec), delimiter)
                except UnicodeDecodeError as error:
                    raise FormatError(
                        "a byte of the first line, which names the fields, is not "
                        f"{error.encoding} ({error.reason}); pass encoding= or errors="
                    ) from None
                yield first[1:]
        if not header:
            raise FormatError("it is empty: a CSV or TSV file begins with a line of field names")
