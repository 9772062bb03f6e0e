"""Which files are there?

Turns a path, a list of paths, a glob or an fsspec URL into a sorted, compact list of files. Sorted by the parts of their names
relative to the root, byte by byte: the same on every machine, file system and locale.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.arguments import described
from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError, HeadraceError, RemoteError
from headrace.io.packed_strings import NamesBuilder, order_of_parts
from headrace.io.packed_strings import PackedNames as PackedNames
from headrace.io.paths import is_url as is_url
from headrace.io.paths import redact as redact
from headrace.io.remote.fsspec_calls import path_in
from headrace.io.resolve.contents import MOST, are_bookkeeping, is_hidden, names_below, summary_of, tables_among
from headrace.io.resolve.folders import Listing, list_folder
from headrace.io.resolve.listings import kept_listing
from headrace.memory.anonymous import SharedArray

DataPath = str | os.PathLike[Any] | Sequence[str | os.PathLike[Any]]


def entries_of(data_path: DataPath, name: str = "data_path") -> list[Any]:
    """The paths that `data_path` names.

    Args:
        data_path: as the user gave it.
        name: the argument's, for messages.

    Raises:
        ConfigError: it is no path and no list of paths.
        DataNotFoundError: it is an empty one.
    """
    wanted = f"{name} must be a path, a glob, a URL or a list of these"
    if isinstance(data_path, (str, bytes, os.PathLike)):
        entries: list[Any] = [data_path]
    elif hasattr(data_path, "filename") or hasattr(data_path, "read"):
        raise ConfigError(f"{wanted}, not {described(data_path)} that is open: pass its path")
    elif isinstance(data_path, Mapping) or not isinstance(data_path, Iterable):
        raise ConfigError(f"{wanted}, not {described(data_path)}")
    elif isinstance(data_path, Iterator):
        raise ConfigError(f"{wanted}, not {described(data_path)}, which gives its paths once: pass list(...) of it")
    else:
        entries = list(data_path)
    for number, entry in enumerate(entries):
        if not isinstance(entry, (str, bytes, os.PathLike)):
            raise ConfigError(f"{wanted}, and entry {number} of the {len(entries):,} given is {described(entry)}")
    if not entries or not all(map(os.fspath, entries)):
        raise DataNotFoundError(f"{name} is empty ({data_path!r}): name at least one folder or file")
    return entries


@dataclass(frozen=True, slots=True)
class FileList:
    """The files found.

    Attributes:
        roots: folders (or URL prefixes) that the names are relative to.
        root_of: [files] int32, number of each file's root, or None where there is one root.
        names: relative names with '/' between their parts, as bytes, in the order of their parts.
        url: are the roots paths of an fsspec file system?
        folders: names of the first-level folders of the roots, sorted, also those without files.
        searched: the roots that were searched through.
    """

    roots: tuple[str, ...]
    root_of: SharedArray | None
    names: PackedNames
    url: bool
    folders: tuple[str, ...]
    searched: frozenset[str]

    def path(self, index: int) -> bytes:
        """The full path of one file."""
        root = self.roots[0 if self.root_of is None else int(self.root_of.array[index])]
        name: bytes = self.names[index]
        return os.path.join(os.fsencode(root), name) if root else name


class Server(Protocol):
    """Where files lie that are far away: `headrace.io.remote.client.Remote`."""

    @property
    def filesystem(self) -> Any:
        """fsspec's."""

    def ask(self, question: str, url: str, **options: Any) -> Any:
        """What a method of it gives, however often it takes."""


