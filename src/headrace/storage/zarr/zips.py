"""Locates the members of a remote zip file by its directory alone.

The directory says where a member's head begins, and not how long that head is. Where the members follow one another without gaps, as
nearly always, the next one's beginning tells; of others the heads are read.

NOTE [ index of a zip file ]

It is the end of the file, from the directory on, and the members with metadata: what opening a store reads.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from headrace.errors import FormatError
from headrace.io.array_file import Arrays
from headrace.io.index import IndexKind, index_of, is_unknown
from headrace.io.library_errors import asking
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles

_END = 64 << 10  # bytes at the end of the file that are read first
_HEAD = 30
_METADATA = ("zarr.json", ".zmetadata", ".zarray", ".zgroup", ".zattrs")
_MOST = 64 << 20  # bytes of metadata in an index


class FarZip:
    """A zip file behind a URL.

    Args:
        url: of the file.
        files: its server's.

    Raises:
        FormatError: it is no zip file.
        DataNotFoundError, AccessError, RemoteError: see `RemoteFiles.learn`.
    """

    def __init__(self, url: str, files: RemoteFiles) -> None:
        self._url, self._files = url, files
        files.learn([url], beside=lambda url: is_unknown(files, url, INDEX))
        self._parts = _parts_of(index_of(files, url, INDEX))
        with asking("zipfile", redact(url)), self._opened() as file:
            infos = file.infolist()
            self._begins = _begins(infos, file.start_dir)
        self._numbers = {info.filename: number for number, info in enumerate(infos)}
        self._heads = np.array([info.header_offset for info in infos], np.int64)
        self._sizes = np.array([info.file_size for info in infos], np.int64)
        self._checksums = np.array([info.CRC for info in infos], np.uint32)
        self._checks: dict[int, int] = {}  # by where the content begins
        self.is_stored: bool = all(info.compress_type == zipfile.ZIP_STORED for info in infos)

    @property
    def names(self) -> Sequence[str]:
        """Of all members."""
        return list(self._numbers)

    def size(self, name: str) -> int:
        """Bytes of a member; 0: there is none."""
        return int(self._sizes[self._numbers[name]]) if name in self._numbers else 0

    def read(self, name: str) -> bytes | None:
        """The content of a member, compared with its checksum; None: there is none.

        Raises:
            FormatError: it is damaged.
        """
        if name not in self._numbers:
            return None
        with asking("zipfile", f"{redact(self._url)}: {name}"), self._opened() as file:
            return file.read(name)

    def places(self, names: Sequence[str]) -> list[tuple[int, int] | None]:
        """First byte and bytes of the contents of members; None: there is none of that name.

        Raises:
            FormatError: the file is damaged.
        """
        found = [self._numbers.get(name) for name in names]
        unknown = [number for number in found if number is not None and self._begins[number] < 0]
        if unknown:
            self._read_heads(unknown)
        places: list[tuple[int, int] | None] = []
        for number in found:
            if number is None:
                places.append(None)
                continue
            begin = int(self._begins[number])
            self._checks[begin] = int(self._checksums[number])
            places.append((begin, int(self._sizes[number])))
        return places

    def check(self, begin: int, data: Any) -> None:
        """Compares the content of the member that begins there with its checksum.

        Raises:
            FormatError: it has another.
        """
        if isal_zlib.crc32(data) != self._checks[begin]:
            raise FormatError("wrong checksum (zip), the file is damaged")

    def _read_heads(self, numbers: Sequence[int]) -> None:
        starts = self._heads[list(numbers)].tolist()
        heads = self._files.read(ByteRanges.of((self._url, start, start + _HEAD) for start in starts))
        for number, start, data in zip(numbers, starts, heads, strict=True):
            head = bytes(data or b"")
            if head[:4] != b"PK\x03\x04":
                raise FormatError(f"{redact(self._url)} is damaged: no member begins at byte {start:,}")
            self._begins[number] = start + _HEAD + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")

    def _opened(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(_Parts(self._files, self._url, self._parts))


def _begins(infos: Sequence[zipfile.ZipInfo], directory: int) -> npt.NDArray[np.int64]:
    """Where the contents begin, [members]; -1 where the directory doesn't tell."""
    starts = np.array([info.header_offset for info in infos], np.int64)
    ends = np.append(np.sort(starts), directory)
    following = ends[np.searchsorted(ends, starts, side="right").clip(max=len(starts))]
    sizes = np.array([info.compress_size for info in infos], np.int64)
    heads = np.array([_HEAD + len(_raw_name(info)) + len(info.extra) for info in infos], np.int64)
    has_tail = np.array([bool(info.flag_bits & 8) for info in infos], bool)
    return np.where((starts + heads + sizes == following) & ~has_tail, starts + heads, -1)


def _raw_name(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")


class _Parts(io.RawIOBase):
    """A file of which some parts are known; of the others each read is a request.

    Args:
        files, url: of the file.
        parts: where they begin, and their bytes.
    """

    def __init__(self, files: RemoteFiles, url: str, parts: Sequence[tuple[int, bytes]]) -> None:
        super().__init__()
        self._files, self._url, self._parts = files, url, list(parts)
        self._size, self._at = files.version(url).size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError("before the beginning of the file")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._size, self._at + size)
        data = self.bytes_of(self._at, max(self._at, stop))
        self._at += len(data)
        return data

    def bytes_of(self, start: int, stop: int) -> bytes:
        """Some bytes of the file; what had to be fetched is known from then on."""
        for begin, data in self._parts:
            if begin <= start and stop <= begin + len(data):
                return data[start - begin : stop - begin]
        end = min(self._size, max(stop, start + _END))
        fetched = bytes(self._files.read(ByteRanges.of([(self._url, start, end)]))[0] or b"")
        self._parts.append((start, fetched))
        return fetched[: stop - start]


def _make(files: RemoteFiles, url: str) -> Arrays:
    size = files.version(url).size
    first = max(0, size - _END)
    end = bytes(files.read(ByteRanges.of([(url, first, size)]))[0] or b"")
    parts = _Parts(files, url, [(first, end)])
    with asking("zipfile", redact(url)), zipfile.ZipFile(parts) as file:
        directory, infos = file.start_dir, file.infolist()
        end = parts.bytes_of(directory, size)
    some = [info for info in infos if info.filename.rpartition("/")[2] in _METADATA]
    longest = [_HEAD + 2 * (len(_raw_name(info)) + len(info.extra)) + 64 + info.compress_size for info in some]
    spans = [(info.header_offset, min(info.header_offset + most, directory)) for info, most in zip(some, longest, strict=True)]
    if sum(stop - start for start, stop in spans) > _MOST:
        spans = []
    found = [*(bytes(data or b"") for data in files.read(ByteRanges.of((url, start, stop) for start, stop in spans))), end]
    starts = [*(start for start, _ in spans), directory]
    table = np.array(list(zip(starts, map(len, found), strict=True)), np.int64)
    return [table.reshape(-1), np.frombuffer(zlib.compress(b"".join(found), 1), np.uint8)]


def _parts_of(arrays: Arrays) -> list[tuple[int, bytes]]:
    table, data = arrays[0].reshape(-1, 2), zlib.decompress(arrays[1].tobytes())
    ends = np.cumsum(table[:, 1]).tolist()
    return [(start, data[end - nbytes : end]) for (start, nbytes), end in zip(table.tolist(), ends, strict=True)]


INDEX = IndexKind("zarr-zip", 1, ("<i8", "u1"), _make)
"""See NOTE [ index of a zip file ]."""
