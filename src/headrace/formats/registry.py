"""The formats that headrace reads, in one list. Other packages add theirs by an entry point."""

from __future__ import annotations

import functools
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from headrace.errors import ConfigError, FormatError, MissingNameError
from headrace.formats.hdf5.kind import HDF5
from headrace.formats.resolve.file_set import IMAGES, TEXTS, FileSet, Format as Format
from headrace.formats.resolve.resolver import DataPath, entries_of, look_for, resolve
from headrace.formats.source import Description, Source
from headrace.formats.table.files import TABLES
from headrace.formats.tar import TARS
from headrace.formats.zarr.stores import ZARR
from headrace.io.local_files import LocalFiles
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions

FORMATS: tuple[Format, ...] = (IMAGES, TARS, TEXTS, HDF5, ZARR, TABLES)
"""What comes first here is read where files of several formats lie side by side."""
GROUP = "headrace.formats"
"""The group of entry points by which other packages register a format (`Format` with `open`)."""


class Columns(ABC):
    """An opened container: rows of named columns.

    It is opened in the parent process, and its sources travel to workers by fork or pickle.
    """

    names: Sequence[str]
    """Of the columns, in their order."""
    decoders: Mapping[str, str] = {}
    """By the names of columns that hold encoded bytes what decodes them: the extension that a file
    of these bytes would have, such as "jpg", "json" or "txt".
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def column(self, name: str) -> Source:
        """The values of one column: a `RowSource` where they are arrays of one shape."""

    def rows(self, names: Sequence[str]) -> Source:
        """Several columns, read together: a record is a dict of the values of a row."""
        return _Rows({name: self.column(name) for name in names})


class _Rows(Source):
    """Columns that are read one after the other."""

    def __init__(self, columns: Mapping[str, Source]) -> None:
        self._columns = dict(columns)
        self._first = next(iter(self._columns.values()))
        self.thread_safe = all(column.thread_safe for column in self._columns.values())

    def __len__(self) -> int:
        return len(self._first)

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        read = [column.read(indices) for column in self._columns.values()]
        return [dict(zip(self._columns, values, strict=True)) for values in zip(*read, strict=True)]

    def describe(self) -> Description:
        found = Description()
        for name, column in self._columns.items():
            described = column.describe()
            found.columns += [replace(part, name=name) for part in described.columns]
            found.stored += described.stored
        return found

    def fingerprint(self) -> str:
        said = [f"{name}:{column.fingerprint()}" for name, column in self._columns.items()]
        return hashlib.blake2b("\0".join(said).encode(), digest_size=16).hexdigest()

    def blocks(self) -> Any:
        return self._first.blocks()

    def location(self, index: int) -> str:
        return self._first.location(index)

    def close(self) -> None:
        for column in self._columns.values():
            column.close()


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
                f"{type(format_).__name__}, and not a headrace.Format with open=: repair or "
                "uninstall its package"
            )
        found.append(format_)
    return tuple(found)


def look_up(data_path: DataPath, options: RemoteOptions) -> tuple[Format, FileSet | None]:
    """The format of the files that a path means, headrace's own first, and these files; None for
    those of a server, which are not listed yet.

    Args:
        data_path: a path, glob, URL or list; see `headrace.formats.resolve.resolver.resolve`.
        options: how URLs are read.

    Raises:
        ConfigError, DataNotFoundError, FormatError, AccessError, RemoteError: see `look_for`.
        FormatError: a file is of no format that is known.
    """
    kind, files = look_for(data_path, FORMATS, options)
    if kind is None and installed_formats():
        kind, files = look_for(data_path, installed_formats(), options)
    if kind is not None:
        return kind, files
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
    paths = files.urls()
    if files.server is None:
        paths = [os.path.abspath(path) for path in paths]
    columns: Columns = format_.open(paths, files.server or LocalFiles())
    for name in names:
        if name not in columns.names:
            raise MissingNameError(
                f"{redact(entries_of(files.given)[0])} has no column {name!r}; it has "
                f"{', '.join(map(repr, columns.names))}"
            )
    return columns
