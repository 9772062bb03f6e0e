"""Checksums of a file and of the samples in it, in one pass."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from headrace.dtypes import IntArray
from headrace.errors import FileChangedError
from headrace.memory.processes import read_full

_PIECE = 512 << 10  # bytes that are summed up while they are in the processor's cache


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
    fd: int, edges: IntArray = NOTHING, done: Callable[[int], object] = lambda nbytes: None
) -> FileSums:
    """Reads a file once, and sums up the whole and each sample.

    Args:
        fd: of the file, open for reading.
        edges: [n + 1] int64, ascending: the first byte of each sample, and the end of the last.
        done: is called with a number of bytes when they have been read.

    Raises:
        FileChangedError: the file ends before it should.
        OSError: it can't be read.
    """
    crc32 = isal_zlib.crc32
    size = os.fstat(fd).st_size
    stop = max(size, int(edges[-1]))
    buffer = memoryview(bytearray(_PIECE))
    crc = 0
    carried = 0  # of the part of the next sample that was read
    found = list[int]()
    for start in range(0, stop, _PIECE):
        piece = buffer[: min(_PIECE, stop - start)]
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
        done(len(piece))
    found += [0] * (len(edges) - 1 - len(found))  # empty ones of an empty file
    return FileSums(size, crc, np.array(found, np.uint32))


def replaced(sums: FileSums, offset: int, before: bytes, after: bytes) -> int:
    """The CRC of a file in which some bytes are replaced by as many others."""
    difference = isal_zlib.crc32(before) ^ isal_zlib.crc32(after)
    behind = sums.size - offset - len(after)
    # the difference, moved past the bytes behind it
    return sums.crc ^ int(isal_zlib.crc32_combine(difference, 0, behind))
