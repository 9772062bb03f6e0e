"""The files of a Zarr store: in a folder, in a zip file, or below a URL."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import AccessError, DataNotFoundError, FormatError, MissingNameError
from headrace.io.library_errors import asking
from headrace.io.paths import is_url, redact
from headrace.io.ranges import WHOLE, ByteRanges
from headrace.io.remote_files import RemoteFiles, below
from headrace.io.resolve.file_set import Kind
from headrace.storage.zarr.keys import (
    LARGEST,
    NODE_FILES,
    V2_ALL,
    V2_ARRAY,
    V2_ATTRIBUTES,
    V2_GROUP,
    V3_NODE,
    is_v3_array,
    nodes_among,
    parsed,
    root_among,
)
from headrace.storage.zarr.local import ZarrFolder, ZarrZip
from headrace.storage.zarr.zips import FarZip

_OF_A_NODE = (V3_NODE, V2_GROUP, V2_ARRAY, V2_ATTRIBUTES)
_ROOT = (*_OF_A_NODE, V2_ALL)


class ZarrUrl:
    """The files below a URL. Those with metadata are fetched once, all of a node, or of several, together.

    Args:
        url: of the store.
        files: its server's.
    """

    is_stored = True

    def check_version(self, name: str) -> None:
        """Each read is of one version of its file, or an error; see `RemoteFiles`."""

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
            version = self.files.find_versions([url])[0]
            if version is None:
                return None
            begin, end, _ = slice(start, stop).indices(version.size)
            span = url, begin, max(begin, end)
        found = self.files.read(ByteRanges.of([span]))[0]
        return None if found is None else bytes(found)

    def ranges(self, keys: Sequence[str], checked: bool = True) -> ByteRanges:
        """Where the contents of files lie, whose sizes are asked for at once; those that are missing were never written."""
        urls = [self.place(key) for key in keys]
        found = zip(urls, self.files.find_versions(urls), strict=True)
        return ByteRanges.of(None if version is None else (url, 0, version.size) for url, version in found)

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
            return sorted(nodes_among(found))
        if found is None:
            return [""] if is_v3_array(new) or self._held[V2_ARRAY] is not None else None
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
        is_array = V2_ARRAY in names or (V3_NODE in names and is_v3_array(self.read(f"{node}/{V3_NODE}" if node else V3_NODE)))
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
        try:
            self._root = root_among(self._zip.names)
        except FormatError as error:
            raise FormatError(f"{redact(url)}: {error}") from None
        self.is_stored: bool = self._zip.is_stored

    def know(self, nodes: Sequence[str]) -> None:
        """See `ZarrFolder`."""

    def check_version(self, name: str) -> None:
        """See `ZarrUrl`."""

    def read(self, key: str) -> bytes | None:
        """The content of a small file; None: there is none."""
        if self._zip.size(self._root + key) > LARGEST:
            raise FormatError(f"{redact(self.path)}: {key} is too large to be metadata")
        return self._zip.read(self._root + key)

    def content(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """See `ZarrUrl`."""
        found = self._zip.read(self._root + key)
        return None if found is None else found[start:stop]

    def ranges(self, keys: Sequence[str], checked: bool = True) -> ByteRanges:
        """Where the contents of files lie; those that are missing were never written.

        Raises:
            FormatError: the file is damaged.
        """
        places = self._zip.places([self._root + key for key in keys])
        return ByteRanges.of(None if place is None else (self.path, place[0], place[0] + place[1]) for place in places)

    def check(self, start: int, data: Any) -> None:
        """Compares the content of the file that begins there with its checksum.

        Raises:
            FormatError: it has another.
        """
        self._zip.check(start, data)

    def nodes(self) -> Iterator[str]:
        """The paths of all nodes, that of the root being ""."""
        return nodes_among(key[len(self._root) :] for key in self._zip.names if key.startswith(self._root))


Store = ZarrFolder | ZarrZip | ZarrUrl | ZarrZipUrl
FarStore = ZarrUrl | ZarrZipUrl


def _has_no_listing(filesystem: Any) -> bool:
    protocols = filesystem.protocol if isinstance(filesystem.protocol, tuple | list) else (filesystem.protocol,)
    return "http" in protocols or "https" in protocols


def is_zarr(path: str | os.PathLike[Any]) -> bool:
    """True if it is a folder that is a Zarr node, or a zip file with one store. Of a URL the name decides: ``.zarr`` or ``.zarr.zip``."""
    place = os.fspath(path)
    if is_url(place):
        return place.partition("?")[0].rstrip("/").lower().endswith((".zarr", ".zarr.zip"))
    if os.path.isdir(place):
        return any(os.path.isfile(os.path.join(place, name)) for name in NODE_FILES)
    if not os.path.isfile(place) or not zipfile.is_zipfile(place):
        return False
    with asking("zipfile", redact(place)), zipfile.ZipFile(place) as file, contextlib.suppress(FormatError):
        root_among(set(file.namelist()))
        return True
    return False


def _is_store(url: str, files: RemoteFiles) -> bool:
    """True if metadata of a store lie below a URL, or it is not known: nothing may be read there."""
    try:
        return any(data is not None for data in files.find_metadata([below(url, name) for name in NODE_FILES]))
    except AccessError:
        return True


ZARR = Kind("Zarr stores", (), stores=(".zarr", ".zarr.zip"), keeps_order=True, recognizes=is_zarr, is_store=_is_store)


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
    if zipfile.is_zipfile(place):
        return ZarrZip(place)
    if not is_zarr(place):
        raise FormatError(f"{redact(place)} is no Zarr store: it has neither of {V3_NODE}, {V2_GROUP} and {V2_ARRAY}")
    return ZarrFolder(place)


def _store_at(url: str, files: RemoteFiles, nodes: Sequence[str]) -> FarStore:
    if redact(url).partition("::")[0].lower().endswith(".zip"):
        return ZarrZipUrl(url, files)
    store = ZarrUrl(url, files)
    store.know(nodes)
    if all(store.read(name) is None for name in NODE_FILES):
        raise DataNotFoundError(
            f"{redact(url)}: there is no Zarr store: none of {V3_NODE}, {V2_GROUP} and {V2_ARRAY} is found below it: is the address right?"
        )
    return store
