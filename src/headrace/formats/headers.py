"""Indices of files that are a row of records, each behind a header that says how long it is.

Such a file has no table: each header says how far it is to the next one. An index is made by going
from header to header once, and is kept.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np

from headrace.display import progress_bar
from headrace.errors import AccessError, FormatError, HeadraceError
from headrace.io.array_file import Arrays, unkept
from headrace.io.files import Files
from headrace.io.index import IndexKind, cached_index, index_of, learn_indexed
from headrace.io.paths import cache_folder, redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles

KEPT_FROM = 1 << 12
"""Records from which on an index is cached without a `cache_dir` too, in the user's cache folder:
fewer are read in a tenth of a second.
"""
THREADS = 16
"""Remote files whose headers are read at the same time."""
# bytes of a header's extension, such as a long name; a damaged length would ask for anything
_LONGEST = 1 << 20
_LOCAL = 64 << 10, 4 << 10, 256 << 10
_REMOTE = 1 << 20, 16 << 10, 1 << 20  # a round trip takes as long as some 100 kB or more
"""How much is read at a time: bytes from one header to the next that are rather read than left out;
bytes that are read where the next header is farther away; and, where headers are near, at first.
"""
_DOUBLED = 16  # times as much is read at last, where many headers are near one another


def indices_of(
    files: Files,
    paths: Sequence[str],
    kind: IndexKind,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> list[Arrays]:
    """The indices of files, cached or made now.

    Args:
        files: by which they are read.
        paths: of the files; the first array of an index has an item a record.
        kind: of the indices.
        cache_dir: where the index of a local file is cached; None: the user's cache folder, if it
            is large.
        progress: show a progress bar. None: only on a terminal.

    Raises:
        Exception: what `kind.make` raises.
    """
    threads = 1
    if files.is_remote:
        threads = min(THREADS, len(paths))
        learn_indexed(cast(RemoteFiles, files), paths, kind)
    sizes = [files.version(path).size for path in paths]
    bar = progress_bar(
        progress,
        total=sum(sizes),
        desc=f"reading {kind.name} headers",
        unit="B",
        unit_scale=True,
        delay=1,
    )
    make = functools.partial(_index_of, files, kind, cache_dir)
    indices = list[Arrays]()
    with bar, ThreadPoolExecutor(threads, f"headrace-{kind.name}-index") as pool:
        for index, size in zip(pool.map(make, paths), sizes, strict=True):
            indices.append(index)
            bar.update(size)
    return indices


def _index_of(
    files: Files, kind: IndexKind, cache_dir: str | os.PathLike[str] | None, path: str
) -> Arrays:
    if files.is_remote:
        return index_of(cast(RemoteFiles, files), path, kind)
    cached = cached_index(files, path, kind, cache_dir)
    if (arrays := cached.found()) is not None:
        return [arrays.long, *arrays.short]
    try:
        index = kind.make(files, path)
        files.check(path)
    except HeadraceError:
        raise
    except OSError as error:
        raise AccessError(f"{redact(path)} can't be read: {error.strerror}") from error
    finally:
        files.close()  # each process opens what it reads
    if cache_dir is not None or len(index[0]) > KEPT_FROM:
        folder = str(cache_folder(cache_dir))
        with unkept(folder, f"indices of {kind.name}s are", "headers are read at every start"):
            cached.write(index)
    return index


class Headers:
    """The headers in a file, as a file: where they are near one another by long reads, elsewhere
    one by one.
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
