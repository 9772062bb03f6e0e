"""The formats that headrace reads, in one list. Other packages add theirs by an entry point."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from importlib.metadata import entry_points

from headrace.errors import ConfigError, FormatError, MissingNameError
from headrace.formats.columns import Columns
from headrace.formats.files import check_splits
from headrace.formats.hdf5 import HDF5
from headrace.formats.resolve.file_set import IMAGES, TEXTS, FileSet, Format as Format
from headrace.formats.resolve.resolver import DataPath, entries_of, look_for, resolve
from headrace.formats.shards.litdata import LITDATA
from headrace.formats.shards.mds import MDS
from headrace.formats.table.files import TABLES
from headrace.formats.tar import TARS
from headrace.formats.tfrecord import TFRECORD
from headrace.formats.zarr.stores import ZARR
from headrace.io.local_files import LocalFiles
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions

FORMATS: tuple[Format, ...] = (IMAGES, TARS, MDS, TFRECORD, TEXTS, HDF5, ZARR, TABLES, LITDATA)
"""What comes first here is read where files of several formats lie side by side."""
GROUP = "headrace.formats"
"""The group of entry points by which other packages register a format (`Format` with `open`)."""


@functools.cache
def installed_formats() -> tuple[Format, ...]:
    """The formats of other packages that are installed here, in the order of their names.

    Raises:
        ConfigError: one can't be imported, or is no format.
    """
    found = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            format_ = point.load()
        except Exception as error:
            raise ConfigError(
                f"the entry point {point.name} = {point.value!r} of {GROUP} can't be imported "
                f"({type(error).__name__}: {error}): repair or uninstall its package"
            ) from error
        if not isinstance(format_, Format) or format_.open is None:
            raise ConfigError(
                f"the entry point {point.name} = {point.value!r} of {GROUP} is "
                f"{type(format_).__name__}, and not a headrace.formats.registry.Format with open=: "
                "repair or uninstall its package"
            )
        found.append(format_)
    return tuple(found)


def detect(
    data_path: DataPath | FileSet, options: RemoteOptions
) -> tuple[Format, DataPath | FileSet]:
    """The format of the files that a path means, headrace's own first; and these files, of a server
    the path, since they are not listed yet.

    Args:
        data_path: a path, glob, URL or list; see `headrace.formats.resolve.resolver.resolve`.
        options: how URLs are read.

    Raises:
        ConfigError, DataNotFoundError, FormatError, AccessError, RemoteError: see `look_for`.
        FormatError: a file is of no format that is known.
    """
    kind, where = look_for(data_path, FORMATS, options)
    if kind is None and installed_formats():
        kind, where = look_for(data_path, installed_formats(), options)
    if kind is not None:
        return kind, where
    resolve(data_path, IMAGES, options, asks=True)  # says what is there, of folders
    names = ", ".join(format_.name for format_ in (*FORMATS, *installed_formats()))
    raise FormatError(
        f"{redact(entries_of(data_path)[0])}: the format is not known; headrace reads {names}"
    )


def open_columns(
    data_path: DataPath | FileSet, format_: Format, options: RemoteOptions, names: Sequence[str]
) -> Columns:
    """The opened container of a path, of a format that has `open`.

    Args:
        names: of the columns that will be read.

    Raises:
        MissingNameError: there is no such column; the message lists those there are.
    """
    assert format_.open is not None
    files = resolve(data_path, format_, options)
    check_splits(files)
    paths = files.urls()
    if files.server is None:
        paths = [os.path.abspath(path) for path in paths]
    columns: Columns = format_.open(paths, files.server or LocalFiles(options.cache_dir))
    for name in names:
        if name not in columns.names:
            raise MissingNameError(
                f"{redact(entries_of(files)[0])} has no column {name!r}; it has "
                f"{', '.join(map(repr, columns.names)) or 'none'}"
            )
    return columns
