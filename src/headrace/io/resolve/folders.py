"""Lists local folders in threads: all files below one, in the order of the parts of their names.

Threads list many folders at once, since on a network file system each listing waits for an answer.
Their names come out sorted without a sort of them all: NOTE [ order of parts ].
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import AccessError, DataNotFoundError
from headrace.io.packed_strings import NamesBuilder, PackedNames
from headrace.io.paths import redact
from headrace.io.resolve.contents import is_hidden_part

THREADS = 8
"""How many folders are listed, or looked at, at once."""
FILE, FOLDER, OTHER, NOTHING = b"fd-x"
"""What a link leads to: a file that counts, a folder, neither, or nothing that exists."""

# NOTE [ order of parts ]
#
# Names sort as the lists of their parts do, byte by byte. With b"\0" for b"/" that is the order of
# plain byte strings, since b"\0" is less than any byte of a part. Let each entry of one folder have
# the key `name` if it is a file and `name + b"\0"` if it is a folder: then all that lies below an
# entry begins with its key. Two keys of one folder differ, and where one is the beginning of the
# other ("a" and "ab", never "a\0" and "a\0b", since no name holds b"\0") it is a file's: it stands
# for one name, which sorts before the other's. Else the first byte in which the keys differ
# decides, for everything below them too. So it is enough to sort each folder by these keys and to
# walk depth first.


@dataclass(frozen=True, slots=True)
class Listing:
    """What was found under a folder.

    Attributes:
        names: the files, relative to the folder, in the order of their parts.
        folders: every folder that was looked into, relative to the first, whose own name is empty.
        times: [folders, 2] int64, when the entries of each last changed, and when anything of it
            did (mtime and ctime in ns).
        links: the links that were met.
        kinds: [links] uint8, what each led to: FILE, FOLDER, OTHER or NOTHING.
    """

    names: PackedNames
    folders: PackedNames
    times: npt.NDArray[np.int64]
    links: PackedNames
    kinds: npt.NDArray[np.uint8]


def list_folder(root: bytes, endings: tuple[bytes, ...]) -> Listing:
    """All files below a folder whose names end in one of `endings` (lower case); links are
    followed, loops of them entered once. Files and folders that are hidden (`is_hidden_part`) are
    left out.

    Raises:
        AccessError: a folder may not be listed.
        DataNotFoundError: one went away meanwhile.
    """
    names, folders, times, links, kinds = (
        NamesBuilder(),
        list[bytes](),
        list[tuple[int, int]](),
        list[bytes](),
        bytearray(),
    )
    walk = _Walk(root, endings)
    try:
        for found in walk.results():
            if isinstance(found, _Files):
                names.add_joined(found.joined, found.lengths)
                continue
            folders.append(found.below)
            times.append(found.times)
            links += found.links
            kinds += found.kinds
    finally:
        walk.close()
    when = np.array(times, np.int64).reshape(-1, 2)
    return Listing(
        names.build(),
        PackedNames(folders),
        when,
        PackedNames(links),
        np.frombuffer(bytes(kinds), np.uint8),
    )


@dataclass(slots=True)
class _Files:
    """Files of one folder that follow each other: their names from the root on, one behind the
    other.
    """

    joined: bytes
    lengths: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Folder:
    """One folder: what is in it in order, the folders in it as promises."""

    below: bytes
    times: tuple[int, int]
    links: list[bytes] = field(default_factory=list)
    kinds: bytearray = field(default_factory=bytearray)
    content: list[_Files | Future[_Folder]] = field(default_factory=list)


class _Walk:
    """Lists folders in threads; each listing asks for those of the folders that it found."""

    def __init__(self, root: bytes, endings: tuple[bytes, ...]) -> None:
        self._root, self._endings = root, endings
        self._pool = ThreadPoolExecutor(THREADS, "headrace-list")

    def results(self) -> Iterator[_Files | _Folder]:
        """Folders and files, depth first; what has been given is forgotten."""
        coming: list[_Files | Future[_Folder]] = [self._pool.submit(self._list, b"", frozenset())]
        while coming:
            found = coming.pop()
            if isinstance(found, Future):
                folder = found.result()
                coming += folder.content[::-1]
                folder.content.clear()
                yield folder
            else:
                yield found

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _list(self, below: bytes, above: frozenset[tuple[int, int]]) -> _Folder:
        path = os.path.join(self._root, below) if below else self._root
        # before the listing: what changes after it shows in the times
        status = _explained(os.stat, path)
        folder = _Folder(below, (status.st_mtime_ns, status.st_ctime_ns))
        identity = (status.st_dev, status.st_ino)
        if identity in above:  # a link to a folder that holds it
            return folder
        prefix = below + b"/" if below else b""
        with _explained(os.scandir, path) as listing:
            files, folders = self._sorted(listing, prefix, folder)
        inside, start = above | {identity}, 0
        for name in folders:
            stop = bisect_left(files, name + b"\0", start)
            if stop > start:
                folder.content.append(_join(prefix, files[start:stop]))
            folder.content.append(self._pool.submit(self._list, prefix + name, inside))
            start = stop
        if start < len(files):
            folder.content.append(_join(prefix, files[start:] if start else files))
        return folder

    def _sorted(
        self, listing: Any, prefix: bytes, folder: _Folder
    ) -> tuple[list[bytes], list[bytes]]:
        """The names of files that count and of folders, each sorted; links are noted."""
        files, folders = [], []
        for item in listing:
            name, kind = item.name, OTHER
            if is_hidden_part(name):
                continue
            try:
                if name.lower().endswith(self._endings) and item.is_file():
                    files.append(name)
                    kind = FILE
                elif item.is_dir():
                    folders.append(name)
                    kind = FOLDER
            except OSError as error:
                _check_is_nothing(error, item.path)
            if item.is_symlink():
                if kind == OTHER and not os.path.exists(item.path):
                    kind = NOTHING
                folder.links.append(prefix + name)
                folder.kinds.append(kind)
        files.sort()
        folders.sort()
        return files, folders


def _join(prefix: bytes, names: list[bytes]) -> _Files:
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    return _Files(prefix.join([b"", *names]), lengths + len(prefix))


def _explained(call: Any, folder: bytes) -> Any:
    try:
        return call(folder)
    except PermissionError as error:
        raise AccessError(
            f"{redact(folder)}: this user may not list the folder ({error.strerror})"
        ) from error
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"{redact(folder)} went away while its files were listed: start again"
        ) from error


def _check_is_nothing(error: OSError, path: bytes) -> None:
    """A link that leads nowhere, or to itself, is no file and no folder; anything else is an
    error.
    """
    if isinstance(error, PermissionError):
        raise AccessError(
            f"{redact(path)}: this user may not look at what it links to ({error.strerror})"
        ) from error
    if error.errno != errno.ELOOP:
        raise error
