"""Indexes of files: the data needed to open one fast, cached on disk or found next to it.

NOTE [ life of an index ]

* It consists of a few arrays, which the format creates from the file (`IndexKind.make`), once; this
  may take many round trips.
* It is looked up in `cache_dir`, by URL, size and version of the file, and next to the file, under
  its URL and ".index", where the writer of the file may have put it (`headrace.write_index`), by
  its size alone. Neither is used without a valid checksum.
* A new index is cached in `cache_dir`. If that fails, there is a warning and no other effect.
* See also NOTE [ life of an array file ] in `headrace.io.array_file`.

Some formats are a sequence of records, each behind a header with its length: their index is made by
going from header to header (`Headers`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from headrace.display import progress_bar
from headrace.errors import AccessError, FormatError, HeadraceError, warn
from headrace.io.array_file import (
    ArrayFile,
    Arrays,
    UntrustedError,
    arrays_of,
    hash_of,
    unkept,
)
from headrace.io.files import Files
from headrace.io.paths import cache_folder, redact
from headrace.io.ranges import ByteRanges

if TYPE_CHECKING:
    from headrace.io.remote_files import RemoteFiles

KEPT_FROM = 1 << 12
"""Items of an index from which on that of a local file is cached without a `cache_dir` too, in the
user's cache folder: fewer are made in a tenth of a second.
"""
_HINT_S = 5.0
_THREADS = 16  # remote files whose headers are read at the same time
# bytes of a header's extension, such as a long name; a damaged length would ask for anything
_LONGEST = 1 << 20
_LOCAL = 64 << 10, 4 << 10, 256 << 10
_REMOTE = 1 << 20, 16 << 10, 1 << 20  # a round trip takes as long as some 100 kB or more
"""How much is read at a time: bytes from one header to the next that are rather read than left out;
bytes that are read where the next header is farther away; and, where headers are near, at first.
"""
_DOUBLED = 16  # times as much is read at last, where many headers are near one another


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

    def about(self, size: int) -> str:
        """What the index next to a file of `size` bytes belongs to."""
        return hash_of([self.name, size, self.version])


def index_of(files: Files, path: str, kind: IndexKind) -> Arrays:
    """The index of a file, cached, or made now.

    Args:
        files: reads the file. The index next to a remote file counts if `learn_indexed` has
            fetched it.
        path: path or URL of the file.
        kind: kind of the index.

    Raises:
        Exception: what `kind.make` raises.
    """
    found = found_index(files, path, kind)
    if found is None:
        began = time.monotonic()
        found = kind.make(files, path)
        files.check(path)
        keep_index(files, path, kind, found, time.monotonic() - began)
    return found


def indices_of(
    files: Files, paths: Sequence[str], kind: IndexKind, progress: bool | None = None
) -> list[Arrays]:
    """The indices of files, cached or made now.

    Args:
        files: reads the files.
        paths: paths or URLs of the files.
        kind: kind of the indices.
        progress: show a progress bar. None: only on a terminal.

    Raises:
        AccessError: a file can't be read.
        Exception: what `kind.make` raises.
    """
    learn_indexed(files, paths, kind)
    sizes = [files.version(path).size for path in paths]
    bar = progress_bar(
        progress,
        total=sum(sizes),
        desc=f"reading {kind.name} headers",
        unit="B",
        unit_scale=True,
        delay=1,
    )

    def found(path: str) -> Arrays:
        try:
            return index_of(files, path, kind)
        except HeadraceError:
            raise
        except OSError as error:
            raise AccessError(f"{redact(path)} can't be read: {error.strerror}") from error

    threads = min(_THREADS, len(paths)) if files.is_remote else 1
    indices = list[Arrays]()
    with bar, ThreadPoolExecutor(threads, f"headrace-{kind.name}-index") as pool:
        for index, size in zip(pool.map(found, paths), sizes, strict=True):
            indices.append(index)
            bar.update(size)
    if not files.is_remote:
        files.close()  # each process opens what it reads
    return indices


def found_index(files: Files, path: str, kind: IndexKind) -> Arrays | None:
    """The index of a file from `cache_dir` or next to the file; None: there is none that can be
    trusted.
    """
    version = files.version(path)
    cached = None
    if version.tag is not None:
        cached = cached_index(files, path, kind).found()
    if cached is not None:
        return [cached.long, *cached.short]
    beside = files.beside(path)
    if beside is None:
        return None
    try:
        return arrays_of(beside, kind.about(version.size), kind.types)
    except UntrustedError as error:
        warn(
            f"{redact(path)}: the index next to it is not used: {error}; write it again with "
            "headrace.write_index"
        )
        return None


def learn_indexed(files: Files, urls: Sequence[str], kind: IndexKind) -> None:
    """Requests the versions of remote files, and the index next to each whose index is not cached
    on this machine.

    Raises:
        DataNotFoundError, AccessError, RemoteError: see `RemoteFiles.learn`.
    """
    if not files.is_remote:
        return
    server = cast("RemoteFiles", files)
    unknown: list[str] = []
    for url, version in zip(urls, server.learn(urls), strict=True):
        if version.tag is None or not os.path.exists(cached_index(files, url, kind).path):
            unknown.append(url)
    server.learn_beside(unknown)


def keep_index(files: Files, path: str, kind: IndexKind, made: Arrays, took: float) -> None:
    """Caches an index that took `took` seconds to make. Short ones of local files are not cached
    without a `cache_dir`.
    """
    if files.is_remote and took > _HINT_S:
        warn(
            f"{redact(path)}: making its index took {took:.0f} s; headrace.write_index makes it "
            "beforehand"
        )
    is_long = files.is_remote or files.cache_dir is not None or len(made[0]) > KEPT_FROM
    if files.version(path).tag is None or not is_long:
        return
    with unkept(str(cache_folder(files.cache_dir)), "indexes are", "they are made at every start"):
        cached_index(files, path, kind).write(made)


def cached_index(files: Files, path: str, kind: IndexKind) -> ArrayFile:
    """The cache file of an index."""
    about = {"index": kind.name, "of": files.identity(path)}
    return ArrayFile(str(cache_folder(files.cache_dir)), "index", about, kind.version, kind.types)


# -- files without a table


class Headers:
    """A file object that reads the headers in a file: by long reads where they are close together,
    else one by one.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self.size: int = files.version(path).size
        self._near, self._hop, self._first = _REMOTE if files.is_remote else _LOCAL
        self._long = self._first
        self._start = 0
        self._window = b""
        self._at = 0
        self._last = 0

    def seek(self, offset: int) -> None:
        self._at = offset

    def tell(self) -> int:
        return self._at

    def read_at(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`."""
        self.seek(start)
        return self.read(stop - start)

    def read(self, nbytes: int) -> bytes:
        offset = self._at
        if not 0 <= nbytes <= _LONGEST:
            raise FormatError(
                f"{redact(self._path)}: the header at byte {offset:,} says that {nbytes:,} bytes "
                "of names follow: it is damaged"
            )
        if offset + nbytes > self.size:
            raise FormatError(
                f"{redact(self._path)} ends at byte {self.size:,}, within a header or before its "
                "end mark: it is cut short, copy or write it again"
            )
        if offset + nbytes > self._start + len(self._window) or offset < self._start:
            wanted = self._hop
            if offset - self._last <= self._near:
                wanted = self._long
                self._long = min(_DOUBLED * self._first, 2 * self._long)
            else:
                self._long = self._first
            end = min(offset + max(nbytes, wanted), self.size)
            window = bytearray(end - offset)
            ranges = ByteRanges.in_file(self._path, np.array([offset]), np.array([end]))
            self._files.read_into(ranges, [memoryview(window)])
            self._start = offset
            self._window = bytes(window)
        self._last = self._at = offset + nbytes
        return self._window[offset - self._start : self._last - self._start]
