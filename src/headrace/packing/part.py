"""Writes a file under a locked temporary name, and renames it when it is complete.

It is written under a temporary name in the same folder, which is held under a kernel lock, and
renamed when it is done. The lock is gone with its process, however that ends: what a dead writer
left is told from what a live one writes, and is taken over.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any

from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    HeadraceError,
    TargetExistsError,
    WriteError,
)
from headrace.io.atomic import TEMPORARY
from headrace.io.paths import is_url, redact
from headrace.memory.budget import format_size
from headrace.memory.processes import HAS_LOCKS, try_lock, write_full

_log = logging.getLogger(__name__)
_FLUSHED = 8 << 20  # bytes
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_LOCKLESS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # file systems that know no locks


class PartFile:
    """The temporary file of a target, open and locked inside a ``with``. Removed at the end unless
    committed.

    Its name is ``.{name}.part``: one for a target, so that a lock on it is a lock on the target. A
    second writer, in this process or another one, is refused; with a `token` each has a name of its
    own, and the last one that is done wins.

    Args:
        target: the final path.
        overwrite: True if the target may be replaced.
        token: comes into the name; `remove_abandoned` removes what writers left who are gone.

    Attributes:
        target: the final path, absolute.
        path: the temporary one.
        fd: open for reading and writing, empty at first.
        is_cancelled: asked before each step of writing; True: it ends there.

    Raises:
        TargetExistsError, DataNotFoundError, ConfigError: the target is there; its folder is not;
            it is a folder itself.
        WriteError, AccessError: another job writes the same target; this user may not.
    """

    def __init__(
        self, target: str | os.PathLike[Any], overwrite: bool = False, token: str | None = None
    ) -> None:
        if is_url(target):
            raise ConfigError(
                f"{redact(target)}: a single file is written on this machine: pass shard_size, "
                "such as '1GB', to pack into a store"
            )
        self.target: str = os.path.abspath(os.path.expanduser(os.fspath(target)))
        self._folder, name = os.path.split(self.target)
        self._token = token
        ending = TEMPORARY if token is None else f".{token}{TEMPORARY}"
        self.path: str = os.path.join(self._folder, f".{name}{ending}")
        self.fd: int = -1
        self.is_cancelled: Callable[[], bool] = lambda: False
        self._overwrite = overwrite
        self._committed = False
        self._flushed = 0
        self._scratch = contextlib.ExitStack()
        self._check_target()

    def __enter__(self) -> PartFile:
        if not HAS_LOCKS:
            raise ConfigError(
                "packing needs a system with file locks, such as Linux or macOS; packed files are "
                "read everywhere"
            )
        with self.explained():
            self.fd = self._open_locked()
            try:
                os.ftruncate(self.fd, 0)
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._committed:
            with contextlib.suppress(OSError):
                os.unlink(self.path)  # while it is locked: it can be nobody else's
        os.close(self.fd)
        self._scratch.close()

    def scratch(self) -> int:
        """An unnamed temporary file in the same folder, open until the part file is closed."""
        with self.explained():
            return self._scratch.enter_context(tempfile.TemporaryFile(dir=self._folder)).fileno()

    def write(self, data: Any, offset: int) -> None:
        """Writes bytes at an offset."""
        with self.explained():
            write_full(self.fd, data, offset)

    def commit(self) -> None:
        """Makes the file durable, and gives it its final name.

        Raises:
            TargetExistsError, WriteError, AccessError: a target appeared meanwhile; it can't be
                written.
        """
        self._check_target()
        is_exclusive = self._token is not None and not self._overwrite
        with self.explained():
            os.fsync(self.fd)
            try:
                if is_exclusive:
                    os.link(self.path, self.target)  # fails where another writer was faster
                    os.unlink(self.path)
            except FileExistsError:
                raise self._target_exists() from None
            except OSError:  # a file system without hard links
                is_exclusive = False
            if not is_exclusive:
                os.replace(self.path, self.target)
        self._committed = True
        # some file systems can't: the name may then be lost with the power, not the file's
        # wholeness
        with contextlib.suppress(OSError):
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def reserve(self, nbytes: int) -> None:
        """Sets the length of the file, and checks that there is room, so that a full disk shows
        before any sample is read.

        Raises:
            WriteError, AccessError: there is none; the file can't be written, or is too large for
                the file system or the user's limit.
        """
        with self.explained():
            free = shutil.disk_usage(self._folder).free
            if nbytes > free:
                raise WriteError(
                    f"{redact(self.target)} can't be written, the disk is full: it needs "
                    f"{format_size(nbytes)}, and {format_size(free)} "
                    "are free: free some space, or use another disk"
                )
            os.ftruncate(self.fd, nbytes)

    def restart(self) -> None:
        """Begins anew: what was written may be overwritten."""
        self._flushed = 0

    def begin_flush(self, stop: int) -> None:
        """Starts sending what was written before `stop` to the disk, without waiting."""
        if stop - self._flushed >= _FLUSHED:
            with contextlib.suppress(OSError):  # it is a hint; `reread` says what is wrong
                self._forget(self._flushed, stop - self._flushed)
            self._flushed = stop

    def reread(self) -> None:
        """Makes the file durable, and drops its pages from memory, so that the next reads come from
        the disk if the system allows it.
        """
        with self.explained():
            os.fsync(self.fd)
            self._forget(0, 0)

    def _forget(self, start: int, nbytes: int) -> None:
        """Drops pages that are on the disk from memory, and starts writing the others; 0 bytes: to
        the end.
        """
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, start, nbytes, os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns errors of the system inside the context into ours.

        Raises:
            WriteError, AccessError, DataNotFoundError: in one line: what, where, and what to do.
            CancelledError: see `is_cancelled`.
        """
        if self.is_cancelled():
            raise CancelledError(f"writing {redact(self.target)} was cancelled")
        try:
            yield
        except HeadraceError:
            raise
        except OSError as error:
            raise self._explain(error) from error

    def _check_target(self) -> None:
        path = redact(self.target)
        if os.path.isdir(self.target):
            raise ConfigError(f"{path} is a folder: name the file to write")
        if not os.path.isdir(self._folder):
            raise DataNotFoundError(
                f"{redact(self._folder)}, where {os.path.basename(path)} should go, is no folder: "
                "make it first"
            )
        if os.path.lexists(self.target) and not self._overwrite:
            raise self._target_exists()

    def _target_exists(self) -> TargetExistsError:
        return TargetExistsError(
            f"{redact(self.target)} is there already: pass overwrite=True (--overwrite) to "
            "replace it, or another name"
        )

    def _open_locked(self) -> int:
        while True:
            # O_NOFOLLOW: in a folder that others may write to, the name could be a link to some
            # file of ours
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                # else its writer renamed or removed it between the two calls, or
                # `remove_abandoned` looks at it
                if self._lock(fd) and _is_at(fd, self.path):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _lock(self, fd: int) -> bool:
        """Locks the file. False if another writer of the same target holds it."""
        try:
            is_ours = try_lock(fd)
        except OSError as error:
            if error.errno not in _LOCKLESS:
                raise
            is_ours = True
            _log.warning(
                "%s: this file system has no locks, see that no other job writes there",
                redact(self._folder),
            )
        if not is_ours and self._token is None:
            raise WriteError(
                f"another job is packing to {redact(self.target)} (it holds "
                f"{redact(os.path.basename(self.path))}): "
                "wait for it, or use another name"
            )
        return is_ours

    def _explain(self, error: OSError) -> HeadraceError:
        path = redact(self.target)
        reason = error.strerror or str(error)
        if error.errno in _FORBIDDEN:
            return AccessError(
                f"{redact(self._folder)}: this user may not write there ({reason}): use another "
                "folder"
            )
        if error.errno in _MISSING:
            return DataNotFoundError(
                f"{redact(self._folder)} or the temporary file in it is gone: {reason}"
            )
        remedy = ""
        if error.errno in _FULL:
            remedy = ": the disk is full: free some space, or use another disk"
        elif error.errno == errno.EFBIG:
            remedy = ": too large for this file system, or for this user's limit (ulimit -f)"
        return WriteError(f"{path} can't be written: {reason}{remedy}")


def new_token() -> str:
    """A random text that tells the temporary files of one writer from those of others."""
    return secrets.token_hex(4)


def remove_abandoned(folder: str, prefixes: tuple[str, ...]) -> None:
    """Removes temporary files with one of these prefixes that nobody holds a lock on."""
    names: list[str] = []
    # another job may have removed the folder, which was empty
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(folder)
    for name in names:
        if not name.startswith(prefixes) or not name.endswith(TEMPORARY):
            continue
        path = os.path.join(folder, name)
        # it was renamed or removed meanwhile, or is another user's
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if try_lock(fd) and _is_at(fd, path):
                    os.unlink(path)
            finally:
                os.close(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
