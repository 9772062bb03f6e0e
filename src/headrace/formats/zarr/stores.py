"""Zarr stores that are folders, local or remote, and the function that opens a store of any kind.

NOTE [ a local store that changes ]

Rows of two versions of a store must not be mixed. Each batch costs one `stat` of the array's
metadata file, which must be the one that was read. A chunk file must not have been written after
the store was opened. Its time is known without extra cost when the file is opened or looked up, so
nothing needs to be known about each file in advance. A missing file counts as removed if its folder
was written to since. If the clock of a file server is ahead of this machine's, files that were
written just before opening would seem changed. Therefore the last chunk's file and its folders are
checked at opening, and files that are not newer than these count as unchanged.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from headrace.errors import AccessError, DataNotFoundError, FormatError, MissingNameError
from headrace.formats.zarr.kind import is_zarr
from headrace.formats.zarr.store import (
    LARGEST,
    NODE_FILES,
    V2_ALL,
    V2_ARRAY,
    V2_ATTRIBUTES,
    V2_GROUP,
    V3_NODE,
    Store,
    is_v3_array,
    key_of,
    nodes_among,
    parsed,
    replaced,
)
from headrace.formats.zarr.zips import ZarrZip
from headrace.io.files import Files
from headrace.io.local.files import LocalFiles
from headrace.io.local.folders import IS_SUPPORTED, FolderReader
from headrace.io.paths import chain_of, redact
from headrace.io.ranges import WHOLE, ByteRanges
from headrace.io.remote_files import RemoteFiles, below

T = TypeVar("T")

_OF_A_NODE = (V3_NODE, V2_GROUP, V2_ARRAY, V2_ATTRIBUTES)
_ROOT = (*_OF_A_NODE, V2_ALL)


class ZarrFolder(Store):
    """The files of a store that is a local folder."""

    files: LocalFiles
    reads_files = IS_SUPPORTED

    def __init__(self, path: str, files: LocalFiles) -> None:
        super().__init__(path, files)
        self._opened = time.time_ns()
        self._inodes: dict[str, int] = {}  # of metadata files whose version is known

    def path_of(self, key: str) -> str:
        return f"{self.path}/{key}"

    def read(self, key: str) -> bytes | None:
        path = self.path_of(key)
        try:
            if os.path.getsize(path) > LARGEST:
                raise FormatError(f"{redact(path)} is too large to be metadata")
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
                self._opened = max(self._opened, os.stat(path).st_mtime_ns)
            path = os.path.dirname(path)

    def ranges(self, keys: Sequence[str]) -> ByteRanges:
        ranges: list[tuple[str, int, int] | None] = []
        for key in keys:
            path = f"{self.path}/{key}"
            try:
                status = os.stat(path)
                if stat.S_ISDIR(status.st_mode):
                    raise _is_folder(path)
                self._check(status, path)
                ranges.append((path, 0, status.st_size))
            except (FileNotFoundError, NotADirectoryError):
                self._check_missing(path)
                ranges.append(None)
        return ByteRanges.of(ranges)

    def read_files(self, folder: str, names: Sequence[str]) -> list[bytes | None]:
        found = self._in_folder(folder, lambda reader: reader.read(names))
        self._check_absent(folder, names, [data is None for data in found])
        return found

    def read_files_into(
        self, folder: str, names: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int]:
        sizes = self._in_folder(folder, lambda reader: reader.read_into(names, buffers))
        self._check_absent(folder, names, [size < 0 for size in sizes])
        return sizes

    def _in_folder(self, folder: str, read: Callable[[FolderReader], T]) -> T:
        place = self.path_of(folder)
        try:
            return read(FolderReader(self.files.descriptors, place, self._opened, replaced))
        except IsADirectoryError as error:
            raise _is_folder(error.filename) from None

    def _check_absent(self, folder: str, names: Sequence[str], are_absent: list[bool]) -> None:
        for name, is_absent in zip(names, are_absent, strict=True):
            if is_absent:
                self._check_missing(self.path_of(key_of(folder, name)))

    def check_open(self, paths: Sequence[str]) -> None:
        with contextlib.closing(self.files.descriptors.reading_each(paths)) as opened:
            for start, fds in opened:
                for path, fd in zip(paths[start:], fds, strict=False):
                    self._check(os.fstat(fd), path)

    def _check(self, status: os.stat_result, path: str) -> None:
        if status.st_mtime_ns > self._opened or not status.st_nlink:
            raise replaced(path)

    def _check_missing(self, path: str) -> None:
        """Raises a FileChangedError where the nearest folder above a file that is missing was
        written to since the store was opened.
        """
        while len(path) > len(self.path):
            path = os.path.dirname(path)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._check(os.stat(path), path)
                return

    def check_version(self, name: str) -> None:
        for file in (V3_NODE, V2_ARRAY):
            key = key_of(name, file)
            if key in self._inodes:
                path = self.path_of(key)
                is_same = self.files.is_same(path)
                # An equal file with another inode: the store may be another one, with chunks of its
                # own.
                if not is_same or self.files.version(path).inode != self._inodes[key]:
                    raise replaced(path)
                return

    def nodes(self) -> Iterator[str]:
        """What lies in an array is not looked at."""
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


def _is_folder(path: str) -> FormatError:
    return FormatError(f"{redact(path)} is a folder, where a file with a chunk should be")


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
        keys = [*_ROOT, *(key_of(node, name) for node in nodes if node for name in _OF_A_NODE)]
        new = [key for key in dict.fromkeys(keys) if key not in self._contents]
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
        ranges = ByteRanges.of([(self.path_of(key), 0, WHOLE)])
        if (start, stop) != (0, None):
            ranges = self.ranges([key])
            if not ranges.is_written[0]:
                return None
            begin, end, _ = slice(start, stop).indices(int(ranges.stop[0]))
            ranges = ByteRanges.of([(self.path_of(key), begin, max(begin, end))])
        data = self.files.read(ranges)[0]
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
        old = self._contents[V2_ALL]
        new = self._contents[V3_NODE]
        root = parsed(new or old or b"{}", f"{redact(self.path)}: {V3_NODE if new else V2_ALL}")
        consolidated = root.get("consolidated_metadata") if new else root
        nodes = consolidated.get("metadata") if isinstance(consolidated, dict) else None
        if nodes is None:
            return [""] if is_v3_array(new) or self._contents[V2_ARRAY] is not None else None
        return sorted(nodes_among(nodes)) if new is None else ["", *sorted(nodes)]

    def _walked(self, node: str) -> Iterator[str]:
        place = self.path_of(node)
        try:
            listing = self.files.ask("ls", place, detail=True)
        except FileNotFoundError:
            return
        except PermissionError as error:
            raise AccessError(
                f"{redact(place)}: it may not be listed ({redact(error)}): name the array as "
                "dataset_name"
            ) from None
        kinds = {item["name"].rstrip("/").rpartition("/")[2]: item["type"] for item in listing}
        is_array = V2_ARRAY in kinds
        if V3_NODE in kinds:
            is_array = is_array or is_v3_array(self.read(key_of(node, V3_NODE)))
        if is_array or V2_GROUP in kinds or V3_NODE in kinds:
            yield node
        if not is_array:
            for name in sorted(name for name, kind in kinds.items() if kind == "directory"):
                yield from self._walked(key_of(node, name))


def open_store(
    path: str | os.PathLike[Any], files: Files | None = None, nodes: Sequence[str] = ()
) -> Store:
    """The store at a path.

    Args:
        path: or a URL; one that ends in .zip is a zip file's, any other one that of a folder.
        files: by which it is read; None: local ones.
        nodes: whose metadata will be read; remote ones are fetched with those of the root.

    Raises:
        DataNotFoundError, AccessError, FormatError: there is nothing; it can't be read; it is no
            Zarr store.
        RemoteError: the server does not answer.
    """
    if files is not None and files.is_remote:
        return _remote_store(os.fspath(path), cast(RemoteFiles, files), nodes)
    place = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if not os.path.exists(place):
        raise DataNotFoundError(f"{redact(place)} does not exist (working folder: {os.getcwd()})")
    if not os.access(place, os.R_OK):
        raise AccessError(f"{redact(place)}: this user may not read it")
    local = cast(LocalFiles, files or LocalFiles())
    if zipfile.is_zipfile(place):
        return ZarrZip(place, local)
    if not is_zarr(place):
        raise FormatError(
            f"{redact(place)} is no Zarr store: it has neither of {V3_NODE}, {V2_GROUP} and "
            f"{V2_ARRAY}"
        )
    return ZarrFolder(place, local)


def _remote_store(url: str, files: RemoteFiles, nodes: Sequence[str]) -> Store:
    if redact(chain_of(url)[0]).lower().endswith(".zip"):
        return ZarrZip(url, files)
    store = ZarrUrl(url, files)
    store.fetch_metadata(nodes)
    if all(store.read(name) is None for name in NODE_FILES):
        raise DataNotFoundError(
            f"{redact(url)}: there is no Zarr store: none of {V3_NODE}, {V2_GROUP} and {V2_ARRAY} "
            "is found below it: is the address right?"
        )
    return store
