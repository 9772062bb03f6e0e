"""Checksums of a file and of the samples in it, in one pass."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from headrace.dtypes import IntArray, distinct
from headrace.errors import FileChangedError
from headrace.io.ordered import in_order
from headrace.memory.processes import read_full

_PIECE = 512 << 10  # bytes that are summed up while they are in the processor's cache
_SEGMENT = 32 << 20  # bytes that a thread sums up
_LARGEST_PAGE = 8 << 20  # bytes
_Sums = tuple[int, list[int]]
"""The CRC of a segment of a file, and of each sample in it."""


class FileSums(NamedTuple):
    """What `sum_file` found.

    Attributes:
        size: bytes of the file.
        crc: CRC-32 of all of them.
        crcs: [n] uint32, of each sample.
    """

    size: int
    crc: int
    crcs: npt.NDArray[np.uint32]


NOTHING: IntArray = np.zeros(1, np.int64)
"""The edges of no samples."""


def sum_file(
    fd: int,
    edges: IntArray = NOTHING,
    workers: int = 1,
    done: Callable[[int], object] = lambda nbytes: None,
    ahead: SumsAhead | None = None,
) -> FileSums:
    """Reads a file once, and computes the checksums of the whole and of each sample.

    Args:
        fd: the file, open for reading.
        edges: [n + 1] int64, ascending: the first byte of each sample, and the end of the last.
        workers: number of threads.
        done: is called with a number of bytes when they have been read.
        ahead: what was summed up while the file was written, and is not read again.

    Raises:
        FileChangedError: the file ends before it should.
        OSError: it can't be read.
    """
    size = os.fstat(fd).st_size
    crc = 0
    crcs = np.zeros(len(edges) - 1, np.uint32)
    known = dict[_Segment, Future[_Sums]]()
    if ahead is not None and np.array_equal(ahead.edges, edges):
        known = ahead.futures
    with ThreadPoolExecutor(workers, "headrace-checksums") as pool:
        begun = (
            (one, known.get(one) or pool.submit(_sum_segment, fd, one, edges))
            for one in _segments(edges, size)
        )
        for segment, (segment_crc, found) in in_order(begun, 2 * workers):
            nbytes = segment.stop - segment.start
            crc = int(isal_zlib.crc32_combine(crc, segment_crc, nbytes))
            crcs[segment.first : segment.first + len(found)] = found
            done(nbytes)
    return FileSums(size, crc, crcs)


class SumsAhead:
    """Computes the checksums of a file in a thread, while it is still written.

    Args:
        fd: of the file, open for reading.
        edges: as for `sum_file`.
        settle: called before a segment is read, with its first byte and its end; makes it durable,
            and drops its pages from memory.

    Attributes:
        edges: as given.
        futures: the sums of each segment that is read, or was.
    """

    def __init__(self, fd: int, edges: IntArray, settle: Callable[[int, int], object]) -> None:
        self.edges: IntArray = edges
        self.futures: dict[_Segment, Future[_Sums]] = {}
        self._fd = fd
        self._settle = settle
        self._left = deque(one for one in _segments(edges, 0) if one.start >= edges[0])
        self._pool = ThreadPoolExecutor(1, "headrace-checksums")

    def written(self, stop: int) -> None:
        """Sums up the segments before `stop`, since everything before it is written. A segment
        waits until what follows closely is written, too: it may share a page of the system.
        """
        while self._left and self._left[0].stop + _LARGEST_PAGE <= stop:
            segment = self._left.popleft()
            self.futures[segment] = self._pool.submit(self._sum, segment)

    def _sum(self, segment: _Segment) -> _Sums:
        self._settle(segment.start, segment.stop + _LARGEST_PAGE)
        return _sum_segment(self._fd, segment, self.edges)

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Segment(NamedTuple):
    """Bytes that one thread sums up, and the number of the first sample that begins there."""

    start: int
    stop: int
    first: int


def _segments(edges: IntArray, size: int) -> Iterator[_Segment]:
    """Cuts a file into segments. No sample lies in two of them."""
    begin = int(edges[0])
    end = int(edges[-1])
    starts = np.searchsorted(edges, np.arange(begin, end, _SEGMENT))
    before = np.arange(0, begin, _SEGMENT)
    behind = np.arange(end, size, _SEGMENT)
    cuts = distinct(np.concatenate([before, edges[starts], [end], behind, [max(size, end)]]))
    firsts = np.searchsorted(edges, cuts)
    for start, stop, first in zip(cuts.tolist(), cuts[1:].tolist(), firsts.tolist(), strict=False):
        yield _Segment(start, stop, first)


def _sum_segment(fd: int, segment: _Segment, edges: IntArray) -> _Sums:
    crc32 = isal_zlib.crc32
    last = int(np.searchsorted(edges, segment.stop))
    edges = edges[segment.first : last + 1]
    buffer = memoryview(bytearray(min(_PIECE, segment.stop - segment.start)))
    crc = 0
    carried = 0  # of the part of the next sample that was read
    found = list[int]()
    for start in range(segment.start, segment.stop, _PIECE):
        piece = buffer[: segment.stop - start]
        if read_full(fd, [piece], start) != len(piece):
            raise FileChangedError(
                "the file was cut short while it was read: make sure that no process writes to it"
            )
        crc = crc32(piece, crc)
        end = int(np.searchsorted(edges, start + len(piece), side="right")) - 1
        if end > len(found):  # the samples that end in this piece
            cuts: Sequence[int] = (edges[len(found) : end + 1] - start).tolist()
            found.append(crc32(piece[max(0, cuts[0]) : cuts[1]], carried))
            found += [crc32(piece[a:b]) for a, b in itertools.pairwise(cuts[1:])]
            carried = 0
        if len(found) < len(edges) - 1:
            carried = crc32(piece[max(0, int(edges[len(found)]) - start) :], carried)
    return crc, found


def replaced(sums: FileSums, offset: int, before: bytes, after: bytes) -> int:
    """The CRC of a file in which some bytes are replaced by as many others."""
    difference = isal_zlib.crc32(before) ^ isal_zlib.crc32(after)
    behind = sums.size - offset - len(after)
    # the difference, moved past the bytes behind it
    return sums.crc ^ int(isal_zlib.crc32_combine(difference, 0, behind))