def scan(
    data_path: DataPath, extensions: Sequence[str], server: Server | None = None, cache_dir: str | None = None, *, asks: bool = True
) -> FileList:
    """All files under `data_path` that end in one of `extensions` (any case). Hidden files and folders, whose names begin with a dot, don't
    count, unless they are named themselves.

    Args:
        data_path: a folder (searched through, links followed, loops of links entered once), a file, a glob, or a list of these;
            with a `server`, paths on it.
        extensions: such as (".jpg", ".png"). A file that is named itself is taken whatever its ending.
        server: that lists; or None for local paths.
        cache_dir: a folder where listings of local folders are kept and found again while they still hold; None: nowhere.
        asks: with a `server`: ask whether there is such a file, also where a path ends as one; if not, whoever reads it finds out.

    Raises:
        DataNotFoundError: a path is missing, or nothing fits; the message says what is there, and what reads it.
        FormatError: all that fits is what HuggingFace writes beside the tables of a data set.
        AccessError, RemoteError: a server does not say: see `headrace.io.remote.client.Remote.ask`.
    """
    entries = entries_of(data_path)
    endings = tuple(os.fsencode(e.lower()) for e in extensions)
    walk = _LocalWalk(endings, cache_dir) if server is None else _RemoteWalk(endings, server, asks)
    if len(entries) == 1:
        root_of, found = None, walk(entries[0])
        roots: tuple[str, ...] = (found.root,)
    else:
        roots, root_of, found = _merged(map(walk, entries))
    shown = ", ".join(redact(e) for e in entries[:3])
    if not len(found.names):
        if not walk.others and all(glob.has_magic(os.fsdecode(entry)) for entry in entries):
            raise DataNotFoundError(f"nothing matches {shown}{_working_folder(server)}: is the path right?")
        raise DataNotFoundError(f"no file under {shown} ends in any of {', '.join(extensions)}; {summary_of(walk.others)}")
    if (tables := tables_among(walk.others)) is not None and are_bookkeeping(found.names):
        raise FormatError(f"{shown} holds tables, and no texts but what was written beside them: {tables}")
    folders = tuple(sorted(map(os.fsdecode, found.folders), key=os.fsencode))
    return FileList(roots, root_of, found.names, server is not None, folders, frozenset(found.searched))


def _working_folder(server: Server | None) -> str:
    return f" (working folder: {os.getcwd()})" if server is None else ""


@dataclass(slots=True)
class _Found:
    """What an entry leads to: names below a root, in the order of their parts; its first-level folders; itself, if it was searched."""

    root: str
    names: PackedNames
    folders: set[bytes]
    searched: set[str]


def _merged(lists: Iterable[_Found]) -> tuple[tuple[str, ...], SharedArray | None, _Found]:
    """Several lists as one: the roots, the root of each name, and the rest. Of equal names that of an earlier list comes first."""
    builder, roots, numbers, counts = NamesBuilder(), dict[str, int](), list[int](), list[int]()
    together = _Found("", PackedNames(), set(), set())
    for found in lists:
        data, offsets = found.names.arrays
        builder.add_joined(data, np.diff(offsets))
        numbers.append(roots.setdefault(found.root, len(roots)))
        counts.append(len(found.names))
        together.folders |= found.folders
        together.searched |= found.searched
    together.names, root_of = builder.build(), np.repeat(np.array(numbers, np.int32), counts)
    order = order_of_parts(together.names)
    if order is not None:
        together.names, root_of = together.names.take(order), root_of[order]
    return tuple(roots), SharedArray(root_of) if len(roots) > 1 else None, together


def _in_order(names: PackedNames) -> PackedNames:
    order = order_of_parts(names)
    return names if order is None else names.take(order)


class _LocalWalk:
    """Finds the files of a path on this machine.

    Attributes:
        others: what else is there, where there is nothing that counts: names.
    """

    def __init__(self, endings: tuple[bytes, ...], cache_dir: str | None) -> None:
        self._endings, self._cache_dir = endings, cache_dir
        self.others: list[str] = []

    def __call__(self, entry: str | os.PathLike[Any]) -> _Found:
        path = os.fsdecode(os.path.expanduser(os.fspath(entry)))
        if os.path.isdir(path):
            listing = self._list(path)
            if not len(listing.names) or are_bookkeeping(listing.names):
                self.others += itertools.islice(names_below(path), MOST)
            return _Found(path, listing.names, {name for name in listing.folders if name and b"/" not in name}, {path})
        if os.path.exists(path):
            return _Found(os.path.dirname(path), PackedNames([os.fsencode(os.path.basename(path))]), set(), set())
        if glob.has_magic(path):
            return self._match(path)
        raise DataNotFoundError(f"{redact(path)} does not exist{_working_folder(None)}")

    def _list(self, folder: str) -> Listing:
        if self._cache_dir is None:
            return list_folder(os.fsencode(folder), self._endings)
        return kept_listing(folder, self._endings, self._cache_dir)

    def _match(self, pattern: str) -> _Found:
        root = _before_magic(pattern, os.sep) or ("/" if pattern.startswith("/") else "")
        matches = [os.path.relpath(m, root or ".") for m in glob.glob(pattern, recursive=True) if os.path.isfile(m)]
        looping = {folder: _loops(root, folder) for folder in set(map(os.path.dirname, matches))}
        kept = [os.fsencode(m) for m in matches if not looping[os.path.dirname(m)]]
        kept = [k for k in kept if k.lower().endswith(self._endings)]
        self.others += [] if kept else matches[:MOST]
        return _Found(root, _in_order(PackedNames(kept)), {k.partition(b"/")[0] for k in kept if b"/" in k}, set())


