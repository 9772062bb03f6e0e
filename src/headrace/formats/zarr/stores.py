"""The files of a Zarr store, which is a folder or a zip file, local or remote: their names, where
they lie, and the metadata of its nodes.

NOTE [ a local store that changes ]

Rows of two versions of a store must not be mixed. Each batch costs one `stat` of the array's
metadata file, which must be the one that was read. A chunk file must not have been written after
the store was opened (`ChunkFiles`). Its time is known without extra cost when the file is opened or
looked up, so nothing needs to be known about each file in advance. A missing file counts as removed
if its folder was written to since. If the clock of a file server is ahead of this machine's, files
that were written just before opening would seem changed. Therefore the last chunk's file and its
folders are checked at opening, and files that are not newer than these count as unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from posixpath import join
from typing import Any

import numpy as np
from isal import isal_zlib

from headrace.errors import AccessError, FileChangedError, FormatError, MissingNameError
from headrace.formats.resolve.file_set import Format
from headrace.formats.zips import members_of
from headrace.io.files import Files
from headrace.io.library_errors import asking
from headrace.io.local_files import LocalFiles
from headrace.io.paths import below, is_url, redact
from headrace.io.ranges import WHOLE, ByteRanges
from headrace.io.remote_files import RemoteFiles

V2_ARRAY, V2_GROUP, V2_ATTRIBUTES, V3_NODE = ".zarray", ".zgroup", ".zattrs", "zarr.json"
V2_ALL = ".zmetadata"
OBJECT = "a store object"
NODE_FILES = (V3_NODE, V2_GROUP, V2_ARRAY)
_OF_A_NODE = (*NODE_FILES, V2_ATTRIBUTES)


class Store(ABC):
    """The files of a Zarr store.

    Args:
        path: of the store, or its URL.
        files: by which it is read.
    """

    only_library = ""
    """Why zarr-python alone can read the arrays; "": their files can be read by ranges."""
    reads_whole = False
    """True if a chunk is read as a whole file, whose size would have to be asked for, and which
    may be missing.
    """
    check_content: Callable[[int, Any], None] | None = None
    """First byte and stored bytes of a file -> nothing; raises a FormatError where they have
    another checksum. None: there is none.
    """

    def __init__(self, path: str, files: Files) -> None:
        self.path: str = path
        self.files: Files = files

    # -- files

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The content of a metadata file; None: there is none."""

    @abstractmethod
    def ranges(self, keys: Sequence[str]) -> ByteRanges:
        """Where the contents of files lie; those that are missing were never written.

        Raises:
            FormatError: the file is damaged.
            FileChangedError: a local file was changed after the store was opened.
        """

    def path_of(self, key: str) -> str:
        """The path or URL of a file of a folder."""
        return f"{self.path}/{key}"

    def content(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """The bytes of a file that zarr-python asks for, or some of them (a negative start counts
        from the end); None: there is none.
        """
        ranges = self.ranges([key])
        if not ranges.is_written[0]:
            return None
        path = ranges.paths[ranges.file[0]]
        begin, end, _ = slice(start, stop).indices(int(ranges.stop[0]))
        data = self.files.read(ByteRanges.of([(path, begin, max(begin, end))]))[0]
        return None if data is None else bytes(data)

    # -- local stores that change; of a remote file each read is of one version, or an error

    def note_last(self, key: str) -> None:  # noqa: B027
        """Notes that the last file of an array may have been written now, by the clock of its
        server.
        """

    def check_version(self, name: str) -> None:  # noqa: B027
        """Compares the metadata file of a local array, or the zip file, with the one that was
        opened.

        Raises:
            FileChangedError: it is another one, or gone.
        """

    # -- nodes

    def nodes(self) -> Iterator[str]:
        """The paths of all nodes, that of the root being "". What lies in an array is not looked
        at.

        Raises:
            MissingNameError: neither does the store say, nor can its server be asked.
        """
        return self._walked("")

    def _walked(self, node: str) -> Iterator[str]:
        folders, files = self._listing(node)
        metadata: dict[str, Any] = {}
        if not set(NODE_FILES).isdisjoint(files):
            yield node
            metadata = self.metadata(node) or {}
        if metadata.get("node_type") != "array":
            for folder in sorted(folders):
                yield from self._walked(join(node, folder))

    def _listing(self, node: str) -> tuple[Collection[str], Collection[str]]:
        """The names of the folders and of the files in the folder of a node."""
        raise NotImplementedError

    def metadata(self, name: str) -> dict[str, Any] | None:
        """The metadata of a node, with its attributes; None: there is no node of that name.

        Raises:
            FormatError: the file is damaged.
        """
        node = self._parsed(join(name, V3_NODE))
        if node is not None:
            if node.get("node_type") not in ("array", "group"):
                raise FormatError(
                    f"{redact(self.path)}: {join(name, V3_NODE)} is damaged: it has node_type "
                    f"{node.get('node_type')!r}"
                )
            return node
        for file, kind in ((V2_GROUP, "group"), (V2_ARRAY, "array")):
            node = self._parsed(join(name, file))
            if node is not None:
                attributes = self._parsed(join(name, V2_ATTRIBUTES)) or {}
                return {**node, "node_type": kind, "attributes": attributes}
        return None

    def _parsed(self, key: str) -> dict[str, Any] | None:
        """The JSON object in a metadata file; None: there is no such file."""
        data = self.read(key)
        if data is None:
            return None
        try:
            metadata = json.loads(data)
            if not isinstance(metadata, dict):
                raise ValueError("it is not a JSON object")
            return metadata
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{redact(self.path)}: {key} is damaged: {error}") from error


class ChunkFiles(LocalFiles):
    """Local chunk files, which must not be written after their store was opened; and zip files,
    which have a version.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latest = 0
        """The time in ns of the last opening of a store, or later."""

    def check(self, path: str) -> None:
        try:
            with self.opened(path):
                pass
        except (FileNotFoundError, NotADirectoryError):
            self.check_missing(path)

    def check_open(self, path: str, fd: int, status: os.stat_result | None = None) -> None:
        status = status or os.fstat(fd)
        if path in self._versions:
            super().check_open(path, fd, status)
        elif stat.S_ISDIR(status.st_mode):
            raise FormatError(f"{redact(path)} is a folder, where a file with a chunk should be")
        elif status.st_mtime_ns > self.latest or not status.st_nlink:
            raise replaced(path)

    def check_missing(self, path: str) -> None:
        """Raises a FileChangedError where the nearest folder above a file that is missing was
        written to since the store was opened.
        """
        while path != os.path.dirname(path):
            path = os.path.dirname(path)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if os.stat(path).st_mtime_ns > self.latest:
                    raise replaced(path)
                return


class ZarrFolder(Store):
    """The files of a store that is a local folder."""

    files: ChunkFiles
    reads_whole = True

    def __init__(self, path: str, files: ChunkFiles) -> None:
        super().__init__(path, files)
        files.latest = max(files.latest, time.time_ns())
        self._inodes: dict[str, int] = {}  # of metadata files whose version is known

    def read(self, key: str) -> bytes | None:
        path = self.path_of(key)
        try:
            if key not in self._inodes:
                self._inodes[key] = self.files.version(path).inode
                self.note_last(key)
            with open(path, "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except PermissionError as error:
            raise AccessError(f"{redact(path)}: this user may not read the file") from error

    def note_last(self, key: str) -> None:
        path = self.path_of(key)
        while len(path) >= len(self.path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self.files.latest = max(self.files.latest, os.stat(path).st_mtime_ns)
            path = os.path.dirname(path)

    def ranges(self, keys: Sequence[str]) -> ByteRanges:
        ranges: list[tuple[str, int, int] | None] = []
        for key in keys:
            path = self.path_of(key)
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                self.files.check_missing(path)
                ranges.append(None)
                continue
            self.files.check_open(path, -1, status)
            ranges.append((path, 0, status.st_size))
        return ByteRanges.of(ranges)

    def check_version(self, name: str) -> None:
        for file in (V3_NODE, V2_ARRAY):
            key = join(name, file)
            if key in self._inodes:
                path = self.path_of(key)
                is_same = self.files.is_same(path)
                # An equal file with another inode: the store may be another one, with chunks of its
                # own.
                if not is_same or self.files.version(path).inode != self._inodes[key]:
                    raise replaced(path)
                return

    def _listing(self, node: str) -> tuple[Collection[str], Collection[str]]:
        folder = self.path_of(node)
        for _, folders, files in os.walk(folder):
            return [one for one in folders if not os.path.islink(f"{folder}/{one}")], files
        return (), ()


class ZarrUrl(Store):
    """The files of a store that is a remote folder. Those with metadata are fetched once, all of
    a node, or of several, together.
    """

    files: RemoteFiles
    reads_whole = True

    def __init__(self, path: str, files: RemoteFiles) -> None:
        super().__init__(path, files)
        self._contents: dict[str, bytes | None] = {}  # of metadata files

    def fetch_metadata(self, nodes: Sequence[str]) -> None:
        """Fetches the metadata of nodes together; an AccessError if none of it may be read."""
        keys = [
            join(node, file) for node in {"": None, **dict.fromkeys(nodes)} for file in _OF_A_NODE
        ]
        new = [key for key in (*keys, V2_ALL) if key not in self._contents]
        if new:
            self._contents.update(
                zip(new, self.files.find_metadata([self.path_of(key) for key in new]), strict=True)
            )

    def path_of(self, key: str) -> str:
        return below(self.path, key)

    def read(self, key: str) -> bytes | None:
        self.fetch_metadata([key.rpartition("/")[0]])
        return self._contents[key]

    def content(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        if (start, stop) != (0, None):
            return super().content(key, start, stop)
        data = self.files.read(ByteRanges.of([(self.path_of(key), 0, WHOLE)]))[0]
        return None if data is None else bytes(data)

    def ranges(self, keys: Sequence[str]) -> ByteRanges:
        """Sizes are asked for together."""
        urls = [self.path_of(key) for key in keys]
        versions = zip(urls, self.files.find_versions(urls), strict=True)
        return ByteRanges.of(
            None if version is None else (url, 0, version.size) for url, version in versions
        )

    def nodes(self) -> Iterator[str]:
        self.fetch_metadata([""])
        names = self._consolidated()
        if names is not None:
            self.fetch_metadata(names)
            yield from names
            return
        protocol = self.files.filesystem.protocol
        if not {"http", "https"}.isdisjoint([protocol] if isinstance(protocol, str) else protocol):
            raise MissingNameError(
                "the names of its arrays are not known, since it has no consolidated metadata and "
                f"{self.path.partition('://')[0]} no listing: name one as dataset_name, or "
                "consolidate the store (zarr.consolidate_metadata)"
            )
        yield from self._walked("")
        self.files.filesystem.invalidate_cache()

    def _consolidated(self) -> list[str] | None:
        """The nodes that the consolidated metadata of the root list, or the root if it is an array;
        None: it doesn't say.
        """
        old = self._parsed(V2_ALL)
        new = self._parsed(V3_NODE)
        consolidated = old if new is None else new.get("consolidated_metadata")
        nodes = consolidated.get("metadata") if isinstance(consolidated, dict) else None
        if nodes is None:
            is_array = (new or {}).get("node_type") == "array"
            return [""] if is_array or self._contents[V2_ARRAY] is not None else None
        return sorted(nodes_among(nodes)) if new is None else ["", *sorted(nodes)]

    def _listing(self, node: str) -> tuple[Collection[str], Collection[str]]:
        place = self.path_of(node)
        try:
            listing = self.files.ask("ls", place, detail=True)
        except FileNotFoundError:
            return (), ()
        except PermissionError as error:
            raise AccessError(
                f"{redact(place)}: it may not be listed ({redact(error)}): name the array as "
                "dataset_name"
            ) from None
        kinds = {item["name"].rstrip("/").rpartition("/")[2]: item["type"] for item in listing}
        return [name for name, kind in kinds.items() if kind == "directory"], kinds.keys()


class ZarrZip(Store):
    """The files of a store that is a zip file. Those that are stored as they are can be read by
    ranges.

    The directory at the end of the file, and the metadata of all nodes, are read when a store is
    opened.

    Raises:
        FormatError: it is no zip file, or there is no store in it.
        DataNotFoundError, AccessError, RemoteError: see `Files.version`.
    """

    def __init__(self, path: str, files: Files) -> None:
        super().__init__(path, files)
        infos, self._begins = members_of(path, files)
        for info in infos:
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise FormatError(
                    f"{redact(path)}: {info.filename} is compressed by method "
                    f"{info.compress_type}, which is not supported: store the files as they are"
                )
        self._numbers = {info.filename: number for number, info in enumerate(infos)}
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
        keys = [name for name in self._numbers if name.rpartition("/")[2] in (*_OF_A_NODE, V2_ALL)]
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


def replaced(path: str) -> FileChangedError:
    """The error of a local file that has changed."""
    return FileChangedError(
        f"{redact(path)} was changed after the dataset was opened, and rows of both versions must "
        "not be mixed: open the dataset again"
    )


def nodes_among(keys: Iterable[str]) -> Iterator[str]:
    """The nodes whose metadata are among files."""
    seen = set()
    for key in sorted(keys):
        folder, _, file = key.rpartition("/")
        if file in NODE_FILES and folder not in seen:
            seen.add(folder)
            yield folder


# -- which paths are stores


def root_among(keys: Collection[str]) -> str:
    """Where in a zip file its store begins: "", or "a.zarr/" where a folder was packed with its
    name.

    Raises:
        FormatError: there is no store, or several.
    """
    if any(name in keys for name in NODE_FILES):
        return ""
    nodes = [*nodes_among(key for key in keys if not key.startswith("__MACOSX/"))]
    root = min(nodes, key=lambda node: node.count("/"), default=None)
    if root is None:
        raise FormatError(f"it is not a Zarr store: it has none of {', '.join(NODE_FILES)}")
    for node in nodes:
        if node != root and not node.startswith(f"{root}/"):
            raise FormatError(
                f"it holds several Zarr stores, such as {root!r} and {node!r}: pack one of them "
                "alone"
            )
    return f"{root}/"


def is_zarr(path: str | os.PathLike[Any]) -> bool:
    """True if it is a folder that is a Zarr node, or a zip file with one store. Of a URL the
    name decides: ``.zarr`` or ``.zarr.zip``.
    """
    place = os.fspath(path)
    if is_url(place):
        return place.partition("?")[0].rstrip("/").lower().endswith((".zarr", ".zarr.zip"))
    if os.path.isdir(place):
        nodes = map(partial(os.path.join, place), NODE_FILES)
        return any(map(os.path.isfile, nodes))
    if not os.path.isfile(place) or not zipfile.is_zipfile(place):
        return False
    with (
        asking("zipfile", redact(place)),
        zipfile.ZipFile(place) as file,
        contextlib.suppress(FormatError),
    ):
        root_among(set(file.namelist()))
        return True
    return False


def _is_store(url: str, files: RemoteFiles) -> bool:
    """True if metadata of a store lie below a URL, or it is not known: nothing may be read
    there.
    """
    try:
        return any(
            data is not None
            for data in files.find_metadata([below(url, name) for name in NODE_FILES])
        )
    except AccessError:
        return True


ZARR = Format(
    "Zarr stores",
    (),
    stores=(".zarr", ".zarr.zip"),
    keeps_order=True,
    recognizes=is_zarr,
    is_store=_is_store,
    is_exclusive=True,
    dataset="ZarrDataset",
)
