"""Finds the files of a path or glob on this machine. Folders are listed in threads, since on a
network file system each listing waits for an answer.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import AccessError, DataNotFoundError, warn
from headrace.formats.resolve.file_set import (
    MOST,
    Format,
    Found,
    are_bookkeeping,
    is_hidden_part,
)
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import check_regular, redact

_THREADS = 8
"""How many folders are listed at once."""


def find_local(entry: Any, kinds: Sequence[Format]) -> Found:
    """The files of some kinds that a path or glob of this machine means.

    Raises:
        DataNotFoundError: nothing is there.
        ConfigError, AccessError: it is no file with a size; a folder may not be listed.
    """
    path = os.fsdecode(os.path.expanduser(os.fspath(entry)))
    if os.path.isdir(path) and not _is_store(path, kinds):
        return _searched(path.rstrip("/") or "/", kinds)
    if os.path.exists(path):
        check_regular(path)
        path = path.rstrip("/") or path
        return Found(os.path.dirname(path), PackedNames([os.fsencode(os.path.basename(path))]))
    if glob.has_magic(path):
        return _matched(path, kinds)
    if os.path.islink(path):
        raise DataNotFoundError(
            f"{redact(path)} is a link to {redact(os.readlink(path))}, which does not exist"
        )
    raise DataNotFoundError(f"{redact(path)} does not exist (working folder: {os.getcwd()})")


def _is_store(folder: str, kinds: Sequence[Format]) -> bool:
    for kind in kinds:
        if kind.stores and (folder.rstrip("/").lower().endswith(kind.stores) or kind.knows(folder)):
            return True
    return False


def recognized(path: str, kinds: Sequence[Format]) -> Format | None:
    """The first of some kinds that a local file or folder is of by its content."""
    for kind in kinds:
        if kind.knows(path):
            return kind
    return None


def _searched(folder: str, kinds: Sequence[Format]) -> Found:
    """All files below a folder, and the stores that lie in it."""
    endings = list[bytes]()
    ends_of_stores = list[bytes]()
    for kind in kinds:
        endings += map(os.fsencode, kind.endings)
        ends_of_stores += map(os.fsencode, kind.stores)
    stores = tuple(ends_of_stores)
    inside = list[bytes]()
    if stores:
        for name in os.listdir(os.fsencode(folder)):
            if name.lower().endswith(stores) and not is_hidden_part(name):
                inside.append(name)
    if not endings:
        found = Found(folder, PackedNames(inside), searched=True)
    else:
        listing = list_folder(os.fsencode(folder), tuple(endings), stores)
        if listing.dead_links:
            _warn_of_dead_links(folder, list(map(os.fsdecode, listing.dead_links)))
        names = listing.names
        if inside:
            names = PackedNames([*inside, *names])
        found = Found(folder, names, listing.folders, searched=True, are_sorted=not inside)
    if not inside and (not len(found.names) or are_bookkeeping(found.names)):
        listing = list_folder(os.fsencode(folder), (b"",), (b".zarr",))
        found.others = list(map(os.fsdecode, itertools.islice(listing.names, MOST)))
    return found


def _matched(pattern: str, kinds: Sequence[Format]) -> Found:
    """What a glob matches: names that end as they should; or, where none does, what is recognized
    by its content.
    """
    root = before_magic(pattern, os.sep).rstrip("/")
    if not root and pattern.startswith("/"):
        root = "/"
    paths = _globbed(pattern)
    endings = tuple(ending for kind in kinds for ending in kind.endings)
    stores = tuple(ending for kind in kinds for ending in kind.stores)
    matches = list[str]()
    fitting = list[str]()
    dead = list[str]()
    for path in paths:
        is_file = os.path.isfile(path)
        if not is_file and not os.path.exists(path):
            dead.append(path)
            continue
        name = os.path.relpath(path, root or ".")
        # `glob` leaves out what begins with a dot
        if "__MACOSX" in name.split("/") or not (is_file or stores):
            continue
        matches.append(name)
        if name.lower().endswith(stores) or (is_file and name.lower().endswith(endings)):
            fitting.append(name)
    if dead:
        _warn_of_dead_links(pattern, dead)
    if not fitting:
        fitting = [name for name in matches if recognized(os.path.join(root, name), kinds)]
    if not matches:
        raise DataNotFoundError(
            f"nothing matches {redact(pattern)} (working folder: {os.getcwd()}): is the path right?"
        )
    names = list(map(os.fsencode, fitting))
    folders = {name.partition(b"/")[0] for name in names if b"/" in name}
    found = Found(root, PackedNames(names), folders)
    if not fitting:
        found.others = matches[:MOST]
    return found


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
    tops = [start]
    if glob.has_magic(start):
        tops = glob.glob(start)
    for top in tops:
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
    links = "a link leads"
    if len(dead) != 1:
        links = f"{len(dead):,} links lead"
    warn(
        f"{redact(place)}: {links} to what does not exist, and nothing is read there: fix or "
        f"remove {redact(min(dead))!r}"
    )


def before_magic(path: str, separator: str) -> str:
    """The folders of a glob before the first one with a wildcard."""
    return re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition(separator)[0]


# -- listing


class Listing(NamedTuple):
    """What was found below a folder.

    Attributes:
        names: the files, relative to the folder, in the order of their parts.
        folders: names of the folders of its first level.
        dead_links: names of links that lead to nothing.
    """

    names: PackedNames
    folders: set[bytes]
    dead_links: list[bytes]


class _Folder(NamedTuple):
    """A folder that is listed: its name with b"\0" behind each part, and (device, inode) of the
    folders that it lies in, to which no link may lead back.
    """

    name: bytes
    above: frozenset[tuple[int, int]]


def list_folder(root: bytes, endings: tuple[bytes, ...], stores: tuple[bytes, ...] = ()) -> Listing:
    """All files below a folder whose names end in one of `endings` (lower case); links are
    followed, loops of them entered once. Files and folders that are hidden (`is_hidden_part`) are
    left out; folders that end in one of `stores` are not entered, and count as files.

    Names sort as the lists of their parts do, byte by byte: with b"\0" for b"/" that is the order
    of plain byte strings, since b"\0" is less than any byte of a part.

    Raises:
        AccessError: a folder may not be listed.
        DataNotFoundError: one went away meanwhile.
    """
    level = [_Folder(b"", frozenset())]
    names = list[bytes]()
    folders = set[bytes]()
    dead_links = list[bytes]()
    with ThreadPoolExecutor(_THREADS, "headrace-list") as pool:
        while level:
            count = len(level)
            listings = pool.map(_listed, [root] * count, level, [endings] * count, [stores] * count)
            level = []
            for files, below, dead in listings:
                names += files
                level += below
                dead_links += dead
            if not folders:
                folders.update(folder.name[:-1] for folder in level)
    names.sort()
    offsets = np.cumsum([0, *map(len, names)])
    data = np.frombuffer(b"".join(names).replace(b"\0", b"/"), np.uint8)
    return Listing(PackedNames.from_arrays(data, offsets), folders, dead_links)


def _listed(
    root: bytes, folder: _Folder, endings: tuple[bytes, ...], stores: tuple[bytes, ...]
) -> tuple[list[bytes], list[_Folder], list[bytes]]:
    """The files, folders and dead links in one folder."""
    files = list[bytes]()
    below = list[_Folder]()
    dead_links = list[bytes]()
    path = os.path.join(root, folder.name.replace(b"\0", b"/")).rstrip(b"/") or b"/"
    try:
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        if identity in folder.above:
            return files, below, dead_links
        above = folder.above | {identity}
        with os.scandir(path) as entries:
            for entry in entries:
                name = entry.name.lower()
                if is_hidden_part(entry.name):
                    continue
                try:
                    if name.endswith(endings) and (entry.is_file() or name.endswith(stores)):
                        files.append(folder.name + entry.name)
                    elif entry.is_dir():
                        if not name.endswith(stores):
                            below.append(_Folder(folder.name + entry.name + b"\0", above))
                    elif entry.is_symlink() and not os.path.exists(entry.path):
                        dead_links.append(entry.path)
                except OSError as error:
                    if error.errno != errno.ELOOP:  # a link to itself
                        raise
                    dead_links.append(entry.path)
    except PermissionError as error:
        raise AccessError(
            f"{redact(error.filename or path)}: this user may not list the folder "
            f"({error.strerror})"
        ) from error
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"{redact(path)} went away while its files were listed: start again"
        ) from error
    return files, below, dead_links
