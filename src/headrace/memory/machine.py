"""A sample store that all ranks of a machine share.

It is a file that they find by its name, in a folder of the user. All processes that map it share
its pages.

NOTE [ life of a shared file ]

* Each user of the file holds a shared `flock` on it, which workers inherit with the descriptor, and
  which the kernel releases when the last of them has ended, however that happens. A file without a
  lock is unused.
* Opening and leaving hold an exclusive `flock` on the folder, for milliseconds. An unused file is
  created again at this point, since what a killed job left behind is never trusted. Unused files of
  other keys are removed.
* The last process that leaves removes the file. After SIGKILL it stays until the next opening in
  that folder.
* Samples are written by `pwrite`, which reports a full disk, whereas writing to mapped memory would
  kill the process. The space before them is allocated at the start. Samples are read from mapped
  memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import AccessError, ConfigError, WriteError
from headrace.memory.anonymous import AnonymousMemory
from headrace.memory.locks import HAS_LOCKS, try_lock, unlock, wait_for_lock
from headrace.memory.store import SampleStore
from headrace.memory.whole import write_full

PREFIX = "headrace-store-"
SUFFIX = ".mem"
VERSION = "3"
# seconds that the door is waited for; and where it is no matter if it stays shut
_PATIENCE = 10.0
_SHORT_PATIENCE = 1.0

_open: weakref.WeakValueDictionary[str, SampleStore] = weakref.WeakValueDictionary()


def open_machine_store(
    folder: Path,
    key: str,
    length: int,
    capacity: int,
    policy: str = "keep",
    max_items: int | None = None,
) -> SampleStore:
    """The store of that key in a folder, which is made if it is missing: the one that other
    processes of this user have open, or a new one.

    Args:
        key: whoever gives the same key must cache the same samples.
        capacity: of a new store; an open one has that of its maker.
        policy, max_items: of a new store.

    Raises:
        ConfigError: this system can't share a file's memory.
        AccessError, WriteError: the folder can't be used, or its disk is full.
    """
    if not HAS_LOCKS or not hasattr(os, "posix_fallocate"):
        raise ConfigError(
            "shared='machine' needs file locks and posix_fallocate, which this system lacks: use "
            "shared='rank'"
        )
    digest = hashlib.blake2b(
        "\0".join([VERSION, str(length), str(os.getuid()), key]).encode(),
        digest_size=16,
    ).hexdigest()
    path = os.path.join(os.path.realpath(folder), f"{PREFIX}{digest}{SUFFIX}")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _door(folder):
            store = _open.get(path)
            if store is None:  # in this process: POSIX locks would not tell two apart
                _remove_others(folder, path)
                table, log = SampleStore.sizes(length, capacity)
                memory = SharedFile(path, table, log)
                room = memory.nbytes - table
                store = _open[path] = SampleStore(length, room, policy, max_items, memory)
            return store
    except OSError as error:
        kind = AccessError if isinstance(error, PermissionError) else WriteError
        raise kind(
            f"shared='machine': {path} can't be used: {error.strerror or error}; pass another "
            "cache_dir"
        ) from error


@contextlib.contextmanager
def _door(folder: str | os.PathLike[str], patience: float = _PATIENCE) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not wait_for_lock(fd, time.monotonic() + patience, poll_s=0.002):
            raise OSError(
                errno.EAGAIN,
                f"another process has kept {folder} locked for {patience:g} s: resume or end it",
            )
        yield
    finally:
        os.close(fd)  # and the lock with it


def _remove_others(folder: Path, path: str) -> None:
    """What killed jobs left behind."""
    for other in folder.glob(f"{PREFIX}*{SUFFIX}"):
        if other.name != os.path.basename(path):
            _is_unused(other, remove=True)


def holds_samples(name: str) -> bool:
    """True if a file of this name holds the samples of a machine's store."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def is_unused(path: str, *, remove: bool = False) -> bool:
    """True if nobody uses a file that holds samples; it may be removed then. False too where that
    can't be known.

    Nobody opens one meanwhile: whoever did so while its lock is tried would take it for used.
    """
    with contextlib.suppress(OSError), _door(os.path.dirname(path), patience=_SHORT_PATIENCE):
        return _is_unused(path, remove)
    return False


def _is_unused(path: str | os.PathLike[str], remove: bool) -> bool:
    with contextlib.suppress(OSError):  # another user's, or gone
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if try_lock(fd):
                if remove:
                    os.unlink(path)
                return True
        finally:
            unlock(fd)
    return False


class SharedFile(AnonymousMemory):
    """Memory with a name, for all processes of a user; see NOTE [ life of a shared file ].

    In a worker, whose descriptor stands for its parent's lock, it is only closed at the end.

    Args:
        path: of the file.
        allocated: bytes at its start that are allocated now.
        rest: bytes after them; both count only where the file is not in use.
    """

    def __init__(self, path: str, allocated: int, rest: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
                raise PermissionError(errno.EPERM, "it is no file of this user's")
            if try_lock(fd):  # nobody uses it
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, allocated)
                os.ftruncate(fd, allocated + rest)
            try_lock(fd, shared=True)
        except BaseException:
            os.close(fd)
            raise
        self._own(fd)
        weakref.finalize(self, _leave, fd, path, os.getpid())

    def write(self, offset: int, data: memoryview) -> None:
        write_full(self.fd, data, offset)


def _leave(fd: int, path: str, pid: int) -> None:
    """Removes the file with its last user (its workers end with it)."""
    with contextlib.suppress(OSError):
        if os.getpid() == pid:
            with _door(os.path.dirname(path), patience=_SHORT_PATIENCE):
                if try_lock(fd) and os.path.samestat(os.stat(path), os.fstat(fd)):
                    os.unlink(path)
    with contextlib.suppress(OSError):
        os.close(fd)
