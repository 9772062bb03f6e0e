"""Keeps many files open in each process that reads them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

from headrace.memory.per_process import keep_inherited, renew_after_fork

T = TypeVar("T")


_TOGETHER = 16  # files that are taken at once


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
            entry = self._enter(path)
        try:
            yield entry[0]
        finally:
            self._leave([entry])

    def reading_each(self, paths: Sequence[str]) -> Generator[tuple[int, list[T]]]:
        """The open files, a few at a time: the number of the first path, and what it and the next
        ones opened, which stay so until more are asked for.

        Raises:
            Exception: what the opener raises.
        """
        for start in range(0, len(paths), _TOGETHER):
            entries = list[list[Any]]()
            try:
                with self._lock:
                    for path in paths[start : start + _TOGETHER]:
                        # so that what was entered is left, also after an error
                        entries.append(self._enter(path))
                yield start, [entry[0] for entry in entries]
            finally:
                self._leave(entries)

    def _enter(self, path: str) -> list[Any]:
        entry = self._open.get(path)
        if entry is None:
            entry = self._open[path] = [self._opener(path), 0]
        else:
            self._open.move_to_end(path)
        entry[1] += 1
        return entry

    def _leave(self, entries: list[list[Any]]) -> None:
        with self._lock:
            for entry in entries:
                entry[1] -= 1
            if len(self._open) > self._most:
                self._close_idle(self._most)

    def close(self) -> None:
        """Closes what nobody reads; it is opened again when it is needed."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, left: int) -> None:
        for path, (handle, readers) in list(self._open.items()):
            if len(self._open) <= left:
                break
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
