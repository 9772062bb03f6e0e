"""Samples that are a file each."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.io.cache.disk_cache import disk_cache_of
from headrace.io.cache.whole_files import WholeFiles
from headrace.io.local.hints import HINTS, TO_THE_END
from headrace.io.paths import redact
from headrace.io.remote.client import Remote
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath, entries_of, urls_among
from headrace.io.resolve.file_set import FileSet, Kind
from headrace.io.resolve.remote import names_file
from headrace.io.resolve.resolver import resolve
from headrace.storage.source import Source

_OPEN = 64  # files that are open at once
_PIECE = 1 << 16  # names that are looked at together: what is made of them is small


class FilesSource(Source):
    """One file a sample: local paths are read directly, URLs through fsspec, a batch of them at once.

    The index is built here, once, and held as packed bytes and offsets.

    Args:
        data_path: folder, file, glob, fsspec URL, or a list of these.
        extensions: endings of the files that count, in any case.
        remote: how URLs are read. Its `cache_dir`, made if it is missing, also keeps listings of local folders, which are used again while
            they still hold (see `headrace.io.resolve.listings`); without one a folder is listed at every start.

    Raises:
        DataNotFoundError: nothing there, or nothing that fits.
        ConfigError: URLs and paths are mixed, or of several file systems.
    """

    def __init__(
        self,
        data_path: DataPath,
        extensions: Sequence[str],
        remote: RemoteOptions | None = None,
    ) -> None:
        options = remote or RemoteOptions()
        kind = Kind("files", tuple(map(str.lower, extensions)))
        entries = entries_of(data_path)
        urls = urls_among(entries)
        self._far: WholeFiles | None = None
        self._url_ends = "", ""  # of the URLs that messages show: what stands before the path, and after it
        if urls:
            first, chained, rest = str(urls[0]).partition("::")
            self._url_ends = f"{first.partition('://')[0]}://", chained + redact(rest)
            shown = functools.partial(_shown, self._url_ends)
            server = Remote(str(urls[0]), options.storage_options, retries=options.retries, deadline=options.deadline, shown=shown)
            files = resolve(urls, kind, options, server=server, asks=_are_folders(urls, kind, server))
        else:
            files = resolve(entries, kind, options)
        self.listing: FileSet = files
        if urls:
            disk_cache = disk_cache_of(options.disk_cache_size, options.cache_dir)
            self._far = WholeFiles(server, disk_cache, len(files.names), self._url)

    def __len__(self) -> int:
        return len(self.listing.names)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The files' bytes."""
        if self._far is not None:
            return self._far.read(indices)
        began, waits = time.perf_counter(), HINTS.are_wanted and len(indices) > 1
        paths = [self.listing.path(i) for i in indices]
        found = self._read_told(paths) if waits else list(map(self._read_file, paths))
        HINTS.note(began, 4 * len(found), sum(map(len, found)))  # to open a file takes longer than to read a stretch
        return found

    def _read_file(self, path: bytes) -> bytes:
        with open(path, "rb", buffering=0) as file:
            return self._content(file)

    def _read_told(self, paths: list[bytes]) -> list[bytes]:
        """The same of several, from a disk that is told of some files before the first of them is read."""
        found: list[bytes] = []
        for start in range(0, len(paths), _OPEN):
            with contextlib.ExitStack() as opened:
                files = [opened.enter_context(open(path, "rb", buffering=0)) for path in paths[start : start + _OPEN]]
                for file in files:
                    HINTS.give(file.fileno(), [(0, TO_THE_END)])
                found += map(self._content, files)
        return found

    def _content(self, file: io.FileIO) -> bytes:
        """What an open file of this machine holds."""
        return file.read()

    def _url(self, index: int) -> str:
        return os.fsdecode(self.listing.path(index))

    def how(self) -> dict[str, str]:
        cache = None if self._far is None else self._far.cache
        return {} if cache is None else {"files": cache.explain()}

    def take_counts(self) -> Counter[str]:
        return Counter() if self._far is None else self._far.take_counts()

    def fingerprint(self) -> str:
        """A hash of the sorted relative names and their number."""
        return fingerprint_names(*self.listing.names.arrays)

    def location(self, index: int) -> str:
        return _shown(self._url_ends, os.fsdecode(self.listing.path(index)))

    def sizes(self) -> npt.NDArray[np.int64]:
        """The size of each file in bytes ([n] int64); 0 where it is not known."""
        if self._far is None:
            return np.fromiter((_size_of(self.listing.path(i)) for i in range(len(self))), np.int64, len(self))
        return _remote_sizes(self._far.remote, self.listing)


def _are_folders(urls: Sequence[str], kind: Kind, remote: Remote) -> bool:
    """Is a URL that looks like that of a file one of a folder? Asked of all at once, as often as it takes.

    Raises:
        DataNotFoundError, AccessError, RemoteError: there is no such file; see `Remote.versions`.
    """
    named = [url for url in urls if names_file(url, kind)]
    empty = [url for url, version in zip(named, remote.versions(named), strict=True) if not version.size]
    return any(map(remote.is_folder, empty))


def _shown(ends: tuple[str, str], path: str) -> str:
    """A path as messages name it: the URL that it belongs to, without secrets."""
    (before, after), path = ends, redact(path)
    if "://" in path:  # it is one
        return path
    if before == "memory://":
        path = path.lstrip("/")
    return f"{before}{path}{after}"


def _remote_sizes(remote: Remote, files: FileSet) -> npt.NDArray[np.int64]:
    """By listing the roots once more, where they were searched through: asking for each file would take far longer."""
    known: dict[str, int | None] = {}
    for root in files.searched:
        known.update((path, info.get("size")) for path, info in remote.ask("find", root, detail=True).items())
    remote.filesystem.invalidate_cache()
    sizes = np.zeros(len(files.names), np.int64)
    for start in range(0, len(sizes), _PIECE):
        paths = [os.fsdecode(files.path(i)) for i in range(start, min(start + _PIECE, len(sizes)))]
        unknown = [path for path in paths if known.get(path) is None]
        if unknown:
            known.update(zip(unknown, remote.sizes(unknown), strict=True))
        sizes[start : start + len(paths)] = [known[path] or 0 for path in paths]
    return sizes


def _size_of(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # gone since the folder was listed: reading it will say so, and name the sample
        return 0


def fingerprint_names(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> str:
    """The fingerprint of samples that have names: a blake2b hash of names, their lengths and their number."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.int64(len(offsets) - 1).tobytes())
    for start in range(0, len(offsets) - 1, _PIECE):
        digest.update(np.diff(offsets[start : start + _PIECE + 1]).astype("<i8").tobytes())
    digest.update(np.ascontiguousarray(data).data)
    return digest.hexdigest()
