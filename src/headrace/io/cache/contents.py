"""Lists what headrace keeps in a `cache_dir`, and removes what is old or abandoned.

Only files with names of headrace's own are listed, and of these only the user's own are removed. A
dataset that is open reads on from what it has open; what it asks for anew is made again.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.errors import AccessError
from headrace.io.atomic import ABANDONED_S, TEMPORARY, user_id
from headrace.io.cache.disk_cache import BLOCK_ENDING
from headrace.io.paths import redact
from headrace.memory.machine import holds_samples, is_unused

_ARRAYS = re.compile(r"headrace-([a-z][a-z0-9-]*)-[0-9a-f]{16,}\.bin$")
_BLOCKS = re.compile(r"blocks-(\d+)$")
BLOCKS = "blocks of remote files"
SAMPLES = "samples shared by the ranks of this machine"
REST = "what killed processes left"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A file in a `cache_dir`.

    Attributes:
        path: of it.
        what: it is, in words.
        nbytes: of it.
        used: when it was last read or written, in seconds since 1970.
        user: who owns it, by number.
        is_abandoned: True if its writer is gone, and nobody will ever use it.
    """

    path: str
    what: str
    nbytes: int
    used: float
    user: int
    is_abandoned: bool = False


def cache_entries(folder: str) -> list[CacheEntry]:
    """The files that headrace keeps in a folder, in the order of their names; nothing where there
    is no such folder.

    Raises:
        AccessError: it may not be listed.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise AccessError(f"{redact(folder)} can't be listed: {error.strerror or error}") from error
    found: list[CacheEntry] = []
    for name in names:
        path = os.path.join(folder, name)
        if _BLOCKS.match(name):
            found += _blocks_in(path)
        elif (entry := _entry(path, name)) is not None:
            found.append(entry)
    return found


def _entry(path: str, name: str) -> CacheEntry | None:
    """A file by its name; None: it is none of headrace's."""
    base = name
    is_temporary = name.endswith(TEMPORARY)
    if is_temporary:
        base = name.removesuffix(TEMPORARY).rpartition(".")[0]
    match = _ARRAYS.match(base)
    if match is not None:
        what = f"arrays: {match[1]}"
    elif holds_samples(name):
        what = SAMPLES
    else:
        return None
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            is_abandoned = is_unused(path) if what == SAMPLES else is_temporary and _is_old(status)
            return CacheEntry(
                path,
                REST if is_abandoned else what,
                status.st_size,
                _used(status),
                status.st_uid,
                is_abandoned,
            )
    return None


def _blocks_in(folder: str) -> Iterator[CacheEntry]:
    for below, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(below, name)
            if name.endswith((BLOCK_ENDING, TEMPORARY)):
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    is_abandoned = name.endswith(TEMPORARY) and _is_old(status)
                    what = REST if is_abandoned else BLOCKS
                    yield CacheEntry(
                        path, what, status.st_size, _used(status), status.st_uid, is_abandoned
                    )


def _is_old(status: os.stat_result) -> bool:
    """True if a temporary file has no writer any more."""
    return status.st_mtime < time.time() - ABANDONED_S


def _used(status: os.stat_result) -> float:
    return max(status.st_mtime, status.st_atime)


def remove_entries(entries: Sequence[CacheEntry], older_than: float) -> list[CacheEntry]:
    """Removes the user's own files that were abandoned, or not used for so many seconds; those that
    were removed.

    What a job of this machine shares among its ranks stays, as long as the job runs.
    """
    removed = []
    since = time.time() - older_than
    for entry in entries:
        in_use = entry.what == SAMPLES and not entry.is_abandoned
        if entry.user != user_id() or in_use or not (entry.is_abandoned or entry.used <= since):
            continue
        if _remove(entry.path):
            removed.append(entry)
    return removed


def _remove(path: str) -> bool:
    if holds_samples(os.path.basename(path)):
        return is_unused(path, remove=True)
    try:
        os.unlink(path)
    except OSError:  # gone meanwhile, or in a folder that may not be written to
        return False
    return True
