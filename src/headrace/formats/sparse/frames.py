"""Columns of the tables beside a matrix: what AnnData knows of rows (`obs`) and of columns (`var`).

A table is a group with an array per column. A categorical column has codes, and the categories that
they number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError, warn
from headrace.formats.tree import Tree

_NULLABLE = ("nullable-integer", "nullable-boolean", "nullable-string-array")


class Column(NamedTuple):
    """A column of a table."""

    values: npt.NDArray[Any]
    """[rows] numbers; str objects; of categories their codes, -1 where there is none."""
    categories: list[str] | None = None


def tables_of(tree: Tree, group: str) -> tuple[str | None, str | None]:
    """Where the tables of the rows and of the columns of a matrix lie; None: there is none.

    Those of ``X`` and ``layers/...`` lie beside them; ``raw/X`` shares its rows with the rest of
    the file, and so does ``obsm/...``, which has columns of its own.
    """
    *before, last = group.split("/")
    rows: list[str] | None = None
    columns: list[str] | None = None
    if before[-1:] == ["obsm"]:
        rows = before[:-1]
    elif before[-1:] == ["layers"]:
        columns = before[:-1]
    elif last == "X":
        columns = before
    if columns is not None:
        rows = columns
        if columns[-1:] == ["raw"]:
            rows = columns[:-1]
    found: list[str | None] = []
    for base, table in ((rows, "obs"), (columns, "var")):
        name = None if base is None else "/".join([*base, table])
        found.append(name if name is not None and tree.is_group(name) else None)
    return found[0], found[1]


def names_in(tree: Tree, table: str) -> npt.NDArray[Any]:
    """The names of a table's rows: [rows] str objects."""
    name = tree.text(table, "_index") or "_index"
    if tree.kind(f"{table}/{name}") is None:
        raise FormatError(
            f"{tree.shown}: {table!r} has no {name!r}, where the names of its rows should be: the "
            "file is damaged"
        )
    column = read_column(tree, table, name)
    values = column.values
    if column.categories is not None:
        values = np.array(column.categories, object)[values]
    if values.dtype == object:
        return values
    return np.array(_as_names(values), object)


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
    if tree.is_group(place):
        column = _of_group(tree, place, where)
    elif tree.is_array(place):
        column = _with_categories(tree, tree.column(place), f"{table}/__categories/{name}")  # 0.7
    else:
        raise tree.missing(f"column in {table}:", name, column_names(tree, table))
    if column.values.ndim != 1 or (rows is not None and len(column.values) != rows):
        raise FormatError(
            f"{where} has shape {list(column.values.shape)}, and not one value for each of "
            f"{rows:,} rows"
        )
    if column.categories is not None:
        _check_codes(column.values, len(column.categories), where)
    return column


def column_of_group(tree: Tree, place: str, rows: int) -> Column | None:
    """A column of a table of AnnData that is a group: categories, or values of which some may be
    missing; None: it is none.

    Args:
        tree, place: where it lies.
        rows: that it must have.

    Raises:
        FormatError: see `read_column`.
    """
    table, _, name = place.strip("/").rpartition("/")
    if not table or not tree.is_group(f"{table}/{name}"):
        return None
    encoding = tree.text(f"{table}/{name}", "encoding-type")
    if encoding not in ("categorical", *_NULLABLE):
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


def _as_names(values: npt.NDArray[Any]) -> list[str]:
    return [*map(str, values.tolist())]


def _with_categories(tree: Tree, values: npt.NDArray[Any], place: str) -> Column:
    return Column(values, _as_names(tree.column(place)) if tree.is_array(place) else None)


def _of_group(tree: Tree, place: str, where: str) -> Column:
    encoding = tree.text(place, "encoding-type")
    if encoding == "categorical":
        tree.check_has(place, "codes", "categories")
        return _with_categories(tree, tree.column(f"{place}/codes"), f"{place}/categories")
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
    return Column(tree.column(f"{place}/values"))


def _check_codes(codes: npt.NDArray[Any], count: int, where: str) -> None:
    if codes.dtype.kind not in "iu":
        raise FormatError(f"{where}: codes are {codes.dtype}, and no integers: the file is damaged")
    wrong = np.flatnonzero((codes < -1) | (codes >= count))
    if len(wrong):
        row = int(wrong[0])
        raise FormatError(
            f"{where}: row {row:,} has code {int(codes[row])}, and there are {count:,} "
            "categories: the file is damaged"
        )


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
        if len(columns) == 1:
            return columns[0]
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
            "-1, which no class has"
        )
    return Column(codes, list(numbers))
