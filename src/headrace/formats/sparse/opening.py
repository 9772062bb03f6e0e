"""Opens the CSR matrices that a path means, with the names of their columns and what is known of
their rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FileChangedError, FormatError
from headrace.formats.resolve.file_set import Format
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.sparse.frames import (
    Column,
    column_names,
    joined_column,
    names_in,
    read_column,
    tables_of,
)
from headrace.formats.sparse.join import Columns, FileColumns, Join, join_columns
from headrace.formats.sparse.matrix import Matrix, open_matrix
from headrace.formats.sparse.source import JoinedRows, SparseSource
from headrace.formats.tree import Tree
from headrace.formats.trees import look_into, tree_kind
from headrace.io.remote.options import RemoteOptions

_OF_MATRIX = ("", "/indptr", "/indices", "/data")


class OpenedRows(NamedTuple):
    """The rows of one or several files."""

    source: SparseSource | JoinedRows
    columns: Columns
    targets: dict[str, Column]
    """The columns that were asked for, by name, of all rows."""
    table: RowTable


class RowTable(Mapping[str, npt.NDArray[Any]]):
    """The columns of `obs`, by name: [rows] numbers or str objects, of categories their codes. Each
    is read when it is asked for.

    Args:
        data_path, reach, kind, group: of the matrices.
        rows: of each file.
    """

    def __init__(
        self,
        data_path: DataPath,
        reach: RemoteOptions,
        kind: Format,
        group: str,
        rows: Sequence[int],
    ) -> None:
        self._where = (data_path, reach, kind)
        self._group = group
        self._rows = list(rows)
        self._names: list[str] | None = None

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        nodes = ["obs", f"obs/{name}"]

        def read(tree: Tree) -> tuple[str, Column]:
            return tree.shown, _row_columns(tree, self._group, [name])[0]

        found, _ = look_into(*self._where, read, nodes=nodes)
        rows = [len(column.values) for _, column in found]
        if rows != self._rows:
            by_file = {shown: len(column.values) for shown, column in found}
            raise FileChangedError(
                f"column {name!r} has {by_file} rows now, and the matrices had {self._rows}: open "
                "them again"
            )
        return joined_column([column for _, column in found], name).values

    def __iter__(self) -> Iterator[str]:
        if self._names is None:
            (self._names,), _ = look_into(*self._where, self._names_in, nodes=["obs"], first=1)
        return iter(self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return any(name == one for one in self)

    def _names_in(self, tree: Tree) -> list[str]:
        rows, _ = tables_of(tree, self._group)
        if rows is None:
            return []
        return column_names(tree, rows)


class _File(NamedTuple):
    """What is found in one file."""

    shown: str
    matrix: Matrix
    names: npt.NDArray[Any] | None
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
    group = group.strip("/")
    kind = tree_kind(data_path, reach)
    nodes = [f"{group}{end}".strip("/") for end in _OF_MATRIX]
    nodes += ["obs", "var", "var/_index", *(f"obs/{name}" for name in targets)]
    look = functools.partial(_look_into, group=group, targets=targets)
    files, opened = look_into(data_path, reach, kind, look, nodes=nodes, direct=direct, keeps=True)
    joined = join_columns(
        [FileColumns(file.shown, file.matrix.shape[1], file.names) for file in files],
        join,
        columns,
    )
    if dtype is None:
        _check_dtypes(files)
    of_columns = ""
    if columns is not None or len(files) > 1:
        of_columns = _columns_hash(joined)
    sources = [
        SparseSource(file.shown, opened, file.matrix, joined.width, numbers, dtype, of_columns)
        for file, numbers in zip(files, joined.numbers, strict=True)
    ]
    of_rows = {
        name: joined_column([file.targets[number] for file in files], name)
        for number, name in enumerate(targets)
    }
    table = RowTable(data_path, reach, kind, group, [file.matrix.shape[0] for file in files])
    source = sources[0] if len(sources) == 1 else JoinedRows(sources)
    return OpenedRows(source, joined, of_rows, table)


def _look_into(tree: Tree, group: str, targets: Sequence[str]) -> _File:
    matrix = open_matrix(tree, group)
    _, columns = tables_of(tree, group)
    names = None if columns is None else names_in(tree, columns)
    if names is not None and len(names) != matrix.shape[1]:
        raise FormatError(
            f"{tree.shown}: {columns!r} names {len(names):,} columns, and {group!r} has "
            f"{matrix.shape[1]:,}: the file is damaged"
        )
    return _File(tree.shown, matrix, names, _row_columns(tree, group, targets, matrix.shape[0]))


def _row_columns(
    tree: Tree, group: str, names: Sequence[str], rows: int | None = None
) -> list[Column]:
    """Columns of the table of the rows."""
    table, _ = tables_of(tree, group)
    if names and table is None:
        raise ConfigError(
            f"{tree.shown} has no table obs beside {group or '/'!r}, so there is no column "
            f"{names[0]!r}: pass targets= an array with one target a row"
        )
    return [read_column(tree, str(table), name, rows) for name in names]


def _check_dtypes(files: Sequence[_File]) -> None:
    first = files[0].matrix.data.dtype.newbyteorder("=")
    for file in files[1:]:
        dtype = file.matrix.data.dtype.newbyteorder("=")
        if dtype != first:
            raise FormatError(
                f"{file.shown} and {files[0].shown} can't be one dataset: values are {dtype} "
                f"here, and {first} there: pass dtype='float32', say"
            )


def _columns_hash(columns: Columns) -> str:
    """A hash of the columns of samples: of their names, or of the numbers that are taken."""
    content = b""
    if columns.names is not None:
        content = "\0".join(columns.names).encode()
    elif columns.numbers[0] is not None:
        content = columns.numbers[0].astype("<i4").tobytes()
    return hashlib.blake2b(content + b"\0%d" % columns.width, digest_size=16).hexdigest()