def _before_magic(path: str, separator: str) -> str:
    """The folders of a glob before the first one with a wildcard."""
    found = re.search(r"[*?\[]", path)
    return path[: found.start() if found else None].rpartition(separator)[0]


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
    """Finds the files of a path on a server.

    Attributes:
        others: what else is there, where there is nothing that counts: paths.
    """

    def __init__(self, endings: tuple[bytes, ...], server: Server, asks: bool) -> None:
        self._endings, self._server, self._asks = endings, server, asks
        self.others: list[str] = []

    def __call__(self, entry: Any) -> _Found:
        try:
            root, files, endings, is_searched = self._files(os.fspath(entry))
        except FileNotFoundError:
            raise DataNotFoundError(f"{redact(entry)} does not exist") from None  # the cause may show the URL's secrets
        root = root.rstrip("/") or ("/" if any(p.startswith("/") for p in files) else "")
        folders: set[bytes] = set()
        pattern = path_in(os.fspath(entry), self._server.filesystem)[len(root) :]
        shows_hidden = endings == (b"",) or "/." in pattern
        names = PackedNames(_below(root, files, endings, folders, shows_hidden))
        if not len(names) or are_bookkeeping(names):
            self.others += (path for path in files[:MOST] if not is_hidden(os.fsencode(path[len(root) :].lstrip("/"))))
        del files  # as many strings: they go before the names are sorted
        return _Found(root, _in_order(names), folders, {root} if is_searched else set())

    def _files(self, url: str) -> tuple[str, list[str], tuple[bytes, ...], bool]:
        """Root, full paths, which endings count, and whether all below the root was searched through."""
        path = path_in(url, self._server.filesystem)
        kind = "file" if not self._asks and names_file(path, self._endings) else self._kind(url, path)
        if kind == "file":
            return path.partition("?")[0].rpartition("/")[0], [path], (b"",), False
        if kind != "directory" and glob.has_magic(path):
            return _before_magic(path, "/"), self._server.ask("glob", url), self._endings, False
        refusal = kind if isinstance(kind, HeadraceError) else None
        try:
            found = self._server.ask("find", url)
        except (FileNotFoundError, AccessError):
            if refusal is None:
                raise
            raise refusal from None
        if not found and kind != "directory":
            raise refusal or FileNotFoundError(path)
        return path, found, self._endings, True

    def _kind(self, url: str, path: str) -> str | HeadraceError | None:
        """ "file", or "directory", as is what all lies in; None: there is no such thing. Or an error, if nothing is found below: the server
        does not tell, as where a user may see some folders of a bucket alone; or what it has is a page."""
        try:
            info = self._server.ask("info", url) if path else {"type": "directory"}
            if _is_page(path, info):
                return FormatError(f"{redact(url)} is a web page in which no files are listed: name the files, or look at the URL")
            return str(info["type"])
        except FileNotFoundError:
            return None
        except (AccessError, RemoteError) as error:
            if isinstance(error, RemoteError) and not error.is_final:
                raise
            return error


def _is_page(path: str, info: Any) -> bool:
    """Is a "file" what a server of the web shows of a folder? fsspec calls everything a file there."""
    place = path.partition("?")[0]
    is_named = "." in place.rpartition("/")[2]
    return info["type"] == "file" and (place.endswith("/") or (not is_named and "html" in str(info.get("mimetype"))))


def _below(root: str, paths: Iterable[str], endings: tuple[bytes, ...], folders: set[bytes], shows_hidden: bool) -> Iterator[bytes]:
    """The names relative to the root; their first-level folders are added to `folders`."""
    start = len(root)
    for path in paths:
        name = os.fsencode(path[start:].lstrip("/"))
        if name.lower().endswith(endings) and (shows_hidden or not is_hidden(name)):
            folder, slash, _ = name.partition(b"/")
            if slash:
                folders.add(folder)
            yield name


def names_file(url: str, endings: tuple[bytes, ...]) -> bool:
    """Does a URL, or a path of a server, look like that of one file, which ends as it should?"""
    plain = url.partition("::")[0].partition("?")[0]
    return not glob.has_magic(plain) and os.fsencode(plain).lower().endswith(endings)


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
