"""The files of a local Zarr store: of a folder, or of a zip file.

NOTE [ a local store that changes ]

Rows of two versions of a store must not be mixed. Each batch costs one `stat` of the array's metadata file, which must be the one that was
read. A chunk file must not have been written after the store was opened: its time says so, and it is known where the file is opened, or
looked for, anyway. So nothing needs to be known of each file beforehand. A file that is missing counts as removed where its folder was
written to since. Where a file server's clock is ahead of this machine's, files that were written just before would seem to be changed: so
the last chunk's file and its folders are looked at first, and what is as old as these is not.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import zipfile
from collections.abc import Iterator, Sequence

from isal import isal_zlib

from headrace.errors import AccessError, FileChangedError, FormatError
from headrace.io.library_errors import asking
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.storage.zarr.keys import LARGEST, V2_ARRAY, V2_GROUP, V3_NODE, is_v3_array, nodes_among, root_among

_ZIP_HEAD = 30
_PART = 1 << 20  # bytes that are read at once to be checked


def _version_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _replaced(path: str) -> FileChangedError:
    return FileChangedError(
        f"{redact(path)} was changed after the dataset was opened, and rows of both versions must not be mixed: open the dataset again"
    )


class ZarrFolder:
    """The files of a store that is a folder."""

    is_stored = True
    """Do files lie as they are?"""

    def __init__(self, path: str) -> None:
        self.path = path
        self._opened = time.time_ns()
        self._versions: dict[str, tuple[int, int, int]] = {}  # of metadata files

    def know(self, nodes: Sequence[str]) -> None:
        """The metadata of these nodes will be read."""

    def read(self, key: str) -> bytes | None:
        """The content of a small file; None: there is none."""
        place = os.path.join(self.path, key)
        try:
            if os.path.getsize(place) > LARGEST:
                raise FormatError(f"{redact(place)} is too large to be metadata")
            with open(place, "rb") as file:
                status = os.fstat(file.fileno())
                if key not in self._versions:
                    self._versions[key] = _version_of(status)
                    self._note_time(place)
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except PermissionError as error:
            raise AccessError(f"{redact(place)}: this user may not read the file") from error

    def note_last(self, key: str) -> None:
        """Notes that the last file of an array may have been written now, by the clock of its server; see the NOTE above."""
        self._note_time(f"{self.path}/{key}")

    def _note_time(self, place: str) -> None:
        while len(place) >= len(self.path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._opened = max(self._opened, os.stat(place).st_mtime_ns)
            place = os.path.dirname(place)

    def ranges(self, keys: Sequence[str], checked: bool = True) -> ByteRanges:
        """Where the contents of files lie; those that are missing were never written.

        Raises:
            FormatError: a folder lies there.
            FileChangedError: a file was changed after the store was opened.
        """
        found: list[tuple[str, int, int] | None] = []
        for key in keys:
            place = f"{self.path}/{key}"
            try:
                status = os.stat(place)
                if stat.S_ISDIR(status.st_mode):
                    raise FormatError(f"{redact(place)} is a folder, where a file with a chunk should be")
                self.check_file(status, place)
                found.append((place, 0, status.st_size))
            except (FileNotFoundError, NotADirectoryError):
                self._check_missing(place)
                found.append(None)
        return ByteRanges.of(found)

    def check_file(self, status: os.stat_result, place: str) -> None:
        """Compares a file with chunks, which may be open, with the time when the store was opened.

        Raises:
            FileChangedError: it was changed, or replaced, since.
        """
        if status.st_mtime_ns > self._opened or not status.st_nlink:
            raise _replaced(place)

    def _check_missing(self, place: str) -> None:
        """Raises a FileChangedError where the nearest folder above a file that is missing was written to since the store was opened."""
        while len(place) > len(self.path):
            place = os.path.dirname(place)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if os.stat(place).st_mtime_ns > self._opened:
                    raise _replaced(place)
                return

    def check_version(self, name: str) -> None:
        """Compares the metadata file of an array with the one that was read.

        Raises:
            FileChangedError: it is another one, or gone.
        """
        for file in (V3_NODE, V2_ARRAY):
            key = f"{name}/{file}" if name else file
            known = self._versions.get(key)
            if known is not None:
                place = f"{self.path}/{key}"
                try:
                    is_same = _version_of(os.stat(place)) == known
                except (FileNotFoundError, NotADirectoryError):
                    is_same = False
                if not is_same:
                    raise _replaced(place)
                return

    def nodes(self) -> Iterator[str]:
        """The paths of all nodes, that of the root being "". What lies in an array is not looked at."""
        for folder, folders, files in os.walk(self.path):
            name = os.path.relpath(folder, self.path).replace(os.sep, "/")
            is_array = V2_ARRAY in files
            if V3_NODE in files:
                is_array = is_array or is_v3_array(self.read(os.path.join(name, V3_NODE)))
            if is_array or V2_GROUP in files or V3_NODE in files:
                yield "" if name == "." else name
            if is_array:
                folders.clear()
            folders.sort()


class ZarrZip:
    """The files of a store that is a zip file. Those that are stored as they are can be read directly.

    Attributes:
        root: where in the zip file the store lies: "", or a folder with a slash behind it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with asking("zipfile", redact(path)), open(path, "rb") as whole, zipfile.ZipFile(whole) as file:
            self._version = _version_of(os.fstat(whole.fileno()))
            self._infos = {info.filename: info for info in file.infolist()}
        try:
            self.root = root_among(self._infos)
        except FormatError as error:
            raise FormatError(f"{redact(path)}: {error}") from None
        self.is_stored = all(info.compress_type == zipfile.ZIP_STORED for info in self._infos.values())
        self._places: dict[str, tuple[str, int, int]] = {}

    def know(self, nodes: Sequence[str]) -> None:
        """See `ZarrFolder`."""

    def read(self, key: str) -> bytes | None:
        """The content of a small file; None: there is none."""
        info = self._infos.get(self.root + key)
        if info is None:
            return None
        if info.file_size > LARGEST:
            raise FormatError(f"{redact(self.path)}: {key} is too large to be metadata")
        with asking("zipfile", f"{redact(self.path)}: {key}"), zipfile.ZipFile(self.path) as file:
            return file.read(info)

    def ranges(self, keys: Sequence[str], checked: bool = True) -> ByteRanges:
        """Where the contents of files lie; those that are missing were never written.

        Args:
            checked: compare what lies there with its checksum, once; else where it begins with the metadata alone.

        Raises:
            FormatError: the file is damaged.
            FileChangedError: it has been changed.
        """
        found = []
        self.check_version("")
        for key in (self.root + key for key in keys):
            place, info = self._places.get(key), self._infos.get(key)
            if place is None and info is not None:
                with open(self.path, "rb") as file:
                    file.seek(info.header_offset)
                    head = file.read(_ZIP_HEAD)
                if len(head) < _ZIP_HEAD or head[:4] != b"PK\x03\x04":
                    raise FormatError(f"{redact(self.path)} is damaged: no file begins where {key} should")
                begin = info.header_offset + _ZIP_HEAD + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
                if begin + info.file_size > self._version[1]:
                    raise FormatError(f"{redact(self.path)} is damaged: {key} lies beyond its end")
                if checked and _crc_of(self.path, begin, info.file_size) != info.CRC:
                    raise FormatError(f"{redact(self.path)}: {key} has a wrong checksum (zip), the file is damaged")
                place = self._places[key] = (self.path, begin, begin + info.file_size)
            found.append(place)
        return ByteRanges.of(found)

    def nodes(self) -> Iterator[str]:
        """The paths of all nodes, that of the root being ""."""
        return nodes_among(key[len(self.root) :] for key in self._infos if key.startswith(self.root))

    def check_version(self, name: str) -> None:
        """Compares the zip file with the one that was opened.

        Raises:
            FileChangedError: it is another one, or gone.
        """
        try:
            is_same = _version_of(os.stat(self.path)) == self._version
        except (FileNotFoundError, NotADirectoryError):
            is_same = False
        if not is_same:
            raise _replaced(self.path)


def _crc_of(path: str, begin: int, nbytes: int) -> int:
    """The CRC-32 of a part of a file."""
    crc = 0
    with open(path, "rb") as file:
        file.seek(begin)
        while nbytes and (data := file.read(min(nbytes, _PART))):
            crc, nbytes = isal_zlib.crc32(data, crc), nbytes - len(data)
    return crc
