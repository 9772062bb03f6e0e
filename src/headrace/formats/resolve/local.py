"""Finds the files of a path or glob on this machine."""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.errors import AccessError, DataNotFoundError, warn
from headrace.formats.resolve.file_set import (
    MOST,
    Format,
    Found,
    are_bookkeeping,
    in_order,
    is_hidden_part,
)
from headrace.io.packed_strings import NamesBuilder, PackedNames
from headrace.io.paths import check_regular, redact

_THREADS = 8
"""How many folders are listed at once."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What was found below a folder.

    Attributes:
        names: the files, relative to the folder, in the order of their parts.
        folders: names of the folders of its first level.
        dead_links: names of links that lead to nothing.
    """

    names: PackedNames
    folders: set[bytes]
    dead_links: list[bytes]


@dataclass(slots=True)
class _Folder:
    """One folder.

    Attributes:
        name: relative to the first folder, with a slash at its end; of the first itself b"".
        above: (device, inode) of the folders that it lies in, to which no link may lead back.
        files, folders: the names in it.
        dead_links: relative to the first folder.
    """

    name: bytes
    above: frozenset[tuple[int, int]]
    files: list[bytes] = field(default_factory=list)
    folders: list[bytes] = field(default_factory=list)
    dead_links: list[bytes] = field(default_factory=list)

    def list(self, root: bytes, endings: tuple[bytes, ...]) -> None:
        path = os.path.join(root, self.name).rstrip(b"/") or b"/"
        try:
            status = os.stat(path)
            identity = (status.st_dev, status.st_ino)
            if identity in self.above:
                return
            self.above |= {identity}
            with os.scandir(path) as entries:
                for entry in entries:
                    if not is_hidden_part(entry.name):
                        self._add(entry, endings)
        except PermissionError as error:
            raise AccessError(
                f"{redact(error.filename or path)}: this user may not list the folder "
                f"({error.strerror})"
            ) from error
        except FileNotFoundError as error:
            raise DataNotFoundError(
                f"{redact(path)} went away while its files were listed: start again"
            ) from error

    def _add(self, entry: os.DirEntry[bytes], endings: tuple[bytes, ...]) -> None:
        try:
            if entry.name.lower().endswith(endings) and entry.is_file():
                self.files.append(entry.name)
            elif entry.is_dir():
                self.folders.append(entry.name)
            elif entry.is_symlink() and not os.path.exists(entry.path):
                self.dead_links.append(self.name + entry.name)
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link to itself
                raise
            self.dead_links.append(self.name + entry.name)


def list_folder(root: bytes, endings: tuple[bytes, ...]) -> Listing:
    """All files below a folder whose names end in one of `endings` (lower case); links are
    followed, loops of them entered once. Files and folders that are hidden (`is_hidden_part`) are
    left out.

    Raises:
        AccessError: a folder may not be listed.
        DataNotFoundError: one went away meanwhile.
    """
    first = _Folder(b"", frozenset())
    level = [first]
    listed: dict[bytes, _Folder] = {}
    with ThreadPoolExecutor(_THREADS, "headrace-list") as pool:
        while level:
            for _ in pool.map(lambda folder: folder.list(root, endings), level):
                pass
            listed.update((folder.name, folder) for folder in level)
            level = [
                _Folder(folder.name + name + b"/", folder.above)
                for folder in level
                for name in folder.folders
            ]
    dead_links = [link for folder in listed.values() for link in folder.dead_links]
    return Listing(_names_in_order(listed), set(first.folders), dead_links)


