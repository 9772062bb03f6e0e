"""Finds the files of a path or glob on this machine. Folders are listed in threads, since on a
network file system each listing waits for an answer.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, NamedTuple

from headrace.errors import AccessError, DataNotFoundError, warn
from headrace.formats.resolve.file_set import (
    MOST,
    Format,
    Found,
    encoded,
    is_hidden_part,
    plain_bytes,
    plain_name,
)
from headrace.io.paths import check_regular, redact

_THREADS = 8
"""How many folders are listed at once."""
_GROUP = 32
"""Folders that a thread lists one after the other, at most."""


def find_local(entry: Any, kinds: Sequence[Format]) -> Found:
    """The files of some kinds that a path or glob of this machine means.

    Raises:
        DataNotFoundError: nothing is there.
        ConfigError, AccessError: it is no file with a size; a folder may not be listed.
    """
    path = os.fsdecode(os.path.expanduser(os.fspath(entry)))
    if os.path.isdir(path) and not _is_store(path, kinds):
        return list_folder(path.rstrip("/") or "/", kinds)
    if os.path.exists(path):
        check_regular(path)
        path = path.rstrip("/") or path
        return Found(os.path.dirname(path), [os.fsencode(os.path.basename(path))])
    if glob.has_magic(path):
        return _matched(path, kinds)
    if os.path.islink(path):
        raise DataNotFoundError(
            f"{redact(path)} is a link to {redact(os.readlink(path))}, which does not exist"
        )
    raise DataNotFoundError(f"{redact(path)} does not exist (working folder: {os.getcwd()})")


def _is_store(folder: str, kinds: Sequence[Format]) -> bool:
    name = folder.rstrip("/").lower()
    for kind in kinds:
        if not kind.stores:
            continue
        if name.endswith(kind.stores) or (kind.recognizes and kind.recognizes(folder)):
            return True
    return False


def recognized(path: str, kinds: Sequence[Format]) -> Format | None:
    """The first of some kinds that a local file or folder is of by its content."""
    for kind in kinds:
        if kind.recognizes is not None and kind.recognizes(path):
            return kind
    return None


def _matched(pattern: str, kinds: Sequence[Format]) -> Found:
    """What a glob matches: names that end as they should; or, where none does, what is recognized
    by its content.
    """
    root = before_magic(pattern, os.sep).rstrip("/")
    if not root and pattern.startswith("/"):
        root = "/"
    endings = tuple(ending for kind in kinds for ending in kind.endings)
    stores = tuple(ending for kind in kinds for ending in kind.stores)
    found = Found(root, [])
    dead = list[str]()
    for path in _globbed(pattern):
        is_file = os.path.isfile(path)
        name = os.path.relpath(path, root or ".")
        ends = plain_name(name)
        if not is_file and not os.path.exists(path):
            dead.append(path)
        # `glob` leaves out what begins with a dot
        elif "__MACOSX" in name.split("/") or not (is_file or stores):
            continue
        elif ends.endswith(stores) or (is_file and ends.endswith(endings)):
            found.names.append(os.fsencode(name))
        else:
            found.others.append(os.fsencode(name))
    if dead:
        _warn_of_dead_links(pattern, dead)
    if not found.names:
        for other in found.others:
            if recognized(os.path.join(root, os.fsdecode(other)), kinds):
                found.names.append(other)
    if not found.names and not found.others:
        raise DataNotFoundError(
            f"nothing matches {redact(pattern)} (working folder: {os.getcwd()}): is the path right?"
        )
    found.folders = {name.partition(b"/")[0] for name in found.names if b"/" in name}
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
    around = dict[str, frozenset[tuple[int, int]]]()
    for folder, below, _ in os.walk(top or ".", followlinks=True):
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        above = around.pop(folder, frozenset())
        if identity in above:
            below.clear()
            continue
        yield folder
        below[:] = [name for name in below if name[0] != "."]
        for name in below:
            around[os.path.join(folder, name)] = above | {identity}


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


class _Folder(NamedTuple):
    """A folder that is listed: its name with b"/" behind each part, and (device, inode) of the
    folders that it lies in, to which no link may lead back.
    """

    name: bytes
    above: frozenset[tuple[int, int]]


class _Wanted(NamedTuple):
    """Below which folder what is looked for: endings of files, and of stores, in lower case."""

    root: bytes
    endings: tuple[bytes, ...]
    stores: tuple[bytes, ...]


def list_folder(root: str, kinds: Sequence[Format]) -> Found:
    """All files of some kinds below a folder, in any order, and the stores that lie in it. Links
    are followed, loops of them entered once. Files and folders that are hidden (`is_hidden_part`)
    are left out; stores are not entered.

    Raises:
        AccessError: a folder may not be listed.
        DataNotFoundError: one went away meanwhile.
    """
    endings = list[str]()
    stores = list[str]()
    for kind in kinds:
        endings += kind.endings
        stores += kind.stores
    wanted = _Wanted(os.fsencode(root), encoded(endings), encoded(stores))
    found = Found(root, [], searched=True)
    level = [_Folder(b"", frozenset())]
    dead_links = list[str]()
    with ThreadPoolExecutor(_THREADS, "headrace-list") as pool:
        while level:
            size = max(1, min(_GROUP, len(level) // (4 * _THREADS)))
            groups = list[list[_Folder]]()
            for start in range(0, len(level), size):
                groups.append(level[start : start + size])
            level = []
            for names, others, below, dead in pool.map(_listed, repeat(wanted), groups):
                found.names += names
                found.others += others[: MOST - len(found.others)]
                level += below
                dead_links += dead
            if not found.folders:
                for folder in level:
                    found.folders.add(folder.name[:-1])
            if found.names and not wanted.endings:  # stores are on the first level
                break
    if dead_links:
        _warn_of_dead_links(root, dead_links)
    return found


class _Listing(NamedTuple):
    """What is in some folders."""

    names: list[bytes]
    """Files that are wanted."""
    others: list[bytes]
    below: list[_Folder]
    dead_links: list[str]


def _listed(wanted: _Wanted, folders: Sequence[_Folder]) -> _Listing:
    """Lists some folders."""
    listing = _Listing([], [], [], [])
    for folder in folders:
        _list_into(listing, wanted, folder)
    return listing


def _list_into(listing: _Listing, wanted: _Wanted, folder: _Folder) -> None:
    names, others, below, dead_links = listing
    path = os.path.join(wanted.root, folder.name).rstrip(b"/") or b"/"
    try:
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        if identity in folder.above:
            return
        above = folder.above | {identity}
        with os.scandir(path) as entries:
            for entry in entries:
                if is_hidden_part(entry.name):
                    continue
                name = folder.name + entry.name
                ends = plain_bytes(entry.name)
                try:
                    if ends.endswith(wanted.stores):
                        if not folder.name:
                            names.append(name)
                    elif entry.is_file():
                        if ends.endswith(wanted.endings):
                            names.append(name)
                        else:
                            others.append(name)
                    elif entry.is_dir():
                        below.append(_Folder(name + b"/", above))
                    elif entry.is_symlink() and not os.path.exists(entry.path):
                        dead_links.append(os.fsdecode(entry.path))
                except OSError as error:
                    if error.errno != errno.ELOOP:  # a link to itself
                        raise
                    dead_links.append(os.fsdecode(entry.path))
    except PermissionError as error:
        raise AccessError(
            f"{redact(error.filename or path)}: this user may not list the folder "
            f"({error.strerror})"
        ) from error
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"{redact(path)} went away while its files were listed: start again"
        ) from error
