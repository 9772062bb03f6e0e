"""Which files of a server do URLs name?"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.storage.paths import is_url
from headrace.storage.remote_files import RemoteFiles, RemoteOptions
from headrace.storage.scan import check_one_filesystem, scan


def far_files(entries: Sequence[Any], endings: Sequence[str], options: RemoteOptions) -> tuple[RemoteFiles, list[str]]:
    """The files of a server, and the URLs of those that are meant, in the order of the entries; of each folder and glob sorted.

    The server is asked only where a URL has none of the endings, or is a glob.

    Args:
        entries: URLs of files, folders (searched through) or globs.
        endings: of files that count, such as ".h5".
        options: how the server is reached.

    Raises:
        ConfigError: paths of this machine among them, or URLs of several servers; options that make no sense.
        DataNotFoundError, AccessError: nothing there; access is denied.
    """
    if not all(map(is_url, entries)):
        raise ConfigError("data_path mixes URLs and local paths: make one dataset of each")
    files = RemoteFiles(entries[0], options)
    filesystem = files.filesystem
    check_one_filesystem(entries, filesystem)
    found: list[str] = []
    for entry in entries:
        first, chained, rest = entry.partition("::")
        path = first.partition("?")[0]
        if path.lower().endswith(tuple(endings)) and not glob.has_magic(path):
            found.append(entry)
            continue
        listed = scan(entry, endings, filesystem)
        scheme = f"{path.partition('://')[0]}://"
        paths = sorted(os.fsdecode(listed.path(number)) for number in range(len(listed.names)))
        found += [f"{path if path.startswith(scheme) else scheme + path}{chained}{rest}" for path in paths]
    return files, found
