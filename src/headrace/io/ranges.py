"""Byte ranges of files, and their coalescing into requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

GAP, MOST = 64 << 10, 4 << 20
"""Remote ranges with so few bytes between them are fetched as one; requests that are longer are split."""
WHOLE = -1
"""The stop of a range that is a whole file, of whatever size, which may be missing."""


class ByteRanges(NamedTuple):
    """Many ranges of files, one column for each property.

    Attributes:
        paths: distinct paths or URLs.
        file: [n] number of the path.
        start: [n] first byte; -1: never written, there is nothing to read.
        stop: [n] end; `WHOLE` with a start of 0: the whole file, whose size is not known.
    """

    paths: Sequence[str]
    file: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def of(cls, ranges: Iterable[tuple[str, int, int] | None]) -> ByteRanges:
        """From path, first byte and end of each; None: never written."""
        numbers: dict[str, int] = {}
        found = [(0, -1, -1) if one is None else (numbers.setdefault(one[0], len(numbers)), one[1], one[2]) for one in ranges]
        columns = np.array(found, np.int64).reshape(-1, 3)
        return cls(list(numbers), columns[:, 0], columns[:, 1], columns[:, 2])

    @classmethod
    def in_file(cls, path: str, start: IntArray, stop: IntArray) -> ByteRanges:
        """Ranges of one file."""
        return cls([path], np.zeros(len(start), np.int64), start, stop)

    @classmethod
    def joined(cls, parts: Sequence[ByteRanges]) -> ByteRanges:
        """The ranges of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        numbers: dict[str, int] = {}
        files = [np.empty(0, np.int64)]
        for part in parts:
            new = np.array([numbers.setdefault(path, len(numbers)) for path in part.paths], np.int64)
            files.append(new[part.file] if len(new) else part.file)
        empty = [np.empty(0, np.int64)]
        starts, stops = (np.concatenate(empty + [part[column] for part in parts]) for column in (2, 3))
        return cls(list(numbers), np.concatenate(files), starts, stops)

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self.file)

    @property
    def nbytes(self) -> IntArray:
        """[n] bytes of each; 0 for what was never written, and for whole files."""
        nbytes: IntArray = np.maximum(self.stop - self.start, 0)
        return nbytes

    @property
    def is_written(self) -> npt.NDArray[np.bool_]:
        """[n] False for what was never written."""
        is_written: npt.NDArray[np.bool_] = self.start >= 0
        return is_written

    @property
    def is_whole(self) -> npt.NDArray[np.bool_]:
        """[n] True for whole files of unknown size."""
        is_whole: npt.NDArray[np.bool_] = (self.stop == WHOLE) & (self.start >= 0)
        return is_whole

    def take(self, numbers: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> ByteRanges:
        """Some of the ranges, by number or mask."""
        return ByteRanges(self.paths, self.file[numbers], self.start[numbers], self.stop[numbers])

    def each(self) -> Iterator[tuple[str, int, int]]:
        """Path, first byte and end of each range."""
        for file, start, stop in zip(self.file.tolist(), self.start.tolist(), self.stop.tolist(), strict=True):
            yield self.paths[file] if start >= 0 else "", start, stop

    def split(self, most: int) -> tuple[ByteRanges, IntArray]:
        """Pieces of at most so many bytes, and for each range the number of its first piece, with their total at the end ([n + 1])."""
        counts = -(-self.nbytes // most)
        edges = np.concatenate([[0], np.cumsum(counts)])
        if edges[-1] == self.size and counts.all():
            return self, edges
        of = np.repeat(np.arange(self.size), counts)
        starts = self.start[of] + (np.arange(edges[-1]) - edges[of]) * most
        return ByteRanges(self.paths, self.file[of], starts, np.minimum(starts + most, self.stop[of])), edges


class Requests(NamedTuple):
    """What is asked for instead of ranges.

    Attributes:
        ranges: [m] the requests, sorted by file and place.
        order: numbers of the ranges that have bytes, sorted likewise.
        edges: [m + 1]; request i serves the ranges ``order[edges[i]:edges[i + 1]]``.
    """

    ranges: ByteRanges
    order: IntArray
    edges: IntArray


def coalesce(ranges: ByteRanges, gap: int, most: int | None = None) -> Requests:
    """Joins ranges that lie close together.

    Each range with bytes lies in one request. Whole files, empty ranges and those that were never written lie in none.

    Args:
        ranges: of any files, in any order; they may overlap.
        gap: bytes between two ranges that are rather read than left out.
        most: bytes of a request, which a range that begins behind its end does not make longer.
    """
    paths, file, start, stop = ranges
    order = np.flatnonzero((stop > start) & (start >= 0))
    if len(order) < len(file):
        file, start, stop = file[order], start[order], stop[order]
    sort = start.argsort(kind="stable") if len(paths) < 2 else np.lexsort((start, file))
    order, file, start, stop = order[sort], file[sort], start[sort], stop[sort]
    is_other = file[1:] != file[:-1]
    end = stop
    if ((start[1:] < stop[:-1]) & ~is_other).any():  # overlaps: where all ranges so far end, file by file
        end = stop.copy()
        edges = [0, *(np.flatnonzero(is_other) + 1).tolist(), len(order)]
        for first, last in itertools.pairwise(edges):
            np.maximum.accumulate(end[first:last], out=end[first:last])
    firsts = np.flatnonzero(np.concatenate([np.ones(min(1, len(order)), bool), is_other | (start[1:] > end[:-1] + gap)]))
    lasts = np.append(firsts[1:], len(order))[: len(firsts)] - 1
    if most is not None and (end[lasts] - start[firsts] > most).any():
        firsts = _cut(firsts, lasts, start, end, most)
        lasts = np.append(firsts[1:], len(order)) - 1
    requests = ByteRanges(paths, file[firsts], start[firsts], end[lasts])
    return Requests(requests, order, np.append(firsts, len(order)))


def _cut(firsts: IntArray, lasts: IntArray, start: IntArray, end: IntArray, most: int) -> IntArray:
    """Begins another request where one would become too long, before ranges that don't overlap it."""
    found: list[int] = []
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        while True:
            found.append(first)
            if end[last] - start[first] <= most:
                break
            first += max(1, int(np.searchsorted(end[first : last + 1], start[first] + most, side="right")))
            while first <= last and start[first] < end[first - 1]:
                first += 1
            if first > last:
                break
    return np.array(found, np.int64)
