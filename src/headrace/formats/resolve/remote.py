"""Finds the files of a URL or glob on a server."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FormatError,
    HeadraceError,
    RemoteError,
)
from headrace.formats.resolve.file_set import (
    MOST,
    Format,
    Found,
    encoded,
    is_hidden,
    is_hidden_part,
    plain_bytes,
)
from headrace.formats.resolve.local import before_magic
from headrace.io.paths import chain_of, named_part, redact
from headrace.io.remote.requests import path_in, server_of
from headrace.io.remote_files import RemoteFiles

_FOLDERS = 32
"""Folders that are listed to find out what kind of files there is."""


def has_magic(url: str) -> bool:
    """True if it is a glob: the query of a URL is none."""
    return glob.has_magic(url.partition("?")[0])


def names_file(url: str, kind: Format) -> bool:
    """True if it is the URL of one file or store, by its ending, so that nothing need be listed.
    A folder's ends in a slash.
    """
    plain = named_part(url)
    return (
        kind.fits(url)
        and not glob.has_magic(plain)
        and (not plain.endswith("/") or plain.rstrip("/").lower().endswith(kind.stores))
    )


def check_one_filesystem(urls: Sequence[str], filesystem: Any) -> None:
    """All URLs of a list must lie on one file system: one host, one archive.

    Raises:
        ConfigError: they don't.
    """
    places = set()
    for url in urls:
        first, *others = chain_of(url)
        server = server_of(first, filesystem)
        places.add((first.partition("://")[0], repr(sorted(server.items())), *others))
    if len(places) > 1:
        shown = ", ".join(map(redact, urls[:3]))
        raise ConfigError(
            f"data_path names more than one file system, server or archive ({shown}): make one "
            "dataset of each"
        )


def learn(urls: Sequence[str], server: RemoteFiles) -> None:
    """Asks for the versions of files, all at once.

    Raises:
        DataNotFoundError: a URL that looks like that of a file is one of a folder; there is no such
            file.
        AccessError, RemoteError: see `Remote.versions`.
    """
    for url, version in zip(urls, server.learn(urls), strict=True):
        if not version.size and server.is_folder(url):
            raise DataNotFoundError(
                f"{redact(url)} is a folder with the name of a file: add a slash to its end"
            )


def find_remote(entry: Any, kind: Format, server: RemoteFiles) -> Found:
    """The files of a kind that a URL or glob means. What ends as a file does is not looked at.

    Raises:
        DataNotFoundError: nothing is there.
        FormatError, AccessError, RemoteError: it is a web page; the server does not say.
    """
    url = os.fspath(entry)
    path = path_in(url, server.filesystem)
    if names_file(url, kind):
        return _named(path)
    try:
        found = _listed(url, path, kind, server)
    except FileNotFoundError:
        # the cause may show the URL's secrets
        raise DataNotFoundError(f"{redact(url)} does not exist") from None
    if not (found.names or found.searched or found.others):
        raise DataNotFoundError(f"nothing matches {redact(url)}: is the path right?")
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


def _listed(url: str, path: str, kind: Format, server: RemoteFiles) -> Found:
    """What a glob matches, or lies below a folder; of stores only the first level is listed."""
    if not kind.endings:
        if has_magic(url):
            return _globbed(path, server.ask("glob", url), kind)
        if kind.is_store is not None and not kind.is_store(url, server):
            root = path.rstrip("/")
            names = _stores_below(root, _first_level(url, server), kind)
            if names:
                return Found(root, names, searched=True)
        return _named(path)
    is_a = _type(url, path, server)
    if is_a == "file":
        return _named(path)
    if is_a != "directory" and glob.has_magic(path):
        return _globbed(path, server.ask("glob", url), kind)
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
    root = _root(path, paths)
    found = _below(root, paths, kind.endings, "/." in path[len(root) :])
    found.searched = True
    stores = _stores_below(root, paths, kind)
    if stores:
        found.names = list({*stores, *found.names})
    return found


def _first_level(url: str, server: RemoteFiles) -> list[str]:
    """What lies in a folder; nothing where the server does not list."""
    try:
        return list(server.ask("ls", url, detail=False))
    except (OSError, HeadraceError, NotImplementedError):
        return []


def _stores_below(root: str, paths: Iterable[str], kind: Format) -> list[bytes]:
    if not kind.stores:
        return []
    stores = encoded(kind.stores)
    first = {_name_below(root, path).partition(b"/")[0] for path in paths}
    return [name for name in first if name.lower().endswith(stores) and not is_hidden(name)]


def _globbed(pattern: str, paths: list[str], kind: Format) -> Found:
    root = _root(before_magic(pattern, "/"), paths)
    shows_hidden = "/." in pattern[len(root) :]
    found = _below(root, paths, kind.all_endings, shows_hidden)
    if not found.names and not kind.endings:  # stores may have any name
        found = _below(root, paths, ("",), shows_hidden)
    return found


def _type(url: str, path: str, server: RemoteFiles) -> str | HeadraceError | None:
    """ "file", or "directory", as is what all lies in; None: there is no such thing. Or an
    error, if nothing is found below: the server does not tell, as where a user may see some
    folders of a bucket alone; or what it has is a page.
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
            f"{redact(url)} is a web page in which no files are listed: name the files, or look at "
            "the URL"
        )
    return str(info["type"])


def _root(path: str, paths: Sequence[str]) -> str:
    root = path.rstrip("/")
    if not root and any(p.startswith("/") for p in paths):
        return "/"
    return root


def _name_below(root: str, path: str) -> bytes:
    """The name of a path relative to the root. A key is opaque: of slashes that follow each
    other only the first parts them.
    """
    return os.fsencode(path[len(root) :].removeprefix("/"))


def _below(root: str, paths: list[str], endings: Sequence[str], shows_hidden: bool) -> Found:
    """The files of some paths that end as they should."""
    found = Found(root, [])
    ends = encoded(endings)
    for path in paths:
        name = _name_below(root, path)
        if not shows_hidden and is_hidden(name):
            continue
        if plain_bytes(name).endswith(ends):
            found.names.append(name)
        elif len(found.others) < MOST:
            found.others.append(name)
    found.folders = {name.partition(b"/")[0] for name in found.names if b"/" in name}
    return found


def names_below(url: str, server: RemoteFiles) -> Iterator[str]:
    """Names of the files below a remote folder that are not hidden, of its first folders; of Zarr
    stores their own. Nothing where the URL is no folder, or the server does not list.
    """
    with contextlib.suppress(FileNotFoundError, AccessError, NotImplementedError):
        waiting = []
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
