"""How is a folder not listed anew at every start?

NOTE [ life of a kept listing ]

* `cache_dir` holds one file for each user, folder and set of endings: the names that were found, and for each folder that was looked
  into when it last changed (mtime and ctime). Nothing of the files but their names.
* It is used again if no folder has changed, and every link still leads to a file, to a folder or to nothing, as it did. That costs a
  `stat` for each folder and link, and none for a file.
* A folder that changed less than 2 s before it was listed may change again without its time changing: such a listing is not kept.
* The file is written under a temporary name, with a checksum, and gets its own name when it is on the disk. One that is damaged, of
  another version, another user's, or that others may write to, is not trusted, and written anew.
* A writer that is killed leaves its temporary file; the next one removes such files an hour later.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from headrace.errors import warn
from headrace.storage.folders import FILE, FOLDER, OTHER, THREADS, Listing, list_folder
from headrace.storage.names import PackedNames
from headrace.storage.paths import redact

_log = logging.getLogger(__name__)

VERSION = 1
SETTLED_NS = 2_000_000_000
"""A folder must have been left alone for so long before it was listed: times on some file systems tick in steps of 2 s."""
ABANDONED_S = 3600
"""A temporary file that has not been written to for so long has no writer any more."""
_PREFIX, _SUFFIX, _TEMPORARY = "headrace-listing-", ".bin", ".part"
_TYPES = ("u1", "<i8", "u1", "<i8", "<i8", "u1", "<i8", "u1")  # of the arrays of a listing, as `_arrays` gives them


def kept_listing(root: str, endings: tuple[bytes, ...], cache_dir: str) -> Listing:
    """`list_folder`, or what is kept of an earlier time where it still holds.

    Warns where `cache_dir` can't be written to.
    """
    root, endings = os.path.abspath(root), tuple(sorted(set(endings)))
    path, meta = _place(root, endings, cache_dir)
    try:
        kept = _read(path, meta)
        if _still_holds(os.fsencode(root), endings, kept):
            return kept
        _log.info("%s: the folder has changed since it was listed", redact(root))
    except FileNotFoundError:
        pass
    except (_UntrustedError, OSError) as error:
        _log.info("%s is not used: %s", redact(path), error)
    began = time.time_ns()
    listing = list_folder(os.fsencode(root), endings)
    if np.any(listing.times[:, 0] > began - SETTLED_NS):
        _log.info("%s: the folder changed just now, so its listing is not kept", redact(root))
    else:
        _keep(path, meta, listing, root)
    return listing


class _UntrustedError(Exception):
    """Why a kept listing is not used."""


def _place(root: str, endings: tuple[bytes, ...], cache_dir: str) -> tuple[str, bytes]:
    """The path of a listing's file, and what it says of itself."""
    meta = json.dumps({"root": root, "endings": [os.fsdecode(e) for e in endings], "user": _user()}).encode()
    return os.path.join(cache_dir, f"{_PREFIX}{hashlib.blake2b(meta, digest_size=16).hexdigest()}{_SUFFIX}"), meta


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


# -- does it still hold?


def _still_holds(root: bytes, endings: tuple[bytes, ...], kept: Listing) -> bool:
    def times_of(folders: list[bytes], start: int) -> bool:
        times: list[list[int] | None] = kept.times[start : start + len(folders)].tolist()
        return times == [_times(os.path.join(root, name) if name else root) for name in folders]

    def kinds_of(links: list[bytes], start: int) -> bool:
        kinds: list[int | None] = kept.kinds[start : start + len(links)].tolist()
        return kinds == [_kind(os.path.join(root, name), endings) for name in links]

    return _all_in_threads(times_of, kept.folders) and _all_in_threads(kinds_of, kept.links)


