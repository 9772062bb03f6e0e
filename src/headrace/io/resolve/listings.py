"""Caches listings of local folders on disk, and checks them at the next start.

NOTE [ life of a cached listing ]

* `cache_dir` holds one file for each user, folder and set of endings: the names that were found,
  and for each folder that was looked into when it last changed (mtime and ctime). Nothing of the
  files but their names.
* It is used again if no folder has changed, and every link still leads to a file, to a folder or to
  nothing, as it did. That costs a `stat` for each folder and link, and none for a file.
* A folder that changed less than 2 s before it was listed may change again without its time
  changing: such a listing is not cached.
* See also NOTE [ life of an array file ] in `headrace.io.array_file`.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import warn
from headrace.io.array_file import ArrayFile
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import redact
from headrace.io.resolve.folders import FILE, FOLDER, NOTHING, OTHER, THREADS, Listing, list_folder

_log = logging.getLogger(__name__)

VERSION = 3
SETTLED_NS = 2_000_000_000
"""A folder must have been left alone for so long before it was listed: times on some file
systems tick in steps of 2 s.
"""
# of the arrays of a listing, as `_arrays` gives them
_TYPES = ("u1", "<i8", "u1", "<i8", "<i8", "u1", "<i8", "u1")


def cached_listing(root: str, endings: tuple[bytes, ...], cache_dir: str) -> Listing:
    """`list_folder`, or a listing cached earlier, where it still holds.

    Warns where `cache_dir` can't be written to.
    """
    root, endings = os.path.abspath(root), tuple(sorted(set(endings)))
    about = {"root": root, "endings": [os.fsdecode(e) for e in endings]}
    file = ArrayFile(cache_dir, "listing", about, VERSION, _TYPES)
    arrays = file.loaded()
    if arrays is not None:
        cached = _listing(arrays)
        if _still_holds(os.fsencode(root), endings, cached):
            return cached
        _log.info("%s: the folder has changed since it was listed", redact(root))
    began = time.time_ns()
    listing = list_folder(os.fsencode(root), endings)
    if np.any(listing.times[:, 0] > began - SETTLED_NS):
        _log.info("%s: the folder changed just now, so its listing is not cached", redact(root))
    else:
        _write(file, listing, root)
    return listing


# -- does it still hold?


def _still_holds(root: bytes, endings: tuple[bytes, ...], cached: Listing) -> bool:
    def times_of(folders: list[bytes], start: int) -> bool:
        times: list[list[int] | None] = cached.times[start : start + len(folders)].tolist()
        return times == [_times(os.path.join(root, name) if name else root) for name in folders]

    def kinds_of(links: list[bytes], start: int) -> bool:
        kinds: list[int | None] = cached.kinds[start : start + len(links)].tolist()
        return kinds == [_kind(os.path.join(root, name), endings) for name in links]

    return _all_in_threads(times_of, cached.folders) and _all_in_threads(kinds_of, cached.links)


def _all_in_threads(check: Callable[[list[bytes], int], bool], names: PackedNames) -> bool:
    """True if `check(some names, number of the first)` is, for all."""
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
        # None: listing it says what is wrong
        return NOTHING if error.errno in (errno.ENOENT, errno.ELOOP) else None
    if stat.S_ISDIR(mode):
        return FOLDER
    return FILE if stat.S_ISREG(mode) and link.lower().endswith(endings) else OTHER


# -- the arrays of a listing


def _arrays(listing: Listing) -> list[npt.NDArray[Any]]:
    (a, b), (c, d), (e, f) = (
        names.arrays for names in (listing.names, listing.folders, listing.links)
    )
    return [a, b, c, d, listing.times.reshape(-1), e, f, listing.kinds]


def _listing(arrays: list[npt.NDArray[Any]]) -> Listing:
    a, b, c, d, times, e, f, kinds = arrays
    names = [PackedNames.from_arrays(data, offsets) for data, offsets in ((a, b), (c, d), (e, f))]
    return Listing(names[0], names[1], times.reshape(-1, 2), names[2], kinds)


def _write(file: ArrayFile, listing: Listing, root: str) -> None:
    folder = os.path.dirname(file.path)
    shown = f"cache_dir={redact(folder)!r}: the listing of {redact(root)} is not cached"
    if _lies_in(folder, root):
        warn(
            f"{shown}, for it would change the folder that is listed: use a cache_dir outside of it"
        )
        return
    try:
        file.write(_arrays(listing))
    except OSError as error:
        warn(f"{shown} ({error.strerror or error}), so every start lists it anew")


def _lies_in(folder: str, root: str) -> bool:
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(root))
