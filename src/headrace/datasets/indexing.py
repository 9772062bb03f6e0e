"""Writes the index of a file next to it, for readers of its URL."""

from __future__ import annotations

import os
from typing import Unpack

from headrace.arguments import check_names
from headrace.errors import AccessError, ConfigError, WriteError
from headrace.formats.hdf5.rows import INDEX as HDF5
from headrace.formats.resolve.file_set import Format
from headrace.formats.resolve.resolver import DataPath, resolve
from headrace.formats.table.arrow import INDEX as ARROW
from headrace.formats.tar import INDEX as TAR
from headrace.formats.tfrecord import INDEX as TFRECORD
from headrace.io.atomic import written_to
from headrace.io.index import IndexKind, index_bytes
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions, ServerKeywords
from headrace.io.remote.requests import path_in
from headrace.io.remote_files import RemoteFiles, with_index

_KINDS: dict[str, IndexKind] = {
    ".tar": TAR,
    **dict.fromkeys((".tfrecord", ".tfrecords"), TFRECORD),
    **dict.fromkeys((".arrow", ".feather"), ARROW),
    **dict.fromkeys((".h5", ".hdf5", ".he5", ".h5ad"), HDF5),
}
"""Indexes by the endings of files."""
_INDEXED = Format("files with an index", tuple(_KINDS))
"""What is looked for in folders."""


def write_index(data_path: DataPath, **options: Unpack[ServerKeywords]) -> list[str]:
    """Writes an index file next to each data file, so that a dataset opens its URL in few round
    trips.

    An index contains what a dataset must know before it can read samples. The index of
    ``train.tar`` is ``train.tar.index``; upload both. It is valid for that version of the file
    only: write it again when the file changes.

    Args:
        data_path: a file, folder, glob or URL (of a writable server), or a list of these: .tar,
            .tfrecord, .h5, .h5ad, .arrow and .feather.
        **options: `storage_options`, `retries` and `deadline`: see `headrace.RemoteOptions`.

    Returns:
        The paths or URLs of the written indexes.

    Raises:
        ConfigError: an option is invalid; or a file can't have an index, such as a text.
        DataNotFoundError, AccessError, FormatError, RemoteError: a file is missing, can't be read,
            or is damaged.
        WriteError: the index can't be written there.
    """
    check_names("write_index", options, ServerKeywords.__optional_keys__)
    remote, _ = RemoteOptions.split(options)
    files = resolve(data_path, _INDEXED, remote)
    paths = files.urls()
    written = list[str]()
    server: RemoteFiles | None = files.server
    if server is None:
        paths = [os.path.abspath(path) for path in paths]
        server = RemoteFiles(f"file://{paths[0]}", remote)
    try:
        for path in paths:
            url = path
            if not files.is_remote:
                url = f"file://{path}"
            kind = _kind_of(path)
            server.learn([url])
            data = index_bytes(kind.make(server, url), kind, server.version(url).size)
            written.append(_write(with_index(url), data, server))
    finally:
        server.close()
    return written


def _kind_of(path: str) -> IndexKind:
    """The kind of the index of a file."""
    ending = os.path.splitext(path.partition("?")[0])[1].lower()
    if ending not in _KINDS:
        raise ConfigError(f"{redact(path)} has no index: those of {', '.join(_KINDS)} have one")
    return _KINDS[ending]


def _write(url: str, data: bytes, server: RemoteFiles) -> str:
    """Writes a file, and returns its path or URL."""
    path = url.removeprefix("file://")
    try:
        if path != url:
            with written_to(path) as file:
                file.write(data)
        else:
            server.filesystem.pipe_file(path_in(url, server.filesystem), data)
        return path
    except PermissionError as error:
        raise AccessError(f"{redact(url)} can't be written: {redact(error)}") from None
    except Exception as error:  # of whatever library speaks to that server
        cause = redact(error) or type(error).__name__
        raise WriteError(
            f"{redact(url)} can't be written ({cause}): write the index of a local copy, and "
            "upload it"
        ) from None
