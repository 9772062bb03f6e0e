"""Reads files of this machine by `preadv`, with hints to the system if its disk is slow."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections.abc import Iterator, Sequence

import google_crc32c
import numpy as np

from headrace.dtypes import AnyArray
from headrace.errors import AccessError, DataNotFoundError, FileChangedError, FormatError
from headrace.io.files import Files, Version, wrong_length
from headrace.io.handles import FLAGS, HINTS, OpenFile, Scratch, WorkerFiles
from headrace.io.paths import redact
from headrace.io.ranges import WHOLE, ByteRanges
from headrace.memory.processes import PerProcess, read_full

_SPAN = 32 << 10  # bytes, of which little is wanted, that are read by one call rather than many
_IOV_MAX = 1024
_SAMPLE = 4 << 10  # bytes of a block that `sample_of` looks at
_SAMPLES = 8  # of these
_OPENING = 4  # ranges that are read while a file is opened
_TOGETHER = 32  # whole files that are open at once
_MISSING = (FileNotFoundError, NotADirectoryError)


class LocalFiles(Files):
    """See `headrace.io.files.Files`."""

    is_remote = False
    patience: float = 60.0

    def __init__(self, cache_dir: str | os.PathLike[str] | None = None) -> None:
        self.cache_dir = cache_dir
        self._descriptors: WorkerFiles[OpenFile] | None = None
        self._scratch: PerProcess[Scratch] | None = None
        self._versions: dict[str, Version] = {}
        self._samples: dict[str, int] = {}  # `sample_of` the files whose version is known

    @property
    def descriptors(self) -> WorkerFiles[OpenFile]:
        """Open files, other than those that are read whole. Two threads may create two at first:
        each is closed with its last reader.
        """
        if self._descriptors is None:
            self._descriptors = WorkerFiles(OpenFile.of, os.close)
        return self._descriptors

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

    def check_open(self, path: str, fd: int, status: os.stat_result | None = None) -> None:
        """Compares an open file with its version, if that was requested. `status` saves a call of
        ``fstat``.

        Raises:
            FileChangedError: the file has another version.
        """
        known = self._versions.get(path)
        if known is None:
            return
        if version_of(status or os.fstat(fd)) != known and not self.is_same(path, fd):
            raise changed(path)

    def is_same(self, path: str, fd: int | None = None) -> bool:
        """True if a path, or an open file, has the version that was requested.

        chmod, hard links and network disks change ctime or inode alone: then some bytes are
        compared, and if they are equal, the file has its new version from now on.
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
    def opened(self, path: str) -> Iterator[OpenFile]:
        """A descriptor of a file, which stays open inside of the context.

        Raises:
            OSError: it can't be opened.
            FileChangedError: it has another version than was requested.
        """
        with self.descriptors.reading(path) as fd:
            self.check_open(path, fd)
            yield fd

    def read(self, ranges: ByteRanges) -> list[memoryview | None]:
        self._tell(ranges)
        found: list[memoryview | None] = [None] * ranges.size
        wholes = np.flatnonzero(ranges.is_whole).tolist()
        if wholes:
            paths = [ranges.paths[file] for file in ranges.file[wholes].tolist()]
            contents = self._read_wholes(paths, [None] * len(wholes))
            for number, content in zip(wholes, contents, strict=True):
                found[number] = content
        for path, numbers, starts, sizes in _by_file(ranges):
            read = self._read_at(path, starts, sizes)
            for number, data in zip(numbers, read, strict=True):
                found[number] = memoryview(data)
        return found

    def _read_at(self, path: str, starts: list[int], sizes: list[int]) -> list[bytes]:
        """Parts of one file, by a call each."""
        with self.opened(path) as fd:
            began = HINTS.begin()
            read = list(map(os.pread, itertools.repeat(fd), sizes, starts))
            if list(map(len, read)) != sizes:  # one call stops at 2 GiB
                wholes = [bytearray(size) for size in sizes]
                for whole, start in zip(wholes, starts, strict=True):
                    fill(fd, [memoryview(whole)], start, path)
                read = list(map(bytes, wholes))
        HINTS.note(began, len(sizes), sum(sizes))
        return read

    def _read_wholes(
        self, paths: Sequence[str], buffers: Sequence[memoryview | None]
    ) -> list[memoryview | None]:
        """Whole files, each into its buffer if it has one; None: a file is missing. Several are
        open at once, so that hints need no opening of their own.
        """
        found: list[memoryview | None] = []
        for first in range(0, len(paths), _TOGETHER):
            some = paths[first : first + _TOGETHER]
            began = HINTS.begin()
            nbytes = 0
            opened: list[int | None] = []
            try:
                for path in some:
                    fd = None
                    try:
                        fd = os.open(path, FLAGS)
                    except _MISSING:
                        self.check_missing(path)
                    opened.append(fd)
                if len(some) > 1:
                    HINTS.give_wholes(fd for fd in opened if fd is not None)
                for path, fd, buffer in zip(some, opened, buffers[first:], strict=False):
                    data = None
                    if fd is not None:
                        data = self._content(path, fd, buffer)
                        nbytes += len(data)
                    found.append(data)
            finally:
                for fd in opened:
                    if fd is not None:
                        os.close(fd)
            HINTS.note(began, _OPENING * len(some), nbytes)
        return found

    def _content(self, path: str, fd: int, buffer: memoryview | None) -> memoryview:
        """All bytes of an open file, in its buffer if there is one."""
        status = os.fstat(fd)
        self.check_open(path, fd, status)
        size = status.st_size
        try:
            if buffer is None:
                data = memoryview(os.read(fd, size))
                done = len(data)
            elif len(buffer) == size:
                data = buffer
                done = os.preadv(fd, [buffer], 0)
            else:
                raise wrong_length(redact(path), size, len(buffer))
        except IsADirectoryError as error:
            raise IsADirectoryError(error.errno, error.strerror, path) from None
        if done != size:  # one call to the system stops at 2 GiB
            data = buffer or memoryview(bytearray(size))
            fill(fd, [data], 0, path)
        return data

    def check_missing(self, path: str) -> None:
        """Raises an error if a whole file may not be missing."""

    def read_into(self, ranges: ByteRanges, buffers: Sequence[memoryview]) -> list[int]:
        if ranges.size and ranges.stop[0] == WHOLE:
            paths = [ranges.paths[file] for file in ranges.file.tolist()]
            found = self._read_wholes(paths, buffers)
            return [number for number, data in enumerate(found) if data is None]
        if ranges.size == 1:  # of a sample by itself: there is nothing to sort
            path = ranges.paths[ranges.file[0]]
            start = int(ranges.start[0])
            with self.opened(path) as fd:
                if os.preadv(fd, buffers, start) != len(buffers[0]):
                    fill(fd, [buffers[0]], start, path)
            return []
        self._tell(ranges)
        _, waits = HINTS.begin()
        seconds = 0.0  # without those that files take to be opened
        for path, numbers, starts, sizes in _by_file(ranges):
            with self.opened(path) as fd:
                since = time.perf_counter()
                count = len(starts)
                first = 0
                while first < count:  # what follows without a gap by one call
                    start = starts[first]
                    end = start + sizes[first]
                    some = [buffers[numbers[first]]]
                    first += 1
                    while first < count and starts[first] == end:
                        some.append(buffers[numbers[first]])
                        end += sizes[first]
                        first += 1
                    if len(some) > _IOV_MAX or os.preadv(fd, some, start) != end - start:
                        fill(fd, some, start, path)
                seconds += time.perf_counter() - since
        HINTS.note((time.perf_counter() - seconds, waits), ranges.size, sum(map(len, buffers)))
        return []

    def read_joined(self, ranges: ByteRanges) -> bytes:
        if ranges.size > 1 and ranges.stop[0] != WHOLE:
            path = ranges.paths[ranges.file[0]]
            sizes = ranges.nbytes.tolist()
            first = int(ranges.start.min())
            nbytes = int(ranges.stop.max()) - first
            if nbytes <= _SPAN + 2 * sum(sizes):
                starts = (ranges.start - first).tolist()
                span = self._read_at(path, [first], [nbytes])[0]
                if (ranges.start[1:] == ranges.stop[:-1]).all():
                    return span
                pairs = zip(starts, sizes, strict=True)
                return b"".join([span[start : start + size] for start, size in pairs])
            if self._scratch is None:
                self._scratch = PerProcess(Scratch)
            # what goes wrong is said where it is read in the other way
            with contextlib.suppress(OSError), self.opened(path) as fd:
                gathered = fd.gathered(ranges.start.tolist(), sizes, self._scratch)
                if gathered is not None:
                    return gathered
        return super().read_joined(ranges)

    # -- what is read next

    def prefetch(self, pieces: Sequence[ByteRanges], urgent: bool = False) -> None:
        if not pieces or not HINTS.are_wanted:
            return
        ranges = ByteRanges.joined(pieces)
        self._tell(ranges)
        for file in ranges.file[ranges.is_whole].tolist():
            path = ranges.paths[file]
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as whole:
                HINTS.give_wholes([whole.fileno()])

    def _tell(self, ranges: ByteRanges) -> None:
        """Advises the system which parts of files are read next, if its disk is slow."""
        if not HINTS.are_wanted:
            return
        for path, _, starts, sizes in _by_file(ranges):
            # who reads them says so
            with contextlib.suppress(OSError), self.descriptors.reading(path) as fd:
                HINTS.give(fd, zip(starts, sizes, strict=True))

    # -- the rest

    def explain(self) -> str:
        return "read by pread"

    def close(self) -> None:
        for opened in (self._descriptors, self._scratch):
            if opened is not None:
                opened.close()


