"""Which files are there?

Turns a path, a list of paths, a glob or an fsspec URL into a sorted, compact list of files. Sorted by the parts of their names
relative to the root, byte by byte: the same on every machine, file system and locale.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import AccessError, ConfigError, DataNotFoundError, SampleError

DataPath = str | os.PathLike[Any] | Sequence[str | os.PathLike[Any]]


def is_url(path: object) -> bool:
    """Is it an fsspec URL, such as ``s3://bucket/key`` or ``zip://*::archive.zip``?"""
    return isinstance(path, str) and ("://" in path or "::" in path)


def redact(path: object) -> str:
    """A path or URL as it may be shown: without user, password and query string, and always printable."""
    text = os.fsdecode(path) if isinstance(path, (bytes, os.PathLike)) else str(path)
    if is_url(text):
        text = re.sub(r"(://)[^/?\s]*@", r"\1", text)
        text = re.sub(r"\?(?:(?!::)\S)*", "", text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def entries_of(data_path: DataPath) -> list[Any]:
    """The paths that `data_path` names.

    Raises:
        ConfigError: it is no path and no list of paths, or an empty one.
    """
    one = isinstance(data_path, (str, bytes, os.PathLike))
    entries = list(data_path) if isinstance(data_path, Iterable) and not one else [data_path]
    if not all(isinstance(e, (str, bytes, os.PathLike)) for e in entries):
        raise ConfigError(f"data_path must be a path, a glob, a URL or a list of these, not a {type(data_path).__name__}")
    if not entries or not all(map(os.fspath, entries)):  # type: ignore[arg-type]
        raise DataNotFoundError(f"data_path is empty ({data_path!r}): name at least one folder or file")
    return entries


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
        name: bytes = self.names[index]
        return os.path.join(os.fsencode(root), name) if root else name


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
    entries = entries_of(data_path)
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
        with _listing(path) as listing:
            return path, names, [e.name for e in listing if _leads_to(e.is_dir, e.path)]
    if os.path.exists(path):
        return os.path.dirname(path), [os.fsencode(os.path.basename(path))], []
    if glob.has_magic(path):
        root = _before_magic(path, os.sep) or ("/" if path.startswith("/") else "")
        matches = [os.path.relpath(m, root or ".") for m in glob.glob(path, recursive=True) if os.path.isfile(m)]
        looping = {folder: _loops(root, folder) for folder in set(map(os.path.dirname, matches))}
        kept = [os.fsencode(m) for m in matches if not looping[os.path.dirname(m)]]
        kept = [k for k in kept if k.lower().endswith(endings)]
        return root, kept, sorted({os.fsdecode(k.partition(b"/")[0]) for k in kept if b"/" in k})
    raise DataNotFoundError(f"{redact(path)} does not exist (working folder: {os.getcwd()})")


def _before_magic(path: str, separator: str) -> str:
    """The folders of a glob before the first one with a wildcard."""
    found = re.search(r"[*?\[]", path)
    return path[: found.start() if found else None].rpartition(separator)[0]


def _walk_folder(root: bytes, endings: tuple[bytes, ...]) -> list[bytes]:
    names: list[bytes] = []
    stack: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset())]
    while stack:
        below, above = stack.pop()
        folder = os.path.join(root, below) if below else root
        with _listing(folder) as listing:
            status = os.stat(folder)
            identity = (status.st_dev, status.st_ino)
            if identity in above:  # a link to a folder that holds it
                continue
            inside = above | {identity}
            for item in listing:
                name = below + b"/" + item.name if below else item.name
                if item.name.lower().endswith(endings) and _leads_to(item.is_file, item.path):
                    names.append(name)
                elif _leads_to(item.is_dir, item.path):
                    stack.append((name, inside))
    return names


def _listing(folder: Any) -> Any:
    try:
        return os.scandir(folder)
    except PermissionError as error:
        raise AccessError(f"{redact(folder)}: this user may not list the folder ({error.strerror})") from error
    except FileNotFoundError as error:
        raise DataNotFoundError(f"{redact(folder)} went away while its files were listed: start again") from error


