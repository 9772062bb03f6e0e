"""The files of a Zarr store: their names, and the metadata of its nodes.

The metadata are read here, without zarr-python: only what isn't understood is left to that.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.errors import FileChangedError, FormatError, MissingNameError
from headrace.io.files import Files
from headrace.io.nearest_names import listed_names
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges

V2_ARRAY, V2_GROUP, V2_ATTRIBUTES, V3_NODE = ".zarray", ".zgroup", ".zattrs", "zarr.json"
V2_ALL = ".zmetadata"
NODE_FILES = (V3_NODE, V2_GROUP, V2_ARRAY)
LARGEST = 64 << 20
"""Bytes of a metadata file, beyond which it is none."""


class Store(ABC):
    """The files of a Zarr store, which is a folder or a zip file, local or remote.

    Args:
        path: of the store, or its URL.
        files: by which it is read.
    """

    is_stored = True
    """True if files lie as they are, and can be read by ranges."""
    reads_whole = False
    """True if a chunk is read as a whole file, whose size would have to be asked for, and which
    may be missing.
    """
    reads_files = False
    """True if chunks that are files of their own are read by `read_files`, which looks at them
    when they are open: of a local folder.
    """

    def __init__(self, path: str, files: Files) -> None:
        self.path, self.files = path, files

    # -- files

    def fetch_metadata(self, nodes: Sequence[str]) -> None:  # noqa: B027
        """Fetches the metadata of remote nodes together; an AccessError where all that could be
        there may not be read.
        """

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The content of a metadata file; None: there is none."""

    @abstractmethod
    def path_of(self, key: str) -> str:
        """The path or URL of a file."""

    @abstractmethod
    def ranges(self, keys: Sequence[str]) -> ByteRanges:
        """Where the contents of files lie; those that are missing were never written.

        Raises:
            FormatError: the file is damaged, or a folder lies there.
            FileChangedError: a local file was changed after the store was opened.
        """

    def read_files(self, folder: str, names: Sequence[str]) -> list[bytes | None]:
        """The contents of files of a local folder, by their names below one of its own; None for
        those that are missing.

        Raises:
            FormatError: a folder lies there.
            FileChangedError: a file was changed after the store was opened.
            OSError: one can't be read.
        """
        raise NotImplementedError

    def read_files_into(
        self, folder: str, names: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int]:
        """As `read_files`, into buffers, see `FolderReader.read_into`."""
        raise NotImplementedError

    @property
    def check_content(self) -> Callable[[int, Any], None] | None:
        """First byte and stored bytes of a file -> nothing; raises a FormatError where they have
        another checksum. None: there is none.
        """
        return None

    def content(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """The bytes of a remote file, or some of them (a negative start counts from the end);
        None: there is none.
        """
        raise NotImplementedError

    @abstractmethod
    def nodes(self) -> Iterator[str]:
        """The paths of all nodes, that of the root being "".

        Raises:
            MissingNameError: neither does the store say, nor can its server be asked.
        """

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

    def check_open(self, paths: Sequence[str]) -> None:  # noqa: B027
        """Compares local files with chunks, which this process has open, with the time when the
        store was opened.

        Raises:
            FileChangedError: one was changed since.
        """

    # -- nodes

    def metadata(self, name: str) -> dict[str, Any] | None:
        """The metadata of a node as its file says them; None: there is no node of that name.

        Raises:
            FormatError: the file is damaged.
        """
        for file in NODE_FILES:
            key = key_of(name, file)
            data = self.read(key)
            if data is None:
                continue
            metadata = parsed(data, f"{redact(self.path)}: {key}")
            if file == V3_NODE and metadata.get("node_type") not in ("array", "group"):
                raise FormatError(
                    f"{redact(self.path)}: {key} is damaged: it has node_type "
                    f"{metadata.get('node_type')!r}"
                )
            if file == V2_ARRAY:
                self._attributes_2(name)  # which must not be damaged either
            kind = {V2_ARRAY: "array", V2_GROUP: "group"}.get(file)
            return metadata if kind is None else {**metadata, "node_type": kind}
        return None

    def attributes(self, name: str) -> dict[str, Any]:
        """The attributes of a node."""
        metadata = self.metadata(name) or {}
        if metadata.get("zarr_format") != 3:
            return self._attributes_2(name)
        attributes = metadata.get("attributes")
        return attributes if isinstance(attributes, dict) else {}

    def axis_names(self, name: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of an array's axes; empty ones where the store doesn't say. (`metadata`: of
        the array.)
        """
        axes = len(metadata["shape"])
        names = metadata.get("dimension_names") or self.attributes(name).get("_ARRAY_DIMENSIONS")
        if not isinstance(names, list) or len(names) != axes:
            return ("",) * axes
        return tuple(str(axis or "") for axis in names)

    def _attributes_2(self, name: str) -> dict[str, Any]:
        key = key_of(name, V2_ATTRIBUTES)
        data = self.read(key)
        return {} if data is None else parsed(data, f"{redact(self.path)}: {key}")

    def array_names(self) -> list[str]:
        """The arrays; "" is the root."""
        return [
            name for name in self.nodes() if (self.metadata(name) or {}).get("node_type") == "array"
        ]

    def array(self, name: str | None) -> tuple[str, dict[str, Any]]:
        """The name of an array, and its metadata; without a name the only one there is.

        Raises:
            MissingNameError: there is none of that name, or several and no name; the message lists
                them, where they are known.
        """
        wanted = "" if name is None else name.strip("/")
        metadata = self.metadata(wanted)
        if metadata is not None and metadata["node_type"] == "array":
            return wanted, metadata
        where = redact(self.path)
        absent = "" if name is None else f"it has no array {name!r}; "
        try:
            names = self.array_names()
        except MissingNameError as why:
            raise MissingNameError(f"{where}: {absent}{why}") from None
        if name is None and len(names) == 1:
            return names[0], self.metadata(names[0]) or {}
        has = listed_names(names, wanted, repr)
        if name is not None:
            raise MissingNameError(f"{where} has no array {name!r}; it has: {has}")
        raise MissingNameError(
            f"{where} has {len(names)} arrays, name one of them as dataset_name: {has}"
        )


def replaced(path: str) -> FileChangedError:
    """The error of a local file that was changed."""
    return FileChangedError(
        f"{redact(path)} was changed after the dataset was opened, and rows of both versions must "
        "not be mixed: open the dataset again"
    )


def key_of(node: str, file: str) -> str:
    """The name of a file of a node."""
    return f"{node}/{file}" if node else file


def nodes_among(keys: Iterable[str]) -> Iterator[str]:
    """The nodes whose metadata are among files."""
    seen = set()
    for key in sorted(keys):
        folder, _, file = key.rpartition("/")
        if file in NODE_FILES and folder not in seen:
            seen.add(folder)
            yield folder


def root_among(keys: Collection[str]) -> str:
    """Where in a zip file its store begins: "", or "a.zarr/" where a folder was packed with its
    name.

    Raises:
        FormatError: there is no store, or several.
    """
    if any(name in keys for name in NODE_FILES):
        return ""
    nodes = nodes_among(key for key in keys if not key.startswith("__MACOSX/"))
    root = min(nodes, key=lambda node: node.count("/"), default=None)
    if root is None:
        raise FormatError(f"it is no Zarr store: it has neither of {', '.join(NODE_FILES)}")
    for node in nodes_among(key for key in keys if not key.startswith(("__MACOSX/", f"{root}/"))):
        raise FormatError(
            f"it holds several Zarr stores, such as {root!r} and {node!r}: pack one of them alone"
        )
    return f"{root}/"


def is_v3_array(data: bytes | None) -> bool:
    """True if a metadata file of version 3 is an array's."""
    return b'"array"' in (data or b"") and parsed(data or b"{}", "").get("node_type") == "array"


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object that a metadata file is.

    Raises:
        FormatError: it is none.
    """
    try:
        metadata = json.loads(data)
        if not isinstance(metadata, dict):
            raise ValueError("it is no JSON object")
        return metadata
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is damaged: {error}") from error
