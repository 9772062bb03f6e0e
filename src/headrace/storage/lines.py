"""Where do the lines of a text begin?

A vectorised scan, a piece at a time: nothing but the places of one piece is ever in memory. Lines end as Python's ``open(newline=...)``
has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
Newline: TypeAlias = Literal["\n", "\r", "\r\n"] | None

PIECE = 1 << 20
LF, CR, QUOTE = 10, 13, 34


class LineScanner:
    """Finds the places right behind the ends of lines, in a text that is given a piece at a time.

    Args:
        newline: what ends a line: one of these texts; or None: any of them.
        quote: a character (its code) between two of which no line ends, as in CSV files; None: there is none.

    Attributes:
        is_open: does a quoted part reach to the end of what was seen?
    """

    def __init__(self, newline: Newline = None, quote: int | None = None) -> None:
        self._newline, self._quote = newline, quote
        self._at = 0  # of the next piece
        self._after_cr = False  # was a CR the last byte, of which nobody knows yet whether an LF follows?
        self.is_open = False

    def feed(self, piece: npt.NDArray[np.uint8]) -> IntArray:
        """The places in the next piece, ascending; one that only the following piece can tell comes with that.

        Args:
            piece: [bytes] uint8.
        """
        if not piece.size:
            return np.empty(0, np.int64)
        cut, self._at = self._at, self._at + piece.size
        ends: IntArray = self._ends(piece)
        if self._quote is not None:
            ends = self._outside_of_quotes(piece, ends)
        places: IntArray = ends + cut
        return places

    def finish(self) -> IntArray:
        """The place behind a CR that was the last byte of all, if it ended a line."""
        ends = self._after_cr and self._newline is None and not self.is_open
        self._after_cr = False
        return np.array([self._at] if ends else [], np.int64)

    def _ends(self, piece: npt.NDArray[np.uint8]) -> Any:
        if self._newline == "\n":
            return np.flatnonzero(piece == LF) + 1
        after_cr = self._after_cr
        self._after_cr = bool(piece[-1] == CR)
        has_cr = after_cr or self._newline is not None or bytes(piece.data).find(b"\r") >= 0
        if not has_cr:
            return np.flatnonzero(piece == LF) + 1
        returns = np.flatnonzero(piece == CR) + 1
        if self._newline == "\r":
            return returns
        feeds = np.flatnonzero(piece == LF) + 1
        is_pair = np.where(feeds > 1, piece[feeds - 2] == CR, after_cr)
        if self._newline == "\r\n":
            return feeds[is_pair]
        inside = returns[returns < piece.size]  # what follows the last byte is not known
        alone = inside[piece[inside] != LF]
        if after_cr and piece[0] != LF:
            alone = np.concatenate([[0], alone])
        return np.sort(np.concatenate([feeds, alone]))

    def _outside_of_quotes(self, piece: npt.NDArray[np.uint8], ends: IntArray) -> IntArray:
        quotes = np.flatnonzero(piece == self._quote)
        inside = (np.searchsorted(quotes, ends) + self.is_open) % 2 == 1
        self.is_open = (quotes.size + self.is_open) % 2 == 1
        outside: IntArray = ends[~inside]
        return outside


def line_starts(
    fd: int,
    begin: int,
    end: int,
    newline: Newline = None,
    quote: int | None = None,
    watch: Callable[[npt.NDArray[np.uint8]], None] | None = None,
) -> Iterator[IntArray]:
    """The places where the lines of a part of a file begin, and at last the place where the last one ends.

    So of n lines n + 1 places come, in pieces; of nothing one.

    Args:
        fd: an open file.
        begin, end: the part.
        newline, quote: see `LineScanner`.
        watch: called with each piece as it is read.

    Raises:
        EOFError: the file is shorter.
    """
    scanner, last = LineScanner(newline, quote), begin
    yield np.array([begin], np.int64)
    for piece in file_pieces(fd, begin, end):
        if watch is not None:
            watch(piece)
        places = scanner.feed(piece) + begin
        if places.size:
            last = int(places[-1])
            yield places
    places = scanner.finish() + begin
    if places.size:
        last = end
        yield places
    if last < end:  # without an end of its own
        yield np.array([end], np.int64)


def file_pieces(fd: int, begin: int, end: int) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of a part of a file, a piece at a time, which holds until the next is asked for.

    Raises:
        EOFError: the file is shorter.
    """
    buffer, at = np.empty(min(PIECE, max(1, end - begin)), np.uint8), begin
    while at < end:
        got = os.preadv(fd, [buffer[: end - at].data], at)
        if not got:
            raise EOFError(f"it ends at byte {at:,} and not at {end:,}")
        yield buffer[:got]
        at += got


def strip_end(line: bytes, newline: Newline) -> bytes:
    """A line without its end."""
    if newline is not None:
        return line.removesuffix(newline.encode())
    if line.endswith(b"\n"):
        return line[:-2] if line.endswith(b"\r\n") else line[:-1]
    return line[:-1] if line.endswith(b"\r") else line


def is_blank(lengths: IntArray, line: Callable[[int], bytes]) -> npt.NDArray[Any]:
    """Which lines hold nothing but their end?

    Args:
        lengths: [lines] bytes of each, its end included.
        line: gives one by its number.
    """
    blank = np.zeros(lengths.size, bool)
    for number in np.flatnonzero(lengths <= 2).tolist():
        blank[number] = not line(number).strip(b"\r\n")
    return blank
