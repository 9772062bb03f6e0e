"""Which files that are far away do URLs name?"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError, DataNotFoundError
from headrace.io.packed_strings import PackedNames, order_of_parts
from headrace.io.paths import is_url, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.scan import check_one_filesystem, scan


def name_of(url: str) -> str:
    """The last part of a URL's path, without its query."""
    return url.partition("::")[0].partition("?")[0].rstrip("/").rpartition("/")[2]


def names_a_file(url: str, endings: Sequence[str]) -> bool:
    """Is it the URL of one file, by its ending, so that nothing need be listed?"""
    return name_of(url).lower().endswith(tuple(endings)) and not glob.has_magic(url.partition("?")[0])


def list_far(urls: Sequence[str], endings: Sequence[str], files: RemoteFiles) -> tuple[PackedNames, list[str]]:
    """Names and URLs of the files that some URLs name, in the order of their names, as `scan` has it for local ones.

    Args:
        urls: of files that end in one of `endings`, which are taken as they are; of folders, which are searched through; or globs.
        endings: such as (".tar",).
        files: their server's.

    Raises:
        ConfigError: they lie on several servers.
        DataNotFoundError, AccessError: nothing there, or nothing that fits; it may not be read.
    """
    check_one_filesystem(urls, files.filesystem)
    names, found = list[bytes](), list[str]()
    for url in urls:
        if names_a_file(url, endings):
            names.append(os.fsencode(name_of(url)))
            found.append(url)
            continue
        listed = scan([url], endings, files)
        names += listed.names
        found += [_url_of(os.fsdecode(listed.path(number)), url) for number in range(len(listed.names))]
    if not found:
        raise DataNotFoundError(f"no file under {redact(urls[0])} ends in any of {', '.join(endings)}: is the URL right?")
    packed = PackedNames(names)
    order = order_of_parts(packed)
    return (packed, found) if order is None else (packed.take(order), [found[number] for number in order.tolist()])


def far_files(entries: Sequence[Any], endings: Sequence[str], options: RemoteOptions) -> tuple[RemoteFiles, list[str]]:
    """The files of a server, and the URLs of those that are meant, in the order of the entries; of each folder and glob sorted as text,
    as local globs are.

    Args:
        entries: URLs of files, folders (searched through) or globs.
        endings: of files that count, such as ".h5".
        options: how the server is reached.

    Raises:
        ConfigError: paths of this machine among them, or URLs of several servers; options that make no sense.
        DataNotFoundError, AccessError: as `list_far`.
    """
    if not all(map(is_url, entries)):
        raise ConfigError("data_path mixes URLs and local paths: make one dataset of each")
    files = RemoteFiles(entries[0], options)
    check_one_filesystem(entries, files.filesystem)
    found: list[str] = []
    for entry in entries:
        found += [entry] if names_a_file(entry, endings) else sorted(list_far([entry], endings, files)[1])
    return files, found


def far_stores(entries: Sequence[Any], options: RemoteOptions) -> tuple[RemoteFiles, list[str]]:
    """The files of a server, and URLs as they are, globs resolved: what they name is a folder, of which nothing need be listed.

    Args:
        entries: URLs or globs.
        options: how the server is reached.

    Raises:
        ConfigError: paths of this machine among them, or URLs of several servers; options that make no sense.
        DataNotFoundError, AccessError: nothing fits a glob; the server does not list.
    """
    if not all(map(is_url, entries)):
        raise ConfigError("data_path mixes URLs and local paths: make one dataset of each")
    files = RemoteFiles(entries[0], options)
    check_one_filesystem(entries, files.filesystem)
    return files, [found for entry in entries for found in _globbed(entry, files)]


def _globbed(url: str, files: RemoteFiles) -> list[str]:
    if not glob.has_magic(url.partition("?")[0]):
        return [url]
    found = sorted(files.ask("glob", url))
    files.filesystem.invalidate_cache()
    if not found:
        raise DataNotFoundError(f"nothing fits {redact(url)}")
    return [_url_of(path, url) for path in found]


def _url_of(path: str, listed: str) -> str:
    """The URL of a path on the server where a URL was listed."""
    first, chained, rest = listed.partition("::")
    scheme = f"{first.partition('://')[0]}://"
    below = path if scheme in ("file://", "local://") else path.lstrip("/")
    return f"{path if path.startswith(scheme) else scheme + below}{chained}{rest}"
