"""Files that each process keeps open, and reads of them: hints to the system, and many short ranges
by one call.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from headrace.memory.processes import PerProcess, keep_inherited, renew_after_fork

T = TypeVar("T")


class WorkerFiles(Generic[T]):
    """Many files that each process opens when it first needs them, and of which it keeps those open
    that were used last.

    A pickle takes along how to open, and not what is open. Thread-safe.

    Args:
        opener: called with a path; picklable where workers are spawned. Default: a descriptor for
            `pread`.
        closer: called with what the opener returned.
        most: files that stay open while nobody reads them.
        survives_fork: may a forked child go on with what it inherits? So it is with descriptors,
            for `pread` has no position to share.
    """

    def __init__(
        self,
        opener: Callable[[str], T] | None = None,
        closer: Callable[[T], object] | None = None,
        most: int = 64,
        *,
        survives_fork: bool = True,
    ) -> None:
        self._opener: Callable[[str], Any] = opener or _open_descriptor
        self._closer: Callable[[Any], object] = closer or os.close
        self._most = most
        self._survives_fork = survives_fork
        # path -> [handle, number of readers]; the latest at the end
        self._open: OrderedDict[str, list[Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._close_all = weakref.finalize(self, _close_entries, self._open, self._closer)
        self._close_all.atexit = False
        renew_after_fork(self)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[T]:
        """The open file, which stays so inside of the context.

        Raises:
            Exception: what the opener raises.
        """
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                entry = self._open[path] = [self._opener(path), 0]
            else:
                self._open.move_to_end(path)
            entry[1] += 1
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1
                if len(self._open) > self._most:
                    self._close_idle(self._most)

    def close(self) -> None:
        """Closes what nobody reads; it is opened again when it is needed."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, left: int) -> None:
        # of the oldest; those that are read are closed when they are left
        for path, (handle, readers) in [*islice(self._open.items(), len(self._open) - left)]:
            if not readers:
                del self._open[path]
                self._closer(handle)

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock, and is not here to release it;
        nor are its readers.
        """
        self._lock = threading.Lock()
        for entry in self._open.values():
            entry[1] = 0
        if not self._survives_fork:
            for handle, _ in self._open.values():
                keep_inherited(handle)
            self._open.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return _worker_files, (self._opener, self._closer, self._most, self._survives_fork)


def _worker_files(opener: Any, closer: Any, most: int, survives_fork: bool) -> WorkerFiles[Any]:
    return WorkerFiles(opener, closer, most, survives_fork=survives_fork)


def _open_descriptor(path: str) -> int:
    return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))


def _close_entries(entries: OrderedDict[str, list[Any]], closer: Callable[[Any], object]) -> None:
    for handle, _ in entries.values():
        with contextlib.suppress(OSError):
            closer(handle)
    entries.clear()


# reads from memory are no slower than so many seconds a range, and bytes a second
_CALM = 10e-6
_RATE = 1e9
_BATCHES = 256  # that have hints after slow ones
TO_THE_END = sys.maxsize
"""Bytes that no file has."""


class Hints:
    """Watches the reads of this process. Thread-safe: at worst it gives too many hints, or too
    few.
    """

    def __init__(self) -> None:
        self._left = 0  # batches that have hints
        self._was_slow = False  # the last batch

    @property
    def are_wanted(self) -> bool:
        """True if reads have lately been slow."""
        return self._left > 0

    def give(self, fd: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Tells the system which bytes of an open file are read next: where they begin, and how
        many.
        """
        with contextlib.suppress(OSError):  # a file that can't be read ahead is read all the same
            for start, nbytes in ranges:
                if nbytes:  # 0 would mean: to the end
                    os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_WILLNEED)

    def note(self, began: float, count: int, nbytes: int) -> None:
        """So many ranges of so many bytes in all have been read since `began`, by
        `time.perf_counter`.
        """
        if not _CAN_TELL or not count:
            return
        is_slow = time.perf_counter() - began > count * _CALM + nbytes / _RATE
        if is_slow and (self._was_slow or self._left):
            self._left = _BATCHES
        elif self._left:
            self._left -= 1
        self._was_slow = is_slow


HINTS = Hints()
_CAN_TELL = hasattr(os, "posix_fadvise")


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
