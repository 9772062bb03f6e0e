"""Opens the CSR matrices that a path means, joins their columns by name, and chooses among them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.arguments import described
from headrace.errors import ConfigError, FileChangedError, FormatError, MissingNameError
from headrace.formats.resolve.file_set import Format
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.sparse.matrix import (
    Column,
    Matrix,
    column_names,
    joined_column,
    names_in,
    open_matrix,
    read_column,
    tables_of,
)
from headrace.formats.sparse.rows import JoinedRows, SparseSource
from headrace.formats.tree import Tree
from headrace.formats.trees import look_into, tree_kind
from headrace.io.paths import listed_names
from headrace.io.remote.options import RemoteOptions

Join = Literal["inner", "outer"]


class RowTable(Mapping[str, npt.NDArray[Any]]):
    """The columns of `obs`, by name: [rows] numbers or str objects, of categories their codes. Each
    is read when it is asked for.

    Args:
        where: the files, how they are reached, and their format.
        group: of the matrices.
        rows: of each file.
        names: of the columns of the first.
    """

    def __init__(
        self,
        where: tuple[DataPath, RemoteOptions, Format],
        group: str,
        rows: Sequence[int],
        names: Sequence[str],
    ) -> None:
        self._where = where
        self._group = group
        self._rows = list(rows)
        self._names = list(names)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        def read(tree: Tree) -> tuple[str, Column]:
            table, _ = tables_of(tree, self._group)
            return tree.shown, _row_columns(tree, table, self._group, [name])[0]

        found, _ = look_into(*self._where, read, nodes=["obs", f"obs/{name}"])
        rows = {shown: len(column.values) for shown, column in found}
        if [*rows.values()] != self._rows:
            raise FileChangedError(
                f"column {name!r} has {rows} rows now, and the matrices had {self._rows}: open "
                "them again"
            )
        return joined_column([column for _, column in found], name).values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class _File(NamedTuple):
    """What is found in one file.

    Attributes:
        names: of its columns; None: it names none.
        of_rows: names of the columns of `obs`.
    """

    shown: str
    matrix: Matrix
    names: npt.NDArray[Any] | None
    targets: list[Column]
    of_rows: list[str]


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
) -> tuple[SparseSource | JoinedRows, list[str] | None, dict[str, Column], RowTable]:
    """Opens all files, and joins their columns.

    Args:
        data_path: HDF5 files or Zarr stores.
        reach: how URLs are reached.
        group: of the matrix, in each of them.
        targets: names of columns of `obs`.
        columns, join: see `SparseDataset`.
        dtype: that values are cast to.
        direct: False: arrays are read by h5py and zarr-python alone.

    Returns:
        The source of the rows; the names of their columns (None: the files name none); the columns
        of `obs` that were asked for, by name, of all rows; and all columns of `obs`.

    Raises:
        DataNotFoundError, AccessError, RemoteError: a file is missing, or can't be read.
        MissingNameError, FormatError, ConfigError: see `open_matrix`, `read_column`, and for
            columns that can't be joined or chosen.
    """
    group = group.strip("/")
    kind = tree_kind(data_path, reach)
    nodes = [f"{group}{end}".strip("/") for end in ("", "/indptr", "/indices", "/data")]
    nodes += ["obs", "var", "var/_index", *(f"obs/{name}" for name in targets)]
    look = functools.partial(_look_into, group=group, targets=targets)
    files, opened = look_into(data_path, reach, kind, look, nodes=nodes, direct=direct, keeps=True)
    names, width, numbers = _join_columns(files, join, columns)
    if dtype is None:
        kinds = [file.matrix.data.dtype.newbyteorder("=") for file in files]
        for file, stored in zip(files, kinds, strict=True):
            if stored != kinds[0]:
                raise FormatError(
                    f"{file.shown} and {files[0].shown} can't be one dataset: values are {stored} "
                    f"here, and {kinds[0]} there: pass dtype='float32', say"
                )
    of_columns = ""
    if columns is not None or len(files) > 1:
        content = b""
        if names is not None:
            content = "\0".join(names).encode()
        elif numbers[0] is not None:
            content = numbers[0].astype("<i4").tobytes()
        of_columns = hashlib.blake2b(content + b"\0%d" % width, digest_size=16).hexdigest()
    sources = [
        SparseSource(file.shown, opened, file.matrix, width, own, dtype, of_columns)
        for file, own in zip(files, numbers, strict=True)
    ]
    of_rows = {
        name: joined_column([file.targets[number] for file in files], name)
        for number, name in enumerate(targets)
    }
    rows = [file.matrix.shape[0] for file in files]
    table = RowTable((data_path, reach, kind), group, rows, files[0].of_rows)
    source = sources[0] if len(sources) == 1 else JoinedRows(sources)
    return source, names, of_rows, table


def _look_into(tree: Tree, group: str, targets: Sequence[str]) -> _File:
    matrix = open_matrix(tree, group)
    rows, columns = tables_of(tree, group)
    names = None if columns is None else names_in(tree, columns)
    if names is not None and len(names) != matrix.shape[1]:
        raise FormatError(
            f"{tree.shown}: {columns!r} names {len(names):,} columns, and {group!r} has "
            f"{matrix.shape[1]:,}: the file is damaged"
        )
    of_rows = [] if rows is None else column_names(tree, rows)
    found = _row_columns(tree, rows, group, targets, matrix.shape[0])
    return _File(tree.shown, matrix, names, found, of_rows)


def _row_columns(
    tree: Tree, table: str | None, group: str, names: Sequence[str], rows: int | None = None
) -> list[Column]:
    """Columns of the table of the rows of a matrix."""
    if not names:
        return []
    if table is None:
        raise ConfigError(
            f"{tree.shown} has no table obs beside {group or '/'!r}, so there is no column "
            f"{names[0]!r}: pass targets= an array with one target a row"
        )
    return [read_column(tree, table, name, rows) for name in names]


# -- columns


def _join_columns(
    files: Sequence[_File], join: Join | None, columns: Any
) -> tuple[list[str] | None, int, list[npt.NDArray[np.int32] | None]]:
    """The columns that samples have: their names (None: there are none), how many, and for each
    file the number in a sample of each of its columns, -1 where it is left out; None: its columns
    are those of samples.
    """
    if join not in (None, "inner", "outer"):
        raise ConfigError(f"join must be 'inner', 'outer' or None, not {join!r}")
    chosen = _as_array(columns)
    first = files[0]
    width = first.matrix.shape[1]
    are_alike = all(
        file.matrix.shape[1] == width and np.array_equal(file.names, first.names)  # type: ignore[arg-type]
        for file in files
    )
    names: list[str] | None = None
    if not are_alike:
        names = _joint_names(files, join, chosen is not None and chosen.dtype == object)
        width = len(names)
    elif first.names is not None:
        names = first.names.tolist()
    known = {name: number for number, name in enumerate(names or ())}
    picked = np.arange(width)
    if chosen is not None:
        picked = _picked(chosen, names, known, width, files)
    becomes = np.full(width + 1, -1, np.int32)  # the last one is that of columns that are left out
    becomes[picked] = np.arange(len(picked), dtype=np.int32)
    tables: list[npt.NDArray[np.int32] | None] = []
    for file in files:
        own = np.arange(width)
        if not are_alike:
            own = np.array([known.get(name, -1) for name in _names_of(file)], np.int64)
        numbers = becomes[own]
        tables.append(None if np.array_equal(numbers, np.arange(len(picked))) else numbers)
    if names is not None and chosen is not None:
        names = [names[number] for number in picked.tolist()]
    return names, len(picked), tables


def _names_of(file: _File) -> list[str]:
    """The names of the columns of a file, none of which comes twice."""
    if file.names is None:
        raise FormatError(
            f"{file.shown} does not name its {file.matrix.shape[1]:,} columns (there is no var), "
            "so they can't be found by name"
        )
    names: list[str] = file.names.tolist()
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise FormatError(
            f"{file.shown}: more than one column is called {name!r}, so columns can't be found by "
            "name: make names unique (anndata: adata.var_names_make_unique()), or choose columns "
            "by number"
        )
    return names


def _joint_names(files: Sequence[_File], join: Join | None, are_named: bool) -> list[str]:
    """The names of the joint columns of files that don't have the same. (`are_named`: columns are
    named, and looked for among those of all.)
    """
    names = [dict.fromkeys(_names_of(file)) for file in files]
    if join == "outer":
        return list({name: None for some in names for name in some})
    common = [name for name in names[0] if all(name in some for some in names[1:])]
    for file, some in zip(files, names, strict=True):
        if join is not None or are_named or some.keys() == names[0].keys():
            continue
        odd = sorted(some.keys() ^ names[0].keys())
        raise FormatError(
            f"{file.shown} and {files[0].shown} differ in {len(odd):,} columns, such as "
            f"{listed_names(odd[:3], show=repr)}: pass join='inner' (columns that all files have) "
            "or join='outer' (columns that any has, zeros where a file has none)"
        )
    if not common:
        raise FormatError(
            f"{files[0].shown} and the other files have no column in common: are their names of "
            "one kind?"
        )
    return common


def _as_array(columns: Any) -> npt.NDArray[Any] | None:
    """Names as objects, numbers as int64, a mask as bool."""
    if columns is None:
        return None
    array = np.asarray(columns)
    if array.ndim == 1:
        if not len(array):
            raise ConfigError("columns is empty: name at least one, or leave it out")
        if array.dtype.kind == "b":
            return array
        if array.dtype.kind in "iu":
            return array.astype(np.int64)
        if all(isinstance(name, str) for name in array.tolist()):
            return array.astype(object)
    raise ConfigError(
        f"columns must be names or numbers of columns, or a mask, not {described(columns)}"
    )


def _picked(
    chosen: npt.NDArray[Any],
    names: list[str] | None,
    known: Mapping[str, int],
    width: int,
    files: Sequence[_File],
) -> npt.NDArray[np.int64]:
    """The numbers of the chosen columns among the joint ones."""
    if chosen.dtype == bool:
        if len(chosen) != width or not chosen.any():
            raise ConfigError(
                f"columns is a mask of {len(chosen):,} that takes {int(chosen.sum()):,}, and there "
                f"are {width:,} columns"
            )
        return np.flatnonzero(chosen)
    if chosen.dtype == object:
        if names is None:
            raise ConfigError(
                f"columns holds names, and {files[0].shown} does not name its columns (there is no "
                "var): pass numbers"
            )
        for file in files:
            own = set(_names_of(file))
            for name in chosen.tolist():
                if name not in own and name not in known:
                    raise MissingNameError(
                        f"{file.shown} has no column {name!r}; it has: "
                        f"{listed_names(names, name, repr)}"
                    )
        picked = np.array([known[name] for name in chosen.tolist()], np.int64)
    else:
        if chosen.min() < -width or chosen.max() >= width:
            raise ConfigError(
                f"columns reach from {chosen.min():,} to {chosen.max():,}, and there are {width:,}"
            )
        picked = chosen % width
    unique, counts = np.unique(picked, return_counts=True)
    if (counts > 1).any():
        number = int(unique[np.argmax(counts > 1)])
        shown = f"column {number:,}" if names is None else repr(names[number])
        raise ConfigError(f"columns takes {shown} more than once")
    return picked
