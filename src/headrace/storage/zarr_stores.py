"""Where are the files of a Zarr store: in a folder, in a zip file, or below a URL?"""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

from isal import isal_zlib

from headrace.errors import AccessError, DataNotFoundError, FormatError, MissingNameError
from headrace.storage.foreign import asking
from headrace.storage.paths import is_url, redact
from headrace.storage.remote_files import WHOLE, RemoteFiles, below
from headrace.storage.stamps import Stamp
from headrace.storage.stretches import Stretch
from headrace.storage.zarr_zips import FarZip

V2_ARRAY, V2_GROUP, V2_ATTRIBUTES, V3_NODE = ".zarray", ".zgroup", ".zattrs", "zarr.json"
V2_ALL = ".zmetadata"
_OF_A_NODE = (V3_NODE, V2_GROUP, V2_ARRAY, V2_ATTRIBUTES)
_ROOT = (*_OF_A_NODE, V2_ALL)
_LARGEST = 64 << 20  # bytes of a metadata file, beyond which it is none
_ZIP_HEAD = 30
_PART = 1 << 20  # bytes that are read at once to be checked


class ZarrFolder:
    """The files of a store that is a folder."""

    is_stored = True
    """Do files lie as they are?"""

    def __init__(self, path: str) -> None:
        self.path = path

    def know(self, nodes: Sequence[str]) -> None:
        """The metadata of these nodes will be read."""

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

    def know(self, nodes: Sequence[str]) -> None:
        """See `ZarrFolder`."""

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
        return _nodes_among(self._infos)


