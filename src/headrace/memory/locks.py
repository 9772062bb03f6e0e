"""Kernel file locks, which end with their holder: of whole files, and of single bytes of them.

A lock of a whole file (`flock`) belongs to whoever opened it, and to all who inherit that open
file. A lock of one byte belongs to the open file too (Linux's OFD locks; elsewhere to the process).
`ProcessLock` tells processes apart that share one open file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
from collections.abc import Iterator

from headrace.memory.per_process import PerProcess

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None
"""True if this system has file locks."""
PATIENCE = 0.5
"""Seconds that a `ProcessLock` waits for another process before it goes on without."""
_HAS_OFD = hasattr(fcntl, "F_OFD_SETLK") and struct.calcsize("P") == 8
_BUSY = (errno.EAGAIN, errno.EACCES)


def try_lock(fd: int, byte: int | None = None, *, shared: bool = False) -> bool:
    """Locks an open file, or one byte of it, without waiting; a whole file also `shared` with
    others that lock it so.

    Returns:
        False where another process has the lock.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        if byte is None:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        elif _HAS_OFD:
            _set_ofd(fd, fcntl.F_WRLCK, byte, 1)
        else:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError as error:
        if error.errno not in _BUSY:
            raise
        return False
    return True


def wait_for_lock(fd: int, end: float, byte: int | None = None, *, poll_s: float = 0.01) -> bool:
    """As `try_lock`, but tries again until a moment of the monotonic clock."""
    while not try_lock(fd, byte):
        if time.monotonic() >= end:
            return False
        time.sleep(poll_s)
    return True


def unlock(fd: int) -> None:
    """Releases all locks of an open file and closes it. Closing alone is not enough where a
    forked child has inherited it.
    """
    with contextlib.suppress(OSError):
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_UN)
            if _HAS_OFD:
                _set_ofd(fd, fcntl.F_UNLCK, 0, 0)
    os.close(fd)


def _set_ofd(fd: int, kind: int, start: int, nbytes: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi4x", kind, os.SEEK_SET, start, nbytes, 0))


class ProcessLock:
    """Locks the first byte of an open file that processes share, among their threads too.
    Fork-safe.

    A POSIX record lock, since only that tells a process from its forked child; a `threading.Lock`
    among the threads of a process, which it does not tell apart.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._threads = PerProcess(threading.Lock)

    def of_threads(self) -> threading.Lock:
        """The lock among the threads of this process."""
        return self._threads.get()

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Yields True with the lock held; False where another process is stopped while it holds
        it.
        """
        with self.of_threads():
            if fcntl is None:  # Windows: what is locked is a process's own there
                yield True
                return
            deadline = time.monotonic() + PATIENCE
            is_held = self._try()
            while not is_held and time.monotonic() < deadline:
                time.sleep(0.0002)
                is_held = self._try()
            try:
                yield is_held  # else its holder is stopped (a dead one holds no lock)
            finally:
                if is_held:
                    fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError:
            return False
        return True
