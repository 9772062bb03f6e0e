"""The texts that a dataset is made of, local or remote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from headrace.errors import DataNotFoundError
from headrace.io.files import Files
from headrace.io.local.files import LocalFiles
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet, Kind
from headrace.io.resolve.resolver import resolve


class Texts(NamedTuple):
    """Texts of this machine, or of one server."""

    files: Files
    listing: FileSet
    paths: list[str]
    """Of each file of the listing: absolute, or a URL."""


def local_texts(listing: FileSet) -> Texts:
    """The texts of a listing of local files."""
    paths = [os.path.abspath(os.fsdecode(listing.path(number))) for number in range(len(listing.names))]
    return Texts(LocalFiles(), listing, paths)


def remote_texts(data_path: DataPath | FileSet, extensions: Sequence[str], options: RemoteOptions, listing: FileSet | None = None) -> Texts:
    """The texts that some URLs lead to, with size and version of each.

    Args:
        data_path: a URL, or a list: of files, of folders (or prefixes), or globs.
        extensions: endings of the files that count, in any case.
        options: how they are reached.
        listing: of these URLs, where it is known.

    Raises:
        ConfigError: URLs and paths are mixed, or of several servers.
        DataNotFoundError, AccessError, RemoteError: nothing there, or nothing that fits; see `Remote.versions`.
    """
    if listing is None:
        listing = resolve(data_path, Kind("texts", tuple(map(str.lower, extensions))), options)
        assert listing.server is not None
        files = listing.server
    else:
        files = RemoteFiles(listing.url(0), options)
    try:
        urls = listing.urls()
        for url, version in zip(urls, files.learn(urls, beside=lambda _: True), strict=True):
            if not version.size and files.is_folder(url):
                raise DataNotFoundError(f"{redact(url)} is a folder with the name of a file: add a slash to its end")
    except BaseException:
        files.close()
        raise
    return Texts(files, listing, urls)
