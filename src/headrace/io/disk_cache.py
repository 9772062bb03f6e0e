"""The disk cache of remote blocks, shared by many processes, within a size limit.

NOTE [ life of a cached block ]

* A block is a file, named by a hash of its file's URL and version and of its position there, so
  that two buckets, or two versions of a file, are never mixed. Its head has length and checksum,
  which are compared at each read; a damaged block is removed and fetched again.
* It is written under a temporary name, on which its writer holds a kernel lock, then flushed to
  disk, then renamed. A writer that is killed leaves this file without a lock, and the next eviction
  removes it.
* A reader opens the file and reads all of it, so an eviction that removes its name meanwhile does
  not disturb it.
* The ledger is the number of bytes of all blocks, including those being written. It is raised
  before a block is written, and lowered after one is removed, under a lock: so it may be too high
  after a process was killed, but never too low. Eviction measures the folder itself and corrects
  it. So all processes together stay below the limit.
* One process fetches a block; others that need it wait (`claimed`), at most as long as the fetch
  may take.
* Without disk space or write permission, everything works without the cache, with one warning. Each
  user has a separate folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c

from headrace.errors import AccessError, ConfigError, warn
from headrace.io.atomic import ABANDONED_S, TEMPORARY, is_ours, user_id
from headrace.io.paths import redact
from headrace.memory.budget import format_size
from headrace.memory.processes import (
    HAS_LOCKS,
    renew_after_fork,
    try_lock,
    unlock,
    wait_for_lock,
    write_full,
)

_HEAD = struct.Struct("<8sQI")
_MAGIC = b"hr-blk-1"
BLOCK_ENDING = ".blk"
_DOWN_TO = 0.9  # of the limit: an eviction makes room for more than one block
_TOUCHED_S = 60.0  # how exactly the time of the last use is known
_PAUSE_S = 60.0  # after the disk was full, nothing is written for so long
_POLL_S = 0.02
_PATIENCE_S = 10.0  # for the ledger, which nobody holds for long


class DiskCache:
    """Blocks of bytes in a folder, shared by all processes of this user. Thread-safe; forked and
    pickled copies are the same cache.

    Args:
        folder: created if missing; each user has a folder in it.
        limit: maximum bytes of all blocks together.

    Raises:
        ConfigError: the limit is not positive, or the system has no file locks.
    """

    def __init__(self, folder: str, limit: int) -> None:
        if not HAS_LOCKS:
            raise ConfigError(
                "disk_cache_size needs file locks, which this system lacks: leave it out"
            )
        if limit < 1:
            raise ConfigError(f"disk_cache_size must be above 0 bytes, not {limit}")
        self.folder: str = os.path.join(os.path.abspath(folder), f"blocks-{user_id()}")
        self.limit: int = limit
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._paused_until = 0.0
        self._has_warned = False
        renew_after_fork(self)

    after_fork = _reset

    @staticmethod
    def key(url: str, version: object, number: int) -> str:
        """The name of a block, by the URL and version of its file and its number there."""
        return hashlib.blake2b(repr((url, version, number)).encode(), digest_size=20).hexdigest()

    # -- reading

    def get(self, key: str) -> bytes | None:
        """A block; None if it is missing or damaged."""
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd, "rb", buffering=0) as file:
                status = os.fstat(fd)
                content = file.readall() or b""
                if time.time() - status.st_mtime > _TOUCHED_S:
                    with contextlib.suppress(OSError):  # read-only, or evicted meanwhile
                        os.utime(fd)
        except OSError:
            return None
        data = content[_HEAD.size :]
        if not is_ours(status) or content[: _HEAD.size] != _head_of(data):
            self._count("disk_damaged")
            self._remove(path)
            return None
        self._count("disk_hits")
        return data

    # -- writing

    def put(self, key: str, data: bytes) -> bool:
        """Stores a block; False if there is no room, or no permission."""
        size = _HEAD.size + len(data)
        if size > self.limit or time.monotonic() < self._paused_until:
            return False
        path = self._path(key)
        temporary = f"{path}.{os.getpid()}-{threading.get_ident()}-{size}{TEMPORARY}"
        try:
            self._make_folder()
            fd = self._reserve(temporary, size)
            if fd is None:
                return False
            try:
                write_full(fd, _head_of(data))
                write_full(fd, data)
                os.fsync(fd)
                os.replace(temporary, path)
            except BaseException:
                self._remove(temporary)
                with contextlib.suppress(OSError), self._ledger() as ledger:
                    _write_ledger(ledger, max(0, _read_ledger(ledger) - size))
                raise
            finally:
                unlock(fd)
        except OSError as error:
            self._give_up(error)
            return False
        self._count("disk_puts")
        return True

    def _give_up(self, error: OSError) -> None:
        self._paused_until = time.monotonic() + _PAUSE_S
        if not self._has_warned:
            self._has_warned = True
            why = "the disk is full"
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                why = error.strerror or str(error)
            warn(
                f"cache_dir={redact(self.folder)!r}: nothing is written to the disk cache for now "
                f"({why}); blocks are fetched again instead"
            )

    # -- one fetch a machine

    @contextlib.asynccontextmanager
    async def claimed(self, keys: Iterable[str], patience: float) -> AsyncIterator[None]:
        """A context in which this coroutine fetches blocks, while others of this machine that need
        them wait here, at most `patience` seconds.

        Look for the blocks again inside: another process may have fetched them meanwhile.
        """
        fd = None
        # without permission to write there are no claims, and blocks may be fetched twice
        with contextlib.suppress(OSError):
            self._make_folder()
            claims = os.path.join(self.folder, "claims")
            fd = os.open(claims, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            end = time.monotonic() + patience
            with contextlib.suppress(OSError):
                # in order, which prevents deadlocks
                for number in sorted({int(key[:12], 16) for key in keys}):
                    while fd is not None and not try_lock(fd, number):
                        if time.monotonic() >= end:
                            break
                        await asyncio.sleep(_POLL_S)
            yield
        finally:
            if fd is not None:
                unlock(fd)

    # -- the limit

    def _reserve(self, temporary: str, size: int) -> int | None:
        """Makes room for a block, and its temporary file, locked; None: there is no room."""
        with self._ledger() as ledger:
            total = _read_ledger(ledger) + size
            if total > self.limit:
                total = self._evicted(size) + size
            if total > self.limit:
                _write_ledger(ledger, total - size)
                return None
            os.makedirs(os.path.dirname(temporary), 0o700, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try_lock(fd)
            _write_ledger(ledger, total)
            return fd

    def _evicted(self, wanted: int) -> int:
        """Removes the least recently used blocks until there is more room than wanted; returns the
        bytes that are left.

        Under the ledger's lock. A block that is being written counts by the size in its name.
        """
        found = []
        total = 0
        for path, status in _files_below(self.folder):
            if path.endswith(TEMPORARY):
                if _has_writer(path):
                    total += int(path.removesuffix(TEMPORARY).rpartition("-")[2])
                else:
                    self._remove(path)
                continue
            total += status.st_size
            found.append((status.st_mtime_ns, status.st_size, path))
        for _, size, path in sorted(found):
            if total + wanted <= self.limit * _DOWN_TO:
                break
            self._remove(path)
            self._count("disk_evicted")
            total -= size
        return total

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[int]:
        fd = os.open(
            os.path.join(self.folder, "ledger"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            if not wait_for_lock(lambda: try_lock(fd), _PATIENCE_S, 0.01):
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    "another process holds the lock of the disk cache, and does not go on",
                )
            yield fd
        finally:
            unlock(fd)

    # -- small things

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, key[:2], key + BLOCK_ENDING)

    def _make_folder(self) -> None:
        os.makedirs(self.folder, 0o700, exist_ok=True)
        status = os.lstat(self.folder)
        if status.st_uid != user_id() or status.st_mode & 0o022:
            raise PermissionError(
                errno.EPERM, "the folder is another user's, or others may write to it", self.folder
            )

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def take_counts(self) -> Counter[str]:
        """Hits, blocks written, evicted and found damaged by this process, since the last call."""
        with self._lock:
            counts = self._counts
            self._counts = Counter()
        return counts

    def explain(self) -> str:
        """Describes where the cache is, and how full."""
        try:
            with self._ledger() as ledger:
                used = format_size(_read_ledger(ledger))
        except OSError:
            used = "nothing"
        return f"disk cache: {used} of {format_size(self.limit)} in {redact(self.folder)}"

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def _read_ledger(fd: int) -> int:
    try:
        return max(0, int(os.pread(fd, 32, 0)))
    except ValueError:  # new, or cut off in the middle of a write
        return 1 << 62  # too high: the next one to reserve looks at the folder


def _write_ledger(fd: int, total: int) -> None:
    os.pwrite(fd, b"%32d" % total, 0)


def _files_below(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """The blocks below a folder, also those that are being written."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith((BLOCK_ENDING, TEMPORARY)):
                with contextlib.suppress(OSError):  # gone meanwhile
                    yield path, os.lstat(path)


