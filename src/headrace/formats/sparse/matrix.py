"""Opens and checks CSR matrices and the tables beside them; joins the columns of several files by
name, and selects some.

A CSR matrix is a group of three arrays: `data` and `indices` hold the values of all rows and their
columns, and row i has those from ``indptr[i]`` to ``indptr[i + 1] - 1``. AnnData marks the group by
the attributes encoding-type and shape, older versions and h5sparse by h5sparse_format and
h5sparse_shape.

What AnnData knows of rows (`obs`) and of columns (`var`) are tables: groups with an array per
column. A categorical column has codes, and the categories that they number.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.arguments import described
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import (
    ConfigError,
    FileChangedError,
    FormatError,
    MissingNameError,
    warn,
)
from headrace.formats.arrays.reader import ArrayReader
from headrace.formats.arrays.rows import ConcatSource, concatenated, long_doubles_in
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.sparse.rows import Matrix, SparseSource
from headrace.formats.tree import Tree, join
from headrace.formats.trees import look_into
from headrace.io.paths import listed_names
from headrace.io.remote.options import RemoteOptions

Join = Literal["inner", "outer"]
_NULLABLE = ("nullable-integer", "nullable-boolean", "nullable-string-array")


def format_of(tree: Tree, group: str) -> str | None:
    """ "csr" or "csc"; None: it is no sparse matrix."""
    if not tree.is_group(group):
        return None
    for key in ("encoding-type", "h5sparse_format"):
        name = tree.text(group, key)
        if name is not None:
            kind = name.removesuffix("_matrix")
            return kind if kind in ("csr", "csc") else None
    return None


def claims(tree: Tree) -> str | None:
    """The group of the sparse matrix that a file is about: "X", the file itself ("/"), or the only
    one, where nothing lies beside it. None: there is none.
    """
    if format_of(tree, "X") is not None:
        return "X"
    if format_of(tree, "") is not None:
        return "/"
    if tree.opened.files.is_remote:
        return None
    names = tree.children("")
    if len(names) == 1 and format_of(tree, names[0]) is not None:
        return names[0]
    return None


def open_matrix(tree: Tree, group: str) -> Matrix:
    """The CSR matrix in a group.

    Raises:
        MissingNameError: there is no such group; the message lists the sparse matrices that there
            are.
        ConfigError: it is a dense array, or something else.
        FormatError: it is a CSC matrix, or damaged.
    """
    kind = format_of(tree, group)
    where = f"{tree.shown}: {group or '/'!r}"
    if kind is None:
        others = [name for name in ["", *tree.nodes()] if format_of(tree, name) is not None]
        if tree.kind(group) is None:
            raise tree.missing("sparse matrix", group, others or tree.children(""))
        also = f"; sparse matrices of this file: {', '.join(map(repr, others[:10]))}"
        if tree.is_array(group):
            raise ConfigError(
                f"{where} is a dense array, {tree.described(group)}, not a sparse matrix: use "
                f"{tree.dataset_class}(path, {group!r}){also}"
            )
        encoding = tree.text(group, "encoding-type")
        raise ConfigError(
            f"{where} is not a sparse matrix: its encoding-type is {encoding!r}, not "
            f"'csr_matrix'{also}"
        )
    if kind == "csc":
        raise FormatError(
            f"{where} is a CSC matrix, whose values are stored by column: convert it once, with "
            "anndata: adata.X = adata.X.tocsr(), and write the file again"
        )
    tree.check_has(group, "indptr", "indices", "data")
    indptr = tree.column(join(group, "indptr"))
    indices = tree.numbers(join(group, "indices"))
    data = tree.numbers(join(group, "data"))
    attributes = tree.attrs(group)
    shape = attributes.get("shape", attributes.get("h5sparse_shape"))
    try:
        rows, columns = map(int, shape)
        damage = _damage(indptr, rows, columns, indices, data)
    except (TypeError, ValueError, OverflowError):
        damage = f"its attribute shape is {shape!r}, and not the numbers of rows and columns"
    if damage:
        raise FormatError(f"{where}: {damage}: the file is damaged, or cut short")
    if data.dtype.kind not in "biufc":
        raise FormatError(f"{where}: data are {data.dtype}, not numbers")
    if long_doubles_in(data.dtype) is not None:
        raise FormatError(
            f"{where}: data are long doubles ({data.dtype}), which torch does not have: convert "
            "them to float64"
        )
    return Matrix(group, (rows, columns), indptr, indices, data)


def _damage(
    indptr: AnyArray, rows: int, columns: int, indices: ArrayReader, data: ArrayReader
) -> str | None:
    """What is wrong with the arrays of a matrix."""
    if rows < 0 or columns < 0:
        return f"its attribute shape is {[rows, columns]}"
    if indptr.dtype.kind not in "iu" or indptr.shape != (rows + 1,):
        return (
            f"indptr is {indptr.dtype} {list(indptr.shape)}, and {rows:,} rows need "
            f"{rows + 1:,} integers"
        )
    if indptr[0] != 0:
        return f"indptr begins at {int(indptr[0])}, and not at 0"
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])
    if len(falls):
        row = int(falls[0])
        return f"indptr falls from {int(indptr[row]):,} to {int(indptr[row + 1]):,} at row {row:,}"
    for name, reader in (("indices", indices), ("data", data)):
        if len(reader.shape) != 1:
            return f"{name} has shape {list(reader.shape)}, and should have one axis"
    if indices.dtype.kind not in "iu":
        return f"indices are {indices.dtype}, and no integers"
    if indices.shape != data.shape:
        return f"there are {indices.shape[0]:,} indices and {data.shape[0]:,} data"
    if indptr[-1] > data.shape[0]:
        return f"indptr ends at {int(indptr[-1]):,}, and there are {data.shape[0]:,} values"
    return None


# -- tables


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        values: [rows] numbers; str objects; of categories their codes, -1 where there is none.
    """

    values: AnyArray
    categories: list[str] | None = None


