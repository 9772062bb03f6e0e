"""Which files are there?

Turns a path, a list of paths, a glob or an fsspec URL into a sorted, compact list of files. Sorted by the parts of their names
relative to the root, byte by byte: the same on every machine, file system and locale.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import AccessError, ConfigError, DataNotFoundError

DataPath = str | os.PathLike[Any] | Sequence[str | os.PathLike[Any]]


def is_url(path: object) -> bool:
    """Is it an fsspec URL, such as ``s3://bucket/key`` or ``zip://*::archive.zip``?"""
    return isinstance(path, str) and ("://" in path or "::" in path)


def redact(path: object) -> str:
    """A path or URL as it may be shown: without user, password and query string, and always printable."""
    text = os.fsdecode(path) if isinstance(path, (bytes, os.PathLike)) else str(path)
    if is_url(text):
        text = re.sub(r"(://)[^/@\s]*@", r"\1", text)
        text = re.sub(r"\?[^\s:]*", "", text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class PackedNames(Sequence[bytes]):
    """Many byte strings in two flat arrays: workers share the pages instead of copying a list of objects."""

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        listed = list(names)
        self._offsets = np.zeros(len(listed) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, listed), np.int64, len(listed)), out=self._offsets[1:])
        self._bytes = np.frombuffer(b"".join(listed), np.uint8)

    @classmethod
    def from_arrays(cls, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> PackedNames:
        """From [bytes] uint8 and [n + 1] int64 offsets into them."""
        packed = cls.__new__(cls)
        packed._bytes, packed._offsets = data, offsets
        return packed

    @property
    def arrays(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """The bytes and the offsets."""
        return self._bytes, self._offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index = index % len(self)
        return self._bytes[self._offsets[index] : self._offsets[index + 1]].tobytes()


@dataclass(frozen=True, slots=True)
class FileList:
    """The files found.

    Attributes:
        roots: folders (or URL prefixes) that the names are relative to.
        root_of: [files] number of each file's root, or None where there is one root.
        names: relative names with '/' between their parts, as bytes.
        url: are the roots paths of an fsspec file system?
        folders: names of the first-level folders of the roots, sorted, also those without files.
    """

    roots: tuple[str, ...]
    root_of: npt.NDArray[np.int32] | None
    names: PackedNames
    url: bool
    folders: tuple[str, ...]

    def path(self, index: int) -> bytes:
        """The full path of one file."""
        root = self.roots[0 if self.root_of is None else int(self.root_of[index])]
        return os.path.join(os.fsencode(root), self.names[index]) if root else self.names[index]


def scan(data_path: DataPath, extensions: Sequence[str], filesystem: Any = None) -> FileList:
    """All files under `data_path` that end in one of `extensions` (any case).

    Args:
        data_path: a folder (searched through, links followed, loops of links entered once), a file, a glob, or a list of these;
            with a `filesystem`, paths on it.
        extensions: such as (".jpg", ".png"). A file that is named itself is taken whatever its ending.
        filesystem: an fsspec file system, or None for local paths.

    Raises:
        DataNotFoundError: a path is missing, or nothing fits; the message names the extensions.
    """
    entries = [data_path] if isinstance(data_path, (str, bytes, os.PathLike)) else list(data_path)
    if not entries:
        raise DataNotFoundError("data_path is an empty list: name at least one folder or file")
    endings = tuple(os.fsencode(e.lower()) for e in extensions)
    walk = _walk_local if filesystem is None else _RemoteWalk(filesystem)
    found: list[tuple[bytes, bytes, int]] = []  # sort key, name, root
    roots: list[str] = []
    folders: set[str] = set()
    for entry in entries:
        root, names, below = walk(entry, endings)
        folders.update(below)
        roots.append(root)
        found.extend((name.replace(b"/", b"\0"), name, len(roots) - 1) for name in names)
    if not found:
        shown = ", ".join(redact(e) for e in entries[:3])
        raise DataNotFoundError(f"no file under {shown} ends in any of {', '.join(extensions)}: is the path right?")
    found.sort()
    root_of = np.fromiter((f[2] for f in found), np.int32, len(found)) if len(roots) > 1 else None
    ordered = sorted(folders, key=os.fsencode)
    return FileList(tuple(roots), root_of, PackedNames(f[1] for f in found), filesystem is not None, tuple(ordered))


def _walk_local(entry: str | os.PathLike[Any], endings: tuple[bytes, ...]) -> tuple[str, list[bytes], list[str]]:
    """Root, names below it, and its first-level folders."""
    path = os.fsdecode(os.path.expanduser(os.fspath(entry)))
    if os.path.isdir(path):
        names = _walk_folder(os.fsencode(path), endings)
        with os.scandir(path) as listing:
            return path, names, [e.name for e in listing if e.is_dir()]
    if os.path.exists(path):
        return os.path.dirname(path), [os.fsencode(os.path.basename(path))], []
    if glob.has_magic(path):
        root = path[: re.search(r"[*?\[]", path).start()].rpartition(os.sep)[0] or ("/" if path.startswith("/") else "")  # type: ignore[union-attr]
        matches = glob.glob(path, recursive=True)
        kept = [os.fsencode(os.path.relpath(m, root or ".")) for m in matches if os.path.isfile(m)]
        kept = [k for k in kept if k.lower().endswith(endings)]
        return root, kept, sorted({os.fsdecode(k.partition(b"/")[0]) for k in kept if b"/" in k})
    raise DataNotFoundError(f"{redact(path)} does not exist (working folder: {os.getcwd()})")


def _walk_folder(root: bytes, endings: tuple[bytes, ...]) -> list[bytes]:
    names: list[bytes] = []
    stack: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset())]
    while stack:
        below, above = stack.pop()
        folder = os.path.join(root, below) if below else root
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if identity in above:  # a link to a folder that holds it
            continue
        above = above | {identity}
        try:
            listing = os.scandir(folder)
        except PermissionError as error:
            raise AccessError(f"{redact(folder)}: this user may not list the folder ({error.strerror})") from error
        with listing:
            for item in listing:
                name = below + b"/" + item.name if below else item.name
                if item.name.lower().endswith(endings) and item.is_file():
                    names.append(name)
                elif item.is_dir():
                    stack.append((name, above))
    return names