class ZarrUrl:
    """The files below a URL. Those with metadata are fetched once, all of a node, or of several, together.

    Args:
        url: of the store.
        files: its server's.
    """

    is_stored = True

    def __init__(self, url: str, files: RemoteFiles) -> None:
        self.path, self.files = url, files
        self._held: dict[str, bytes | None] = {}

    def know(self, nodes: Sequence[str]) -> None:
        """The metadata of these nodes will be read: those that are not known yet are fetched, in one go.

        Raises:
            AccessError: all that could be there may not be read.
            RemoteError: see `Remote.read`.
        """
        keys = [*_ROOT, *(f"{node}/{name}" for node in nodes if node for name in _OF_A_NODE)]
        new = [key for key in dict.fromkeys(keys) if key not in self._held]
        if new:
            self._held.update(zip(new, self.files.find_metadata([self.place(key) for key in new]), strict=True))

    def place(self, key: str) -> str:
        """The URL of a file."""
        return below(self.path, key)

    def read(self, key: str) -> bytes | None:
        """The content of a metadata file; None: there is none."""
        self.know([key.rpartition("/")[0]])
        return self._held[key]

    def content(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """The bytes of any file, or some of them, fetched now (a negative start counts from the end); None: there is none."""
        url = self.place(key)
        if (start, stop) == (0, None):
            span = url, 0, WHOLE
        else:
            version = self.files.seek([url])[0]
            if version is None:
                return None
            begin, end, _ = slice(start, stop).indices(version.size)
            span = url, begin, max(begin, end)
        found = self.files.find([span])[0]
        return None if found is None else bytes(found)

    def stretches(self, keys: Sequence[str], checked: bool = True) -> list[Stretch | None]:
        """Where the contents of files lie, whose sizes are asked for at once; None: there is no such file."""
        urls = [self.place(key) for key in keys]
        found = zip(urls, self.files.seek(urls), strict=True)
        return [None if version is None else Stretch(url, 0, version.size) for url, version in found]

    def nodes(self) -> Iterator[str]:
        """The paths of all nodes, that of the root being "".

        Raises:
            MissingNameError: neither does the store say, nor can its server be asked.
        """
        self.know([""])
        names = self._consolidated()
        if names is None and _has_no_listing(self.files.filesystem):
            raise MissingNameError(
                f"the names of its arrays are not known, since it has no consolidated metadata and {self.path.partition('://')[0]} no "
                "listing: name one as dataset_name, or consolidate the store (zarr.consolidate_metadata)"
            )
        if names is None:
            yield from self._walked("")
            self.files.filesystem.invalidate_cache()
            return
        self.know(names)
        yield from names

    def _consolidated(self) -> list[str] | None:
        old, new = self._held[V2_ALL], self._held[V3_NODE]
        said = parsed(new or old or b"{}", f"{redact(self.path)}: {V3_NODE if new else V2_ALL}")
        all_of_it = said.get("consolidated_metadata") if new else said
        found = all_of_it.get("metadata") if isinstance(all_of_it, dict) else None
        if new is None and found is not None:
            return sorted(_nodes_among(found))
        if found is None:
            return [""] if _is_v3_array(new) or self._held[V2_ARRAY] is not None else None
        return ["", *sorted(found)]

    def _walked(self, node: str) -> Iterator[str]:
        try:
            listing = self.files.ask("ls", self.place(node), detail=True)
        except FileNotFoundError:
            return
        except PermissionError as error:
            raise AccessError(
                f"{redact(self.place(node))}: it may not be listed ({redact(error)}): name the array as dataset_name"
            ) from None
        names = {item["name"].rstrip("/").rpartition("/")[2]: item["type"] == "directory" for item in listing}
        is_array = V2_ARRAY in names or (V3_NODE in names and _is_v3_array(self.read(f"{node}/{V3_NODE}" if node else V3_NODE)))
        if is_array or V2_GROUP in names or V3_NODE in names:
            yield node
        if not is_array:
            for name in sorted(name for name, is_folder in names.items() if is_folder):
                yield from self._walked(f"{node}/{name}" if node else name)


class ZarrZipUrl:
    """The files of a store that is a zip file behind a URL, of which the directory was read.

    Args:
        url: of the zip file.
        files: its server's.
    """

    def __init__(self, url: str, files: RemoteFiles) -> None:
        self.path, self.files = url, files
        self._zip = FarZip(url, files)
        self.is_stored = self._zip.is_stored

    def know(self, nodes: Sequence[str]) -> None:
        """See `ZarrFolder`."""

    def read(self, key: str) -> bytes | None:
        """The content of a small file; None: there is none."""
        if self._zip.size(key) > _LARGEST:
            raise FormatError(f"{redact(self.path)}: {key} is too large to be metadata")
        return self._zip.read(key)

    def content(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """See `ZarrUrl`."""
        found = self._zip.read(key)
        return None if found is None else found[start:stop]

    def stretches(self, keys: Sequence[str], checked: bool = True) -> list[Stretch | None]:
        """Where the contents of files lie; None: there is no such file.

        Raises:
            FormatError: the file is damaged.
        """
        return [None if place is None else Stretch(self.path, *place) for place in self._zip.places(keys)]

    def check(self, stretch: Stretch, data: Any) -> None:
        """Compares the content of a file with its checksum.

        Raises:
            FormatError: it has another.
        """
        self._zip.check(stretch.offset, data)

    def nodes(self) -> Iterator[str]:
        """The paths of all nodes, that of the root being ""."""
        return _nodes_among(self._zip.names)


Store = ZarrFolder | ZarrZip | ZarrUrl | ZarrZipUrl
FarStore = ZarrUrl | ZarrZipUrl


def _has_no_listing(filesystem: Any) -> bool:
    protocols = filesystem.protocol if isinstance(filesystem.protocol, tuple | list) else (filesystem.protocol,)
    return "http" in protocols or "https" in protocols


def _nodes_among(keys: Any) -> Iterator[str]:
    """The nodes whose metadata are among files."""
    seen = set()
    for key in sorted(keys):
        folder, _, file = key.rpartition("/")
        if file in (V2_ARRAY, V2_GROUP, V3_NODE) and folder not in seen:
            seen.add(folder)
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
    return b'"array"' in (data or b"") and (parsed(data or b"{}", "") or {}).get("node_type") == "array"


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object that a metadata file is.

    Raises:
        FormatError: it is none.
    """
    try:
        said = json.loads(data)
        if not isinstance(said, dict):
            raise ValueError("it is no JSON object")
        return said
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is damaged: {error}") from error


def is_zarr(path: str | os.PathLike[Any]) -> bool:
    """Is it a folder or a zip file that holds a Zarr node at its root? Of a URL the name decides: ``.zarr`` or ``.zarr.zip``."""
    place = os.fspath(path)
    if is_url(place):
        return place.partition("?")[0].rstrip("/").lower().endswith((".zarr", ".zarr.zip"))
    if os.path.isdir(place):
        return any(os.path.isfile(os.path.join(place, name)) for name in (V2_ARRAY, V2_GROUP, V3_NODE))
    if not os.path.isfile(place) or not zipfile.is_zipfile(place):
        return False
    with asking("zipfile", redact(place)), zipfile.ZipFile(place) as file:
        return any(name in file.namelist() for name in (V2_ARRAY, V2_GROUP, V3_NODE))


def open_store(path: str | os.PathLike[Any], files: RemoteFiles | None = None, nodes: Sequence[str] = ()) -> Store:
    """The store at a path.

    Args:
        path: or a URL; one that ends in .zip is a zip file's, any other one that of a folder.
        files: of a URL's server.
        nodes: whose metadata will be read; they are fetched with those of the root.

    Raises:
        DataNotFoundError, AccessError, FormatError: there is nothing; it can't be read; it is no Zarr store.
        RemoteError: the server does not answer.
    """
    if files is not None:
        return _store_at(os.fspath(path), files, nodes)
    place = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if not os.path.exists(place):
        raise DataNotFoundError(f"{redact(place)} does not exist (working folder: {os.getcwd()})")
    if not os.access(place, os.R_OK):
        raise AccessError(f"{redact(place)}: this user may not read it")
    if not is_zarr(place):
        raise FormatError(f"{redact(place)} is no Zarr store: it has neither of {V3_NODE}, {V2_GROUP} and {V2_ARRAY}")
    return ZarrFolder(place) if os.path.isdir(place) else ZarrZip(place)


def _store_at(url: str, files: RemoteFiles, nodes: Sequence[str]) -> FarStore:
    needed = (V3_NODE, V2_GROUP, V2_ARRAY)
    if redact(url).partition("::")[0].lower().endswith(".zip"):
        zipped = ZarrZipUrl(url, files)
        if all(zipped.read(name) is None for name in needed):
            raise FormatError(f"{redact(url)} is no Zarr store: it has neither of {V3_NODE}, {V2_GROUP} and {V2_ARRAY}")
        return zipped
    store = ZarrUrl(url, files)
    store.know(nodes)
    if all(store.read(name) is None for name in needed):
        raise DataNotFoundError(
            f"{redact(url)}: there is no Zarr store: none of {V3_NODE}, {V2_GROUP} and {V2_ARRAY} is found below it: is the address right?"
        )
    return store
