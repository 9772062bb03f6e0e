"""Finds the files of a path, URL or glob. Local folders are listed in threads, since on a network
file system each listing waits for an answer.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace.errors import (
    AccessError,
    DataNotFoundError,
    FormatError,
    HeadraceError,
    RemoteError,
    warn,
)
from headrace.formats.resolve.file_set import (
    MOST,
    Format,
    Found,
    is_hidden,
    is_hidden_part,
    plain_bytes,
    plain_name,
)
from headrace.io.paths import check_regular, named_part, redact

if TYPE_CHECKING:
    from headrace.io.remote_files import RemoteFiles

_THREADS = 8
"""Folders listed at once."""
_GROUP = 32
"""Folders that a thread lists in one task, at most."""
_FOLDERS = 32
"""Folders that are listed to detect the format."""


def find_local(entry: Any, kinds: Sequence[Format]) -> Found:
    """The files of some formats at a local path, or that a glob matches.

    Raises:
        DataNotFoundError: nothing is there.
        ConfigError, AccessError: it is a pipe or the like; a folder may not be listed.
    """
    path = os.fsdecode(os.path.expanduser(os.fspath(entry)))
    if os.path.isdir(path):
        name = path.rstrip("/").lower()
        is_store = False
        for kind in kinds:
            if not kind.stores:
                continue
            if name.endswith(kind.stores) or (kind.recognizes and kind.recognizes(path)):
                is_store = True
        if not is_store:
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


def recognized(path: str, kinds: Sequence[Format]) -> Format | None:
    """The first of some formats that recognizes the content of a local file or folder."""
    for kind in kinds:
        if kind.recognizes is not None and kind.recognizes(path):
            return kind
    return None


def _matched(pattern: str, kinds: Sequence[Format]) -> Found:
    """The matches of a glob that have the right endings; if none has, those whose content is
    recognized.
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
            f"nothing matches {redact(pattern)} (working folder: {os.getcwd()}): check the path"
        )
    found.folders = {name.partition(b"/")[0] for name in found.names if b"/" in name}
    return found


def _globbed(pattern: str) -> list[str]:
    """`glob.glob`, but "**" enters no folder that it is in already: links that lead back would
    never end.
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
    """A folder and all folders below it that are not hidden. Links are followed unless they lead
    back to a folder that contains them.
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
        f"{redact(place)}: {links} to nothing, and was left out: fix or remove "
        f"{redact(min(dead))!r}"
    )


def before_magic(path: str, separator: str) -> str:
    """The part of a glob up to the first folder with a wildcard."""
    return re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition(separator)[0]


# -- listing


_Folder = tuple[bytes, frozenset[tuple[int, int]]]
"""A folder to list: its name, with b"/" after each part, and (device, inode) of the folders that
contain it, to which no link may lead back.
"""


