"""Remote files read once from beginning to end, with several requests on their way.

Pieces come in order, so that no more than those on their way is ever in memory.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator
from typing import BinaryIO, cast

import numpy as np

from headrace.io import ordered
from headrace.io.files import Files
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles

PIECE = 4 << 20
"""Bytes of a piece; of several small files together too."""
AHEAD = 8
"""Pieces, or groups of small files, that are on their way at once."""
_TOGETHER = 64  # small files of a group

Part = tuple[int, memoryview]
"""Where in its file a part begins, and its bytes."""


def in_order(files: RemoteFiles, ranges: ByteRanges) -> Iterator[Part]:
    """The bytes of ranges, one after the other, in parts of `PIECE` bytes at most. Empty ranges
    have no part.

    Args:
        files: of the server.
        ranges: which.

    Raises:
        FormatError, RemoteError, FileChangedError, DataNotFoundError, AccessError: see
            `RemoteFiles.read`.
    """
    begun = ((group, files.begin(group)) for group in _groups(ranges.split(PIECE)[0]))
    with contextlib.closing(ordered.in_order(begun, AHEAD)) as fetched:
        yield from itertools.chain.from_iterable(itertools.starmap(_parts, fetched))


def _parts(group: ByteRanges, contents: list[memoryview | None]) -> Iterator[Part]:
    for start, data in zip(group.start.tolist(), contents, strict=True):
        assert data is not None
        yield start, data


def _groups(pieces: ByteRanges) -> Iterator[ByteRanges]:
    """Pieces that are fetched together: no more than `PIECE` bytes, and no more than some."""
    ends = np.cumsum(pieces.nbytes)
    first = 0
    while first < pieces.size:
        before = 0
        if first:
            before = int(ends[first - 1])
        last = max(
            first + 1,
            min(first + _TOGETHER, int(np.searchsorted(ends, before + PIECE, side="right"))),
        )
        yield pieces.take(np.arange(first, last))
        first = last


def opened_in_order(files: Files, path: str) -> BinaryIO:
    """A file to be read once from its beginning on; close it, for the sake of what is on its
    way.
    """
    if not files.is_remote:
        return open(path, "rb")
    return cast(BinaryIO, io.BufferedReader(_Raw(cast(RemoteFiles, files), path), 1 << 16))


class _Raw(io.RawIOBase):
    def __init__(self, files: RemoteFiles, url: str) -> None:
        self._parts = in_order(files, ByteRanges.of([(url, 0, files.version(url).size)]))
        self._left = memoryview(b"")
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if not self._left:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._left = part[1]
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        self._at = self._at + count
        return count

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._parts.close()  # type: ignore[attr-defined]
        super().close()
