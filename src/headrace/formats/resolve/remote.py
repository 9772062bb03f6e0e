"""Finds the files of a URL or glob on a server."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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
    are_bookkeeping,
    in_order,
    is_hidden,
    is_hidden_part,
)
from headrace.formats.resolve.local import before_magic
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import chain_of, named_part, redact
from headrace.io.remote.fsspec_calls import path_in, server_of
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


def are_folders(urls: Sequence[str], kind: Format, server: RemoteFiles) -> bool:
    """True if a URL that looks like that of a file is one of a folder. All are asked for at once.

    Raises:
        DataNotFoundError, AccessError, RemoteError: there is no such file; see `Remote.versions`.
    """
    named = [url for url in urls if names_file(url, kind)]
    empty = [
        url for url, version in zip(named, server.learn(named), strict=True) if not version.size
    ]
    server.forget(named)  # files are read as they are then
    return any(map(server.is_folder, empty))


class RemoteWalk:
    """Finds the files of entries.

    Args:
        kind: of the files that count.
        server: that lists.
        asks: look at what ends as a file does, too: it may be a folder. Else whoever reads it finds
            out.

    Attributes:
        others: paths of what else is there, where nothing counts.
    """

    def __init__(self, kind: Format, server: RemoteFiles, asks: bool) -> None:
        self._kind = kind
        self._server = server
        self._asks = asks
        self._endings = tuple(os.fsencode(ending) for ending in kind.endings)
        self._stores = tuple(os.fsencode(ending) for ending in kind.stores)
        self.others: list[str] = []

    def __call__(self, entry: Any) -> Found:
        url = os.fspath(entry)
        try:
            if names_file(url, self._kind) and not self._asks:
                return self._named(url)
            if not self._endings:
                return self._store(url)
            return self._listed(url)
        except FileNotFoundError:
            # the cause may show the URL's secrets
            raise DataNotFoundError(f"{redact(url)} does not exist") from None

    def _path(self, url: str) -> str:
        return path_in(url, self._server.filesystem)

    def _named(self, url: str) -> Found:
        path = self._path(url)
        plain = path.partition("?")[0].rstrip("/")
        root, _, name = plain.rpartition("/")
        root = root or ("/" if path.startswith("/") else "")
        query = path[len(plain) :].removeprefix("/")
        # elsewhere a question mark may be part of a name
        is_web = path.startswith(("http://", "https://"))
        return Found(
            root,
            PackedNames([os.fsencode(name if is_web else name + query)]),
            tail=query if is_web else "",
        )

    # -- stores, of which nothing below need be listed

    def _store(self, url: str) -> Found:
        if has_magic(url):
            paths = self._server.ask("glob", url)
            self._server.filesystem.invalidate_cache()
            return self._globbed(self._path(url), paths)
        is_store = self._kind.is_store
        if is_store is not None and not is_store(url, self._server):
            root = self._path(url).rstrip("/")
            names = self._stores_below(root, self._first_level(url))
            if names:
                return Found(root, in_order(names, self._kind.keeps_order), set(), {root})
        return self._named(url)

    def _first_level(self, url: str) -> list[str]:
        """What lies in a folder; nothing where the server does not list."""
        try:
            return list(self._server.ask("ls", url, detail=False))
        except (OSError, HeadraceError, NotImplementedError):
            return []

    def _stores_below(self, root: str, paths: Iterable[str]) -> list[bytes]:
        if not self._stores:
            return []
        first = {_name_below(root, path).partition(b"/")[0] for path in paths}
        return [
            name for name in first if name.lower().endswith(self._stores) and not is_hidden(name)
        ]

    # -- files

    def _listed(self, url: str) -> Found:
        path = self._path(url)
        kind = self._type(url, path)
        if kind == "file":
            return self._named(url)
        if kind != "directory" and glob.has_magic(path):
            return self._globbed(path, self._server.ask("glob", url))
        refusal = kind if isinstance(kind, HeadraceError) else None
        try:
            paths = self._server.ask("find", url)
        except (FileNotFoundError, AccessError):
            if refusal is None:
                raise
            raise refusal from None
        if not paths and kind != "directory":
            raise refusal or FileNotFoundError(path)
        root = _root(path, paths)
        folders: set[bytes] = set()
        names = PackedNames(_below(root, paths, self._endings, folders, "/." in path[len(root) :]))
        stores = self._stores_below(root, paths)
        if stores:
            stores = [name for name in stores if name not in set(names)]
        self._note_others(root, paths, names, stores)
        del paths  # as many strings: they go before the names are sorted
        return Found(
            root,
            in_order([*stores, *names] if stores else names, self._kind.keeps_order),
            folders,
            {root},
        )

    def _globbed(self, pattern: str, paths: list[str]) -> Found:
        root = _root(before_magic(pattern, "/"), paths)
        folders = set[bytes]()
        endings = (*self._endings, *self._stores)
        names = PackedNames(_below(root, paths, endings, folders, "/." in pattern[len(root) :]))
        if not len(names) and not self._endings:  # stores may have any name
            names = PackedNames(_below(root, paths, (b"",), folders, "/." in pattern[len(root) :]))
        self._note_others(root, paths, names, [])
        return Found(root, in_order(names, self._kind.keeps_order), folders)

    def _note_others(
        self, root: str, paths: list[str], names: PackedNames, stores: list[bytes]
    ) -> None:
        if not stores and (not len(names) or are_bookkeeping(names)):
            self.others += (path for path in paths[:MOST] if not is_hidden(_name_below(root, path)))

    def _type(self, url: str, path: str) -> str | HeadraceError | None:
        """ "file", or "directory", as is what all lies in; None: there is no such thing. Or an
        error, if nothing is found below: the server does not tell, as where a user may see some
        folders of a bucket alone; or what it has is a page.
        """
        try:
            info = self._server.ask("info", url) if path else {"type": "directory"}
            if _is_page(path, info):
                return FormatError(
                    f"{redact(url)} is a web page in which no files are listed: name the files, "
                    "or look at the URL"
                )
            return str(info["type"])
        except FileNotFoundError:
            return None
        except (AccessError, RemoteError) as error:
            if isinstance(error, RemoteError) and not error.is_final:
                raise
            return error


def _root(path: str, paths: Sequence[str]) -> str:
    return path.rstrip("/") or ("/" if any(p.startswith("/") for p in paths) else "")


def _name_below(root: str, path: str) -> bytes:
    """The name of a path relative to the root. A key is opaque: of slashes that follow each
    other only the first parts them.
    """
    return os.fsencode(path[len(root) :].removeprefix("/"))


def _is_page(path: str, info: Any) -> bool:
    """True if a "file" is what a server of the web shows of a folder: fsspec calls everything a
    file there.
    """
    place = path.partition("?")[0]
    is_named = "." in place.rpartition("/")[2]
    return info["type"] == "file" and (
        place.endswith("/") or (not is_named and "html" in str(info.get("mimetype")))
    )


def _below(
    root: str,
    paths: Iterable[str],
    endings: tuple[bytes, ...],
    folders: set[bytes],
    shows_hidden: bool,
) -> Iterator[bytes]:
    """The names relative to the root; their first-level folders are added to `folders`."""
    for path in paths:
        name = _name_below(root, path)
        if name.lower().endswith(endings) and (shows_hidden or not is_hidden(name)):
            folder, slash, _ = name.partition(b"/")
            if slash:
                folders.add(folder)
            yield name


def names_below(url: str, server: RemoteFiles) -> Iterator[str]:
    """Names of the files below a remote folder that are not hidden, of its first folders; of Zarr
    stores their own. Nothing where the URL is no folder, or the server does not list.
    """
    with contextlib.suppress(FileNotFoundError, AccessError, NotImplementedError):
        waiting = [url] if server.ask("info", url)["type"] == "directory" else []
        for folder in waiting:  # which grows meanwhile
            for found in server.ask("ls", folder, detail=True):
                path = str(found["name"]).rstrip("/")
                name = path.rpartition("/")[2]
                is_inside = (
                    len(waiting) < _FOLDERS
                    and found["type"] == "directory"
                    and not name.lower().endswith(".zarr")
                )
                if is_hidden_part(os.fsencode(name)):
                    continue
                if is_inside:
                    waiting.append(path)
                else:
                    yield name