def _names_in_order(listed: dict[bytes, _Folder]) -> PackedNames:
    """The names of all files, in the order of their parts; `listed` is empty afterwards.

    Names sort as the lists of their parts do, byte by byte. With b"\\0" for b"/" that is the order
    of plain byte strings, since b"\\0" is less than any byte of a part. A file has the key `name`
    in its folder and a folder `name + b"\\0"`, with which everything below it begins. So it is
    enough to sort each folder by these keys, and to walk depth first.
    """
    builder = NamesBuilder()
    coming = [(b"", [b"\0"], 0)]
    while coming:
        prefix, keys, start = coming.pop()
        stop = start
        while stop < len(keys) and not keys[stop].endswith(b"\0"):
            stop += 1
        _add_files(builder, prefix, keys[start:stop])
        if stop == len(keys):
            continue
        coming.append((prefix, keys, stop + 1))
        name = prefix + keys[stop][:-1] + b"/"
        if keys[stop] == b"\0":
            name = b""
        folder = listed.pop(name)
        inside = folder.files + [below + b"\0" for below in folder.folders]
        inside.sort()
        coming.append((name, inside, 0))
    return builder.build()


def _add_files(builder: NamesBuilder, prefix: bytes, names: list[bytes]) -> None:
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    builder.add_joined(prefix.join([b"", *names]), lengths + len(prefix))


