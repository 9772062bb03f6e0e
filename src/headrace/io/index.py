"""Indexes of files: the data needed to open one fast, cached on disk or found next to it.

NOTE [ life of an index ]

* It consists of a few arrays, which the format creates from the file (`IndexKind.make`), once; this
  may take many round trips.
* It is looked up in `cache_dir`, by URL, size and version of the file, and next to the file, under
  its URL and ".index", where the writer of the file may have put it (`headrace.write_index`), by
  its size alone. Neither is used without a valid checksum.
* A new index is cached in `cache_dir`. If that fails, there is a warning and no other effect.
* See also NOTE [ life of an array file ] in `headrace.io.array_file`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.errors import warn
from headrace.io.array_file import (
    ArrayFile,
    Arrays,
    Contents,
    UntrustedError,
    array_bytes,
    arrays_of,
    hash_of,
)
from headrace.io.files import Files
from headrace.io.paths import cache_folder, redact
from headrace.io.remote_files import RemoteFiles

_HINT_S = 5.0


class IndexKind(NamedTuple):
    """The index of one format.

    Attributes:
        name: one word.
        version: of the arrays' meaning, and of how they are made.
        types: of the arrays.
        make: files and a URL -> the arrays.
    """

    name: str
    version: int
    types: tuple[str, ...]
    make: Callable[[Any, str], Arrays]


def index_of(files: RemoteFiles, url: str, kind: IndexKind) -> Arrays:
    """The index of a file, found, or made and kept on this machine.

    Args:
        files: its server's. What lies beside is only looked at where `RemoteFiles.learn` was told
            to.
        url: of the file.
        kind: of the index.

    Raises:
        Exception: what `kind.make` raises.
    """
    found = found_index(files, url, kind)
    if found is None:
        began = time.monotonic()
        found = kind.make(files, url)
        keep_index(files, url, kind, found, time.monotonic() - began)
    return found


def found_index(files: RemoteFiles, url: str, kind: IndexKind) -> Arrays | None:
    """The index of a file as it is kept on this machine, or lies beside the file; None: it is
    nowhere, or not to be trusted.
    """
    version = files.version(url)
    cached = None
    if version.tag is not None:
        cached = cached_index(files, url, kind, files.options.cache_dir).found()
    if cached is not None:
        return [cached.long, *cached.short]
    beside = files.beside(url)
    if beside is None:
        return None
    try:
        return arrays_of(beside, _contents(kind, version.size))
    except UntrustedError as error:
        warn(
            f"{redact(url)}: the index beside it is not used: {error}; write it again with "
            "headrace.write_index"
        )
        return None


def learn_indexed(
    files: RemoteFiles,
    urls: Sequence[str],
    kind: IndexKind,
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """Asks for the versions of files, and then for what lies beside those whose index is not cached
    on this machine.

    Args:
        files: of their server.
        urls: of the files.
        kind: of the index.
        unless: True if none is needed; called when the versions are known.

    Raises:
        DataNotFoundError, AccessError, RemoteError: see `RemoteFiles.learn`.
    """
    is_needless = functools.cache(unless)

    def is_unknown(url: str) -> bool:
        if is_needless():
            return False
        is_kept = os.path.exists(cached_index(files, url, kind, files.options.cache_dir).path)
        return files.version(url).tag is None or not is_kept

    files.learn(urls, is_unknown)


def keep_index(files: RemoteFiles, url: str, kind: IndexKind, made: Arrays, took: float) -> None:
    """Keeps an index that was made, which took so many seconds, on this machine."""
    if took > _HINT_S:
        warn(
            f"{redact(url)}: it took {took:.0f} s to find out what lies where; "
            "headrace.write_index makes the index beforehand"
        )
    if files.version(url).tag is None:
        return
    try:
        cached_index(files, url, kind, files.options.cache_dir).write(made)
    except OSError as error:
        if not files.has_warned:  # of many shards once
            files.has_warned = True
            warn(
                f"cache_dir={redact(cache_folder(files.options.cache_dir))!r}: the index of "
                f"{redact(url)}, and of others here, is not kept "
                f"({error.strerror or error}), so every start makes it anew"
            )


def cached_index(
    files: Files, path: str, kind: IndexKind, cache_dir: str | os.PathLike[str] | None
) -> ArrayFile:
    """The cache file of an index, of a local file or of a remote one."""
    about = {"index": kind.name, "of": files.identity(path)}
    return ArrayFile(str(cache_folder(cache_dir)), "index", about, kind.version, kind.types)


def index_bytes(arrays: Arrays, kind: IndexKind, size: int) -> bytes:
    """The index of a file of `size` bytes as it lies beside it."""
    return array_bytes(arrays, _contents(kind, size))


def _contents(kind: IndexKind, size: int) -> Contents:
    return Contents(hash_of([kind.name, size, kind.version]), kind.types)
