"""Files of this machine, read by `preadv`, with hints to the system where its disk is slow."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from headrace.errors import AccessError, DataNotFoundError, FileChangedError, FormatError
from headrace.io.files import Files, Version, wrong_length
from headrace.io.handles import HINTS, TO_THE_END, Gatherer, WorkerFiles
from headrace.io.paths import redact
from headrace.io.ranges import WHOLE, ByteRanges, coalesce
from headrace.memory.processes import read_full

_GAP = 16 << 10  # bytes between two ranges that are rather read than left out
_MOST = 8 << 20  # bytes that one call reads
_SPAN = 32 << 10  # bytes, of which little is wanted, that are read by one call rather than many
_IOV_MAX = 1024
_SAMPLE = 4 << 10  # bytes of a block that `sample_of` looks at
_SAMPLES = 8  # of these
_OPENING = 4  # ranges that are read while a file is opened
_MISSING = (FileNotFoundError, NotADirectoryError)
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class LocalFiles(Files):
    """See `headrace.io.files.Files`."""

    is_remote = False
    patience: float = 60.0

    def __init__(self) -> None:
        self.descriptors: WorkerFiles[int] = WorkerFiles()
        self._versions: dict[str, Version] = {}
        self._samples: dict[str, int] = {}  # `sample_of` the files whose version is known
        self._gatherer = Gatherer()

    # -- versions

    def version(self, path: str) -> Version:
        known = self._versions.get(path)
        if known is None:
            try:
                known, self._samples[path] = _version_and_sample(path)
                self._versions[path] = known
            except FileNotFoundError as error:
                raise DataNotFoundError(
                    f"{redact(path)} does not exist (working folder: {os.getcwd()})"
                ) from error
            except OSError as error:
                raise AccessError(f"{redact(path)} can't be read: {error.strerror}") from error
        return known

    def identity(self, path: str) -> list[str | int | None]:
        return [path, *self.version(path)]

    def check(self, path: str) -> None:
        if path in self._versions:
            with self.descriptors.reading(path) as fd:
                self.check_open(path, fd)

    def check_open(self, path: str, fd: int) -> None:
        """As `check_status`, of a file that is open."""
        if path in self._versions:
            self.check_status(path, fd, os.fstat(fd))

    def check_status(self, path: str, fd: int, status: os.stat_result) -> None:
        """Compares a file that is open with its version, if that was asked for.

        Raises:
            FileChangedError: it is another one.
        """
        known = self._versions.get(path)
        if known is not None and version_of(status) != known and not self.is_same(path, fd):
            raise changed(path)

    def is_same(self, path: str, fd: int | None = None) -> bool:
        """True if what lies at a path, or is open, has the version that was asked for.

        chmod, hard links and network disks change ctime or inode alone: then some bytes are
        compared, and where they are equal, the file goes on by its new version.
        """
        known = self._versions[path]
        try:
            now = version_of(os.stat(path if fd is None else fd))
            if now == known:
                return True
            if (now.size, now.tag) != (known.size, known.tag):
                return False
            now, sample = (
                _version_and_sample(path) if fd is None else (now, sample_of(fd, now.size))
            )
        except (FileNotFoundError, NotADirectoryError):
            return False
        if (now.size, now.tag, sample) != (known.size, known.tag, self._samples[path]):
            return False
        self._versions[path] = now
        return True

    # -- reading

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """A descriptor of a file, which stays open inside of the context.

        Raises:
            OSError: it can't be opened.
            FileChangedError: it is not the one whose version was asked for.
        """
        with self.descriptors.reading(path) as fd:
            self.check_open(path, fd)
            yield fd

    def read(self, ranges: ByteRanges) -> list[memoryview | None]:
        self._tell(ranges)
        if ranges.is_whole.all():
            return [self.read_whole(ranges.paths[file]) for file in ranges.file.tolist()]
        found: list[memoryview | None] = [None] * ranges.size
        for number in np.flatnonzero(ranges.start >= ranges.stop).tolist():
            if ranges.stop[number] == WHOLE and ranges.start[number] == 0:
                found[number] = self.read_whole(ranges.paths[ranges.file[number]])
            elif ranges.start[number] >= 0:
                found[number] = memoryview(b"")
        requests = coalesce(ranges, _GAP, _MOST)
        order = requests.order.tolist()
        edges = requests.edges.tolist()
        begins = requests.ranges.start.tolist()
        sizes = (requests.ranges.stop - requests.ranges.start).tolist()
        starts = ranges.start.tolist()
        stops = ranges.stop.tolist()
        for path, first, last in _by_file(requests.ranges):
            count = edges[last] - edges[first]
            read = self._read_at(path, begins[first:last], sizes[first:last], count)
            for request, data in enumerate(read, first):
                at = edges[request]
                view = memoryview(data)
                if edges[request + 1] == at + 1:
                    found[order[at]] = view
                    continue
                begin = begins[request]
                for number in order[at : edges[request + 1]]:
                    found[number] = view[starts[number] - begin : stops[number] - begin]
        return found

    def read_each(self, ranges: ByteRanges) -> list[bytes]:
        """By a call each: where ranges are short and far apart that is faster than to join them."""
        if not (ranges.start < ranges.stop).all():
            return super().read_each(ranges)
        self._tell(ranges)
        order = np.lexsort((ranges.start, ranges.file))
        ordered = ranges.take(order)
        starts = ordered.start.tolist()
        sizes = ordered.nbytes.tolist()
        numbers = order.tolist()
        found = [b""] * ranges.size
        for path, first, last in _by_file(ordered):
            read = self._read_at(path, starts[first:last], sizes[first:last], last - first)
            for number, data in zip(numbers[first:last], read, strict=True):
                found[number] = data
        return found

    def _read_at(self, path: str, starts: list[int], sizes: list[int], count: int) -> list[bytes]:
        """Parts of one file, in which `count` ranges lie."""
        with self.opened(path) as fd:
            began = time.perf_counter()
            read = list(map(os.pread, itertools.repeat(fd), sizes, starts))
            if list(map(len, read)) != sizes:  # one call stops at 2 GiB
                places = zip(sizes, starts, strict=True)
                read = [_whole(fd, size, start, path) for size, start in places]
        HINTS.note(began, count, sum(sizes))
        return read

    def read_whole(self, path: str, buffer: memoryview | None = None) -> memoryview | None:
        """A whole file, into a buffer if there is one; None: it is missing."""
        began = time.perf_counter()
        try:
            fd = os.open(path, _FLAGS)
        except _MISSING:
            return None
        try:
            status = os.fstat(fd)
            self.check_status(path, fd, status)
            size = status.st_size
            if buffer is None:
                data = memoryview(os.read(fd, size))
            elif len(buffer) != size:
                raise wrong_length(redact(path), size, len(buffer))
            else:
                data = buffer[: os.preadv(fd, [buffer], 0)]
            if len(data) != size:  # one call to the system stops at 2 GiB
                data = buffer or memoryview(bytearray(size))
                fill(fd, [data], 0, path)
        except IsADirectoryError as error:
            raise IsADirectoryError(error.errno, error.strerror, path) from None
        finally:
            os.close(fd)
        HINTS.note(began, _OPENING, size)
        return data

    def read_into(self, ranges: ByteRanges, buffers: Sequence[memoryview]) -> list[int]:
        if ranges.size and ranges.stop[0] == WHOLE:
            _tell_of_wholes(ranges.paths)
            paths = [ranges.paths[file] for file in ranges.file.tolist()]
            each = enumerate(map(self.read_whole, paths, buffers))
            return [number for number, data in each if data is None]
        if ranges.size == 1:  # of a sample by itself: there is nothing to join
            path = ranges.paths[ranges.file[0]]
            start = int(ranges.start[0])
            with self.opened(path) as fd:
                began = time.perf_counter()
                if os.preadv(fd, buffers, start) != len(buffers[0]):
                    fill(fd, [buffers[0]], start, path)
            HINTS.note(began, 1, len(buffers[0]))
            return []
        self._tell(ranges)
        requests = coalesce(ranges, 0, _MOST)
        order = requests.order.tolist()
        edges = requests.edges.tolist()
        begins = requests.ranges.start.tolist()
        sizes = (requests.ranges.stop - requests.ranges.start).tolist()
        seconds = 0.0  # without those that files take to be opened
        for path, first, last in _by_file(requests.ranges):
            with self.opened(path) as fd:
                began = time.perf_counter()
                for request in range(first, last):
                    at = edges[request]
                    end = edges[request + 1]
                    if end == at + 1:
                        wanted = [buffers[order[at]]]
                    else:
                        wanted = [buffers[number] for number in order[at:end]]
                        if sum(map(len, wanted)) != sizes[request]:  # they overlap
                            for number, buffer in zip(order[at:end], wanted, strict=True):
                                fill(fd, [buffer], int(ranges.start[number]), path)
                            continue
                    begin = begins[request]
                    if end - at > _IOV_MAX or os.preadv(fd, wanted, begin) != sizes[request]:
                        fill(fd, wanted, begin, path)
                seconds += time.perf_counter() - began
        HINTS.note(time.perf_counter() - seconds, ranges.size, sum(sizes))
        return []

    def read_joined(self, ranges: ByteRanges) -> bytes:
        if ranges.size > 1 and ranges.stop[0] != WHOLE:
            path = ranges.paths[ranges.file[0]]
            first = int(ranges.start.min())
            stop = int(ranges.stop.max())
            if stop - first <= _SPAN + 2 * int(ranges.nbytes.sum()):
                return self._read_span(path, first, stop, ranges)
            with contextlib.suppress(OSError):  # said where it is read in the other way
                data = self._gatherer.read(
                    path,
                    ranges.start.tolist(),
                    ranges.nbytes.tolist(),
                    functools.partial(self.check_open, path),
                )
                if data is not None:
                    return data
        return b"".join(self.read_each(ranges))

    def _read_span(self, path: str, first: int, stop: int, ranges: ByteRanges) -> bytes:
        """Ranges that lie close together, by one call."""
        span = self._read_at(path, [first], [stop - first], 1)[0]
        if (ranges.start[1:] == ranges.stop[:-1]).all():
            return span
        starts = (ranges.start - first).tolist()
        stops = (ranges.stop - first).tolist()
        return b"".join([span[start:stop] for start, stop in zip(starts, stops, strict=True)])

    # -- what is read next

    def prefetch(self, pieces: Sequence[ByteRanges], urgent: bool = False) -> None:
        if pieces:
            self._tell(ByteRanges.joined(pieces))

    def _tell(self, ranges: ByteRanges) -> None:
        """Tells the system what is read next, if its disk is slow."""
        if not HINTS.are_wanted:
            return
        with contextlib.suppress(OSError):  # who reads them says so
            requests = coalesce(ranges, _GAP).ranges
            for path, first, last in _by_file(requests):
                with self.descriptors.reading(path) as fd:
                    starts = requests.start[first:last].tolist()
                    sizes = requests.nbytes[first:last].tolist()
                    HINTS.give(fd, zip(starts, sizes, strict=True))
        _tell_of_wholes(ranges.paths[file] for file in ranges.file[ranges.is_whole].tolist())

    # -- the rest

    def explain(self) -> str:
        return "read by pread"

    def close(self) -> None:
        self.descriptors.close()
        self._gatherer.close()


def version_of(status: os.stat_result) -> Version:
    """The version of a local file with that status."""
    return Version(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def sample_of(fd: int, size: int) -> int:
    """A checksum of a file's bytes; of a long file, of blocks from its begin to its end."""
    if size <= _SAMPLES * _SAMPLE:
        return int(google_crc32c.value(os.pread(fd, size, 0)))
    crc = 0
    for number in range(_SAMPLES):
        start = (size - _SAMPLE) * number // (_SAMPLES - 1)
        crc = int(google_crc32c.extend(crc, os.pread(fd, _SAMPLE, start)))
    return crc


