"""Byte ranges of files, and their coalescing into requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray

GAP = 64 << 10
MOST = 4 << 20
"""Remote ranges with so few bytes between them are fetched as one; requests that are longer are
split.
"""
WHOLE = -1
"""The stop of a range that is a whole file, of whatever size, which may be missing."""


class ByteRanges(NamedTuple):
    """Many ranges of files, one column for each property.

    Attributes:
        paths: distinct paths or URLs.
        file: [n] number of the path.
        start: [n] first byte; -1, and so is the stop: never written, there is nothing to read.
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
        found = [
            (0, -1, -1)
            if one is None
            else (numbers.setdefault(one[0], len(numbers)), one[1], one[2])
            for one in ranges
        ]
        columns = np.array(found, np.int64).reshape(-1, 3)
        return cls(list(numbers), columns[:, 0], columns[:, 1], columns[:, 2])

    @classmethod
    def in_file(cls, path: str, start: IntArray, stop: IntArray) -> ByteRanges:
        """Ranges of one file."""
        return cls([path], np.zeros(len(start), np.int64), start, stop)

    @classmethod
    def of_wholes(cls, paths: Sequence[str], numbers: Sequence[int]) -> ByteRanges:
        """Whole files, by the numbers of their paths."""
        file = np.asarray(numbers, np.int64)
        start = np.zeros(len(file), np.int64)
        return cls(paths, file, start, start + WHOLE)

    @classmethod
    def joined(cls, parts: Sequence[ByteRanges]) -> ByteRanges:
        """The ranges of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        numbers: dict[str, int] = {}
        files = [np.empty(0, np.int64)]
        for part in parts:
            new = np.array(
                [numbers.setdefault(path, len(numbers)) for path in part.paths], np.int64
            )
            files.append(new[part.file] if len(new) else part.file)
        empty = [np.empty(0, np.int64)]
        starts, stops = (
            np.concatenate(empty + [part[column] for part in parts]) for column in (2, 3)
        )
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
        for file, start, stop in zip(
            self.file.tolist(), self.start.tolist(), self.stop.tolist(), strict=True
        ):
            yield self.paths[file] if start >= 0 else "", start, stop

    def split(self, most: int) -> tuple[ByteRanges, IntArray]:
        """Pieces of at most so many bytes, and for each range the number of its first piece,
        with their total at the end ([n + 1]).
        """
        counts = -(-self.nbytes // most)
        edges = np.concatenate([[0], np.cumsum(counts)])
        if edges[-1] == self.size and counts.all():
            return self, edges
        of = np.repeat(np.arange(self.size), counts)
        starts = self.start[of] + (np.arange(edges[-1]) - edges[of]) * most
        return ByteRanges(
            self.paths, self.file[of], starts, np.minimum(starts + most, self.stop[of])
        ), edges


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

    Each range with bytes lies in one request. Whole files, empty ranges and those that were never
    written lie in none.

    Args:
        ranges: of any files, in any order; they may overlap.
        gap: bytes between two ranges that are rather read than left out.
        most: bytes of a request, which a range that begins behind its end does not make longer.
    """
    paths, file, start, stop = ranges
    order = np.flatnonzero(stop > start)
    if len(order) < len(file):
        file = file[order]
        start = start[order]
        stop = stop[order]
    sort = start.argsort(kind="stable") if len(paths) < 2 else np.lexsort((start, file))
    order = order[sort]
    file = file[sort]
    start = start[sort]
    stop = stop[sort]
    steps = start[1:] - stop[:-1]
    is_first = steps > gap
    is_other = file[1:] != file[:-1] if len(paths) > 1 else np.zeros(len(steps), bool)
    if len(paths) > 1:
        is_first |= is_other
        steps[is_other] = 0
    if is_first.all():
        return Requests(ByteRanges(paths, file, start, stop), order, np.arange(len(order) + 1))
    end = stop
    if steps.min() < 0:  # overlaps: where all ranges so far end, file by file
        end = stop.copy()
        for first, last in itertools.pairwise(
            [0, *(np.flatnonzero(is_other) + 1).tolist(), len(order)]
        ):
            np.maximum.accumulate(end[first:last], out=end[first:last])
        is_first = is_other | (start[1:] > end[:-1] + gap)
    edges = np.concatenate([[0], np.flatnonzero(is_first) + 1, [len(order)]])
    starts = start[edges[:-1]]
    stops = end[edges[1:] - 1]
    if most is not None and (stops - starts > most).any():
        edges = _cut(edges, start, end, most)
        starts = start[edges[:-1]]
        stops = end[edges[1:] - 1]
    return Requests(ByteRanges(paths, file[edges[:-1]], starts, stops), order, edges)


def _cut(edges: IntArray, start: IntArray, end: IntArray, most: int) -> IntArray:
    """Begins another request where one would become too long, before a range that doesn't
    overlap it.
    """
    found: list[int] = []
    for first, stop in itertools.pairwise(edges.tolist()):
        at = first
        while at < stop:
            found.append(at)
            at += max(1, int(np.searchsorted(end[at:stop], start[at] + most, side="right")))
            while at < stop and start[at] < end[at - 1]:
                at += 1
    return np.array([*found, edges[-1]], np.int64)
