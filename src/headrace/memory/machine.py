"""The sample store that all ranks of a user share on one machine, in a file.

NOTE [ life of a shared file ]

* Each process that uses the file holds a shared lock of it, and so do its workers, who inherit the
  open file. The kernel releases the lock with the last of them, however they end.
* A process that finds the file without a lock empties it first: what killed processes left is
  not trusted. Files of other stores without a lock are removed then.
* Whoever opens or removes a file holds the lock of the folder meanwhile, so nobody removes what
  another process is about to use.
* The last user removes the file.
* Bytes are allocated on the disk before they are written: where it is full, that is an error of
  `posix_fallocate`. A write into a hole of the mapping would end the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import AccessError, ConfigError, WriteError
from headrace.memory.anonymous import AnonymousMemory
from headrace.memory.processes import HAS_LOCKS, try_lock, unlock, wait_for_lock
from headrace.memory.store import SampleStore, log_at

PREFIX = "headrace-store-"
SUFFIX = ".mem"
VERSION = "3"
# seconds to wait for the lock of a folder; and if it does not matter
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
        with _locked_folder(folder):
            store = _open.get(path)
            if store is None:  # in this process: POSIX locks would not tell two apart
                for other in folder.glob(f"{PREFIX}*{SUFFIX}"):  # what killed jobs left behind
                    if other.name != os.path.basename(path):
                        _is_unused(other, remove=True)
                memory = SharedFile(path, log_at(length), max(0, capacity))
                store = _open[path] = SampleStore(length, 0, policy, max_items, memory)
            return store
    except OSError as error:
        kind = AccessError if isinstance(error, PermissionError) else WriteError
        raise kind(
            f"shared='machine': {path} can't be used: {error.strerror or error}; pass another "
            "cache_dir"
        ) from error


@contextlib.contextmanager
def _locked_folder(folder: str | os.PathLike[str], patience: float = _PATIENCE) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not wait_for_lock(lambda: try_lock(fd), patience, 0.002):
            raise OSError(
                errno.EAGAIN,
                f"another process has kept {folder} locked for {patience:g} s: resume or end it",
            )
        yield
    finally:
        os.close(fd)  # and the lock with it


def holds_samples(name: str) -> bool:
    """True if a file of this name holds the samples of a machine's store."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def is_unused(path: str, *, remove: bool = False) -> bool:
    """True if no process uses a file that holds samples, so that it may be removed. False too if
    that can't be determined.

    The folder is locked, since a process that opened the file now would take it for used.
    """
    with (
        contextlib.suppress(OSError),
        _locked_folder(os.path.dirname(path), patience=_SHORT_PATIENCE),
    ):
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
                raise PermissionError(errno.EPERM, "the file belongs to another user")
            if try_lock(fd):  # nobody uses it
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, allocated)
                os.ftruncate(fd, allocated + rest)
            try_lock(fd, shared=True)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        weakref.finalize(self, _leave, fd, path, os.getpid())

    def allocate(self, offset: int, nbytes: int) -> None:
        if nbytes:
            os.posix_fallocate(self.fd, offset, nbytes)


def _leave(fd: int, path: str, pid: int) -> None:
    """Removes the file with its last user (its workers end with it)."""
    with contextlib.suppress(OSError):
        if os.getpid() == pid:
            with _locked_folder(os.path.dirname(path), patience=_SHORT_PATIENCE):
                if try_lock(fd) and os.path.samestat(os.stat(path), os.fstat(fd)):
                    os.unlink(path)
    with contextlib.suppress(OSError):
        os.close(fd)
