"""Opens the CSR matrices that a path means, with the names of their columns and what is known of
their rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, DataNotFoundError, FileChangedError, FormatError
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import Kind
from headrace.io.resolve.resolver import kind_of, resolve
from headrace.storage.arrays.reader import OpenArrays
from headrace.storage.hdf5.kind import HDF5
from headrace.storage.hdf5.rows import open_files
from headrace.storage.sparse.frames import (
    Column,
    column_names,
    joined_column,
    names_in,
    read_column,
    tables_of,
)
from headrace.storage.sparse.groups import GroupFile
from headrace.storage.sparse.hdf5 import HDF5Groups
from headrace.storage.sparse.join import Columns, FileColumns, Join, join_columns
from headrace.storage.sparse.matrix import Matrix, format_of, open_matrix, sparse_groups
from headrace.storage.sparse.source import JoinedRows, SparseSource
from headrace.storage.sparse.zarr import ZarrGroups
from headrace.storage.zarr.kind import ZARR
from headrace.storage.zarr.rows import OpenZarr

_OF_MATRIX = ("", "/indptr", "/indices", "/data")
_T = TypeVar("_T")


class OpenedRows(NamedTuple):
    """The rows of one or several files."""

    source: SparseSource | JoinedRows
    columns: Columns
    targets: dict[str, Column]
    """The columns that were asked for, by name, of all rows."""
    table: RowTable


class _Place(NamedTuple):
    """Where matrices lie, and how they are reached."""

    data_path: DataPath
    reach: RemoteOptions
    is_zarr: bool
    group: str


class RowTable(Mapping[str, npt.NDArray[Any]]):
    """The columns of `obs`, by name: [rows] numbers or str objects, of categories their codes. Each
    is read when it is asked for.

    Args:
        place: of the matrices.
        rows: of each file.
    """

    def __init__(self, place: _Place, rows: Sequence[int]) -> None:
        self._place, self._rows = place, list(rows)
        self._names: list[str] | None = None

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        each = _look_into_each(
            self._place,
            ["obs", f"obs/{name}"],
            lambda file: _row_columns(file, self._place.group, [name]),
        )
        if len(each) != len(self._rows):
            raise FileChangedError(
                f"there are {len(each):,} files now, and {len(self._rows):,} when they were "
                "opened: open them again"
            )
        columns = [column for _, (column,) in each]
        for (path, _), column, rows in zip(each, columns, self._rows, strict=True):
            if len(column.values) != rows:
                raise FileChangedError(
                    f"{redact(path)}: column {name!r} has {len(column.values):,} rows, and the "
                    f"matrix had {rows:,}: open it again"
                )
        return joined_column(columns, name).values

    def __iter__(self) -> Iterator[str]:
        if self._names is None:
            ((_, self._names), *_) = _look_into_each(self._place, ["obs"], self._names_in, 1)
        return iter(self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return any(name == one for one in self)

    def _names_in(self, file: GroupFile) -> list[str]:
        rows, _ = tables_of(file, self._place.group)
        return [] if rows is None else column_names(file, rows)


class _File(NamedTuple):
    """What is found in one file."""

    path: str
    opened: OpenArrays[Any]
    matrix: Matrix
    names: Any
    targets: list[Column]


def open_rows(
    data_path: DataPath,
    reach: RemoteOptions,
    group: str,
    *,
    targets: Sequence[str] = (),
    columns: Any = None,
    join: Join | None = None,
    dtype: np.dtype[Any] | None = None,
    direct: bool = True,
) -> OpenedRows:
    """Opens all files, and joins their columns.

    Args:
        data_path: HDF5 files or Zarr stores.
        reach: how URLs are reached.
        group: of the matrix, in each of them.
        targets: names of columns of `obs`.
        columns, join: see `join_columns`.
        dtype: that values are cast to.
        direct: False: arrays are read by h5py and zarr-python alone.

    Raises:
        DataNotFoundError, AccessError, RemoteError: a file is missing, or can't be read.
        MissingNameError, FormatError, ConfigError: see `open_matrix`, `read_column`,
            `join_columns`.
    """
    wanted = group.strip("/")
    place = _Place(
        data_path,
        reach,
        kind_of(data_path, (HDF5, ZARR), reach, searches=True, is_alone=True) is ZARR,
        wanted,
    )
    nodes = [
        *(f"{wanted}{end}".strip("/") for end in _OF_MATRIX),
        "obs",
        "var",
        "var/_index",
        *(f"obs/{name}" for name in targets),
    ]
    looked = _look_into_each(
        place, nodes, lambda file: _look_into(file, wanted, targets), direct=direct, keeps=True
    )
    found = [one for _, one in looked]
    joined = join_columns(
        [FileColumns(one.path, one.matrix.shape[1], one.names) for one in found], join, columns
    )
    if dtype is None:
        _check_dtypes(found)
    chosen = _column_print(joined) if columns is not None or len(found) > 1 else ""
    sources = [
        SparseSource(one.path, one.opened, one.matrix, joined.width, numbers, dtype, chosen)
        for one, numbers in zip(found, joined.numbers, strict=True)
    ]
    of_rows = {
        name: joined_column([one.targets[at] for one in found], name)
        for at, name in enumerate(targets)
    }
    table = RowTable(place, [one.matrix.shape[0] for one in found])
    return OpenedRows(
        sources[0] if len(sources) == 1 else JoinedRows(sources), joined, of_rows, table
    )


def find_matrix(data_path: DataPath, reach: RemoteOptions, kind: Kind) -> str | None:
    """The group of the sparse matrix that the first of some HDF5 files or Zarr stores is about:
    "X"; the file itself ("/"); the only one, where nothing lies beside it; or of AnnData without X
    the only layer. None: there is none, or the file can't be opened, which a dataset says.
    """

    def find(file: GroupFile) -> str | None:
        if format_of(file, "X") is not None:
            return "X"
        if format_of(file, "") is not None:
            return "/"
        names = [] if file.opened.files.is_remote else file.top_names()
        if len(names) == 1 and format_of(file, names[0]) is not None:
            return names[0]
        is_cells = (
            "layers" in names
            and "X" not in names
            and file.attribute("", "encoding-type") == "anndata"
        )
        layers = (
            [name for name in sparse_groups(file) if name.startswith("layers/")] if is_cells else []
        )
        return layers[0] if len(layers) == 1 else None

    try:
        ((_, found),) = _look_into_each(_Place(data_path, reach, kind is ZARR, "X"), ["X"], find, 1)
    except DataNotFoundError:
        return None
    return found


def _look_into_each(
    place: _Place,
    nodes: Sequence[str],
    look: Callable[[GroupFile], _T],
    first: int | None = None,
    *,
    direct: bool = True,
    keeps: bool = False,
) -> list[tuple[str, _T]]:
    """What `look` finds in each file, or in the first ones, with its path.

    Args:
        nodes: groups and arrays that it looks at, whose metadata a server is asked for together.
        keeps: what is found reads the files later.
    """
    data_path, reach, is_zarr, _ = place
    if is_zarr:
        files = resolve(data_path, ZARR, reach)
        stores = OpenZarr(files.server, direct=direct)
        try:
            return [
                (path, look(ZarrGroups(stores.store(path, nodes), stores)))
                for path in files.urls()[:first]
            ]
        finally:
            if not keeps:
                stores.close()
    paths, opened = open_files(data_path, reach)

    def one(path: str) -> tuple[str, _T]:
        with opened.hdf5.reading(path) as file:
            return path, look(
                HDF5Groups(file, path, opened, direct=direct, cache_dir=reach.cache_dir)
            )

    try:
        return opened.hdf5.read_each(paths[:first], one)
    finally:
        if not keeps:
            opened.close()


def _look_into(file: GroupFile, group: str, targets: Sequence[str]) -> _File:
    matrix = open_matrix(file, group)
    _, columns = tables_of(file, group)
    names = None if columns is None else names_in(file, columns)
    if names is not None and len(names) != matrix.shape[1]:
        raise FormatError(
            f"{file.path}: {columns!r} names {len(names):,} columns, and {group!r} has "
            f"{matrix.shape[1]:,}: the file is damaged"
        )
    return _File(
        file.path, file.opened, matrix, names, _row_columns(file, group, targets, matrix.shape[0])
    )


def _row_columns(
    file: GroupFile, group: str, names: Sequence[str], rows: int | None = None
) -> list[Column]:
    """Columns of the table of the rows."""
    table, _ = tables_of(file, group)
    if names and table is None:
        raise ConfigError(
            f"{file.path} has no table obs beside {group or '/'!r}, so there is no column "
            f"{names[0]!r}: pass targets= an array with one "
            "target a row"
        )
    return [read_column(file, str(table), name, rows) for name in names]


def _check_dtypes(files: Sequence[_File]) -> None:
    first = files[0]
    for other in files[1:]:
        one, its = (file.matrix.data.dtype.newbyteorder("=") for file in (first, other))
        if one != its:
            raise FormatError(
                f"{other.path} and {first.path} can't be one dataset: values are {its} here, and "
                f"{one} there: pass dtype='float32', say"
            )


def _column_print(columns: Columns) -> str:
    """Says which columns samples have: their names, or where there are none the numbers of those
    that are taken.
    """
    told = "\0".join(columns.names).encode() if columns.names is not None else b""
    if columns.names is None and columns.numbers[0] is not None:
        told = columns.numbers[0].astype("<i4").tobytes()
    return hashlib.blake2b(told + b"\0%d" % columns.width, digest_size=16).hexdigest()