def names_below(root: str) -> Iterator[str]:
    """Names of the files below a local folder that are not hidden, in no order; of Zarr stores,
    which are folders, their own.
    """
    seen: set[tuple[int, int]] = set()  # links may lead in circles
    for folder, folders, names in os.walk(root, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        stores = [name for name in folders if name.lower().endswith(".zarr")]
        folders[:] = [
            name for name in folders if not is_hidden_part(os.fsencode(name)) and name not in stores
        ]
        yield from (
            name for name in itertools.chain(names, stores) if not is_hidden_part(os.fsencode(name))
        )


class LocalWalk:
    """Finds the files of entries.

    Args:
        kind: of the files that count.

    Attributes:
        others: names of what else is there, where nothing counts.
    """

    def __init__(self, kind: Format) -> None:
        self._kind = kind
        self._endings = tuple(os.fsencode(ending) for ending in kind.endings)
        self.others: list[str] = []

    def __call__(self, entry: Any) -> Found:
        path = os.fsdecode(os.path.expanduser(os.fspath(entry)))
        if os.path.isdir(path) and not self._is_store(path):
            return self._searched(path.rstrip("/") or "/")
        if os.path.exists(path):
            check_regular(path)
            path = path.rstrip("/") or path
            return Found(os.path.dirname(path), PackedNames([os.fsencode(os.path.basename(path))]))
        if glob.has_magic(path):
            return self._matched(path)
        if os.path.islink(path):
            raise DataNotFoundError(
                f"{redact(path)} is a link to {redact(os.readlink(path))}, which does not exist"
            )
        raise DataNotFoundError(f"{redact(path)} does not exist (working folder: {os.getcwd()})")

    def _is_store(self, folder: str) -> bool:
        if not self._kind.stores:
            return False
        return folder.rstrip("/").lower().endswith(self._kind.stores) or self._recognizes(folder)

    def _recognizes(self, path: str) -> bool:
        return self._kind.recognizes is not None and self._kind.recognizes(path)

    def _searched(self, folder: str) -> Found:
        """All files below a folder, and the stores that lie in it."""
        stores = [os.fsencode(name) for name in self._stores_in(folder)]
        if not self._endings:
            if not stores:
                self.others += itertools.islice(names_below(folder), MOST)
            return Found(folder, in_order(stores, self._kind.keeps_order), set(), {folder})
        listing = list_folder(os.fsencode(folder), self._endings)
        _warn_of_dead_links(folder, list(map(os.fsdecode, listing.dead_links)))
        if not stores and (not len(listing.names) or are_bookkeeping(listing.names)):
            self.others += itertools.islice(names_below(folder), MOST)
        names = listing.names
        if stores or self._kind.keeps_order:
            names = in_order([*stores, *listing.names], self._kind.keeps_order)
        return Found(folder, names, listing.folders, {folder})

    def _stores_in(self, folder: str) -> list[str]:
        if not self._kind.stores:
            return []
        return [
            name
            for name in os.listdir(folder)
            if name.lower().endswith(self._kind.stores) and not is_hidden_part(os.fsencode(name))
        ]

    def _matched(self, pattern: str) -> Found:
        """What a glob matches: names that end as they should; or, where none does, what is
        recognized by its content.
        """
        root = before_magic(pattern, os.sep).rstrip("/") or ("/" if pattern.startswith("/") else "")
        globbed = _globbed(pattern)
        files = list(filter(os.path.isfile, globbed))
        others = set(globbed).difference(files)
        _warn_of_dead_links(pattern, sorted(path for path in others if not os.path.exists(path)))
        matches = [
            os.path.relpath(match, root or ".")
            for match in (globbed if self._kind.stores else files)
        ]
        # as `glob` leaves out what begins with a dot
        matches = [match for match in matches if "__MACOSX" not in match.split("/")]
        looping = {folder: _loops(root, folder) for folder in set(map(os.path.dirname, matches))}
        matches = [match for match in matches if not looping[os.path.dirname(match)]]
        fitting = [m for m in matches if self._fits(root, m)] or [
            m for m in matches if self._recognizes(os.path.join(root, m))
        ]
        self.others += [] if fitting else matches[:MOST]
        names = list(map(os.fsencode, fitting))
        return Found(
            root,
            in_order(names, self._kind.keeps_order),
            {name.partition(b"/")[0] for name in names if b"/" in name},
        )

    def _fits(self, root: str, name: str) -> bool:
        lower = name.lower()
        if lower.endswith(self._kind.stores):
            return True
        return lower.endswith(self._kind.endings) and (
            not self._kind.stores or os.path.isfile(os.path.join(root, name))
        )


def _globbed(pattern: str) -> list[str]:
    """What `glob.glob` gives of a pattern, but "**" enters no folder that it is in already: where
    several links lead back, it would never end.
    """
    parts = pattern.replace(os.sep, "/").split("/")
    if "**" not in parts:
        return glob.glob(pattern)
    at = parts.index("**")
    start = "/".join(parts[:at])
    rest = "/".join(parts[at + 1 :] or ["*"])
    if at and not start:
        start = "/"
    found: dict[str, None] = {}
    for top in glob.glob(start) if glob.has_magic(start) else [start]:
        for folder in _folders_from(top):
            before = glob.escape(os.path.join(folder, ""))
            found |= dict.fromkeys(_globbed(before + (rest or "*/")))
    return list(found)


def _folders_from(top: str) -> Iterator[str]:
    """A folder and those below it, hidden ones left out; through links too, if they don't lead to
    a folder that they are in.
    """
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    while waiting:
        folder, around = waiting.pop()
        try:
            status = os.stat(folder or ".")
            entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
        except OSError:  # as `glob` passes over what it may not list
            continue
        own = (status.st_dev, status.st_ino)
        if own in around:
            continue
        yield folder
        for entry in entries:
            if entry.name[0] != "." and entry.is_dir():
                waiting.append((os.path.join(folder, entry.name), around | {own}))


def _warn_of_dead_links(place: str, dead: list[str]) -> None:
    if dead:
        links = "a link leads"
        if len(dead) != 1:
            links = f"{len(dead):,} links lead"
        warn(
            f"{redact(place)}: {links} to what does not exist, and nothing is read there: fix or "
            f"remove {redact(min(dead))!r}"
        )


def before_magic(path: str, separator: str) -> str:
    """The folders of a glob before the first one with a wildcard."""
    found = re.search(r"[*?\[]", path)
    return path[: found.start() if found else None].rpartition(separator)[0]


def _loops(root: str, below: str) -> bool:
    """True if the path from `root` to a folder `below` it comes through one folder twice, by a
    link.
    """
    seen: set[tuple[int, int]] = set()
    folder = root or "."
    for part in ["", *filter(None, below.split(os.sep))]:
        folder = os.path.join(folder, part)
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            return True
        seen.add((status.st_dev, status.st_ino))
    return False
