"""Files that each process keeps open; hints to the system about reads; and reads of many short
ranges by one call.
"""

from __future__ import annotations

import contextlib
import functools
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

if sys.platform == "linux":
    import resource

from headrace.memory.anonymous import AnonymousMemory
from headrace.memory.processes import PerProcess, keep_inherited, renew_after_fork

T = TypeVar("T")

FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""How files are opened for `pread`."""


class WorkerFiles(Generic[T]):
    """Many files that each process opens when it first needs them; the last used ones stay open.

    A pickle contains how to open files, but no open file. Thread-safe.

    Args:
        opener: called with a path; picklable where workers are spawned. None: none is opened.
        closer: called with what the opener returned.
        most: files that stay open while nobody reads them.
        survives_fork: True if a forked child may use what it inherits, such as descriptors, since
            `pread` shares no position.
    """

    def __init__(
        self,
        opener: Callable[[str], T] | None,
        closer: Callable[[T], object] | None,
        most: int = 64,
        survives_fork: bool = True,
    ) -> None:
        self._opener: Any = opener
        self._closer: Any = closer
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
        """A context with the open file.

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
        """Closes the files that nobody reads; they are opened again when needed."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, left: int) -> None:
        # of the oldest; those that are read are closed when they are left
        for path, (handle, readers) in [*islice(self._open.items(), len(self._open) - left)]:
            if not readers:
                del self._open[path]
                self._closer(handle)

    def after_fork(self) -> None:
        """Replaces the lock, which another thread of the parent may have held, and forgets that
        thread's readers.
        """
        self._lock = threading.Lock()
        for entry in self._open.values():
            entry[1] = 0
        if not self._survives_fork:
            for handle, _ in self._open.values():
                keep_inherited(handle)
            self._open.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._opener, self._closer, self._most, self._survives_fork)


def _close_entries(entries: OrderedDict[str, list[Any]], closer: Any) -> None:
    for handle, _ in entries.values():
        with contextlib.suppress(OSError):
            closer(handle)
    entries.clear()


# reads from memory are no slower than so many seconds a range, and bytes a second
_CALM = 10e-6
_RATE = 1e9
_BATCHES = 256  # that have hints after slow ones
_CAN_TELL = sys.platform == "linux"


def _waits() -> int:
    """How often this thread has given up its core in order to wait."""
    if sys.platform == "linux":
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return 0


class Hints:
    """Gives the system hints about coming reads while reads of this process are slow. Thread-safe:
    at worst it gives too many hints, or too few.
    """

    def __init__(self) -> None:
        self._left = 0  # batches that have hints
        self._was_slow = False  # the last batch

    @property
    def are_wanted(self) -> bool:
        """True if reads have lately been slow."""
        return self._left > 0

    def give(self, fd: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Tells the system which ranges of an open file are read next (begin, number of bytes), if
        reads have lately been slow.
        """
        if not self.are_wanted:
            return
        with contextlib.suppress(OSError):  # a file that can't be read ahead is read all the same
            for start, nbytes in ranges:
                if nbytes:  # 0 would mean: to the end
                    os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_WILLNEED)

    def give_wholes(self, fds: Iterable[int]) -> None:
        """Tells the system that open files are read next, if reads have lately been slow."""
        if not self.are_wanted:
            return
        with contextlib.suppress(OSError):  # as above
            for fd in fds:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)

    def begin(self) -> tuple[float, int]:
        """The time, and how often this thread has waited: what `note` needs from before reads."""
        return time.perf_counter(), _waits()

    def note(self, began: tuple[float, int], count: int, nbytes: int) -> None:
        """Notes that this thread has read `count` ranges, `nbytes` in all, since `begin`. Reads
        during which another process had the core are not slow.
        """
        if not _CAN_TELL or not count:
            return
        seconds, waits = began
        calm = count * _CALM + nbytes / _RATE
        is_slow = time.perf_counter() - seconds > calm and _waits() != waits
        if is_slow and (self._was_slow or self._left):
            self._left = _BATCHES
        elif self._left:
            self._left -= 1
        self._was_slow = is_slow


HINTS = Hints()


_LEAST = 1 << 20  # bytes of a file from which on it is mapped
_SCRATCH = 1 << 20
# bytes from one stretch to the next, on average: what lies closer together the system reads ahead
# better
_APART = 16 << 10
_AT_ONCE = 1024  # stretches that the system takes in one call (IOV_MAX)
_CAN_GATHER = (
    hasattr(os, "memfd_create") and hasattr(os, "pwritev") and hasattr(mmap, "MADV_RANDOM")
)


class Scratch:
    """Memory of one process, which the system writes to."""

    def __init__(self) -> None:
        self.memory: AnonymousMemory = AnonymousMemory(_SCRATCH, "gather")
        self.lock: threading.Lock = threading.Lock()


class OpenFile(int):
    """A descriptor of a file, and its mapping."""

    @classmethod
    def of(cls, path: str) -> OpenFile:
        return cls(os.open(path, FLAGS))

    @functools.cached_property
    def mapping(self) -> memoryview | None:
        """All bytes of the file; None if it is too short to be mapped."""
        size = os.fstat(self).st_size
        if size < _LEAST:
            return None
        whole = mmap.mmap(self, size, access=mmap.ACCESS_READ)
        # else each page that is not in memory brings 128 kB along
        whole.madvise(mmap.MADV_RANDOM)
        return memoryview(whole)

    def gathered(
        self, starts: Sequence[int], sizes: Sequence[int], scratch: PerProcess[Scratch]
    ) -> bytes | None:
        """Ranges of the file, concatenated, by few calls.

        Returns:
            The bytes; None if the ranges are close together or too long, or the file is too short.
        """
        total = sum(sizes)
        is_far = max(starts) - min(starts) >= _APART * len(sizes)
        if not _CAN_GATHER or not is_far or total > _SCRATCH or self.mapping is None:
            return None
        HINTS.give(self, zip(starts, sizes, strict=True))
        view = self.mapping
        stretches = [view[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        memory = scratch.get().memory
        with scratch.get().lock:
            began = HINTS.begin()
            done = 0
            try:
                for first in range(0, len(stretches), _AT_ONCE):
                    done += os.pwritev(memory.fd, stretches[first : first + _AT_ONCE], done)
            # EFAULT: a page that the file does not have any more, or that can't be read
            except OSError:
                return None
            HINTS.note(began, len(stretches), total)
            if done == total:
                return memory.map[:total]
            return None
