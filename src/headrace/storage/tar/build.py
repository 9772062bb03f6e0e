"""Where does the index of a tar come from? It is kept, lies beside the tar, or is made now."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.errors import AccessError, FormatError
from headrace.io.array_file import ArrayFile, Arrays
from headrace.io.index import IndexKind, index_of
from headrace.io.paths import cache_folder, redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.io.version import Stamp
from headrace.storage.tar.index import TarIndex, Wanted, scanned

KEPT_FROM = 1 << 12
"""Members from which on an index is kept without a `cache_dir` too, in the user's cache folder: fewer are read in a tenth of a second."""
THREADS = 16
"""Tars that are far away whose headers are read at the same time."""
_VERSION = 1
_log = logging.getLogger(__name__)

Read = Callable[[int, int], bytes | memoryview]
"""So many bytes, from an offset -> these, or fewer at the end of the file."""


def local_index(stamp: Stamp, cache_dir: str | os.PathLike[str] | None) -> TarIndex:
    """The index of a local tar, kept or made now."""
    folder = cache_folder(cache_dir)
    about = {"path": stamp.path, "size": stamp.size, "mtime": stamp.mtime}
    kept = ArrayFile(os.fspath(folder), "tar", about, _VERSION, TarIndex.TYPES)
    try:
        if (arrays := kept.loaded()) is not None:
            return TarIndex.from_arrays(arrays)
    except ValueError as error:
        _log.info("%s is not used: %s", redact(kept.path), error)
    try:
        with open(stamp.path, "rb", buffering=0) as file:
            stamp.check(file.fileno())
            index = driven(scanned(redact(stamp.path), stamp.size), functools.partial(os.pread, file.fileno()), NEAR)
            stamp.check(file.fileno())
    except OSError as error:
        if isinstance(error, (AccessError, FormatError)):
            raise
        raise AccessError(f"{redact(stamp.path)} can't be read: {error.strerror}") from error
    if cache_dir is not None or len(index.offsets) >= KEPT_FROM:
        try:
            if cache_dir is None:
                os.makedirs(folder.parent, exist_ok=True)
            kept.write(index.arrays())
        except OSError as error:
            _log.info("cache_dir=%r: the index of %s is not kept (%s)", str(folder), redact(stamp.path), error.strerror or error)
    return index


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


def _made_far(files: RemoteFiles, url: str) -> Arrays:
    size = files.version(url).size

    def read(nbytes: int, offset: int) -> memoryview:
        return files.read(ByteRanges.of([(url, offset, min(offset + nbytes, size))]))[0] or memoryview(b"")

    return driven(scanned(redact(url), size), read, FAR).arrays()


INDEX = IndexKind("tar", _VERSION, TarIndex.TYPES, _made_far)
"""The index of a tar that is far away."""


def far_indices(urls: Sequence[str], files: RemoteFiles, tell: Callable[[int], object]) -> list[TarIndex]:
    """The indices of tars that are far away, several at the same time.

    Args:
        urls: of the tars.
        files: of their server, which have learnt their versions and looked beside them.
        tell: is called with a tar's bytes when its index is there.

    Raises:
        FormatError: see `scanned`.
        RemoteError, FileChangedError, DataNotFoundError, AccessError: see `Remote.read`.
    """

    def one(url: str) -> TarIndex:
        arrays = index_of(files, url, INDEX)
        tell(files.version(url).size)
        try:
            return TarIndex.from_arrays(arrays)
        except ValueError as error:
            raise FormatError(
                f"{redact(url)}: its index makes no sense ({error}): remove it from cache_dir, or from beside the tar"
            ) from None

    with ThreadPoolExecutor(min(THREADS, len(urls)), "headrace-tar-index") as pool:
        running = [pool.submit(one, url) for url in urls]
        try:
            return [future.result() for future in running]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
