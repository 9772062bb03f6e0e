"""What processes share, and must not share: values that each creates for itself, kernel locks that
end with their holder, and reads and writes of open files that go on until all bytes are through.

A lock of a whole file (`flock`) belongs to whoever opened it, and to all who inherit that open
file. A lock of one byte belongs to the open file too (Linux's OFD locks; elsewhere to the process).
`ProcessLock` tells processes apart that share one open file.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, parent_process
from typing import Any, Generic, TypeVar

from headrace.errors import ConfigError

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Holds an object that processes must not share, such as an open file, a connection or a lock.
    Thread-safe.

    A forked child drops the inherited value without closing it, since it belongs to the parent. A
    pickle contains `make`, but not the value.

    Args:
        make: a callable without arguments that creates the value. It is called in the process that
            needs the value, and must be picklable if workers are spawned.
        closer: a callable that `close` calls with the value. Default: the value's own ``close()``,
            if it has one.
    """

    def __init__(self, make: Callable[[], T], closer: Callable[[T], object] | None = None) -> None:
        self._make = make
        self._closer = closer
        self._value: T | None = None
        self._lock = threading.Lock()
        renew_after_fork(self)

    def get(self) -> T:
        """Returns the value of this process, and creates it if needed."""
        value = self._value
        if value is not None:
            return value
        with self._lock:
            if self._value is None:
                self._value = self._make()
            return self._value

    def close(self) -> None:
        """Closes the value of this process. The next `get` creates another one."""
        with self._lock:
            value = self._value
            self._value = None
        if value is None:
            return
        if self._closer is not None:
            self._closer(value)
        elif hasattr(value, "close"):
            value.close()

    def after_fork(self) -> None:
        """Drops the inherited value; see `renew_after_fork`."""
        if self._value is not None:
            _inherited.append(self._value)
        self._value = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make, self._closer)


_renewed: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[Any] = []  # kept for ever: their destructors could write into the parent's files


def renew_after_fork(owner: Any) -> None:
    """Calls `owner.after_fork()` in each child that is forked while the owner is alive, before
    anything else runs there: for an object that a fork leaves in need of repair, such as a lock
    that another thread of the parent held.
    """
    _renewed.add(owner)


def keep_inherited(value: object) -> None:
    """Keeps a parent's open file in a forked child, so that no destructor ever runs there."""
    _inherited.append(value)


def _after_fork() -> None:
    for owner in list(_renewed):
        owner.after_fork()


def is_daemonic() -> bool:
    """True if multiprocessing lets this process start no others: a daemonic one, such as a
    worker of a DataLoader or of a Pool.
    """
    return multiprocessing.current_process().daemon


def check_may_start(asked: str) -> None:
    """Raises a ConfigError if this process may start no others. (`asked`: the argument that asks
    for them, for the message.)
    """
    if is_daemonic():
        raise ConfigError(
            f"{asked}: this process is daemonic, and multiprocessing lets it start no processes: "
            f"leave {asked.split('=')[0]} out, or "
            "start this process with daemon=False"
        )


def end_with_parent() -> None:
    """Ends this process when the one that made it is gone: a worker, or a process of a pool,
    whose owner was killed would wait for ever.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(
            target=_end_with, args=(parent.sentinel,), name="headrace-watchdog", daemon=True
        ).start()


def _end_with(sentinel: int) -> None:
    """Waits for the parent's end; nothing is left to be tidied up then, for all that is shared
    is anonymous.
    """
    inherited = os.getppid()
    while not connection.wait([sentinel], timeout=1.0):
        # A sibling that was forked later holds the sentinel's other end too, so look at the parent
        # itself as well.
        if os.getppid() != inherited:
            break
    os._exit(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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


def wait_for_lock(attempt: Callable[[], bool], patience: float, poll_s: float) -> bool:
    """Repeats an attempt to lock for `patience` seconds. False: it never succeeded."""
    end = time.monotonic() + patience
    while not attempt():
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

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Yields True with the lock held; False where another process is stopped while it holds
        it.
        """
        with self._threads.get():
            if fcntl is None:  # Windows: what is locked is a process's own there
                yield True
                return
            is_held = wait_for_lock(self._try, PATIENCE, 0.0002)
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


_IOV_MAX = 1024  # buffers of one call


def read_full(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fills buffers with the bytes of a file from `offset` on. Returns the number of bytes read:
    fewer only at the end of the file.
    """
    done = 0
    rest = [buffer for buffer in buffers if len(buffer)]
    while rest:
        got = os.preadv(fd, rest[:_IOV_MAX], offset + done)
        if not got:
            break
        done += got
        rest = _after(rest, got)
    return done


def write_full_from(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Writes flat buffers one after the other into a file, from `offset` on."""
    done = 0
    rest = [buffer for buffer in buffers if len(buffer)]
    while rest:
        written = os.pwritev(fd, rest[:_IOV_MAX], offset + done)
        done += written
        rest = _after(rest, written)


def write_full(fd: int, data: bytes | memoryview) -> None:
    """Writes all bytes at the file's position."""
    rest = memoryview(data)
    if rest.nbytes:
        rest = rest.cast("B")
    while rest.nbytes:
        rest = rest[os.write(fd, rest) :]


def _after(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of buffers after their first bytes."""
    count = 0
    while count < len(buffers) and nbytes >= len(buffers[count]):
        nbytes -= len(buffers[count])
        count += 1
    rest = buffers[count:]
    if nbytes:
        rest[0] = rest[0][nbytes:]
    return rest