def tables_of(tree: Tree, group: str) -> tuple[str | None, str | None]:
    """Where the tables of the rows and of the columns of a matrix lie; None: there is none.

    Those of ``X`` and ``layers/...`` lie beside them; ``raw/X`` shares its rows with the rest of
    the file, and so does ``obsm/...``, which has columns of its own.
    """
    before, _, last = group.rpartition("/")
    parent, _, kind = before.rpartition("/")
    found: list[str | None] = [None, None]
    if kind == "obsm":
        found[0] = join(parent, "obs")
    elif kind == "layers":
        found = [join(parent, "obs"), join(parent, "var")]
    elif last == "X":
        found = [join(parent if kind == "raw" else before, "obs"), join(before, "var")]
    rows, columns = (table if table and tree.is_group(table) else None for table in found)
    return rows, columns


def names_in(tree: Tree, table: str, rows: int) -> list[str]:
    """The names of a table's rows."""
    name = tree.text(table, "_index") or "_index"
    if tree.kind(f"{table}/{name}") is None:
        raise FormatError(
            f"{tree.shown}: {table!r} has no {name!r}, where the names of its rows should be: the "
            "file is damaged"
        )
    values, categories = read_column(tree, table, name, rows)
    if categories is not None:
        values = np.array(categories, object)[values]
    return [*map(str, values.tolist())]


def read_column(tree: Tree, table: str, name: str, rows: int | None = None) -> Column:
    """A column of a table.

    Args:
        tree: that it lies in.
        table, name: of it.
        rows: that it must have; None: any number.

    Raises:
        MissingNameError: there is no such column; the message lists those there are.
        FormatError: it is of an encoding that is not known here, has another number of rows, or is
            damaged.
    """
    place = f"{table}/{name}"
    where = f"{tree.shown}: {place}"
    labels = f"{table}/__categories/{name}"  # of AnnData 0.7
    if tree.is_array(place):
        values = tree.column(place)
    elif not tree.is_group(place):
        raise tree.missing(f"column in {table}:", name, column_names(tree, table))
    elif tree.text(place, "encoding-type") == "categorical":
        tree.check_has(place, "codes", "categories")
        values = tree.column(f"{place}/codes")
        labels = f"{place}/categories"
    else:
        values = _nullable(tree, place, where)
    if rows is None:
        rows = values.size
    if values.shape != (rows,):
        raise FormatError(
            f"{where} has shape {list(values.shape)}, not one value for each of {rows:,} rows: "
            "the file is damaged"
        )
    if not tree.is_array(labels):
        return Column(values)
    categories = [*map(str, tree.column(labels).tolist())]
    if values.dtype.kind not in "iu":
        raise FormatError(f"{where}: codes are {values.dtype}, not integers: the file is damaged")
    wrong = np.flatnonzero((values < -1) | (values >= len(categories)))
    if len(wrong):
        row = int(wrong[0])
        raise FormatError(
            f"{where}: row {row:,} has code {int(values[row])}, and there are {len(categories):,} "
            "categories: the file is damaged"
        )
    return Column(values, categories)


def _nullable(tree: Tree, place: str, where: str) -> AnyArray:
    """The values of a nullable column, none of which may be missing."""
    encoding = tree.text(place, "encoding-type")
    if encoding not in _NULLABLE:
        raise FormatError(
            f"{where} has encoding-type {encoding!r}; columns of numbers, strings and categories "
            "are read: pass targets= an array"
        )
    tree.check_has(place, "values", "mask")
    missing = np.asarray(tree.column(f"{place}/mask"), bool)
    if missing.any():
        raise FormatError(
            f"{where} has no value for {int(missing.sum()):,} of {len(missing):,} rows, such as "
            f"row {int(np.argmax(missing)):,}: give each one, or choose another column "
            "(SparseDataset takes targets= as an array, too)"
        )
    return tree.column(f"{place}/values")


