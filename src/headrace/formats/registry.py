"""The formats that headrace reads, in one list. Other packages add theirs by an entry point."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Unpack

from headrace.arguments import check_names
from headrace.errors import AccessError, ConfigError, FormatError, MissingNameError, WriteError
from headrace.formats.files import check_splits
from headrace.formats.hdf5 import HDF5
from headrace.formats.hdf5.tree import INDEX as HDF5_INDEX
from headrace.formats.resolve.file_set import (
    IMAGES,
    TARS,
    TEXTS,
    FileSet,
    Format as Format,
    plain_name,
)
from headrace.formats.resolve.resolver import DataPath, entries_of, look_for, resolve
from headrace.formats.shards.litdata import LITDATA
from headrace.formats.shards.mds import MDS
from headrace.formats.source import Columns
from headrace.formats.table.arrow import INDEX as ARROW_INDEX
from headrace.formats.table.files import TABLES
from headrace.formats.tar import INDEX as TAR_INDEX
from headrace.formats.tfrecord import INDEX as TFRECORD_INDEX, TFRECORD
from headrace.formats.zarr.stores import ZARR
from headrace.io.array_file import array_bytes
from headrace.io.atomic import written_to
from headrace.io.index import IndexKind
from headrace.io.paths import redact, with_index
from headrace.io.remote.options import RemoteOptions, ServerKeywords
from headrace.io.remote_files import RemoteFiles

FORMATS: tuple[Format, ...] = (IMAGES, TARS, MDS, TFRECORD, TEXTS, HDF5, ZARR, TABLES, LITDATA)
"""All formats. Of several formats in one folder, the first in this list is read."""
_INDEXES: dict[str, IndexKind] = {
    ".tar": TAR_INDEX,
    **dict.fromkeys((".tfrecord", ".tfrecords"), TFRECORD_INDEX),
    **dict.fromkeys((".arrow", ".feather"), ARROW_INDEX),
    **dict.fromkeys((".h5", ".hdf5", ".he5", ".h5ad"), HDF5_INDEX),
}
"""What `write_index` writes, by the endings of files."""
GROUP = "headrace.formats"
"""The group of entry points by which other packages register a format (`Format` with `open`)."""


@functools.cache
def installed_formats() -> tuple[Format, ...]:
    """The registered formats of installed packages, sorted by name.

    Raises:
        ConfigError: a format can't be imported, or is not a `Format`.
    """
    found = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        package = point.module
        if point.dist is not None:
            package = point.dist.name
        try:
            format_ = point.load()
        except Exception as error:
            raise ConfigError(
                f"the format {point.value!r} of the package {package} can't be imported "
                f"({type(error).__name__}: {error}): repair or uninstall the package"
            ) from error
        if not isinstance(format_, Format) or format_.open is None:
            raise ConfigError(
                f"the format {point.value!r} of the package {package} is {type(format_).__name__}, "
                "not a headrace.formats.registry.Format with open=: repair or uninstall the package"
            )
        found.append(format_)
    return tuple(found)


def detect(
    data_path: DataPath | FileSet,
    options: RemoteOptions,
    kinds: tuple[Format, ...] = FORMATS,
) -> FileSet:
    """The files at a path, with their format.

    Args:
        data_path: a path, glob, URL or list; see `headrace.formats.resolve.resolver.resolve`.
        options: how URLs are read.
        kinds: the formats to look for. Those of other packages follow `FORMATS`.

    Raises:
        ConfigError, DataNotFoundError, FormatError, AccessError, RemoteError: see `look_for`.
        FormatError: a file is of no format that is known.
    """
    found = look_for(data_path, kinds, options)
    if found is None and kinds is FORMATS and installed_formats():
        kinds += installed_formats()
        found = look_for(data_path, installed_formats(), options)
    if found is not None:
        return found
    endings = tuple(ending for format_ in kinds for ending in format_.all_endings)
    files = resolve(data_path, Format("data", endings), options)  # says what is there, of folders
    if files.server is not None:
        files.server.close()
    names = ", ".join(format_.name for format_ in kinds)
    raise FormatError(f"{redact(entries_of(data_path)[0])}: unknown format; headrace reads {names}")


def open_columns(files: FileSet, options: RemoteOptions, names: Sequence[str]) -> Columns:
    """Opens files, as `detect` returns them, of a format that has `open`.

    Args:
        names: names of the columns that will be read.

    Raises:
        ConfigError: the format has no columns.
        MissingNameError: there is no such column; the message lists the columns.
    """
    kind = files.kind
    shown = redact(entries_of(files)[0])
    if kind.open is None:
        raise ConfigError(f"{shown} contains {kind.name}, without columns: leave out column=")
    check_splits(files)
    columns: Columns = kind.open(*files.to_read(options.cache_dir))
    for name in names:
        if name not in columns.names:
            raise MissingNameError(
                f"{shown} has no column {name!r}; it has "
                f"{', '.join(map(repr, columns.names)) or 'none'}"
            )
    return columns


# -- indices beside files


def write_index(data_path: DataPath, **options: Unpack[ServerKeywords]) -> list[str]:
    """Writes an index file next to each data file, by which a dataset opens its URL in few round
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
    files = resolve(data_path, Format("files with an index", tuple(_INDEXES)), remote)
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
            kind = _INDEXES.get(os.path.splitext(plain_name(path.partition("?")[0]))[1])
            if kind is None:
                known = ", ".join(_INDEXES)
                raise ConfigError(f"{redact(path)} has no index: those of {known} have one")
            server.learn([url])
            about = kind.about(server.version(url).size)
            data = array_bytes(kind.make(server, url), about, kind.types)
            written.append(_write(with_index(url), data, server))
    finally:
        server.close()
    return written


def _write(url: str, data: bytes, server: RemoteFiles) -> str:
    """Writes a file, and returns its path or URL."""
    path = url.removeprefix("file://")
    try:
        if path != url:
            with written_to(path) as file:
                file.write(data)
        else:
            server.filesystem.pipe_file(server.path_of(url), data)
        return path
    except PermissionError as error:
        raise AccessError(f"{redact(url)} can't be written: {redact(error)}") from None
    except Exception as error:  # of whatever library speaks to that server
        cause = redact(error) or type(error).__name__
        raise WriteError(
            f"{redact(url)} can't be written ({cause}): write the index of a local copy, and "
            "upload it"
        ) from None
