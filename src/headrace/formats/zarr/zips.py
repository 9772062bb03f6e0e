"""Zarr stores that are zip files, local or remote.

The directory at the end of the file, and the metadata of all nodes, are read when a store is
opened. The directory tells where a member's head begins, and not how long that head is. If the
members follow one another without gaps, as nearly always, the next one's beginning tells; other
heads are read.
"""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.formats.zarr.stores import (
    NODE_FILES,
    V2_ALL,
    V2_ATTRIBUTES,
    Store,
    nodes_among,
    replaced,
    root_among,
)
from headrace.io.files import Files, HeldBytes
from headrace.io.library_errors import asking
from headrace.io.local_files import LocalFiles
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges

_END = 64 << 10  # bytes at the end of the file that are read first
_HEAD = 30
_METADATA = (*NODE_FILES, V2_ALL, V2_ATTRIBUTES)


class ZarrZip(Store):
    """The files of a store that is a zip file. Those that are stored as they are can be read by
    ranges.

    Raises:
        FormatError: it is no zip file, or there is no store in it.
        DataNotFoundError, AccessError, RemoteError: see `Files.version`.
    """

    def __init__(self, path: str, files: Files) -> None:
        super().__init__(path, files)
        infos, start_dir = _directory(files, path)
        self._numbers = {info.filename: number for number, info in enumerate(infos)}
        self._begins = _begins(files, path, infos, start_dir)
        self._stops = self._begins + np.array([info.compress_size for info in infos], np.int64)
        checksums = [info.CRC for info in infos]
        self._checksum_at = dict(zip(self._begins.tolist(), checksums, strict=True))
        self._is_deflated = [info.compress_type != zipfile.ZIP_STORED for info in infos]
        if any(self._is_deflated):
            self.only_library = "a zip file that is compressed itself"
        try:
            self._root = root_among(self._numbers)
        except FormatError as error:
            raise FormatError(f"{redact(path)}: {error}") from None
        keys = [name for name in self._numbers if name.rpartition("/")[2] in _METADATA]
        self._contents = dict(zip(keys, self._read(keys), strict=True))

    def read(self, key: str) -> bytes | None:
        return self._contents.get(self._root + key)

    def content(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        name = self._root + key
        return self._read([name])[0][start:stop] if name in self._numbers else None

    def _read(self, names: Sequence[str]) -> list[bytes]:
        """The contents of members."""
        numbers = [self._numbers[name] for name in names]
        ranges = ByteRanges.in_file(self.path, self._begins[numbers], self._stops[numbers])
        contents: list[bytes] = []
        for name, number, data in zip(names, numbers, self.files.read(ranges), strict=True):
            content = bytes(data or b"")
            if self._is_deflated[number]:
                with contextlib.suppress(zlib.error):
                    content = zlib.decompress(content, -zlib.MAX_WBITS)
            try:
                self.check_content(int(self._begins[number]), content)
            except FormatError as error:
                raise FormatError(f"{redact(self.path)}: {name!r}: {error}") from None
            contents.append(content)
        return contents

    def ranges(self, keys: Sequence[str]) -> ByteRanges:
        numbers = np.array([self._numbers.get(self._root + key, -1) for key in keys], np.int64)
        begins = np.where(numbers < 0, -1, self._begins[numbers])
        return ByteRanges.in_file(
            self.path, begins, np.where(numbers < 0, -1, self._stops[numbers])
        )

    def check_content(self, begin: int, data: Any) -> None:
        if isal_zlib.crc32(data) != self._checksum_at[begin]:
            raise FormatError("wrong checksum (zip), the file is damaged")

    def nodes(self) -> Iterator[str]:
        names = (name for name in self._numbers if name.startswith(self._root))
        return nodes_among(name[len(self._root) :] for name in names)

    def check_version(self, name: str) -> None:
        if isinstance(self.files, LocalFiles) and not self.files.is_same(self.path):
            raise replaced(self.path)


def _directory(files: Files, path: str) -> tuple[list[zipfile.ZipInfo], int]:
    """The members of a zip file, and where their directory begins."""
    size = files.version(path).size

    def read(start: int, stop: int) -> bytes:  # zipfile looks for the comment by `rfind`
        return files.read_joined(ByteRanges.of([(path, start, stop)]))

    tail = max(0, size - _END)
    file = HeldBytes(size, [(tail, read(tail, size))], read)
    with asking("zipfile", redact(path)), zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        start_dir = archive.start_dir
    for info in infos:
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FormatError(
                f"{redact(path)}: {info.filename} is compressed by method {info.compress_type}, "
                "which is not supported: store the files as they are"
            )
    return infos, start_dir


def _begins(
    files: Files, path: str, infos: Sequence[zipfile.ZipInfo], start_dir: int
) -> npt.NDArray[np.int64]:
    """Where the contents of members begin."""
    heads: IntArray = np.array([info.header_offset for info in infos], np.int64)
    edges = np.append(np.sort(heads), start_dir)
    following = edges[np.searchsorted(edges, heads, side="right").clip(max=len(heads))]
    begins = heads + _HEAD
    for number, info in enumerate(infos):
        name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        begins[number] += len(name) + len(info.extra)
        if info.flag_bits & 8 or begins[number] + info.compress_size != following[number]:
            begins[number] = -1
    unknown = np.flatnonzero(begins < 0)
    starts = heads[unknown]
    found = files.read(ByteRanges.in_file(path, starts, starts + _HEAD))
    for number, data in zip(unknown.tolist(), found, strict=True):
        head = bytes(data or b"")
        if head[:4] != b"PK\x03\x04":
            raise FormatError(f"{redact(path)} is damaged: no file begins where one should")
        begins[number] = heads[number] + _HEAD + int(np.frombuffer(head[26:30], "<u2").sum())
    return begins
