"""Checksums of a file and of the samples in it, in one pass."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from headrace.dtypes import IntArray
from headrace.errors import FileChangedError
from headrace.io.ordered import in_order
from headrace.memory.processes import read_full

_PIECE = 512 << 10  # bytes that are summed up while they are in the processor's cache
_SEGMENT = 32 << 20  # bytes of a task
_POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power first


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
) -> FileSums:
    """Reads a file once, and sums up the whole and each sample.

    Args:
        fd: of the file, open for reading.
        edges: [n + 1] int64, ascending: the first byte of each sample, and the end of the last.
        workers: threads.
        done: is called with a number of bytes when they have been read.

    Raises:
        FileChangedError: the file ends before it should.
        OSError: it can't be read.
    """
    size = os.fstat(fd).st_size
    crcs = np.zeros(len(edges) - 1, np.uint32)
    crc = 0

    def task(segment: Segment) -> int:
        return _sum_segment(fd, segment, edges[segment.first : segment.last + 1], crcs)

    with ThreadPoolExecutor(workers, "headrace-checksums") as pool:
        begun = ((one, pool.submit(task, one)) for one in _segments(edges, size))
        for segment, found in in_order(begun, 2 * workers):
            crc = combined(crc, found, segment.stop - segment.start)
            done(segment.stop - segment.start)
    return FileSums(size, crc, crcs)


class Segment(NamedTuple):
    """Bytes that one task sums up."""

    start: int
    stop: int
    first: int
    last: int
    """The samples that lie in it: whole, and one behind the other."""


def _segments(edges: IntArray, size: int) -> Iterator[Segment]:
    count = len(edges) - 1
    for start in range(0, int(edges[0]), _SEGMENT):
        yield Segment(start, min(start + _SEGMENT, int(edges[0])), 0, 0)
    first = 0
    while first < count:
        last = int(np.searchsorted(edges, edges[first] + _SEGMENT, side="right")) - 1
        # of empty ones any number begins at one place
        last = min(max(first + 1, last), first + _SEGMENT // 64, count)
        yield Segment(int(edges[first]), int(edges[last]), first, last)
        first = last
    for start in range(int(edges[-1]), size, _SEGMENT):
        yield Segment(start, min(start + _SEGMENT, size), count, count)


def _sum_segment(fd: int, segment: Segment, edges: IntArray, crcs: npt.NDArray[np.uint32]) -> int:
    """The CRC of a segment; those of its samples, which lie between `edges`, go to `crcs`."""
    crc32 = isal_zlib.crc32
    buffer = memoryview(bytearray(min(_PIECE, max(1, segment.stop - segment.start))))
    crc = 0
    carried = 0
    number = 0
    last = len(edges) - 2
    found = list[int]()
    for start in range(segment.start, segment.stop, _PIECE):
        piece = buffer[: min(_PIECE, segment.stop - start)]
        if read_full(fd, [piece], start) != len(piece):
            raise FileChangedError(
                "the file was cut short while it was read: see that nobody writes to it"
            )
        crc = crc32(piece, crc)
        # the samples that end in this piece; `carried` is of the first one's part before it
        end = int(np.searchsorted(edges, start + len(piece), side="right")) - 1
        if end > number:
            cuts: Sequence[int] = (edges[number : end + 1] - start).tolist()
            found.append(crc32(piece[max(0, cuts[0]) : cuts[1]], carried))
            found += [crc32(piece[a:b]) for a, b in itertools.pairwise(cuts[1:])]
            number = end
            carried = 0
        if number <= last:
            carried = crc32(piece[max(0, int(edges[number]) - start) :], carried)
    found += [0] * (last + 1 - number)  # empty ones of an empty segment
    crcs[segment.first : segment.last] = found
    return crc


def combined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two stretches of bytes, one behind the other, by theirs; the second has
    `nbytes`.
    """
    return shifted(first, nbytes) ^ second


def replaced(sums: FileSums, offset: int, before: bytes, after: bytes) -> int:
    """The CRC of a file in which some bytes are replaced by as many others."""
    difference = isal_zlib.crc32(before) ^ isal_zlib.crc32(after)
    return sums.crc ^ shifted(difference, sums.size - offset - len(after))


def shifted(crc: int, nbytes: int) -> int:
    """A CRC-32 times x^(8 * nbytes), modulo its polynomial: what that many zeros behind it make
    of it, but for their own CRC.
    """
    power, factor = 0x80000000 >> 8, crc  # x^8; the highest bit is x^0
    while nbytes and factor:
        if nbytes & 1:
            factor = _product(factor, power)
        power = _product(power, power)
        nbytes = nbytes >> 1
    return factor


def _product(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo that of CRC-32."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result