def column_of_group(tree: Tree, place: str, rows: int) -> Column | None:
    """A column of a table of AnnData that is a group: categories, or values of which some may be
    missing; None: it is none. See `read_column`.
    """
    table, _, name = place.strip("/").rpartition("/")
    if not table or not tree.is_group(f"{table}/{name}"):
        return None
    if tree.text(f"{table}/{name}", "encoding-type") not in ("categorical", *_NULLABLE):
        return None
    return read_column(tree, table, name, rows)


def column_names(tree: Tree, table: str) -> list[str]:
    """The names of a table's columns."""
    order = tree.attrs(table).get("column-order")
    if order is None or getattr(order, "shape", ()) is None:
        return tree.children(table)
    return [
        one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one)
        for one in np.asarray(order).reshape(-1).tolist()
    ]


def joined_column(columns: list[Column], name: str) -> Column:
    """A column of several files: of categories those of all, in the order in which files name them,
    without those that come again.

    Raises:
        FormatError: it is categorical, or of strings, in some files and not in others.
    """
    kinds = {(column.categories is not None, column.values.dtype == object) for column in columns}
    if len(kinds) > 1:
        raise FormatError(
            f"column {name!r} differs between the files (categories, strings, numbers): convert "
            "it to one kind"
        )
    if columns[0].categories is None:
        return Column(np.concatenate([column.values for column in columns]))
    numbers: dict[str, int] = {}
    parts = []
    for column in columns:
        own = [numbers.setdefault(category, len(numbers)) for category in column.categories or ()]
        parts.append(np.array([*own, -1], np.int64)[column.values])  # the last one is that of -1
    codes = np.concatenate(parts)
    missing = int((codes < 0).sum())
    if missing:
        warn(
            f"{missing:,} of {len(codes):,} rows have no category in {name!r}: their target is "
            "-1, which no class has, and balanced=True draws as one: leave them out by "
            "dataset.subset(...), or pass ignore_index=-1 to the loss"
        )
    return Column(codes, list(numbers))


# -- all files


class RowTable(Mapping[str, AnyArray]):
    """The columns of `obs` by name: [rows] numbers, str objects, or codes of categories. Each is
    read on access.

    Args:
        names: of the columns.
        read: reads one. Must be picklable.
    """

    def __init__(self, names: list[str], read: Callable[[str], AnyArray]) -> None:
        self._names = names
        self._read = read

    def __getitem__(self, name: str) -> AnyArray:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _read_labels(
    data_path: DataPath, reach: RemoteOptions, group: str, matrix_rows: list[int], name: str
) -> AnyArray:
    """A column of `obs` of files whose matrices have so many rows each."""

    def read(tree: Tree) -> tuple[str, Column]:
        return tree.shown, _row_columns(tree, group, [name])[0]

    found, _ = look_into(data_path, reach, None, read, nodes=["obs", f"obs/{name}"])
    rows = {shown: len(column.values) for shown, column in found}
    if [*rows.values()] != matrix_rows:
        raise FileChangedError(
            f"column {name!r} has {rows} rows now, and the matrices had {matrix_rows}: open them "
            "again"
        )
    return joined_column([column for _, column in found], name).values


