"""Reads many short byte ranges of a large local file by one system call.

The file is mapped, and the system itself copies the ranges out of the mapping into scratch memory,
by `pwritev`, as if they were written to a file. No code here touches the mapping, so a file that is
truncated during reading is an error, and not a signal that ends the process (SIGBUS). Only
available on systems with anonymous files (Linux).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from headrace.io.handles import WorkerFiles
from headrace.io.local.hints import HINTS
from headrace.memory.per_process import PerProcess

LEAST = 1 << 20
"""Bytes of a file from which on it is mapped."""
# bytes from one stretch to the next, on average: what lies closer together the system reads ahead
# better
_APART = 16 << 10
_SCRATCH = 1 << 20
_AT_ONCE = 1024  # stretches that the system takes in one call (IOV_MAX)


class Gatherer:
    """Reads stretches of files. Picklable, thread-safe; each process maps for itself what it
    does not inherit.
    """

    def __init__(self) -> None:
        self._files: WorkerFiles[_Mapped] = WorkerFiles(_Mapped, _Mapped.close, 8)
        self._scratch: PerProcess[_Scratch] = PerProcess(_Scratch)

    def read(
        self, path: str, starts: Sequence[int], sizes: Sequence[int], check: Callable[[int], None]
    ) -> bytes | None:
        """Stretches of a file, one behind the other.

        Args:
            path: of the file.
            starts, sizes: of each stretch, in bytes.
            check: called with the open file, before it is read.

        Returns:
            None: not by this way: they lie close together, are too long, or the file is too small
                or shorter than it should be.

        Raises:
            OSError: the file can't be opened, or what `check` raises.
        """
        total = sum(sizes)
        if (
            not _IS_LINUX
            or total > _SCRATCH
            or max(starts, default=0) - min(starts, default=0) < _APART * len(sizes)
        ):
            return None
        with self._files.reading(path) as mapped:
            check(mapped.fd)
            if mapped.view is None:
                return None
            view = mapped.view
            if HINTS.are_wanted:
                HINTS.give(mapped.fd, zip(starts, sizes, strict=True))
            return self._scratch.get().gathered(
                [view[start : start + size] for start, size in zip(starts, sizes, strict=True)],
                total,
            )

    def close(self) -> None:
        """Unmaps what nobody reads."""
        self._files.close()
        self._scratch.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Gatherer, ()


class _Mapped:
    """A file and its mapping; None, where it is too small for one."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.view: memoryview | None = None
        try:
            size = os.fstat(self.fd).st_size
            if size >= LEAST:
                whole = mmap.mmap(self.fd, size, access=mmap.ACCESS_READ)
                # else each page that is not in memory brings 128 kB along
                whole.madvise(mmap.MADV_RANDOM)
                self.view = memoryview(whole)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        if self.view is not None:
            whole = self.view.obj
            self.view.release()
            assert isinstance(whole, mmap.mmap)
            whole.close()
        os.close(self.fd)


class _Scratch:
    """Memory that the system writes to, of one process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("headrace-gather", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, _SCRATCH)
            self._bytes = mmap.mmap(self._fd, _SCRATCH)
        except BaseException:
            os.close(self._fd)
            raise
        self._lock = threading.Lock()
        self._close_file = weakref.finalize(self, os.close, self._fd)
        self._close_file.atexit = False

    def gathered(self, stretches: list[memoryview], total: int) -> bytes | None:
        """Their bytes; None, where some of them are not there."""
        with self._lock:
            done = 0
            began = time.perf_counter()
            try:
                for first in range(0, len(stretches), _AT_ONCE):
                    done += os.pwritev(self._fd, stretches[first : first + _AT_ONCE], done)
            # EFAULT: a page that the file does not have any more, or that can't be read
            except OSError:
                return None
            HINTS.note(began, len(stretches), total)
            if done == total:
                return self._bytes[:total]
            return None

    def close(self) -> None:
        with self._lock:
            self._bytes.close()
            self._close_file()


_IS_LINUX = hasattr(os, "memfd_create") and hasattr(os, "pwritev") and hasattr(mmap, "MADV_RANDOM")