def _version_and_sample(path: str) -> tuple[Version, int]:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return version_of(status), 0
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        version = version_of(os.fstat(fd))
        return version, sample_of(fd, version.size)
    finally:
        os.close(fd)


def changed(path: str) -> FileChangedError:
    """The error of a file that is another one than when it was opened."""
    return FileChangedError(
        f"{redact(path)} has been changed since it was opened: open the dataset again"
    )


def _by_file(ranges: ByteRanges) -> Iterator[tuple[str, int, int]]:
    """The path of each file, and where its ranges begin and end, of sorted ones."""
    edges = [0, ranges.size]
    if len(ranges.paths) > 1:
        edges[1:1] = (np.flatnonzero(np.diff(ranges.file)) + 1).tolist()
    for first, last in itertools.pairwise(edges):
        if first < last:
            yield ranges.paths[ranges.file[first]], first, last


def _whole(fd: int, size: int, offset: int, path: str) -> bytes:
    data = bytearray(size)
    fill(fd, [memoryview(data)], offset, path)
    return bytes(data)


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, to be written to."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def fill(fd: int, buffers: list[memoryview], offset: int, path: str) -> None:
    """Reads from a file until buffers are full.

    Raises:
        FormatError: the file ends before they are.
    """
    for first in range(0, len(buffers), _IOV_MAX):
        some = buffers[first : first + _IOV_MAX]
        nbytes = sum(map(len, some))
        if read_full(fd, some, offset) < nbytes:
            raise FormatError(
                f"{redact(path)} ends before byte {offset + nbytes:,}: the file is cut short"
            )
        offset += nbytes


def _tell_of_wholes(paths: Iterable[str]) -> None:
    """Tells the system which files are read next, if its disk is slow."""
    if HINTS.are_wanted:
        for path in paths:
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                HINTS.give(file.fileno(), [(0, TO_THE_END)])