def _leads_to(is_kind: Callable[[], bool], path: Any) -> bool:
    """Is a folder's entry of some kind? A link that leads nowhere, or to itself, is of none."""
    try:
        return is_kind()
    except PermissionError as error:
        raise AccessError(f"{redact(path)}: this user may not look at what it links to ({error.strerror})") from error
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _loops(root: str, below: str) -> bool:
    """Does the way from `root` to a folder `below` it come through one folder twice, by a link?"""
    seen: set[tuple[int, int]] = set()
    folder = root or "."
    for part in ["", *filter(None, below.split(os.sep))]:
        folder = os.path.join(folder, part)
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            return True
        seen.add((status.st_dev, status.st_ino))
    return False


class _RemoteWalk:
    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def __call__(self, entry: Any, endings: tuple[bytes, ...]) -> tuple[str, list[bytes], list[str]]:
        try:
            root, files = self._files(path_in(os.fspath(entry), self._fs), endings)
        except FileNotFoundError:
            raise DataNotFoundError(f"{redact(entry)} does not exist") from None  # the cause may show the URL's secrets
        except PermissionError as error:
            raise AccessError(f"{redact(entry)}: access is denied ({redact(error)}): look at storage_options") from None
        except Exception as error:
            raise without_secrets(error) from None
        root = root.rstrip("/") or ("/" if any(p.startswith("/") for p in files) else "")
        names = [os.fsencode(p[len(root) :].lstrip("/")) for p in files]
        return root, names, sorted({os.fsdecode(n.partition(b"/")[0]) for n in names if b"/" in n})

    def _files(self, path: str, endings: tuple[bytes, ...]) -> tuple[str, list[str]]:
        """Root and full paths."""
        fs = self._fs
        if glob.has_magic(path) and not fs.exists(path):
            return _before_magic(path, "/"), [p for p in fs.glob(path) if os.fsencode(p).lower().endswith(endings)]
        if path and fs.isfile(path):
            return path.partition("?")[0].rpartition("/")[0], [path]
        found = [p for p in fs.find(path) if os.fsencode(p).lower().endswith(endings)]
        if not found and not fs.exists(path):
            raise FileNotFoundError(path)
        return path, found


def path_in(url: str, filesystem: Any) -> str:
    """The part of a URL that names a path on its file system: ``c1`` of ``zip://c1::s3://bucket/a.zip``."""
    first, chained, rest = url.partition("::")
    path: str = filesystem._strip_protocol(first if "://" in first or not chained else f"{first}://")
    inner = getattr(filesystem, "fs", None)  # of one that caches another and takes over its paths
    return path_in(rest, inner) if chained and not path and inner is not None else path


def check_one_filesystem(urls: Sequence[str], filesystem: Any) -> None:
    """All URLs of a list must lie on one file system: one host, one archive.

    Raises:
        ConfigError: they don't.
    """
    places = set()
    for url in urls:
        first, _, rest = url.partition("::")
        server = filesystem._get_kwargs_from_urls(first) if "://" in first else {}
        places.add((first.partition("://")[0], repr(sorted(server.items())), rest))
    if len(places) > 1:
        shown = ", ".join(map(redact, urls[:3]))
        raise ConfigError(f"data_path names more than one file system, server or archive ({shown}): make one dataset of each")


def without_secrets(error: Exception) -> Exception:
    """The error, or a SampleError with its text if that shows a URL with credentials or a query."""
    text = str(error)
    return error if redact(text) == text else SampleError(f"{type(error).__name__}: {redact(text)}")


def open_filesystem(url: str, storage_options: dict[str, Any] | None = None) -> Any:
    """A fresh fsspec file system for a URL (never one that was inherited by fork).

    Raises:
        ConfigError: the protocol is unknown, or its package is missing.
        DataNotFoundError: the archive that it lies in is missing.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(url, skip_instance_cache=True, **(storage_options or {}))[0]
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{redact(url)} can't be opened: {redact(error)}") from None
    except FileNotFoundError:
        raise DataNotFoundError(f"{redact(url)} does not exist") from None
    except Exception as error:
        raise without_secrets(error) from None
