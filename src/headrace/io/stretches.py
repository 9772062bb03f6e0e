"""How are stretches of files read with as few calls as may be?"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.io.handles import WorkerFiles
from headrace.io.hints import HINTS
from headrace.io.paths import redact
from headrace.io.remote_files import RemoteFiles, Span
from headrace.memory.whole import read_full

_GAP = 16 << 10  # bytes between two stretches that are rather read than left out
_RUN = 8 << 20  # bytes that one call reads at most
_IOV_MAX = 1024

Files = WorkerFiles[int] | RemoteFiles
"""What stretches are read from: files of this machine, or those of a server."""


class Stretch(NamedTuple):
    """Where the stored bytes of a chunk lie."""

    path: str
    offset: int
    nbytes: int
    """Or WHOLE: a whole file that is far away."""
    skipped: int = 0
    """Bit i: codec i was not used."""

    @property
    def span(self) -> Span:
        """Path, first byte, end."""
        return self.path, self.offset, self.offset + self.nbytes


class Places(NamedTuple):
    """Where many stretches lie, an element each."""

    paths: Sequence[str]
    files: npt.NDArray[np.int64]
    """[n] numbers of `paths`."""
    offsets: npt.NDArray[np.int64]
    """[n]; -1: never written."""
    nbytes: npt.NDArray[np.int64]
    """[n]"""

    def stretches(self) -> list[Stretch | None]:
        """The same one by one; None: never written."""
        found = zip(self.files.tolist(), self.offsets.tolist(), self.nbytes.tolist(), strict=True)
        return [None if offset < 0 else Stretch(self.paths[file], offset, nbytes) for file, offset, nbytes in found]

    def spans(self) -> list[Span]:
        """Path, first byte and end of each that was written."""
        paths, found = self.paths, zip(self.files.tolist(), self.offsets.tolist(), self.nbytes.tolist(), strict=True)
        return [(paths[file], offset, offset + nbytes) for file, offset, nbytes in found if offset >= 0]


def places_of(stretches: Sequence[Stretch | None]) -> Places:
    """The same as numbers."""
    paths = {part.path: None for part in stretches if part is not None}
    numbers = {path: number for number, path in enumerate(paths)}
    found = [(0, -1, 0) if part is None else (numbers[part.path], part.offset, part.nbytes) for part in stretches]
    columns = np.array(found, np.int64).reshape(-1, 3)
    return Places(list(paths), columns[:, 0], columns[:, 1], columns[:, 2])


def read_places(places: Places, parts: Sequence[memoryview], files: Files) -> None:
    """Reads stretches of one length, which were written, into memory of that length each; those that follow one another by one call.

    Raises:
        FormatError: a file ends before one of them does.
        OSError: a file can't be opened or read.
    """
    if not len(parts):
        return
    if isinstance(files, RemoteFiles):
        for part, data in zip(parts, files.read(places.spans()), strict=True):
            part[:] = data
        return
    offsets, of = places.offsets, places.files
    order = offsets.argsort() if len(places.paths) == 1 else np.lexsort((offsets, of))
    numbers, offsets, nbytes = order.tolist(), offsets[order].tolist(), len(parts[0])
    starts, paths = [0, len(numbers)], list(places.paths)
    if len(paths) != 1:
        of = of[order]
        starts = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), len(numbers)]
        paths = [paths[number] for number in of[starts[:-1]].tolist()]
    most = min(_IOV_MAX, max(1, _RUN // max(1, nbytes)))
    with contextlib.closing(files.reading_each(paths)) as opened:
        for at, fds in opened:
            if HINTS.are_wanted:
                for fd, first, end in zip(fds, starts[at:], starts[at + 1 :], strict=False):
                    HINTS.give(fd, ((begin, nbytes) for begin in offsets[first:end]))
            began, first = time.perf_counter(), starts[at]
            for fd, path, end in zip(fds, paths[at:], starts[at + 1 :], strict=False):
                while first < end:
                    begin, last = offsets[first], first + 1
                    while last < end and last - first < most and offsets[last] == begin + nbytes * (last - first):
                        last += 1
                    buffers = [parts[number] for number in numbers[first:last]]
                    if os.preadv(fd, buffers, begin) != nbytes * len(buffers):
                        fill(fd, buffers, begin, path)
                    first = last
            HINTS.note(began, first - starts[at], nbytes * (first - starts[at]))


def read_stretches(stretches: Sequence[Stretch | None], files: Files) -> list[memoryview | None]:
    """The bytes of stretches, those that lie close together by one call; None also for a whole file that is missing.

    Raises:
        FormatError: a file ends before one of them does.
        OSError: a file can't be opened or read.
    """
    found: list[memoryview | None] = [None] * len(stretches)
    if isinstance(files, RemoteFiles):
        there = [number for number, part in enumerate(stretches) if part is not None]
        for number, data in zip(there, files.find([part.span for part in stretches if part is not None]), strict=True):
            found[number] = data
        return found
    wanted = sorted((part.path, part.offset, part.nbytes, number) for number, part in enumerate(stretches) if part is not None)
    by_path = [(path, list(same)) for path, same in itertools.groupby(wanted, operator.itemgetter(0))]
    with contextlib.closing(files.reading_each([path for path, _ in by_path])) as opened:
        for at, fds in opened:
            if HINTS.are_wanted:
                for fd, (_, same) in zip(fds, by_path[at:], strict=False):
                    HINTS.give(fd, (part[1:3] for part in same))
            began, some = time.perf_counter(), by_path[at : at + len(fds)]
            for fd, (path, same) in zip(fds, some, strict=True):
                _read_near(fd, path, [part[1:] for part in same], found)
            HINTS.note(began, sum(len(same) for _, same in some), sum(part[2] for _, same in some for part in same))
    return found


def announce(spans: Sequence[Span], files: WorkerFiles[int]) -> None:
    """Tells the system what is read next.

    Raises:
        OSError: a file can't be opened.
    """
    for path, same in itertools.groupby(sorted(spans), operator.itemgetter(0)):
        with files.reading(path) as fd:
            HINTS.give(fd, ((start, end - start) for _, start, end in same))


def read_part(path: str, offset: int, buffer: memoryview, files: Files) -> None:
    """Fills a buffer from a place of a file on.

    Raises:
        FormatError: the file ends before the buffer is full.
        OSError: it can't be opened or read.
    """
    read_parts([(path, offset, offset + len(buffer))], [buffer], files)


def read_parts(spans: Sequence[Span], buffers: Sequence[memoryview], files: Files) -> None:
    """Fills buffers of any length; what is far away is fetched at once.

    Raises:
        FormatError: a file ends before a buffer is full.
        OSError: it can't be opened or read.
    """
    if isinstance(files, RemoteFiles):
        for buffer, data in zip(buffers, files.read(spans), strict=True):
            buffer[:] = data
        return
    if HINTS.are_wanted and len(spans) > 1:
        announce(spans, files)
    began = time.perf_counter()
    for (path, start, _), buffer in zip(spans, buffers, strict=True):
        with files.reading(path) as fd:
            fill(fd, [buffer], start, path)
    HINTS.note(began, len(spans), sum(map(len, buffers)))


def _read_near(fd: int, path: str, wanted: Sequence[tuple[int, int, int]], found: list[memoryview | None]) -> None:
    """Reads (offset, bytes, number), sorted, to the places with these numbers."""
    first = 0
    while first < len(wanted):
        begin, nbytes, _ = wanted[first]
        end, last = begin + nbytes, first + 1
        while last < len(wanted):
            offset, nbytes, _ = wanted[last]
            if offset - end > _GAP or offset + nbytes - begin > _RUN:
                break
            end, last = max(end, offset + nbytes), last + 1
        buffer = memoryview(np.empty(end - begin, np.uint8))  # type: ignore[arg-type]
        fill(fd, [buffer], begin, path)
        for offset, nbytes, number in wanted[first:last]:
            found[number] = buffer[offset - begin : offset - begin + nbytes]
        first = last


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, to be written to."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def fill(fd: int, buffers: list[memoryview], offset: int, path: str) -> None:
    """Reads from a file until buffers are full."""
    wanted = sum(map(len, buffers))
    if read_full(fd, buffers, offset) < wanted:
        raise FormatError(f"{redact(path)} ends before byte {offset + wanted:,}: the file is cut short")
