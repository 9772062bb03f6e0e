"""Lists local folders in threads: all files below one, in the order of the parts of their names.

Threads list many folders at once, since on a network file system each listing waits for an answer.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from headrace.errors import AccessError, DataNotFoundError
from headrace.formats.resolve.contents import is_hidden_part
from headrace.io.packed_strings import NamesBuilder, PackedNames
from headrace.io.paths import redact

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
