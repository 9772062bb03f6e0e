"""Finds where the lines of a text start.

A vectorised scan, piece by piece, so that only the positions of a few pieces are in memory. For a
large text, threads read the next pieces and look for LFs in them, eight bytes at a time; whatever
depends on the previous piece (a CR at its end, an open quote) is done in order. Line endings are
those of Python's ``open``: LF, CR and CRLF.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.ordered import in_order
from headrace.memory.limits import usable_cpus
from headrace.memory.whole import read_full

PIECE = 1 << 20
THREADS = 4
"""That read ahead, at most; no more than there are cores."""
_FEW = 8  # pieces that are not worth a thread
LF, CR, QUOTE = 10, 13, 34
_EXPONENT = (1023 << 52) - (1 << 55)  # of 1.0, less what makes a place one further


class Piece(NamedTuple):
    """Some bytes of a file, and what can be said of them alone."""

    data: npt.NDArray[np.uint8]
    feeds: IntArray
    """The places right behind LFs."""
    has_cr: bool


class LineScanner:
    """Finds the places right behind the ends of lines, in a text that is given a piece at a time.

    Args:
        lf_only: True if nothing but an LF ends a line; else a CR and CRLF do too.
        quote: a character (its code) between two of which no line ends, as in CSV files; None:
            there is none.
        at: the place of the text's first byte.
    """

    def __init__(self, lf_only: bool, quote: int | None, at: int) -> None:
        self._lf_only = lf_only
        self._quote = quote
        self._at = at  # of the next piece
        # True if a CR was the last byte, of which nobody knows yet whether an LF follows
        self._after_cr = False
        self._is_open = False  # True if a quoted part reaches to the end of what was seen

    def feed(self, piece: Piece) -> IntArray:
        """The places in the next bytes, ascending; one that only those that follow can tell comes
        with them.
        """
        if not piece.data.size:
            return np.empty(0, np.int64)
        ends = self._ends(piece)
        if self._quote is not None:
            quotes = np.flatnonzero(piece.data == self._quote)
            inside = (np.searchsorted(quotes, ends) + self._is_open) % 2 == 1
            self._is_open = (quotes.size + self._is_open) % 2 == 1
            ends = ends[~inside]
        ends += self._at  # nobody else has them
        self._at += piece.data.size
        return ends

    def _ends(self, piece: Piece) -> IntArray:
        after_cr = self._after_cr
        if self._lf_only or not (after_cr or piece.has_cr):
            return piece.feeds
        data = piece.data
        self._after_cr = bool(data[-1] == CR)
        returns = np.flatnonzero(data[:-1] == CR) + 1  # what follows the last byte is not known
        alone = returns[data[returns] != LF]
        if after_cr and data[0] != LF:
            alone = np.concatenate([[0], alone])
        return np.sort(np.concatenate([piece.feeds, alone]))


def line_starts(
    pieces: Iterable[Piece], begin: int, end: int, lf_only: bool = False, quote: int | None = None
) -> Iterator[IntArray]:
    """The places where the lines of a part of a file begin, and at last the place where the last
    one ends.

    So of n lines n + 1 places come, in pieces; of nothing one.

    Args:
        pieces: of the part.
        begin, end: where it begins and ends.
        lf_only, quote: see `LineScanner`.
    """
    scanner = LineScanner(lf_only, quote, begin)
    last = begin
    yield np.array([begin], np.int64)
    for piece in pieces:
        places = scanner.feed(piece)
        if places.size:
            last = int(places[-1])
            yield places
    if last < end:  # without an end of its own, or by a CR that nothing followed
        yield np.array([end], np.int64)


def file_pieces(fd: int, begin: int, end: int) -> Iterator[Piece]:
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
        with contextlib.closing(in_order(tasks, len(buffers))) as pieces:
            yield from (piece for _, piece in pieces)


class _Buffer:
    """Room for a piece, and for what is found out about its bytes: used again and again, since
    fresh memory costs more than looking.
    """

    def __init__(self, size: int) -> None:
        self._bytes = bytearray(size)
        words = -(-size // 8)
        self._is_feed = np.empty(8 * words, bool)
        self._has_feed = np.empty(words + words // 8 + 1, bool)

    def read(self, fd: int, at: int, size: int) -> Piece:
        """The bytes from a place in a file."""
        with memoryview(self._bytes) as whole:
            done = read_full(fd, [whole[:size]], at)
            if done < size:
                raise EOFError(f"it ends at byte {at + done:,} and not at {at + size:,}")
        data = np.frombuffer(self._bytes, np.uint8, size)
        return Piece(data, self.behind_feeds(data), self._bytes.find(CR, 0, size) >= 0)

    def behind_feeds(self, data: npt.NDArray[np.uint8]) -> IntArray:
        """The places right behind LFs: first the words of eight bytes that have one, and then
        where in its word it stands.
        """
        words = -(-data.size // 8)
        is_feed = self._is_feed[: 8 * words]
        has_feed = self._has_feed[:words]
        is_feed[data.size :] = False
        np.equal(data, LF, out=is_feed[: data.size])
        by_word = is_feed.view("<u8")
        np.not_equal(by_word, 0, out=has_feed)
        count = np.count_nonzero(has_feed)
        # Below a tenth NumPy jumps from one to the next, and the processor guesses wrong each time:
        # so there are more of them at the end.
        more = 0
        if 10 * count <= words <= 50 * count:
            more = words // 8 + 1
        self._has_feed[words : words + more] = True
        found = np.flatnonzero(self._has_feed[: words + more])[:count]
        chosen = by_word.take(found)
        if (chosen & (chosen - np.uint64(1))).any():  # two in one word: short lines
            inside = np.flatnonzero(chosen.view(bool))
            behind: IntArray = (found.take(inside >> 3) << 3) + (inside & 7) + 1
            return behind
        # 256 to the power of its number in the word: an exponent alone
        places: IntArray = chosen.astype(np.float64).view(np.int64)
        places -= _EXPONENT
        places >>= 55
        found <<= 3
        places += found
        return places


def looked_at(data: npt.NDArray[np.uint8]) -> Piece:
    """A piece of these bytes."""
    return Piece(data, _Buffer(data.size).behind_feeds(data), bool((data == CR).any()))


def strip_end(line: bytes) -> bytes:
    """A line without its end."""
    if line.endswith(b"\n"):
        return line[:-1].removesuffix(b"\r")
    return line.removesuffix(b"\r")


def is_blank(lengths: IntArray, line: Callable[[int], bytes]) -> npt.NDArray[Any]:
    """True for each line that holds nothing but its end.

    Args:
        lengths: [lines] bytes of each, its end included.
        line: gives one by its number.
    """
    blank = np.zeros(lengths.size, bool)
    for number in np.flatnonzero(lengths <= 2).tolist():
        blank[number] = not line(number).strip(b"\r\n")
    return blank
