"""A lock between threads and processes that a dead holder releases.

By a POSIX record lock, which the kernel releases when its holder dies, however; between the threads of a process, whom such a lock
does not tell apart, by a `threading.Lock`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows: what is locked is a process's own there
    fcntl = None  # type: ignore[assignment]

PATIENCE = 0.5
"""Seconds that a process waits for another one's lock before it does without."""


class ProcessLock:
    """Locks the first byte of a file, among threads and processes. Fork-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._own = {os.getpid(): threading.Lock()}

    def of_threads(self) -> threading.Lock:
        """The lock among the threads of this process."""
        pid = os.getpid()  # a thread of the parent may have held the parent's lock at the moment of the fork
        lock = self._own.get(pid)
        return self._own.setdefault(pid, threading.Lock()) if lock is None else lock

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Yields True with the lock held; False where another process is stopped while it holds it."""
        with self.of_threads():
            if fcntl is None:
                yield True
                return
            deadline = time.monotonic() + PATIENCE
            while True:
                try:
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                    break
                except OSError:
                    if time.monotonic() > deadline:  # its holder is stopped (a dead one holds no lock)
                        yield False
                        return
                    time.sleep(0.0002)
            try:
                yield True
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)