class _File(NamedTuple):
    """A file with a matrix.

    Attributes:
        names: of its columns; None: they have no names.
        of_rows: names of the columns of `obs`.
    """

    shown: str
    matrix: Matrix
    names: list[str] | None
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
) -> tuple[
    SparseSource | ConcatSource[SparseSource], list[str] | None, dict[str, Column], RowTable
]:
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
        The source of the rows; the names of their columns (None: they have none); the target
        columns of `obs` by name, for all rows; and all columns of `obs`.

    Raises:
        DataNotFoundError, AccessError, RemoteError: a file is missing, or can't be read.
        MissingNameError, FormatError, ConfigError: see `open_matrix`, `read_column`, and for
            columns that can't be joined or chosen.
    """
    group = group.strip("/")
    nodes = [f"{group}{end}".strip("/") for end in ("", "/indptr", "/indices", "/data")]
    nodes += ["obs", "var", "var/_index", *(f"obs/{name}" for name in targets)]
    look = functools.partial(_look_into, group=group, targets=targets)
    files, opened = look_into(data_path, reach, None, look, nodes=nodes, direct=direct, keeps=True)
    names, width, numbers = _join_columns(files, join, columns)
    if dtype is None:
        kinds = [file.matrix.data.dtype.newbyteorder("=") for file in files]
        for file, stored in zip(files, kinds, strict=True):
            if stored != kinds[0]:
                raise FormatError(
                    f"{file.shown} and {files[0].shown} can't be one dataset: values are {stored} "
                    f"and {kinds[0]}: pass one dtype=, such as 'float32'"
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
    read = functools.partial(_read_labels, data_path, reach, group, rows)
    return concatenated(sources), names, of_rows, RowTable(files[0].of_rows, read)


def _look_into(tree: Tree, group: str, targets: Sequence[str]) -> _File:
    matrix = open_matrix(tree, group)
    table, columns = tables_of(tree, group)
    names = None if columns is None else names_in(tree, columns, matrix.shape[1])
    of_rows = [] if table is None else column_names(tree, table)
    found = _row_columns(tree, group, targets, matrix.shape[0])
    return _File(tree.shown, matrix, names, found, of_rows)


def _row_columns(
    tree: Tree, group: str, names: Sequence[str], rows: int | None = None
) -> list[Column]:
    """Columns of the table of the rows of a matrix."""
    if not names:
        return []
    table, _ = tables_of(tree, group)
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
    names = files[0].names
    width = files[0].matrix.shape[1]
    are_alike = all((file.names, file.matrix.shape[1]) == (names, width) for file in files)
    are_named = columns is not None and np.asarray(columns).dtype.kind not in "biu"
    if not are_alike:
        names = _joint_names(files, join, are_named)
        width = len(names)
    picked = np.arange(width)
    if are_named:
        picked = _named(columns, names, files)
    elif columns is not None:
        picked = _numbered(np.asarray(columns), width)
    unique, counts = np.unique(picked, return_counts=True)
    if (counts > 1).any():
        number = int(unique[np.argmax(counts > 1)])
        shown = f"column {number:,}" if names is None else repr(names[number])
        raise ConfigError(f"columns names {shown} more than once")
    numbers = np.full(width, -1, np.int32)
    numbers[picked] = np.arange(len(picked))
    tables = [numbers] * len(files)
    if names is not None:
        names = [names[number] for number in picked.tolist()]
    if names is not None and not are_alike:
        places = {name: place for place, name in enumerate(names)}
        own = [[places.get(name, -1) for name in _names_of(file)] for file in files]
        tables = [np.array(numbers, np.int32) for numbers in own]
    unchanged = np.arange(len(picked))
    each = [None if np.array_equal(table, unchanged) else table for table in tables]
    return names, len(picked), each


def _names_of(file: _File) -> list[str]:
    """The names of the columns of a file, which must be unique."""
    if file.names is None:
        raise FormatError(
            f"{file.shown} does not name its {file.matrix.shape[1]:,} columns (there is no var), "
            "so they can't be found by name"
        )
    if len(set(file.names)) < len(file.names):
        [(name, _)] = Counter(file.names).most_common(1)
        raise FormatError(
            f"{file.shown}: more than one column is called {name!r}, so columns can't be found by "
            "name: make names unique (anndata: adata.var_names_make_unique()), or choose columns "
            "by number"
        )
    return file.names


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
            f"{files[0].shown} and the other files have no column in common: check that they use "
            "one kind of names"
        )
    return common


def _named(columns: Any, names: list[str] | None, files: Sequence[_File]) -> IntArray:
    """The numbers of columns among the joint ones, by their names."""
    array = np.asarray(columns)
    chosen = array.tolist()
    if array.ndim != 1 or not chosen or not all(isinstance(name, str) for name in chosen):
        raise ConfigError(
            f"columns must be names or numbers of columns, or a mask, not {described(columns)}"
        )
    if names is None:
        raise ConfigError(
            f"columns holds names, but {files[0].shown} does not name its columns (there is no "
            "var): pass numbers"
        )
    known = {name: number for number, name in enumerate(names)}
    for file in files:
        own = set(_names_of(file))
        for name in chosen:
            if name not in own and name not in known:
                raise MissingNameError(
                    f"{file.shown} has no column {name!r}; it has: "
                    f"{listed_names(names, name, repr)}"
                )
    return np.array([known[name] for name in chosen], np.int64)


def _numbered(columns: AnyArray, width: int) -> IntArray:
    """The numbers of columns, by a mask or by numbers, which may be negative."""
    if columns.dtype == bool and columns.shape == (width,):
        columns = np.flatnonzero(columns)
    if columns.dtype == bool or columns.ndim != 1 or not len(columns):
        raise ConfigError(
            f"columns is {columns.dtype} {list(columns.shape)}, and must be numbers of some of "
            f"{width:,} columns, or a mask of them"
        )
    if columns.min() < -width or columns.max() >= width:
        raise ConfigError(
            f"columns reach from {columns.min():,} to {columns.max():,}, and there are {width:,}"
        )
    return columns.astype(np.int64) % width
