"""What is in a Zarr store: a folder, or a zip file of one?

Its metadata are read here, without zarr-python: only what isn't understood is left to that.
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

from isal import isal_zlib

from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError, MissingNameError
from headrace.storage.foreign import asking
from headrace.storage.paths import is_url, redact
from headrace.storage.stamps import Stamp
from headrace.storage.stretches import Stretch

V2_ARRAY, V2_GROUP, V3_NODE = ".zarray", ".zgroup", "zarr.json"
_LARGEST = 64 << 20  # bytes of a metadata file, beyond which it is none
_ZIP_HEAD = 30
_PART = 1 << 20  # bytes that are read at once to be checked


class ZarrFolder:
    """The files of a store that is a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self, key: str) -> bytes | None:
        """The content of a small file; None: there is none."""
        place = os.path.join(self.path, key)
        try:
            if os.path.getsize(place) > _LARGEST:
                raise FormatError(f"{redact(place)} is too large to be metadata")
            with open(place, "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except PermissionError as error:
            raise AccessError(f"{redact(place)}: this user may not read the file") from error

    def stretches(self, keys: Sequence[str], checked: bool = True) -> list[Stretch | None]:
        """Where the contents of files lie; None: there is no such file.

        Raises:
            FormatError: a folder lies there.
        """
        found: list[Stretch | None] = []
        for key in keys:
            place = f"{self.path}/{key}"
            try:
                status = os.stat(place)
                if stat.S_ISDIR(status.st_mode):
                    raise FormatError(f"{redact(place)} is a folder, where a file with a chunk should be")
                found.append(Stretch(place, 0, status.st_size))
            except (FileNotFoundError, NotADirectoryError):
                found.append(None)
        return found

    def nodes(self) -> Iterator[str]:
        """The paths of all nodes, that of the root being "". What lies in an array is not looked at."""
        for folder, folders, files in os.walk(self.path):
            name = os.path.relpath(folder, self.path).replace(os.sep, "/")
            is_array = V2_ARRAY in files
            if V3_NODE in files:
                is_array = is_array or _is_v3_array(self.read(os.path.join(name, V3_NODE)))
            if is_array or V2_GROUP in files or V3_NODE in files:
                yield "" if name == "." else name
            if is_array:
                folders.clear()
            folders.sort()


class ZarrZip:
    """The files of a store that is a zip file. Those that are stored as they are can be read directly."""

    def __init__(self, path: str) -> None:
        self.path = path
        with asking("zipfile", redact(path)), zipfile.ZipFile(path) as file:
            self._infos = {info.filename: info for info in file.infolist()}
        self._stamp = Stamp(path)
        self.is_stored = all(info.compress_type == zipfile.ZIP_STORED for info in self._infos.values())
        self._places: dict[str, Stretch] = {}

    def read(self, key: str) -> bytes | None:
        """The content of a small file; None: there is none."""
        info = self._infos.get(key)
        if info is None:
            return None
        if info.file_size > _LARGEST:
            raise FormatError(f"{redact(self.path)}: {key} is too large to be metadata")
        with asking("zipfile", f"{redact(self.path)}: {key}"), zipfile.ZipFile(self.path) as file:
            return file.read(info)

    def stretches(self, keys: Sequence[str], checked: bool = True) -> list[Stretch | None]:
        """Where the contents of files lie; None: there is no such file.

        Args:
            checked: compare what lies there with its checksum, once; else where it begins with the metadata alone.

        Raises:
            FormatError: the file is damaged.
            AccessError: it has been changed.
        """
        found = []
        for key in keys:
            place, info = self._places.get(key), self._infos.get(key)
            if place is None and info is not None:
                with open(self.path, "rb") as file:
                    self._stamp.check(file.fileno())
                    file.seek(info.header_offset)
                    head = file.read(_ZIP_HEAD)
                if len(head) < _ZIP_HEAD or head[:4] != b"PK\x03\x04":
                    raise FormatError(f"{redact(self.path)} is damaged: no file begins where {key} should")
                begin = info.header_offset + _ZIP_HEAD + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
                if begin + info.file_size > self._stamp.size:
                    raise FormatError(f"{redact(self.path)} is damaged: {key} lies beyond its end")
                if checked and _crc_of(self.path, begin, info.file_size) != info.CRC:
                    raise FormatError(f"{redact(self.path)}: {key} has a wrong checksum (zip), the file is damaged")
                place = self._places[key] = Stretch(self.path, begin, info.file_size)
            found.append(place)
        return found

    def nodes(self) -> Iterator[str]:
        """The paths of all nodes, that of the root being ""."""
        for key in sorted(self._infos):
            folder, _, file = key.rpartition("/")
            if file in (V2_ARRAY, V2_GROUP, V3_NODE):
                yield folder


def _crc_of(path: str, begin: int, nbytes: int) -> int:
    """The CRC-32 of a part of a file."""
    crc = 0
    with open(path, "rb") as file:
        file.seek(begin)
        while nbytes and (data := file.read(min(nbytes, _PART))):
            crc, nbytes = isal_zlib.crc32(data, crc), nbytes - len(data)
    return crc


def _is_v3_array(data: bytes | None) -> bool:
    return b'"array"' in (data or b"") and (_parsed(data or b"{}", "") or {}).get("node_type") == "array"


def _parsed(data: bytes, where: str) -> dict[str, Any]:
    try:
        said = json.loads(data)
        if not isinstance(said, dict):
            raise ValueError("it is no JSON object")
        return said
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is damaged: {error}") from error


def is_zarr(path: str | os.PathLike[Any]) -> bool:
    """Is it a folder or a zip file that holds a Zarr node at its root?"""
    place = os.fspath(path)
    if os.path.isdir(place):
        return any(os.path.isfile(os.path.join(place, name)) for name in (V2_ARRAY, V2_GROUP, V3_NODE))
    if not os.path.isfile(place) or not zipfile.is_zipfile(place):
        return False
    with asking("zipfile", redact(place)), zipfile.ZipFile(place) as file:
        return any(name in file.namelist() for name in (V2_ARRAY, V2_GROUP, V3_NODE))


def open_store(path: str | os.PathLike[Any]) -> ZarrFolder | ZarrZip:
    """The store at a path.

    Raises:
        ConfigError: a URL.
        DataNotFoundError, AccessError, FormatError: there is nothing; it can't be read; it is no Zarr store.
    """
    if is_url(path):
        raise ConfigError(f"{redact(path)}: Zarr stores are read from local disks only by now: copy it, or mount the bucket")
    place = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if not os.path.exists(place):
        raise DataNotFoundError(f"{redact(place)} does not exist (working folder: {os.getcwd()})")
    if not os.access(place, os.R_OK):
        raise AccessError(f"{redact(place)}: this user may not read it")
    if not is_zarr(place):
        raise FormatError(f"{redact(place)} is no Zarr store: it has neither of {V3_NODE}, {V2_GROUP} and {V2_ARRAY}")
    return ZarrFolder(place) if os.path.isdir(place) else ZarrZip(place)


def metadata_of(store: ZarrFolder | ZarrZip, name: str) -> dict[str, Any] | None:
    """The metadata of a node as its file says them; None: there is no node of that name.

    Raises:
        FormatError: the file is damaged.
    """
    for file in (V3_NODE, V2_ARRAY, V2_GROUP):
        key = f"{name}/{file}" if name else file
        data = store.read(key)
        if data is not None:
            said = _parsed(data, f"{redact(store.path)}: {key}")
            if file == V2_ARRAY:
                _attributes_2(store, name)  # which must not be damaged either
            if file != V3_NODE:
                return {**said, "node_type": "array" if file == V2_ARRAY else "group"}
            if said.get("node_type") not in ("array", "group"):
                raise FormatError(f"{redact(store.path)}: {key} is damaged: it has node_type {said.get('node_type')!r}")
            return said
    return None


def attributes_of(store: ZarrFolder | ZarrZip, name: str) -> dict[str, Any]:
    """The attributes of a node."""
    said = metadata_of(store, name) or {}
    found = said.get("attributes", {}) if said.get("zarr_format") == 3 else _attributes_2(store, name)
    return found if isinstance(found, dict) else {}


def _attributes_2(store: ZarrFolder | ZarrZip, name: str) -> dict[str, Any]:
    key = f"{name}/.zattrs" if name else ".zattrs"
    data = store.read(key)
    return {} if data is None else _parsed(data, f"{redact(store.path)}: {key}")


def array_names(store: ZarrFolder | ZarrZip) -> list[str]:
    """The arrays of a store; "" is the root."""
    return [name for name in store.nodes() if (metadata_of(store, name) or {}).get("node_type") == "array"]


def array_named(store: ZarrFolder | ZarrZip, name: str | None) -> tuple[str, dict[str, Any]]:
    """An array and its metadata; without a name the only one there is.

    Raises:
        MissingNameError: there is none of that name, or several and no name; the message lists them.
    """
    wanted = "" if name is None else name.strip("/")
    said = metadata_of(store, wanted)
    if said is not None and said["node_type"] == "array":
        return wanted, said
    names = array_names(store)
    if name is None and len(names) == 1:
        return names[0], metadata_of(store, names[0]) or {}
    has = ", ".join(map(repr, names)) or "none"
    if name is None:
        raise MissingNameError(f"{redact(store.path)} has {len(names)} arrays, name one of them as dataset_name: {has}")
    raise MissingNameError(f"{redact(store.path)} has no array {name!r}; it has: {has}")
