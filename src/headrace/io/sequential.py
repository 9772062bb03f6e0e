"""How are files that are far away gone through once, from their beginning to their end?

By large pieces, several of them on their way at once; small files, many at once. Pieces come in order, so that no more than those on
their way is ever in memory.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, NamedTuple, cast

from headrace.io.remote_files import RemoteFiles, Span

PIECE = 4 << 20
"""Bytes of a piece; of several small files together too."""
AHEAD = 8
"""Pieces, or groups of small files, that are on their way at once."""
_TOGETHER = 64  # small files of a group


class Part(NamedTuple):
    """Some bytes of a file."""

    url: str
    start: int
    data: memoryview


def in_order(files: RemoteFiles, spans: Iterable[Span], *, afresh: bool = False) -> Iterator[Part]:
    """The bytes of spans, one after the other, in parts of `PIECE` bytes at most. Empty spans have no part.

    Args:
        files: of the server.
        spans: path, first byte and end of each.
        afresh: past everything that is kept of them on this machine.

    Raises:
        FormatError, RemoteError, FileChangedError, DataNotFoundError, AccessError: see `RemoteFiles.read`.
    """

    def fetch(group: list[Span]) -> list[Part]:
        if afresh:
            with files.afresh():
                found = files.read(group)
        else:
            found = files.read(group)
        return [Part(url, start, data) for (url, start, _), data in zip(group, found, strict=True)]

    tasks: deque[Future[list[Part]]] = deque()
    with ThreadPoolExecutor(AHEAD, "headrace-in-order") as pool:  # its threads begin as they are needed
        try:
            for group in _groups(spans):
                tasks.append(pool.submit(fetch, group))
                if len(tasks) == AHEAD:
                    yield from tasks.popleft().result()
            while tasks:
                yield from tasks.popleft().result()
        finally:
            for task in tasks:
                task.cancel()


def _groups(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Spans that are fetched together: no more than a piece, and no more than some."""
    group: list[Span] = []
    nbytes = 0
    for url, start, stop in spans:
        for at in range(start, stop, PIECE):
            end = min(at + PIECE, stop)
            if group and (nbytes + end - at > PIECE or len(group) == _TOGETHER):
                yield group
                group, nbytes = [], 0
            group.append((url, at, end))
            nbytes += end - at
    if group:
        yield group


def opened_in_order(files: RemoteFiles, url: str, *, afresh: bool = False) -> BinaryIO:
    """A file that is far away, to be read once from its beginning on; close it, for the sake of what is on its way."""
    return cast(BinaryIO, io.BufferedReader(_Raw(files, url, afresh), 1 << 16))


class _Raw(io.RawIOBase):
    def __init__(self, files: RemoteFiles, url: str, afresh: bool) -> None:
        self._parts = in_order(files, [(url, 0, files.version(url).size)], afresh=afresh)
        self._left, self._at = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if not self._left:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._left = part.data
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left, self._at = self._left[count:], self._at + count
        return count

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._parts.close()  # type: ignore[attr-defined]
        super().close()
