"""Which files that are far away do URLs name?"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from headrace.errors import DataNotFoundError
from headrace.storage.names import PackedNames, order_of_parts
from headrace.storage.paths import redact
from headrace.storage.remote_files import RemoteFiles
from headrace.storage.scan import check_one_filesystem, scan


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
        listed = scan([url], endings, files.filesystem)
        names += listed.names
        found += [_url_of(os.fsdecode(listed.path(number)), url) for number in range(len(listed.names))]
    if not found:
        raise DataNotFoundError(f"no file under {redact(urls[0])} ends in any of {', '.join(endings)}: is the URL right?")
    packed = PackedNames(names)
    order = order_of_parts(packed)
    return (packed, found) if order is None else (packed.take(order), [found[number] for number in order.tolist()])


def _url_of(path: str, listed: str) -> str:
    """The URL of a path on the server where a URL was listed."""
    first, chained, rest = listed.partition("::")
    scheme = f"{first.partition('://')[0]}://"
    return f"{path if path.startswith(scheme) else scheme + path.lstrip('/')}{chained}{rest}"
