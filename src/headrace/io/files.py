"""The interface that reads bytes of files, local and remote."""

from __future__ import annotations

import bisect
import io
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO, NamedTuple

from headrace.errors import DataNotFoundError, FormatError
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges


class Version(NamedTuple):
    """What tells a file from the same file at another time.

    Attributes:
        size: bytes.
        tag: of a local file its mtime in ns; of a remote one its ETag, or else the time of its last
            change; None: the server gives neither.
        ctime: of a local file, in ns: a copy with an old mtime (`cp -p`, rsync) has a new one.
        inode: of a local file.
    """

    size: int
    tag: str | int | None
    ctime: int = 0
    inode: int = 0


class Files(ABC):
    """Files of this machine, or of one server. Thread-safe; a pickle contains their versions.

    A file whose version was requested is read in that version, or a `FileChangedError` is raised.
    Other local files, and other whole files, are read as they are. The methods with a body suit
    files that are neither prefetched nor cached on disk.
    """

    is_remote: bool
    """True if a read is a request to a server."""
    patience: float
    """Seconds that another process may take to read a file."""
    cache_dir: str | os.PathLike[str] | None
    """The folder for caches of these files; None: the user's cache folder."""

    def beside(self, path: str) -> bytes | None:
        """The contents of the index next to a remote file, if they were fetched; else None."""
        return None

    def shown(self, path: str) -> str:
        """A path as messages name it: without secrets."""
        return redact(path)

    @abstractmethod
    def version(self, path: str) -> Version:
        """The version of a file when it was first requested.

        Raises:
            DataNotFoundError, AccessError, RemoteError: there is no such file; it can't be read;
                the server does not tell.
        """

    @abstractmethod
    def identity(self, path: str) -> list[str | int | None]:
        """Tells a file and its version from others (JSON values): part of the names of caches."""

    def check(self, path: str) -> None:  # noqa: B027
        """Compares a local file with its version, if that was requested. Reads from a server
        compare it themselves.

        Raises:
            FileChangedError: the file has another version.
        """

    @abstractmethod
    def read(self, ranges: ByteRanges) -> list[memoryview | None]:
        """The bytes of each range; None for what was never written, and for a whole file that is
        missing.

        Raises:
            FormatError: a file ends before one of them does.
            FileChangedError, DataNotFoundError, AccessError, RemoteError, OSError: a file has
                changed, or can't be read.
        """

    def read_into(self, ranges: ByteRanges, buffers: Sequence[memoryview]) -> list[int]:
        """Fills a buffer with the bytes of each range, all of which were written and are as long as
        their buffers; or with whole files, and no ranges.

        Returns:
            The numbers of whole files that are missing.

        Raises:
            FormatError: a whole file is not as long as its buffer.
            Exception: as `read`.
        """
        missing: list[int] = []
        for number, (buffer, data) in enumerate(zip(buffers, self.read(ranges), strict=True)):
            if data is None:
                missing.append(number)
            elif len(data) != len(buffer):
                path = self.shown(ranges.paths[ranges.file[number]])
                raise wrong_length(path, len(data), len(buffer))
            else:
                buffer[:] = data
        return missing

    def read_each(self, ranges: ByteRanges) -> list[bytes]:
        """The bytes of each range, all of which were written, without the rest of the request that
        they came by.

        Raises:
            DataNotFoundError: a whole file is missing.
            Exception: as `read`.
        """
        found = []
        for number, data in enumerate(self.read(ranges)):
            if data is None:
                path = ranges.paths[ranges.file[number]]
                raise DataNotFoundError(f"{self.shown(path)} does not exist")
            content = data.obj
            if not isinstance(content, bytes) or len(content) > data.nbytes:
                content = bytes(data)
            found.append(content)
        return found

    def read_joined(self, ranges: ByteRanges) -> bytes:
        """The bytes of all ranges of one file, one after the other, all of which were written.

        Raises:
            Exception: as `read`.
        """
        return b"".join(data or b"" for data in self.read(ranges))

    def stream(self, path: str) -> BinaryIO:
        """A file to be read once, from beginning to end. Close it, for the sake of what is on its
        way.
        """
        return open(path, "rb")

    @abstractmethod
    def prefetch(self, pieces: Sequence[ByteRanges], urgent: bool = False) -> None:
        """Announces what is read next: each piece is one request to a server; for local files it
        is a hint to the system, if its disk is slow.

        Args:
            pieces: the ranges of each piece.
            urgent: a reader waits for them, so they precede what is prefetched.
        """

    def drop_prefetched(self) -> None:  # noqa: B027
        """Drops what was prefetched, and cancels what is not fetched yet."""

    def hold_prefetched(self, nbytes: int) -> None:  # noqa: B027
        """Limits the bytes of prefetched pieces that are partly read."""

    @property
    def bytes_prefetched(self) -> int:
        """Bytes of prefetched pieces of which nothing was read yet."""
        return 0

    def bypassing_cache(self) -> AbstractContextManager[None]:
        """A context in which this thread does not read from the disk cache, but replaces its
        blocks: data had a wrong checksum.
        """
        return nullcontext()

    def take_counts(self) -> Counter[str]:
        """Counts of this process since the last call."""
        return Counter()

    @abstractmethod
    def explain(self) -> str:
        """Describes how files are read, and what is cached on disk."""

    @abstractmethod
    def close(self) -> None:
        """Closes what this process has open; it is opened again when needed."""


def wrong_length(where: str, nbytes: int, expected: int) -> FormatError:
    """The error for stored bytes that have another length than expected."""
    return FormatError(f"{where} has {nbytes:,} bytes, not {expected:,}: the file is damaged")


Fetch = Callable[[int, int], bytes | memoryview]
"""First byte and end of a range -> its bytes."""


class HeldBytes(io.RawIOBase):
    """A file object for other libraries, of which some ranges are in memory.

    Args:
        size: of the file.
        held: first byte of each range, and its bytes; ranges don't overlap.
        fetch: reads any other range.
    """

    mode = "rb"

    def __init__(
        self, size: int, held: Sequence[tuple[int, bytes | memoryview]], fetch: Fetch
    ) -> None:
        self._size = size
        self._fetch = fetch
        self._at = 0
        ranges = sorted(held, key=lambda one: one[0])
        self._starts = [start for start, _ in ranges]
        self._views = [view for _, view in ranges]

    def read(self, size: int | None = -1, /) -> Any:
        """The next `size` bytes without a copy; None or a negative size: all that are left."""
        start = self._at
        stop = self._size
        if size is not None and size >= 0:
            stop = min(start + size, stop)
        if stop <= start:
            return b""
        self._at = stop
        number = bisect.bisect_right(self._starts, start) - 1
        if number >= 0 and stop <= self._starts[number] + len(self._views[number]):
            first = self._starts[number]
            return self._views[number][start - first : stop - first]
        return self._fetch(start, stop)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
