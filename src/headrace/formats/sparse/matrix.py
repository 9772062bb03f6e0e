"""What files hold of sparse matrices: the matrix, checked before a row is read, and the tables
beside it.

A CSR matrix is a group of three arrays: `data` and `indices` hold the values of all rows and their
columns, and row i has those from ``indptr[i]`` to ``indptr[i + 1] - 1``. AnnData marks the group by
the attributes encoding-type and shape, older versions and h5sparse by h5sparse_format and
h5sparse_shape.

What AnnData knows of rows (`obs`) and of columns (`var`) are tables: groups with an array per
column. A categorical column has codes, and the categories that they number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError, warn
from headrace.formats.arrays.reader import ArrayReader
from headrace.formats.arrays.rows import long_doubles_in
from headrace.formats.tree import Tree, join

_FORMATS = {"csr_matrix": "csr", "csc_matrix": "csc", "csr": "csr", "csc": "csc"}
_NULLABLE = ("nullable-integer", "nullable-boolean", "nullable-string-array")


class Matrix(NamedTuple):
    """A CSR matrix in a file.

    Attributes:
        indptr: [rows + 1] int32 or int64, from 0 on and never falling.
    """

    group: str
    shape: tuple[int, int]
    indptr: npt.NDArray[Any]
    indices: ArrayReader
    data: ArrayReader


def format_of(tree: Tree, group: str) -> str | None:
    """ "csr" or "csc"; None: it is no sparse matrix."""
    if not tree.is_group(group):
        return None
    for key in ("encoding-type", "h5sparse_format"):
        name = tree.text(group, key)
        if name is not None:
            return _FORMATS.get(name)
    return None


def claims(tree: Tree) -> str | None:
    """The group of the sparse matrix that a file is about: "X"; the file itself ("/"); the only
    one, where nothing lies beside it; or of AnnData without X the only layer. None: there is none.
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
    if "layers" in names and "X" not in names and tree.text("", "encoding-type") == "anndata":
        layers = [name for name in _sparse_groups(tree) if name.startswith("layers/")]
        if len(layers) == 1:
            return layers[0]
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
        others = _sparse_groups(tree)
        if tree.kind(group) is None:
            raise tree.missing("sparse matrix", group, others or tree.children(""))
        also = f"; sparse matrices of this file: {', '.join(map(repr, others[:10]))}"
        if tree.is_array(group):
            raise ConfigError(
                f"{where} is a dense array, {tree.described(group)}, and no sparse matrix: use "
                f"{tree.dataset_class}(path, {group!r}){also}"
            )
        encoding = tree.text(group, "encoding-type")
        raise ConfigError(
            f"{where} is no sparse matrix: its encoding-type is {encoding!r}, not 'csr_matrix'"
            f"{also}"
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
        raise FormatError(f"{where}: data are {data.dtype}, and no numbers")
    if long_doubles_in(data.dtype) is not None:
        raise FormatError(
            f"{where}: data are long doubles ({data.dtype}), which torch does not have: convert "
            "them to float64"
        )
    return Matrix(group, (rows, columns), indptr, indices, data)


def _damage(
    indptr: npt.NDArray[Any], rows: int, columns: int, indices: ArrayReader, data: ArrayReader
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


def _sparse_groups(tree: Tree) -> list[str]:
    """The names of all sparse matrices of a file."""
    return [name for name in ["", *tree.nodes()] if format_of(tree, name) is not None]


# -- tables


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        values: [rows] numbers; str objects; of categories their codes, -1 where there is none.
    """

    values: npt.NDArray[Any]
    categories: list[str] | None = None


def tables_of(tree: Tree, group: str) -> tuple[str | None, str | None]:
    """Where the tables of the rows and of the columns of a matrix lie; None: there is none.

    Those of ``X`` and ``layers/...`` lie beside them; ``raw/X`` shares its rows with the rest of
    the file, and so does ``obsm/...``, which has columns of its own.
    """
    before, _, last = group.rpartition("/")
    parent, _, kind = before.rpartition("/")
    rows: str | None = None
    columns: str | None = None
    if kind in ("obsm", "layers"):
        rows = parent
        if kind == "layers":
            columns = parent
    elif last == "X":
        rows = columns = before
        if kind == "raw":
            rows = parent
    found: list[str | None] = []
    for base, table in ((rows, "obs"), (columns, "var")):
        has_table = base is not None and tree.is_group(join(base, table))
        found.append(join(base or "", table) if has_table else None)
    return found[0], found[1]


def names_in(tree: Tree, table: str) -> npt.NDArray[Any]:
    """The names of a table's rows: [rows] str objects."""
    name = tree.text(table, "_index") or "_index"
    if tree.kind(f"{table}/{name}") is None:
        raise FormatError(
            f"{tree.shown}: {table!r} has no {name!r}, where the names of its rows should be: the "
            "file is damaged"
        )
    values, categories = read_column(tree, table, name)
    if categories is not None:
        values = np.array(categories, object)[values]
    if values.dtype == object:
        return values
    return np.array([*map(str, values.tolist())], object)


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
    if values.ndim != 1 or (rows is not None and len(values) != rows):
        raise FormatError(
            f"{where} has shape {list(values.shape)}, and not one value for each of {rows:,} rows"
        )
    if not tree.is_array(labels):
        return Column(values)
    categories = [*map(str, tree.column(labels).tolist())]
    if values.dtype.kind not in "iu":
        raise FormatError(
            f"{where}: codes are {values.dtype}, and no integers: the file is damaged"
        )
    wrong = np.flatnonzero((values < -1) | (values >= len(categories)))
    if len(wrong):
        row = int(wrong[0])
        raise FormatError(
            f"{where}: row {row:,} has code {int(values[row])}, and there are {len(categories):,} "
            "categories: the file is damaged"
        )
    return Column(values, categories)


def _nullable(tree: Tree, place: str, where: str) -> npt.NDArray[Any]:
    """The values of a column of which some may be missing, and none is."""
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
    if order is None:
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
            f"column {name!r} is not of one kind in all files (categories, strings, numbers): "
            "make it so"
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
