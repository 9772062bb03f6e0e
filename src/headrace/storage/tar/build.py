"""Indices of tars: cached, found beside the tar, or made from its headers."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from headrace.display import progress_bar
from headrace.errors import AccessError, FormatError, HeadraceError
from headrace.io.array_file import ArrayFile, Arrays
from headrace.io.files import Files
from headrace.io.index import IndexKind, index_of, is_unknown
from headrace.io.paths import cache_folder, redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.storage.tar.index import TarIndex, Wanted, scanned

KEPT_FROM = 1 << 12
"""Members from which on an index is kept without a `cache_dir` too, in the user's cache folder: fewer are read in a tenth of a second."""
THREADS = 16
"""Remote tars whose headers are read at the same time."""
_VERSION = 1
_log = logging.getLogger(__name__)

Read = Callable[[int, int], bytes | memoryview]
"""So many bytes, from an offset -> these, or fewer at the end of the file."""


def tar_indices(files: Files, paths: Sequence[str], cache_dir: str | os.PathLike[str] | None, progress: bool | None) -> list[TarIndex]:
    """The indices of tars, cached or made now; of remote ones several at the same time.

    Args:
        files: by which they are read.
        paths: of the tars.
        cache_dir: where indices of local tars are cached; None: the user's cache folder, for large ones.
        progress: show a progress bar; None: only on a terminal.

    Raises:
        FormatError: see `scanned`.
        RemoteError, FileChangedError, DataNotFoundError, AccessError: see `Files.read`.
    """
    make: Callable[[str], TarIndex]
    if files.is_remote:
        server = cast(RemoteFiles, files)
        server.learn(paths, beside=lambda url: is_unknown(server, url, INDEX))
        make = functools.partial(_remote_index, server)
    else:
        make = functools.partial(_local_index, files, cache_dir)
    sizes = [files.version(path).size for path in paths]
    bar = progress_bar(progress, total=sum(sizes), desc="reading tar headers", unit="B", unit_scale=True, delay=1)
    with bar, ThreadPoolExecutor(min(THREADS, len(paths)) if files.is_remote else 1, "headrace-tar-index") as pool:
        running = [pool.submit(make, path) for path in paths]
        try:
            found = []
            for future, size in zip(running, sizes, strict=True):
                found.append(future.result())
                bar.update(size)
            return found
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _local_index(files: Files, cache_dir: str | os.PathLike[str] | None, path: str) -> TarIndex:
    folder, version = cache_folder(cache_dir), files.version(path)
    about = {"path": path, "size": version.size, "mtime": version.tag}
    cached = ArrayFile(os.fspath(folder), "tar", about, _VERSION, TarIndex.TYPES)
    try:
        if (arrays := cached.loaded()) is not None:
            return TarIndex.from_arrays(arrays)
    except ValueError as error:
        _log.info("%s is not used: %s", redact(cached.path), error)
    try:
        files.check(path)
        with open(path, "rb", buffering=0) as file:
            index = driven(scanned(redact(path), version.size), functools.partial(os.pread, file.fileno()), NEAR)
        files.check(path)
    except OSError as error:
        if isinstance(error, HeadraceError):
            raise
        raise AccessError(f"{redact(path)} can't be read: {error.strerror}") from error
    finally:
        files.close()  # each process opens what it reads
    if cache_dir is not None or len(index.offsets) >= KEPT_FROM:
        try:
            if cache_dir is None:
                os.makedirs(folder.parent, exist_ok=True)
            cached.write(index.arrays())
        except OSError as error:
            _log.info("cache_dir=%r: the index of %s is not cached (%s)", str(folder), redact(path), error.strerror or error)
    return index


def _remote_index(files: RemoteFiles, url: str) -> TarIndex:
    arrays = index_of(files, url, INDEX)
    try:
        return TarIndex.from_arrays(arrays)
    except ValueError as error:
        raise FormatError(f"{redact(url)}: its index makes no sense ({error}): remove it from cache_dir, or from beside the tar") from None


class Pace:
    """How much of a tar is read at a time, for its headers.

    Args:
        near: bytes from one header to the next which are rather read than left out.
        hop: bytes that are read where the next header is farther away.
        first, most: where headers are near, bytes that are read at first, and after these were doubled some times.
    """

    def __init__(self, near: int, hop: int, first: int, most: int) -> None:
        self.near: int = near
        self.hop: int = hop
        self.first: int = first
        self.most: int = most


NEAR = Pace(64 << 10, 4 << 10, 256 << 10, 256 << 10)
"""Of a disk."""
FAR = Pace(1 << 20, 16 << 10, 1 << 20, 16 << 20)
"""Of a server, where a round trip takes as long as some 100 kB or more; long reads are cut, and their parts fetched at the same time."""


def driven(scan: Generator[Wanted, bytes | memoryview, TarIndex], read: Read, pace: Pace) -> TarIndex:
    """What a scan of a tar gives: where headers are near one another by long reads, elsewhere from one to the next.

    Args:
        scan: see `scanned`.
        read: from the tar.
        pace: how much at a time.
    """
    start, window, last, piece = 0, memoryview(b""), 0, pace.first
    try:
        offset, nbytes = next(scan)
        while True:
            if offset + nbytes > start + len(window):
                is_near = offset - last <= pace.near
                start, window = offset, memoryview(read(max(nbytes, piece if is_near else pace.hop), offset))
                piece = min(pace.most, piece * 2) if is_near else pace.first
                if len(window) < nbytes:
                    raise AccessError("the file is shorter than it was: open the dataset again")
            last = offset + nbytes
            offset, nbytes = scan.send(window[offset - start : last - start])
    except StopIteration as done:
        index: TarIndex = done.value
        return index


def _made(files: RemoteFiles, url: str) -> Arrays:
    size = files.version(url).size

    def read(nbytes: int, offset: int) -> bytes:
        return files.read_joined(ByteRanges.of([(url, offset, min(offset + nbytes, size))]))

    return driven(scanned(redact(url), size), read, FAR).arrays()


INDEX = IndexKind("tar", _VERSION, TarIndex.TYPES, _made)
"""The index of a remote tar."""
