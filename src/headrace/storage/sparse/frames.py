"""Columns of the tables beside a matrix: what AnnData knows of rows (`obs`) and of columns (`var`).

A table is a group with an array a column; or, in files of AnnData before 0.7, one array of
compounds. A categorical column has codes, and the categories that they number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError, warn
from headrace.storage.sparse.groups import GroupFile, as_text

_LAYERS, _OF_ROWS = "layers", "obsm"
_NULLABLE = ("nullable-integer", "nullable-boolean", "nullable-string-array")


class Column(NamedTuple):
    """A column of a table."""

    values: npt.NDArray[Any]
    """[rows] numbers; str objects; of categories their codes, -1 where there is none."""
    categories: list[str] | None = None


def tables_of(file: GroupFile, group: str) -> tuple[str | None, str | None]:
    """Where the tables of the rows and of the columns of a matrix lie; None: there is none.

    Those of ``X`` and ``layers/...`` lie beside them; ``raw/X`` shares its rows with the rest of
    the file, and so does ``obsm/...``, which has columns of its own.
    """
    parts = group.split("/")
    if len(parts) > 1 and parts[-2] == _OF_ROWS:
        beside = "/".join([*parts[:-2], "obs"])
        return (beside if file.is_group(beside) or file.is_array(beside) else None), None
    base = (
        parts[:-2]
        if len(parts) > 1 and parts[-2] == _LAYERS
        else parts[:-1]
        if parts[-1] == "X"
        else None
    )
    if base is None:
        return None, None
    rows = [*(base[:-1] if base[-1:] == ["raw"] else base), "obs"]
    found = ("/".join(one) for one in (rows, [*base, "var"]))
    obs, var = (name if file.is_group(name) or file.is_array(name) else None for name in found)
    return obs, var


def names_in(file: GroupFile, table: str) -> npt.NDArray[Any]:
    """The names of a table's rows: [rows] str objects."""
    if file.is_array(table):
        compounds = file.column(table)
        return as_text(
            compounds[(compounds.dtype.names or ("index",))[0]], f"{file.path}: {table!r}"
        )
    index = file.attribute(table, "_index")
    name = index if isinstance(index, str) else "_index"
    if not (file.is_array(f"{table}/{name}") or file.is_group(f"{table}/{name}")):
        raise FormatError(
            f"{file.path}: {table!r} has no {name!r}, where the names of its rows should be: the "
            "file is damaged"
        )
    column = read_column(file, table, name)
    if column.categories is not None:
        names: npt.NDArray[Any] = np.array(column.categories, object)[column.values]
        return names
    return (
        column.values
        if column.values.dtype == object
        else np.array([*map(str, column.values.tolist())], object)
    )


def read_column(file: GroupFile, table: str, name: str, rows: int | None = None) -> Column:
    """A column of a table.

    Args:
        file: that it lies in.
        table, name: of it.
        rows: that it must have; None: any number.

    Raises:
        MissingNameError: there is no such column; the message lists those there are.
        FormatError: it is of an encoding that is not known here, has another number of rows, or is
            damaged.
    """
    where, place = f"{file.path}: {table}/{name}", f"{table}/{name}"
    if file.is_array(table):
        column = _of_compounds(file, table, name, where)
    elif file.is_group(place):
        column = _of_group(file, place, where)
    elif file.is_array(place):
        column = Column(file.column(place))
        if file.is_array(categories := f"{table}/__categories/{name}"):  # AnnData 0.7
            column = Column(column.values, _as_names(file.column(categories)))
    else:
        raise file.missing(f"column in {table}:", name, column_names(file, table))
    if column.values.ndim != 1 or (rows is not None and len(column.values) != rows):
        raise FormatError(
            f"{where} has shape {list(column.values.shape)}, and not one value for each of "
            f"{rows:,} rows"
        )
    if column.categories is not None:
        _check_codes(column.values, len(column.categories), where)
    return column


