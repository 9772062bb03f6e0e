"""Zarr stores that are zip files, local or remote.

The directory at the end of the file, and the metadata of all nodes, are read when a store is
opened. The directory tells where a member's head begins, and not how long that head is. If the
members follow one another without gaps, as nearly always, the next one's beginning tells; other
heads are read.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.formats.zarr.store import (
    LARGEST,
    NODE_FILES,
    V2_ALL,
    V2_ATTRIBUTES,
    Store,
    nodes_among,
    replaced,
    root_among,
)
from headrace.io.files import Files
from headrace.io.library_errors import asking
from headrace.io.local.files import LocalFiles
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
        self._sizes = np.array([info.file_size for info in infos], np.int64)
        self._stored = np.array([info.compress_size for info in infos], np.int64)
        self._methods = np.array([info.compress_type for info in infos], np.int64)
        self._checksums = np.array([info.CRC for info in infos], np.uint32)
        self._heads = np.array([info.header_offset for info in infos], np.int64)
        self._begins = _begins(infos, self._heads, start_dir)
        self._checksum_at = dict(zip(self._begins.tolist(), self._checksums.tolist(), strict=True))
        self.is_stored: bool = not self._methods.any()
        try:
            self._root = root_among(self._numbers)
        except FormatError as error:
            raise FormatError(f"{redact(path)}: {error}") from None
        keys = [name for name in self._numbers if name.rpartition("/")[2] in _METADATA]
        self._contents = dict(
            zip(keys, self._read([self._numbers[key] for key in keys]), strict=True)
        )

    def path_of(self, key: str) -> str:
        return self.path

    def read(self, key: str) -> bytes | None:
        return self._contents.get(self._root + key)

    def content(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        number = self._numbers.get(self._root + key)
        return None if number is None else self._read([number])[0][start:stop]

    def _read(self, numbers: Sequence[int]) -> list[bytes]:
        """The contents of members."""
        begins = self._begins_of(np.array(numbers, np.int64))
        ranges = ByteRanges.in_file(self.path, begins, begins + self._stored[numbers])
        contents: list[bytes] = []
        for number, data in zip(numbers, self.files.read(ranges), strict=True):
            content = bytes(data or b"")
            with contextlib.suppress(zlib.error):
                if self._methods[number]:
                    content = zlib.decompress(content, -zlib.MAX_WBITS)
            if isal_zlib.crc32(content) != self._checksums[number]:
                name = [*self._numbers][number]
                raise FormatError(
                    f"{redact(self.path)}: {name!r} has a wrong checksum (zip), the file is damaged"
                )
            contents.append(content)
        return contents

    def ranges(self, keys: Sequence[str]) -> ByteRanges:
        numbers = np.array([self._numbers.get(self._root + key, -1) for key in keys], np.int64)
        is_there = numbers >= 0
        begins = np.full(len(keys), -1, np.int64)
        begins[is_there] = self._begins_of(numbers[is_there])
        stops = np.where(is_there, begins + self._sizes[numbers], -1)
        return ByteRanges.in_file(self.path, begins, stops)

    def _begins_of(self, numbers: IntArray) -> IntArray:
        """Where the contents of members begin."""
        unknown = numbers[self._begins[numbers] < 0]
        if len(unknown):
            starts = self._heads[unknown]
            heads = self.files.read(ByteRanges.in_file(self.path, starts, starts + _HEAD))
            for number, data in zip(unknown.tolist(), heads, strict=True):
                head = bytes(data or b"")
                if head[:4] != b"PK\x03\x04":
                    raise FormatError(
                        f"{redact(self.path)} is damaged: no file begins where one should"
                    )
                sizes = np.frombuffer(head[26:30], "<u2")
                begin = int(self._heads[number]) + _HEAD + int(sizes.sum())
                self._begins[number] = begin
                self._checksum_at[begin] = int(self._checksums[number])
        begins: IntArray = self._begins[numbers]
        return begins

    @property
    def check_content(self) -> Callable[[int, Any], None] | None:
        return self._check

    def _check(self, begin: int, data: Any) -> None:
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
    length = _END
    with asking("zipfile", redact(path)):
        while True:
            start = max(0, size - length)
            end = files.read_joined(ByteRanges.of([(path, start, size)]))
            try:
                with zipfile.ZipFile(io.BytesIO(end)) as file:
                    infos = file.infolist()
                    start_dir = file.start_dir + start
                break
            except (zipfile.BadZipFile, ValueError):
                # the directory begins earlier
                if not start or b"PK\x05\x06" not in end:
                    raise
                length *= 16
    for info in infos:
        info.header_offset += start
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FormatError(
                f"{redact(path)}: {info.filename} is compressed by method {info.compress_type}, "
                "which is not supported: store the files as they are"
            )
        if info.filename.rpartition("/")[2] in _METADATA and info.file_size > LARGEST:
            raise FormatError(f"{redact(path)}: {info.filename} is too large to be metadata")
    return infos, start_dir


def _begins(
    infos: Sequence[zipfile.ZipInfo], heads: IntArray, start_dir: int
) -> npt.NDArray[np.int64]:
    """Where the contents begin, [members]; -1 where the directory doesn't tell."""
    lengths: list[int] = []
    for info in infos:
        name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        lengths.append(_HEAD + len(name) + len(info.extra))
    begins = heads + np.array(lengths, np.int64)
    edges = np.append(np.sort(heads), start_dir)
    following = edges[np.searchsorted(edges, heads, side="right").clip(max=len(heads))]
    sizes = np.array([info.compress_size for info in infos], np.int64)
    has_tail = np.array([bool(info.flag_bits & 8) for info in infos], bool)
    return np.where((begins + sizes == following) & ~has_tail, begins, -1)