class _RemoteWalk:
    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def __call__(self, entry: Any, endings: tuple[bytes, ...]) -> tuple[str, list[bytes], list[str]]:
        fs, path = self._fs, self._fs._strip_protocol(os.fspath(entry))
        try:
            if glob.has_magic(path):
                root = path[: re.search(r"[*?\[]", path).start()].rpartition("/")[0]  # type: ignore[union-attr]
                files = [p for p in fs.glob(path) if p.lower().encode().endswith(endings)]
            elif fs.isfile(path):
                root, files = path.rpartition("/")[0], [path]
            else:
                root, files = path, [p for p in fs.find(path) if p.lower().encode().endswith(endings)]
                if not files and not fs.exists(path):
                    raise FileNotFoundError(path)
        except FileNotFoundError as error:
            raise DataNotFoundError(f"{redact(entry)} does not exist") from error
        cut = len(root.rstrip("/")) + 1 if root else 0
        names = [p[cut:].encode("utf-8", "surrogateescape") for p in files]
        return root.rstrip("/"), names, sorted({n.partition(b"/")[0].decode() for n in names if b"/" in n})


def open_filesystem(url: str, storage_options: dict[str, Any] | None = None) -> Any:
    """A fresh fsspec file system for a URL (never one that was inherited by fork).

    Raises:
        ConfigError: the protocol is unknown, or its package is missing.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(url, skip_instance_cache=True, **(storage_options or {}))[0]
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{redact(url)} can't be opened: {error}") from error