def list_folder(root: str, kinds: Sequence[Format]) -> Found:
    """All files of some formats below a folder, in any order, and the stores in its first level.
    Links are followed, loops entered once. Hidden files and folders (`is_hidden_part`) are left
    out; stores are not entered.

    Raises:
        AccessError: a folder may not be listed.
        DataNotFoundError: a folder was removed meanwhile.
    """
    found = Found(root, [], searched=True)
    dead_links = list[str]()
    endings: tuple[bytes, ...] = ()
    stores: tuple[bytes, ...] = ()
    for kind in kinds:
        endings += tuple(map(os.fsencode, kind.endings))
        stores += tuple(map(os.fsencode, kind.stores))

    def listed(folder: _Folder) -> list[_Folder]:
        """The folders in a folder, whose files are added to those found."""
        name, above = folder
        below = list[_Folder]()
        path = os.path.join(os.fsencode(root), name).rstrip(b"/") or b"/"
        try:
            status = os.stat(path)
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                return below
            with os.scandir(path) as entries:
                for entry in entries:
                    if is_hidden_part(entry.name):
                        continue
                    ends = plain_bytes(entry.name)
                    try:
                        if ends.endswith(stores):
                            if not name:
                                found.names.append(entry.name)
                        elif entry.is_file():
                            if ends.endswith(endings):
                                found.names.append(name + entry.name)
                            elif len(found.others) < MOST:
                                found.others.append(name + entry.name)
                        elif entry.is_dir():
                            below.append((name + entry.name + b"/", above | {identity}))
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
                f"{redact(path)} disappeared while its files were listed: start again"
            ) from error
        return below

    level: list[_Folder] = [(b"", frozenset())]
    with ThreadPoolExecutor(_THREADS, "headrace-list") as pool:
        while level:
            size = max(1, min(_GROUP, len(level) // (4 * _THREADS)))
            groups = list[list[_Folder]]()
            for start in range(0, len(level), size):
                groups.append(level[start : start + size])
            each = pool.map(lambda group: list(map(listed, group)), groups)
            level = list(chain.from_iterable(chain.from_iterable(each)))
            if not found.folders:
                for name, _ in level:
                    found.folders.add(name[:-1])
            if found.names and not endings:  # stores are on the first level
                break
    if dead_links:
        _warn_of_dead_links(root, dead_links)
    return found


# -- on a server


def has_magic(url: str) -> bool:
    """True if a URL is a glob. Its query does not count."""
    return glob.has_magic(url.partition("?")[0])


def names_file(url: str, kind: Format) -> bool:
    """True if a URL has the ending of a file or store, so that nothing needs to be listed. The URL
    of a folder ends in a slash.
    """
    plain = named_part(url)
    return (
        kind.fits(url)
        and not glob.has_magic(plain)
        and (not plain.endswith("/") or plain.rstrip("/").lower().endswith(kind.stores))
    )


def learn(urls: Sequence[str], server: RemoteFiles) -> None:
    """Requests the versions of files, all at once. An error closes the server.

    Raises:
        DataNotFoundError: there is no such file, or it is a folder.
        AccessError, RemoteError: see `Remote.versions`.
    """
    try:
        for url, version in zip(urls, server.learn(urls), strict=True):
            if not version.size and server.ask("isdir", url):
                raise DataNotFoundError(
                    f"{redact(url)} is a folder with the name of a file: add a slash to its end"
                )
    except BaseException:
        server.close()
        raise


def find_remote(entry: Any, kind: Format, server: RemoteFiles) -> Found:
    """The files of a format at a URL, or that a glob matches. A URL with the ending of a file is
    not checked.

    Raises:
        DataNotFoundError: nothing is there.
        FormatError: it is a web page.
        AccessError, RemoteError: the server does not answer.
    """
    url = os.fspath(entry)
    path = server.path_of(url)
    if names_file(url, kind):
        return _named(path)
    try:
        found = _found_at(url, path, kind, server)
    except FileNotFoundError:
        # the cause may show the URL's secrets
        raise DataNotFoundError(f"{redact(url)} does not exist") from None
    if not (found.names or found.searched or found.others):
        raise DataNotFoundError(f"nothing matches {redact(url)}: check the URL")
    return found


def _named(path: str) -> Found:
    """One file or store."""
    plain = path.partition("?")[0].rstrip("/")
    root, _, name = plain.rpartition("/")
    if not root and path.startswith("/"):
        root = "/"
    query = path[len(plain) :].removeprefix("/")
    if path.startswith(("http://", "https://")):
        return Found(root, [os.fsencode(name)], tail=query)
    # elsewhere a question mark may be part of a name
    return Found(root, [os.fsencode(name + query)])


def _found_at(url: str, path: str, kind: Format, server: RemoteFiles) -> Found:
    """The files that a glob matches, or below a folder; for stores its first level only."""
    if not kind.endings:
        if has_magic(url):
            return _matched_at(path, server.ask("glob", url), kind)
        if kind.is_store is not None and not kind.is_store(url, server):
            # some servers do not list folders
            with contextlib.suppress(OSError, HeadraceError, NotImplementedError):
                found = _below(path, server.ask("ls", url, detail=False), (), kind.stores)
                if found.names:
                    found.searched = True
                    return found
        return _named(path)
    is_a = _type(url, path, server)
    if is_a == "file":
        return _named(path)
    if is_a != "directory" and glob.has_magic(path):
        return _matched_at(path, server.ask("glob", url), kind)
    try:
        paths = server.ask("find", url)
    except (FileNotFoundError, AccessError):
        if not isinstance(is_a, HeadraceError):
            raise
        raise is_a from None
    if not paths and isinstance(is_a, HeadraceError):
        raise is_a
    if paths == [path] and isinstance(is_a, FormatError):  # the page itself
        raise is_a
    if not paths and is_a != "directory":
        raise FileNotFoundError(path)
    found = _below(path, paths, kind.endings, kind.stores)
    found.searched = True
    return found


def _matched_at(pattern: str, paths: list[str], kind: Format) -> Found:
    place = before_magic(pattern, "/")
    found = _below(place, paths, kind.all_endings, (), pattern)
    if not found.names and not kind.endings:  # stores may have any name
        found = _below(place, paths, ("",), (), pattern)
    return found


def _type(url: str, path: str, server: RemoteFiles) -> str | HeadraceError | None:
    """ "file" or "directory" (also the root of a server); None: there is nothing. Or the error to
    raise if nothing is found below: the server does not tell, as the user may see only some folders
    of a bucket; or it is a web page.
    """
    if not path:
        return "directory"
    try:
        info = server.ask("info", url)
    except FileNotFoundError:
        return None
    except (AccessError, RemoteError) as error:
        if isinstance(error, RemoteError) and not error.is_final:
            raise
        return error
    # fsspec calls everything on the web a file, and so what a server shows of a folder
    place = path.partition("?")[0]
    is_page = "." not in place.rpartition("/")[2] and "html" in str(info.get("mimetype"))
    is_root = not urlsplit(place).path  # http://host:port
    if info["type"] == "file" and (place.endswith("/") or is_page or is_root):
        return FormatError(
            f"{redact(url)} is a web page that lists no files: name the files, or check the URL"
        )
    return str(info["type"])


def _below(
    place: str,
    paths: Sequence[str],
    endings: Sequence[str],
    stores: Sequence[str],
    pattern: str = "",
) -> Found:
    """Divides paths below a place into files with the right endings, stores in the first level,
    which are not entered, and others. Hidden ones count if the pattern names them.
    """
    root = place.rstrip("/")
    if not root and any(path.startswith("/") for path in paths):
        root = "/"
    shows_hidden = "/." in pattern[len(root) :]
    found = Found(root, [])
    ends = tuple(map(os.fsencode, endings))
    ends_of_stores = tuple(map(os.fsencode, stores))
    found_stores = set[bytes]()
    for path in paths:
        # a key is opaque: only the first of several slashes is a separator
        name = os.fsencode(path[len(root) :].removeprefix("/"))
        first = name.partition(b"/")[0]
        if first.lower().endswith(ends_of_stores) and not is_hidden(first):
            found_stores.add(first)
        elif not shows_hidden and is_hidden(name):
            continue
        elif plain_bytes(name).endswith(ends):
            found.names.append(name)
        elif len(found.others) < MOST:
            found.others.append(name)
    found.folders = {name.partition(b"/")[0] for name in found.names if b"/" in name}
    found.names += found_stores
    return found


def names_below(url: str, server: RemoteFiles) -> Iterator[str]:
    """Paths that a glob matches; or names of files in the first folders below a remote folder, and
    of Zarr stores. Hidden files are left out. Nothing if the URL is no folder, or the server does
    not list folders.
    """
    with contextlib.suppress(FileNotFoundError, AccessError, NotImplementedError):
        waiting = []
        if has_magic(url):
            yield from server.ask("glob", url)
            return
        if server.ask("info", url)["type"] == "directory":
            waiting.append(url)
        for folder in waiting:  # which grows meanwhile
            for found in server.ask("ls", folder, detail=True):
                path = str(found["name"]).rstrip("/")
                name = path.rpartition("/")[2]
                is_folder = found["type"] == "directory" and not name.lower().endswith(".zarr")
                if is_hidden_part(os.fsencode(name)):
                    continue
                if is_folder and len(waiting) < _FOLDERS:
                    waiting.append(path)
                else:
                    yield name
