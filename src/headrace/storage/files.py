"""How is a sample read that is a file of its own?"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.storage.handles import WorkerHandle
from headrace.storage.scan import (
    DataPath,
    FileList,
    check_one_filesystem,
    entries_of,
    is_url,
    open_filesystem,
    redact,
    scan,
    without_secrets,
)
from headrace.storage.source import Source


class FilesSource(Source):
    """One file a sample: local paths are read directly, URLs through fsspec, a batch of them at once.

    The index is built here, once, and held as packed bytes and offsets.

    Args:
        data_path: folder, file, glob, fsspec URL, or a list of these.
        extensions: endings of the files that count, in any case.
        storage_options: passed to fsspec.

    Raises:
        DataNotFoundError: nothing there, or nothing that fits.
    """

    def __init__(self, data_path: DataPath, extensions: Sequence[str], storage_options: dict[str, Any] | None = None) -> None:
        entries = entries_of(data_path)
        urls = [e for e in entries if is_url(e)]
        self._filesystem: WorkerHandle[Any] | None = None
        self._url_ends = "", ""  # of the URLs that messages show: what stands before the path, and after it
        if urls and len(urls) != len(entries):
            raise ConfigError("data_path mixes URLs and local paths: make one dataset of each")
        if urls:
            self._filesystem = WorkerHandle(functools.partial(open_filesystem, str(urls[0]), storage_options), _no_close)
            first, chained, rest = str(urls[0]).partition("::")
            self._url_ends = f"{first.partition('://')[0]}://", chained + redact(rest)
            check_one_filesystem(urls, self._filesystem.get())
            files = scan(entries, extensions, self._filesystem.get())
        else:
            files = scan(entries, extensions)
        self.files: FileList = files

    def __len__(self) -> int:
        return len(self.files.names)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The files' bytes."""
        if self._filesystem is None:
            return [_read_file(self.files.path(i)) for i in indices]
        paths = [os.fsdecode(self.files.path(i)) for i in indices]
        each = list(dict.fromkeys(paths))
        try:
            # Not `cat`, which takes names such as "img[1].jpg" for patterns.
            found = self._filesystem.get().cat_ranges(each, None, None, on_error="raise")
        except Exception as error:
            raise without_secrets(error) from None
        for content in found:
            if isinstance(content, Exception):  # some file systems return them all the same
                raise without_secrets(content) from None
        contents = dict(zip(each, found, strict=True))
        return [contents[p] for p in paths]

    def fingerprint(self) -> str:
        """A hash of the sorted relative names and their number."""
        return fingerprint_names(*self.files.names.arrays)

    def location(self, index: int) -> str:
        path, (before, after) = redact(self.files.path(index)), self._url_ends
        if before == "memory://":
            path = path.lstrip("/")
        return path if path.startswith(before) else f"{before}{path}{after}"

    def sizes(self) -> npt.NDArray[np.int64]:
        """The size of each file in bytes ([n] int64); 0 where it is not known."""
        if self._filesystem is None:
            return np.fromiter((_size_of(self.files.path(i)) for i in range(len(self))), np.int64, len(self))
        fs = self._filesystem.get()
        sizes = fs.sizes([os.fsdecode(self.files.path(i)) for i in range(len(self))])
        return np.array([s or 0 for s in sizes], np.int64)


def _no_close(filesystem: Any) -> None:
    """A file system is left to the garbage collector: fsspec has no common way to close one."""


def _read_file(path: bytes) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _size_of(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # gone since the folder was listed: reading it will say so, and name the sample
        return 0


def fingerprint_names(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> str:
    """The fingerprint of samples that have names: a blake2b hash of names, their lengths and their number."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.int64(len(offsets) - 1).tobytes())
    digest.update(np.ascontiguousarray(np.diff(offsets)).astype("<i8").tobytes())
    digest.update(np.ascontiguousarray(data).tobytes())
    return digest.hexdigest()
