"""Byte ranges of files, and their coalescing into requests."""

from __future__ import annotations

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
        if not parts:
            return cls.of(())
        if len(parts) == 1:
            return parts[0]
        numbers: dict[str, int] = {}
        files = []
        for part in parts:
            renumbered = [numbers.setdefault(path, len(numbers)) for path in part.paths]
            # ranges that were never written have the number 0, even if there are no paths
            files.append(np.array(renumbered or [0], np.int64)[part.file])
        start = np.concatenate([part.start for part in parts])
        stop = np.concatenate([part.stop for part in parts])
        return cls(list(numbers), np.concatenate(files), start, stop)

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

    def merged(self) -> tuple[ByteRanges, IntArray]:
        """Ranges that follow one another without a gap, as one; and for each the number of its
        first one, with the number of all at the end ([n + 1]). What was never written stays apart.
        """
        follows = (self.start[1:] == self.stop[:-1]) & (self.file[1:] == self.file[:-1])
        follows &= self.start[1:] >= 0  # -1 is also the stop of a whole file
        edges = np.concatenate([[0], np.flatnonzero(~follows) + 1, [self.size]])
        firsts = edges[:-1]
        stops = self.stop[edges[1:] - 1]
        return ByteRanges(self.paths, self.file[firsts], self.start[firsts], stops), edges

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
    """The requests that ranges are joined to.

    Attributes:
        ranges: [m] the requests, sorted by file and begin.
        order: numbers of the ranges that have bytes, sorted likewise.
        edges: [m + 1]; request i serves the ranges ``order[edges[i]:edges[i + 1]]``.
    """

    ranges: ByteRanges
    order: IntArray
    edges: IntArray


def coalesce(ranges: ByteRanges, gap: int, most: int | None = None) -> Requests:
    """Joins ranges that are close together.

    Each range with bytes lies in one request. Whole files, empty ranges and those that were never
    written lie in none.

    Args:
        ranges: ranges of any files, in any order; they may overlap.
        gap: two ranges with at most so many bytes between them are joined.
        most: maximum bytes of a request that joins ranges without an overlap.
    """
    order = np.flatnonzero(ranges.stop > ranges.start)
    order = order[np.lexsort((ranges.start[order], ranges.file[order]))]
    ordered = ranges.take(order)
    columns = zip(ordered.file.tolist(), ordered.start.tolist(), ordered.stop.tolist(), strict=True)
    edges: list[int] = []
    made: list[list[int]] = []  # file, first byte and end of each request
    for number, (file, start, stop) in enumerate(columns):
        if made and made[-1][0] == file:
            _, begin, end = made[-1]
            is_too_long = most is not None and start >= end and stop > begin + most
            if start <= end + gap and not is_too_long:
                made[-1][2] = max(end, stop)
                continue
        edges.append(number)
        made.append([file, start, stop])
    requests = np.array(made, np.int64).reshape(-1, 3)
    edges.append(len(order))
    return Requests(ByteRanges(ranges.paths, *requests.T), order, np.array(edges))