def column_of_group(file: GroupFile, place: str, rows: int) -> Column | None:
    """A column of a table of AnnData that is a group: categories, or values of which some may be
    missing; None: it is none.

    Args:
        file, place: where it lies.
        rows: that it must have.

    Raises:
        FormatError: see `read_column`.
    """
    table, _, name = place.strip("/").rpartition("/")
    if not table or not file.is_group(f"{table}/{name}"):
        return None
    is_column = file.attribute(f"{table}/{name}", "encoding-type") in ("categorical", *_NULLABLE)
    return read_column(file, table, name, rows) if is_column else None


def column_names(file: GroupFile, table: str) -> list[str]:
    """The names of a table's columns."""
    if file.is_array(table):
        return [*(file.column(table).dtype.names or ())]
    order = file.attribute(table, "column-order")
    if order is not None:
        return [
            one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one)
            for one in np.asarray(order).reshape(-1).tolist()
        ]
    return [
        name.removeprefix(f"{table}/") for name in file.names() if name.rpartition("/")[0] == table
    ]


def _as_names(values: npt.NDArray[Any]) -> list[str]:
    return [*map(str, values.tolist())]


def _of_group(file: GroupFile, place: str, where: str) -> Column:
    encoding = file.attribute(place, "encoding-type")
    if encoding == "categorical":
        if not file.is_array(f"{place}/codes"):
            raise FormatError(f"{where} is categorical and has no codes: the file is damaged")
        if not file.is_array(f"{place}/categories"):
            raise FormatError(f"{where} is categorical and has no categories: the file is damaged")
        return Column(file.column(f"{place}/codes"), _as_names(file.column(f"{place}/categories")))
    if encoding in _NULLABLE:
        file.need(place, "values", "mask")
        missing = np.asarray(file.column(f"{place}/mask"), bool)
        if missing.any():
            raise FormatError(
                f"{where} has no value for {int(missing.sum()):,} of {len(missing):,} rows, such "
                f"as row {int(np.argmax(missing)):,}: give "
                "each one, or choose another column (SparseDataset takes targets= as an array, too)"
            )
        return Column(file.column(f"{place}/values"))
    raise FormatError(
        f"{where} has encoding-type {encoding!r}; columns of numbers, strings and categories are "
        "read: pass targets= an array"
    )


def _of_compounds(file: GroupFile, table: str, name: str, where: str) -> Column:
    compounds = file.column(table)
    fields = [*(compounds.dtype.names or ())]
    if name not in fields:
        raise file.missing(f"column in {table}:", name, fields)
    values = as_text(compounds[name], where)
    categories = f"uns/{name}_categories"
    if values.dtype.kind in "iu" and file.is_array(categories):
        return Column(values, _as_names(file.column(categories)))
    return Column(values)


def _check_codes(codes: npt.NDArray[Any], count: int, where: str) -> None:
    if codes.dtype.kind not in "iu":
        raise FormatError(f"{where}: codes are {codes.dtype}, and no integers: the file is damaged")
    if not len(codes):
        return
    wrong = (codes < -1) | (codes >= count)
    if wrong.any():
        row = int(np.argmax(wrong))
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
    if (
        len({(column.categories is not None, column.values.dtype == object) for column in columns})
        > 1
    ):
        raise FormatError(
            f"column {name!r} is not of one kind in all files (categories, strings, numbers): "
            "make it so"
        )
    if columns[0].categories is None:
        return Column(
            np.concatenate([column.values for column in columns])
            if len(columns) > 1
            else columns[0].values
        )
    numbers: dict[str, int] = {}
    for column in columns:
        for category in column.categories or ():
            numbers.setdefault(category, len(numbers))
    parts = []
    for column in columns:
        # the last one is that of -1
        new = np.array([*(numbers[category] for category in column.categories or ()), -1], np.int64)
        parts.append(new[column.values])
    codes = np.concatenate(parts)
    if missing := int((codes < 0).sum()):
        warn(
            f"{missing:,} of {len(codes):,} rows have no category in {name!r}: their target is "
            "-1, which no class has"
        )
    return Column(codes, list(numbers))