def _all_in_threads(check: Callable[[list[bytes], int], bool], names: PackedNames) -> bool:
    """Is `check(some names, number of the first)` true for all?"""
    if not len(names):
        return True
    step = max(1, min(256, len(names) // THREADS))
    with ThreadPoolExecutor(THREADS, "headrace-look") as pool:
        starts = range(0, len(names), step)
        try:
            return all(pool.map(lambda start: check(names[start : start + step], start), starts))
        finally:
            pool.shutdown(cancel_futures=True)


def _times(folder: bytes) -> list[int] | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_ctime_ns]


def _kind(link: bytes, endings: tuple[bytes, ...]) -> int | None:
    try:
        mode = os.stat(link).st_mode
    except OSError as error:
        return OTHER if error.errno in (errno.ENOENT, errno.ELOOP) else None  # None: listing it says what is wrong
    if stat.S_ISDIR(mode):
        return FOLDER
    return FILE if stat.S_ISREG(mode) and link.lower().endswith(endings) else OTHER


# -- the file: a line with version and checksum, a line that says whose listing it is, the sizes of the arrays, the arrays


def _arrays(listing: Listing) -> list[npt.NDArray[Any]]:
    names = (listing.names, listing.folders, listing.links)
    (a, b), (c, d), (e, f) = (n.arrays for n in names)
    arrays = (a, b, c, d, listing.times.reshape(-1), e, f, listing.kinds)
    return [np.ascontiguousarray(array, dtype) for array, dtype in zip(arrays, _TYPES, strict=True)]


def _digest(meta: bytes, arrays: Iterable[npt.NDArray[Any]]) -> bytes:
    digest = hashlib.blake2b(meta, digest_size=16)
    for array in arrays:
        digest.update(array.data)
    return digest.hexdigest().encode()


def _read(path: str, meta: bytes) -> Listing:
    """The listing in a file.

    Raises:
        FileNotFoundError, OSError: there is none; it can't be read.
        _UntrustedError: it is not ours, or not whole.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not _is_ours(status):
            raise _UntrustedError("it is another user's, or others may write to it")
        head = file.readline(200).split()
        if head[:2] != [b"headrace-listing", b"%d" % VERSION]:
            raise _UntrustedError("it is of another version")
        if file.readline(len(meta) + 1) != meta + b"\n":
            raise _UntrustedError("it is of another folder")
        sizes = _read_array(file, 8 * len(_TYPES), "<i8").tolist()
        if min(sizes) < 0 or sum(sizes) != status.st_size - file.tell():
            raise _UntrustedError("it is damaged")
        arrays = [_read_array(file, size, dtype) for size, dtype in zip(sizes, _TYPES, strict=True)]
    if head[2:] != [_digest(meta, arrays)]:
        raise _UntrustedError("it is damaged")
    a, b, c, d, times, e, f, kinds = (array.astype(array.dtype.newbyteorder("="), copy=False) for array in arrays)
    names = [PackedNames.from_arrays(data, offsets) for data, offsets in ((a, b), (c, d), (e, f))]
    return Listing(names[0], names[1], times.reshape(-1, 2), names[2], kinds)


def _is_ours(status: os.stat_result) -> bool:
    private = not hasattr(os, "geteuid") or (status.st_uid == _user() and not status.st_mode & 0o022)
    return private and stat.S_ISREG(status.st_mode)


def _read_array(file: BinaryIO, nbytes: int, dtype: str) -> npt.NDArray[Any]:
    array = np.empty(nbytes // np.dtype(dtype).itemsize, dtype)
    if array.nbytes != nbytes or file.readinto(array.view(np.uint8)) != nbytes:  # type: ignore[attr-defined]
        raise _UntrustedError("it is damaged")
    return array


def _keep(path: str, meta: bytes, listing: Listing, root: str) -> None:
    folder = os.path.dirname(path)
    shown = f"cache_dir={redact(folder)!r}: the listing of {redact(root)} is not kept"
    if _lies_in(folder, root):
        warn(f"{shown}, for it would change the folder that is listed: take a cache_dir outside of it")
        return
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        _remove_abandoned(folder)
        with _written_to(path) as file:
            arrays = _arrays(listing)
            file.write(b"headrace-listing %d %s\n%s\n" % (VERSION, _digest(meta, arrays), meta))
            file.write(np.array([a.nbytes for a in arrays], "<i8").tobytes())
            for array in arrays:
                file.write(array.data)
    except OSError as error:
        warn(f"{shown} ({error.strerror or error}), so every start lists it anew")


def _lies_in(folder: str, root: str) -> bool:
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(root))


@contextlib.contextmanager
def _written_to(path: str) -> Iterator[BinaryIO]:
    """A file that has its name, and is on the disk, when all of it was written; only its owner may read it."""
    folder, name = os.path.split(path)
    fd, temporary = tempfile.mkstemp(_TEMPORARY, f"{name}.", folder)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _remove_abandoned(folder: str) -> None:
    with os.scandir(folder) as listing:
        for item in listing:
            if item.name.startswith(_PREFIX) and item.name.endswith(_TEMPORARY):
                with contextlib.suppress(OSError):  # another user's, or gone
                    if item.stat(follow_symlinks=False).st_mtime < time.time() - ABANDONED_S:
                        os.unlink(item.path)
