"""Writes the index of a file next to it, for readers of its URL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Unpack

from headrace.arguments import check_names
from headrace.errors import AccessError, ConfigError, WriteError
from headrace.io.atomic import written_to
from headrace.io.index import IndexKind, index_bytes
from headrace.io.paths import redact
from headrace.io.remote.fsspec_calls import path_in
from headrace.io.remote.options import RemoteOptions, ServerKeywords
from headrace.io.remote_files import RemoteFiles, with_index
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import Kind
from headrace.io.resolve.resolver import resolve
from headrace.storage.hdf5.rows import INDEX as HDF5
from headrace.storage.table.arrow import INDEX as ARROW
from headrace.storage.tar.index import INDEX as TAR
from headrace.storage.text.index import INDEX as LINES
from headrace.storage.text.plain import is_compressed
from headrace.storage.text.records import FORMATS, JSON_LINES
from headrace.storage.zarr.kind import is_zarr
from headrace.storage.zarr.shards import INDEX as SHARDS, indexed
from headrace.storage.zarr.stores import ZarrUrl
from headrace.storage.zarr.zips import INDEX as ZIP

_INDEXED = Kind(
    "files with an index",
    (
        ".tar",
        ".h5",
        ".hdf5",
        ".he5",
        ".h5ad",
        *JSON_LINES,
        ".txt",
        ".arrow",
        ".feather",
        ".zarr.zip",
    ),
    stores=(".zarr",),
    recognizes=is_zarr,
)
"""What is looked for in folders."""
_KINDS: dict[str, IndexKind] = {".tar": TAR, ".zip": ZIP}
_KINDS |= dict.fromkeys((".arrow", ".feather"), ARROW)
_KINDS |= dict.fromkeys((".h5", ".hdf5", ".he5", ".h5ad"), HDF5)
_KINDS |= dict.fromkeys((".txt", ".md", *FORMATS), LINES)


def write_index(data_path: DataPath, **options: Unpack[ServerKeywords]) -> list[str]:
    """Writes an index file next to each data file, so that a dataset opens its URL in few round
    trips.

    An index contains what a dataset must know before it can read samples. The index of
    ``train.tar`` is ``train.tar.index``; upload both. It is valid for that version of the file
    only: write it again when the file changes.

    Args:
        data_path: a file, folder, glob or URL (of a writable server), or a list of these: .tar,
            .h5, .h5ad, .txt, .md, .csv, .tsv, .json, .jsonl, .ndjson, .arrow, .feather, .zarr.zip
            and .zarr (of sharded arrays). Folders are searched for .tar, .h5, .h5ad, .txt, .jsonl,
            .ndjson, .arrow, .feather, .zarr.zip and .zarr.
        **options: `storage_options`, `retries` and `deadline`: see `headrace.RemoteOptions`.

    Returns:
        The paths or URLs of the written indexes.

    Raises:
        ConfigError: an option is invalid; or a file can't have an index, such as compressed texts,
            which are unpacked on each machine.
        DataNotFoundError, AccessError, FormatError, RemoteError: a file is missing, can't be read,
            or is damaged.
        WriteError: the index can't be written there.
    """
    check_names("write_index", options, ServerKeywords.__optional_keys__)
    remote, written = RemoteOptions.taken_from(options), []
    files = resolve(data_path, _INDEXED, remote)
    urls = (
        files.urls()
        if files.is_remote
        else [f"file://{os.path.abspath(path)}" for path in files.urls()]
    )
    server: RemoteFiles = files.server or RemoteFiles(urls[0], remote)
    try:
        for url in urls:
            for one, kind in _wanted(url, files.is_remote, server, len(urls) == 1):
                server.learn([one])
                data = index_bytes(kind.make(server, one), kind, server.version(one).size)
                written.append(_write(with_index(one), data, not files.is_remote, server))
    finally:
        server.close()
    return written


def _wanted(
    url: str, is_remote: bool, server: RemoteFiles, is_only: bool
) -> Iterator[tuple[str, IndexKind]]:
    """The files of a URL that get an index, and its kind."""
    path = url if is_remote else url.removeprefix("file://")
    if is_zarr(path) and not path.lower().endswith(".zip"):
        arrays = list(indexed(ZarrUrl(url.rstrip("/"), server)))
        if not arrays and is_only:
            raise ConfigError(
                f"{redact(path)} has no array with shards, so there is nothing to write an index of"
            )
        yield from ((one, SHARDS) for one in arrays)
        return
    if ".zarr" in os.path.dirname(path):  # a file of a store is no shard
        return
    kind = _kind_of(url)
    if kind is None and is_compressed(path.partition("?")[0]):
        raise ConfigError(
            f"{redact(path)} is compressed, and is unpacked on each machine: it has no index"
        )
    if kind is None:
        raise ConfigError(
            f"{redact(path)} has no index: those of {', '.join(_KINDS)} and .zarr have one"
        )
    yield url, kind


def _kind_of(path: str) -> IndexKind | None:
    return _KINDS.get(os.path.splitext(path.partition("?")[0])[1].lower())


def _write(url: str, data: bytes, local: bool, files: RemoteFiles) -> str:
    try:
        if local:
            path = url.removeprefix("file://")
            with written_to(path) as file:
                file.write(data)
            return path
        files.filesystem.pipe_file(path_in(url, files.filesystem), data)
    except PermissionError as error:
        raise AccessError(f"{redact(url)} can't be written: {redact(error)}") from None
    except Exception as error:  # of whatever library speaks to that server
        cause = redact(error) or type(error).__name__
        raise WriteError(
            f"{redact(url)} can't be written ({cause}): write the index of a local copy, and "
            "upload it"
        ) from None
    return url
