"""Zarr stores that are zip files, local or remote, read by their directory.

The directory says where a member's head begins, and not how long that head is. Where the members
follow one another without gaps, as nearly always, the next one's beginning tells; of others the
heads are read.

NOTE [ index of a zip file ]

It is the end of the file, from the directory on, and the members with metadata: what opening a
remote store reads.
"""

from __future__ import annotations

import io
import itertools
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from headrace.errors import FormatError
from headrace.io.array_file import Arrays
from headrace.io.files import Files
from headrace.io.index import IndexKind, index_of, learn_indexed
from headrace.io.library_errors import asking
from headrace.io.local.files import LocalFiles
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.storage.zarr.store import (
    LARGEST,
    NODE_FILES,
    V2_ALL,
    V2_ATTRIBUTES,
    Store,
    nodes_among,
    replaced,
    root_among,
)

_END = 64 << 10  # bytes at the end of the file that are read first
_HEAD = 30
_METADATA = (*NODE_FILES, V2_ALL, V2_ATTRIBUTES)
_MOST = 64 << 20  # bytes of metadata in an index
_PIECE = 1 << 20  # bytes that are read at once to be checked


class ZarrZip(Store):
    """The files of a store that is a zip file. Those that are stored as they are can be read by
    ranges.

    Raises:
        FormatError: it is no zip file, or there is no store in it.
        DataNotFoundError, AccessError, RemoteError: see `Files.version`.
    """

    def __init__(self, path: str, files: Files) -> None:
        super().__init__(path, files)
        self._known, self._data = ByteRanges.of([]), list[bytes]()
        if files.is_remote:
            server = cast(RemoteFiles, files)
            learn_indexed(server, [path], INDEX)
            table, data = index_of(server, path, INDEX)
            starts, sizes = table.reshape(-1, 2).T
            whole, ends = zlib.decompress(data.tobytes()), np.cumsum(sizes).tolist()
            self._known = ByteRanges.in_file(path, starts, starts + sizes)
            self._data = [whole[first:end] for first, end in itertools.pairwise([0, *ends])]
        else:
            files.version(path)
        with asking("zipfile", redact(path)), self._opened() as file:
            infos, begins = file.infolist(), _begins(file)
        self._numbers = {info.filename: number for number, info in enumerate(infos)}
        self._heads = np.array([info.header_offset for info in infos], np.int64)
        self._sizes = np.array([info.file_size for info in infos], np.int64)
        self._checksums = np.array([info.CRC for info in infos], np.uint32)
        # local heads are looked at
        self._begins = begins if files.is_remote else np.full(len(infos), -1)
        # checksums by where contents begin: of a local file of those that were compared
        self._checked: dict[int, int] = {}
        self.is_stored: bool = all(info.compress_type == zipfile.ZIP_STORED for info in infos)
        try:
            self._root = root_among(self._numbers)
        except FormatError as error:
            raise FormatError(f"{redact(path)}: {error}") from None
        self.library_root: str = "" if files.is_remote else self._root

    def path_of(self, key: str) -> str:
        return self.path

    def read(self, key: str) -> bytes | None:
        number = self._numbers.get(self._root + key)
        if number is not None and self._sizes[number] > LARGEST:
            raise FormatError(f"{redact(self.path)}: {key} is too large to be metadata")
        return self.content(key)

    def content(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        name = self._root + key
        if name not in self._numbers:
            return None
        with asking("zipfile", f"{redact(self.path)}: {name}"), self._opened() as file:
            return file.read(name)[start:stop]

    def ranges(self, keys: Sequence[str], checked: bool = True) -> ByteRanges:
        names = [self._root + key for key in keys]
        numbers = np.array([self._numbers.get(name, -1) for name in names], np.int64)
        start = np.where(numbers >= 0, self._begins[numbers], 0)
        if start.min(initial=0) < 0:
            self._read_heads([names[number] for number in np.flatnonzero(start < 0).tolist()])
        start = np.where(numbers >= 0, self._begins[numbers], -1)
        stop = np.where(numbers >= 0, start + self._sizes[numbers], -1)
        for name, number, begin in (
            zip(names, numbers.tolist(), start.tolist(), strict=True) if checked else ()
        ):
            if number >= 0:
                self._compare(name, number, begin)
        return ByteRanges.in_file(self.path, start, stop)

    def _compare(self, name: str, number: int, begin: int) -> None:
        """Compares the content of a local member with its checksum, once; that of a remote one
        is compared when it comes (`_check`).
        """
        expected, known = int(self._checksums[number]), self._checked.get(begin)
        if known is None:
            known = (
                expected
                if self.files.is_remote
                else self._checksum(name, begin, begin + int(self._sizes[number]))
            )
        if known != expected:  # or the directory says of two members that they lie at one place
            raise FormatError(
                f"{redact(self.path)}: {name} has a wrong checksum (zip), the file is damaged"
            )
        self._checked[begin] = expected

    def _checksum(self, name: str, begin: int, end: int) -> int:
        if end > self.files.version(self.path).size:
            raise FormatError(f"{redact(self.path)} is damaged: {name} lies beyond its end")
        pieces, _ = ByteRanges.in_file(self.path, np.array([begin]), np.array([end])).split(_PIECE)
        crc = 0
        for piece in range(pieces.size):
            crc = isal_zlib.crc32(self.files.read(pieces.take(np.array([piece])))[0] or b"", crc)
        return crc

    @property
    def check_content(self) -> Callable[[int, Any], None] | None:
        return self._check if self.files.is_remote else None

    def _check(self, begin: int, data: Any) -> None:
        if isal_zlib.crc32(data) != self._checked[begin]:
            raise FormatError("wrong checksum (zip), the file is damaged")

    def _read_heads(self, names: Sequence[str]) -> None:
        numbers = [self._numbers[name] for name in names]
        starts = self._heads[numbers]
        heads = self.files.read(ByteRanges.in_file(self.path, starts, starts + _HEAD))
        for name, number, data in zip(names, numbers, heads, strict=True):
            head = bytes(data or b"")
            if head[:4] != b"PK\x03\x04":
                raise FormatError(
                    f"{redact(self.path)} is damaged: no file begins where {name} should"
                )
            nbytes = (
                _HEAD
                + int.from_bytes(head[26:28], "little")
                + int.from_bytes(head[28:30], "little")
            )
            self._begins[number] = self._heads[number] + nbytes

    def nodes(self) -> Iterator[str]:
        return nodes_among(
            key[len(self._root) :] for key in self._numbers if key.startswith(self._root)
        )

    def check_version(self, name: str) -> None:
        if isinstance(self.files, LocalFiles) and not self.files.is_same(self.path):
            raise replaced(self.path)

    def _opened(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(_RangesFile(self.files, self.path, self._known, self._data))


def _begins(file: zipfile.ZipFile) -> npt.NDArray[np.int64]:
    """Where the contents begin, [members]; -1 where the directory doesn't tell."""
    infos = file.infolist()
    starts = np.array([info.header_offset for info in infos], np.int64)
    ends = np.append(np.sort(starts), file.start_dir)
    following = ends[np.searchsorted(ends, starts, side="right").clip(max=len(starts))]
    sizes = np.array([info.compress_size for info in infos], np.int64)
    heads = np.array([_HEAD + len(_raw_name(info)) + len(info.extra) for info in infos], np.int64)
    has_tail = np.array([bool(info.flag_bits & 8) for info in infos], bool)
    return np.where((starts + heads + sizes == following) & ~has_tail, starts + heads, -1)


def _raw_name(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")


class _RangesFile(io.RawIOBase):
    """A file for zipfile, read by ranges.

    Args:
        files, path: of the file.
        known, data: ranges that were read already, and their bytes.
    """

    def __init__(self, files: Files, path: str, known: ByteRanges, data: Sequence[bytes]) -> None:
        super().__init__()
        self._files, self._path, self._known, self._data = files, path, known, list(data)
        self._size, self._at = files.version(path).size, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError("before the beginning of the file")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._size, self._at + size)
        data = self.bytes_of(self._at, max(self._at, stop))
        self._at += len(data)
        return data

    def bytes_of(self, start: int, stop: int) -> bytes:
        """Bytes of the file; what had to be read is known from then on."""
        for (_, begin, end), data in zip(self._known.each(), self._data, strict=True):
            if begin <= start and stop <= end:
                return data[start - begin : stop - begin]
        ranges = ByteRanges.of([(self._path, start, min(self._size, max(stop, start + _END)))])
        self._data.append(self._files.read_joined(ranges))
        self._known = ByteRanges.joined([self._known, ranges])
        return self._data[-1][: stop - start]


def _make(files: RemoteFiles, url: str) -> Arrays:
    size = files.version(url).size
    ending = ByteRanges.of([(url, max(0, size - _END), size)])
    whole = _RangesFile(files, url, ending, [files.read_joined(ending)])
    with asking("zipfile", redact(url)), zipfile.ZipFile(whole) as file:
        directory = file.start_dir
        infos = [info for info in file.infolist() if info.filename.rpartition("/")[2] in _METADATA]
        end = whole.bytes_of(directory, size)
    starts = np.array([info.header_offset for info in infos], np.int64)
    longest = [
        _HEAD + 2 * (len(_raw_name(info)) + len(info.extra)) + 64 + info.compress_size
        for info in infos
    ]
    ranges = ByteRanges.in_file(
        url, starts, np.minimum(starts + np.array(longest, np.int64), directory)
    )
    if ranges.nbytes.sum() > _MOST:
        ranges = ByteRanges.of([])
    parts = [*files.read_each(ranges), end]
    table = np.array([[*ranges.start.tolist(), directory], list(map(len, parts))], np.int64)
    return [table.T.reshape(-1), np.frombuffer(zlib.compress(b"".join(parts), 1), np.uint8)]


INDEX = IndexKind("zarr-zip", 1, ("<i8", "u1"), _make)
"""See NOTE [ index of a zip file ]."""
