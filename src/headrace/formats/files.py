"""Samples that are a file each."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.formats.describe import Column, Description
from headrace.formats.resolve.expressions import DataPath
from headrace.formats.resolve.file_set import FileSet, Format
from headrace.formats.resolve.resolver import resolve
from headrace.formats.source import Source
from headrace.io.files import Files
from headrace.io.local.files import LocalFiles
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles

_LOOKED_AT = 1000  # files whose sizes are looked at
_PIECE = 1 << 16  # names that are looked at together: what is made of them is small


class FilesSource(Source):
    """One file a sample: local paths are read directly, URLs through fsspec, a batch of them at
    once.

    The index is built here, once, and held as packed bytes and offsets.

    Args:
        data_path: folder, file, glob, fsspec URL, or a list of these.
        extensions: endings of the files that count, in any case.
        remote: how URLs are read.

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
        self.listing: FileSet = resolve(
            data_path, Format("files", tuple(map(str.lower, extensions))), remote, asks=True
        )
        self._paths = _Paths(self.listing)
        self._server: RemoteFiles | None = self.listing.server
        self._files: Files = self._server or LocalFiles()
        self._listed_sizes: npt.NDArray[np.int64] | None = None
        if self._server is not None:
            self._server.share_versions(self._paths)

    def __len__(self) -> int:
        return len(self.listing.names)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The files' bytes."""
        return self._files.read_each(ByteRanges.of_wholes(self._paths, indices))

    def describe(self) -> Description:
        count = len(self)
        if self._server is not None:
            way = f"a file each, fetched whole; {self._files.explain()}"
            return Description([Column("files", way)], files=count)
        some = np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(np.int64)
        mean = 0
        if count:
            mean = int(self.sizes(some).mean())
        column = Column("files", f"a file each, {self._files.explain()}", read=mean)
        return Description([column], files=count, stored=mean * count)

    def take_counts(self) -> Counter[str]:
        return self._files.take_counts()

    def fingerprint(self) -> str:
        """A hash of the sorted relative names and their number."""
        return fingerprint_names(*self.listing.names.arrays)

    def location(self, index: int) -> str:
        if self._server is None:
            return redact(self._paths[index])
        return self._server.shown(self._paths[index])

    def sizes(self, indices: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """The sizes of files in bytes, of all or of some ([n] int64); 0 where it is not known.
        Remote ones are listed when all are asked for; of some the sizes are those of the last
        listing.
        """
        if self._server is None:
            numbers = range(len(self)) if indices is None else indices.tolist()
            return np.fromiter(
                (_size_of(self.listing.path(i)) for i in numbers), np.int64, len(numbers)
            )
        if indices is None or len(indices) >= len(self) or self._listed_sizes is None:
            self._listed_sizes = _remote_sizes(self._server, self.listing, self._paths)
        if indices is None:
            return self._listed_sizes.copy()
        return self._listed_sizes[indices]


class _Paths(Sequence[str]):
    """The paths of files, made when they are needed; of remote ones those on their server."""

    def __init__(self, files: FileSet) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        return os.fsdecode(self._files.path(index))


def _remote_sizes(
    server: RemoteFiles, files: FileSet, paths: Sequence[str]
) -> npt.NDArray[np.int64]:
    """By listing the roots once more, where they were searched through: asking for each file
    would take far longer.
    """
    known: dict[str, int | None] = {}
    for root in files.searched:
        known.update(
            (path, info.get("size")) for path, info in server.ask("find", root, detail=True).items()
        )
    server.filesystem.invalidate_cache()
    sizes = np.zeros(len(paths), np.int64)
    for start in range(0, len(sizes), _PIECE):
        some = [paths[i] for i in range(start, min(start + _PIECE, len(sizes)))]
        unknown = [path for path in some if known.get(path) is None]
        if unknown:
            known.update(zip(unknown, server.sizes(unknown), strict=True))
        sizes[start : start + len(some)] = [known[path] or 0 for path in some]
    return sizes


def _size_of(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # gone since the folder was listed: reading it will say so, and name the sample
        return 0


def fingerprint_names(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> str:
    """The fingerprint of samples that have names: a blake2b hash of names, their lengths and
    their number.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.int64(len(offsets) - 1).tobytes())
    for start in range(0, len(offsets) - 1, _PIECE):
        digest.update(np.diff(offsets[start : start + _PIECE + 1]).astype("<i8").tobytes())
    digest.update(np.ascontiguousarray(data).data)
    return digest.hexdigest()