def _has_writer(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(fd)
    except OSError:
        return True
    finally:
        os.close(fd)


def _head_of(data: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, len(data), google_crc32c.value(data))


# -- the files in a cache_dir

_ARRAYS = re.compile(rf"headrace-([a-z][a-z0-9-]*)-[0-9a-f]{{16,}}\.bin(\.[^.]*\{TEMPORARY})?$")
_BLOCKS = re.compile(r"blocks-(\d+)$")
BLOCKS = "blocks of remote files"
SAMPLES = "samples shared by the ranks of this machine"
REST = "what killed processes left"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A file in a `cache_dir`.

    Attributes:
        path: its path.
        what: its kind in words; `REST` if its writer is gone, so that it will never be used.
        nbytes: its size.
        used: when it was last read or written, in seconds since 1970.
        user: the number of its owner.
    """

    path: str
    what: str
    nbytes: int
    used: float
    user: int


def cache_entries(folder: str) -> list[CacheEntry]:
    """The files of headrace in a folder, sorted by name; none if there is no such folder.

    Raises:
        AccessError: the folder may not be listed.
    """
    from headrace.memory.machine import holds_samples, is_unused  # needs torch

    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise AccessError(f"{redact(folder)} can't be listed: {error.strerror or error}") from error
    found: list[tuple[str, str]] = []
    for name in names:
        path = os.path.join(folder, name)
        match = _ARRAYS.match(name)
        if _BLOCKS.match(name):
            found += [(block, BLOCKS) for block, _ in _files_below(path)]
        elif holds_samples(name):
            found.append((path, SAMPLES))
        elif match is not None:
            found.append((path, f"arrays: {match[1]}"))
    entries = []
    for path, what in found:
        with contextlib.suppress(OSError):  # gone meanwhile
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                continue
            is_abandoned = status.st_mtime < time.time() - ABANDONED_S and path.endswith(TEMPORARY)
            if is_abandoned or (what == SAMPLES and is_unused(path)):
                what = REST
            used = max(status.st_mtime, status.st_atime)
            entries.append(CacheEntry(path, what, status.st_size, used, status.st_uid))
    return entries


def remove_entries(entries: Sequence[CacheEntry], older_than: float) -> list[CacheEntry]:
    """Removes this user's files that are abandoned, or were not used for `older_than` seconds;
    returns those that were removed.

    What a running job shares among its ranks stays.
    """
    from headrace.memory.machine import holds_samples, is_unused

    removed = []
    since = time.time() - older_than
    for entry in entries:
        is_wanted = entry.what == REST or (entry.what != SAMPLES and entry.used <= since)
        if entry.user != user_id() or not is_wanted:
            continue
        if holds_samples(os.path.basename(entry.path)):
            if is_unused(entry.path, remove=True):
                removed.append(entry)
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or in a folder not to be written to
            os.unlink(entry.path)
            removed.append(entry)
    return removed