def version_of(status: os.stat_result) -> Version:
    """The version of a local file with that status."""
    return Version(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def sample_of(fd: int, size: int) -> int:
    """A checksum of a file; of a long one, of some blocks from begin to end."""
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
    fd = os.open(path, FLAGS)
    try:
        version = version_of(os.fstat(fd))
        return version, sample_of(fd, version.size)
    finally:
        os.close(fd)


def changed(path: str) -> FileChangedError:
    """The error for a file that has another version than when it was opened."""
    return FileChangedError(
        f"{redact(path)} has been changed since it was opened: open the dataset again"
    )


def _by_file(ranges: ByteRanges) -> Iterator[tuple[str, list[int], list[int], list[int]]]:
    """The path of each file, and the numbers, begins and sizes of its ranges, in the order of the
    file. Whole files, and what was never written, are left out.
    """
    order = np.flatnonzero((ranges.stop >= ranges.start) & (ranges.start >= 0))
    if len(order) > 1:
        order = order[np.lexsort((ranges.start[order], ranges.file[order]))]
    ordered = ranges.take(order)
    edges = np.flatnonzero(ordered.file[1:] != ordered.file[:-1]) + 1
    # lists, since many files have one range each
    files, numbers = ordered.file.tolist(), order.tolist()
    starts, sizes = ordered.start.tolist(), ordered.nbytes.tolist()
    for first, last in itertools.pairwise([0, *edges.tolist(), len(order)]):
        if first < last:
            some = slice(first, last)
            yield ranges.paths[files[first]], numbers[some], starts[some], sizes[some]


def bytes_of(array: AnyArray) -> memoryview:
    """The bytes of a C-contiguous array, as a writable view."""
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
