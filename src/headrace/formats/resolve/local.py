"""Finds the files of a path or glob on this machine."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

from headrace.errors import DataNotFoundError, warn
from headrace.formats.resolve.contents import MOST, are_bookkeeping, is_hidden_part, names_below
from headrace.formats.resolve.file_set import Format, Found, in_order
from headrace.formats.resolve.folders import list_folder
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import check_regular, redact


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
