"""Reads whole files below a folder with four calls to the system for each: open, fstat, read,
close.

Names are looked up from the folder's descriptor, which stays open, and nothing is asked of a file
before it is open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence

from headrace.io.handles import WorkerFiles
from headrace.io.local.files import fill
from headrace.io.local.hints import HINTS, TO_THE_END

IS_SUPPORTED = os.open in os.supports_dir_fd and hasattr(os, "preadv")
"""True if this system looks names up from a descriptor."""
_TOGETHER = 32  # files that are open at once, so that a slow disk can be told of all of them
_CALLS = 4  # for each file: it counts as so many reads where the disk's pace is watched
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
_MISSING = (FileNotFoundError, NotADirectoryError)


class FolderReader:
    """Reads whole files below a folder. Picklable, thread-safe.

    What reads raises what `changed` gives where a file was changed, an IsADirectoryError where one
    is a folder, and an OSError where one can't be read.

    Args:
        descriptors: what each process has open, for `pread`.
        folder: its path.
        latest: a time in ns; a file that was written later was changed.
        changed: a path -> the error of a file that was changed.
    """

    def __init__(
        self,
        descriptors: WorkerFiles[int],
        folder: str,
        latest: int,
        changed: Callable[[str], Exception],
    ) -> None:
        self._descriptors = descriptors
        self._folder = folder
        self._latest = latest
        self._changed = changed

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """The contents of files; None for those that are missing."""
        found: list[bytes | None] = []
        for name, (fd, size) in zip(names, self._each(names), strict=True):
            data = os.pread(fd, size, 0) if fd >= 0 else None
            if data is not None and len(data) != size:  # one call to the system stops at 2 GiB
                whole = bytearray(size)
                fill(fd, [memoryview(whole)], 0, f"{self._folder}/{name}")
                data = bytes(whole)
            found.append(data)
        return found

    def read_into(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        """Fills a buffer with each file that is as long.

        Returns:
            [n] bytes of each file, -1 for those that are missing; those of another length than
            their buffers are not read.
        """
        sizes = []
        for name, buffer, (fd, size) in zip(names, buffers, self._each(names), strict=True):
            if size == len(buffer) and os.preadv(fd, [buffer], 0) != size:
                fill(fd, [buffer], 0, f"{self._folder}/{name}")
            sizes.append(size)
        return sizes

    def _each(self, names: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Descriptor and bytes of each file, which is open until the next ones are asked for; -1
        and -1 for those that are missing.
        """
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(self._descriptors.reading(self._folder))
            except _MISSING:
                yield from [(-1, -1)] * len(names)
                return
            for start in range(0, len(names), _TOGETHER):
                yield from self._together(folder, names[start : start + _TOGETHER])

    def _together(self, folder: int, names: Sequence[str]) -> Iterator[tuple[int, int]]:
        began = time.perf_counter()
        total = 0
        opened = list[int]()
        try:
            for name in names:
                try:
                    opened.append(os.open(name, _FLAGS, dir_fd=folder))
                except _MISSING:
                    opened.append(-1)
            if HINTS.are_wanted and len(names) > 1:
                for fd in opened:
                    if fd >= 0:
                        HINTS.give(fd, [(0, TO_THE_END)])
            for fd, name in zip(opened, names, strict=True):
                if fd < 0:
                    yield -1, -1
                    continue
                status = os.fstat(fd)
                if stat.S_ISDIR(status.st_mode):
                    raise IsADirectoryError(
                        errno.EISDIR, os.strerror(errno.EISDIR), f"{self._folder}/{name}"
                    )
                if status.st_mtime_ns > self._latest or not status.st_nlink:
                    raise self._changed(f"{self._folder}/{name}")
                total += status.st_size
                yield fd, status.st_size
            HINTS.note(began, _CALLS * len(names), total)
        finally:
            for fd in opened:
                if fd >= 0:
                    os.close(fd)
