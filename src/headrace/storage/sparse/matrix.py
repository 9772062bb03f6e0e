"""Finds the sparse matrix in a group, and checks it before a row is read.

A CSR matrix is a group of three arrays: `data` and `indices` hold the values of all rows and their
columns, and row i has those from ``indptr[i]`` to ``indptr[i + 1] - 1``. AnnData marks the group by
the attributes encoding-type and shape, older versions and h5sparse by h5sparse_format and
h5sparse_shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError
from headrace.storage.arrays.spans import SpanReader
from headrace.storage.arrays.values import long_doubles_in
from headrace.storage.sparse.groups import GroupFile, shown

_FORMATS = {"csr_matrix": "csr", "csc_matrix": "csc", "csr": "csr", "csc": "csc"}


class Matrix(NamedTuple):
    """A CSR matrix that lies in a file."""

    group: str
    shape: tuple[int, int]
    indptr: npt.NDArray[Any]
    """[rows + 1] int32 or int64, from 0 on and never falling."""
    indices: SpanReader
    data: SpanReader
    chunks: tuple[int | None, int | None]
    """Elements of a chunk of `indices` and of `data`; None: there are no chunks."""


def format_of(file: GroupFile, group: str) -> str | None:
    """ "csr" or "csc"; None: it is no sparse matrix."""
    if not file.is_group(group):
        return None
    for key in ("encoding-type", "h5sparse_format"):
        if isinstance(name := file.attribute(group, key), str):
            return _FORMATS.get(name)
    return None


def open_matrix(file: GroupFile, group: str) -> Matrix:
    """The CSR matrix in a group.

    Raises:
        MissingNameError: there is no such group; the message lists the sparse matrices that there
            are.
        ConfigError: it is a dense array, or something else.
        FormatError: it is a CSC matrix, or damaged.
    """
    kind = _checked_format(file, group)
    where = f"{file.path}: {shown(group)}"
    if kind == "csc":
        raise FormatError(
            f"{where} is a CSC matrix, whose values lie column by column, so a row can't be read "
            "without all of it: convert it once, "
            "with anndata: adata.X = adata.X.tocsr(), and write the file again"
        )
    file.need(group, "indptr", "indices", "data")
    shape = _shape(file, group, where)
    indptr = file.column(file.child(group, "indptr"))
    indices, of_indices = file.spans(file.child(group, "indices"))
    data, of_data = file.spans(file.child(group, "data"))
    _check_indptr(indptr, shape[0], where)
    for name, reader in (("indices", indices), ("data", data)):
        if len(reader.shape) != 1:
            raise FormatError(
                f"{where}: {name} has shape {list(reader.shape)}, and should have one axis: the "
                "file is damaged"
            )
    if indices.dtype.kind not in "iu":
        raise FormatError(
            f"{where}: indices are {indices.dtype}, and no integers: the file is damaged"
        )
    if data.dtype.kind not in "biufc":
        raise FormatError(f"{where}: data are {data.dtype}, and no numbers")
    if long_doubles_in(data.dtype) is not None:
        raise FormatError(
            f"{where}: data are long doubles ({data.dtype}), which torch does not have: convert "
            "them to float64"
        )
    if indices.shape != data.shape:
        raise FormatError(
            f"{where}: there are {indices.shape[0]:,} indices and {data.shape[0]:,} data, and "
            "each value has one index: the file is damaged"
        )
    if indptr[-1] > data.shape[0]:
        raise FormatError(
            f"{where}: indptr ends at {int(indptr[-1]):,}, and there are {data.shape[0]:,} "
            "values: the file is damaged, or cut short"
        )
    return Matrix(group, shape, indptr, indices, data, (of_indices, of_data))


def _checked_format(file: GroupFile, group: str) -> str:
    where = f"{file.path}: {shown(group)}"
    kind = format_of(file, group)
    if kind is not None:
        return kind
    if file.is_array(group):
        raise ConfigError(
            f"{where} is a dense array, {file.described(group)}, and no sparse matrix: use "
            f"{file.reader_name}(path, {group!r})"
            f"{_others(file)}"
        )
    if file.is_group(group):
        encoding = file.attribute(group, "encoding-type")
        raise ConfigError(
            f"{where} is no sparse matrix: its encoding-type is {encoding!r}, not "
            f"'csr_matrix'{_others(file)}"
        )
    others = sparse_groups(file)
    if others:
        raise file.missing("group", group, others)
    raise file.missing("sparse matrix", group, file.top_names())


def _others(file: GroupFile) -> str:
    found = sparse_groups(file)
    return f"; sparse matrices of this file: {', '.join(map(shown, found[:10]))}" if found else ""


def sparse_groups(file: GroupFile) -> list[str]:
    """The names of all sparse matrices of a file."""
    return [name for name in ["", *file.names()] if format_of(file, name) is not None]


def _shape(file: GroupFile, group: str, where: str) -> tuple[int, int]:
    told: Any = next(
        (
            value
            for key in ("shape", "h5sparse_shape")
            if (value := file.attribute(group, key)) is not None
        ),
        None,
    )
    try:
        rows, columns = (int(extent) for extent in told)
        if rows < 0 or columns < 0:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise FormatError(
            f"{where}: its attribute shape is {told!r}, and not the numbers of rows and columns: "
            "the file is damaged"
        ) from None
    return rows, columns


def _check_indptr(indptr: npt.NDArray[Any], rows: int, where: str) -> None:
    """Raises a FormatError where indptr does not lead from 0 on through all rows, never
    backwards.
    """
    if indptr.dtype.kind not in "iu" or indptr.shape != (rows + 1,):
        raise FormatError(
            f"{where}: indptr is {indptr.dtype} {list(indptr.shape)}, and {rows:,} rows need "
            f"{rows + 1:,} integers: the file is damaged"
        )
    if indptr[0] != 0:
        raise FormatError(
            f"{where}: indptr begins at {int(indptr[0])}, and not at 0: the file is damaged"
        )
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])
    if len(falls):
        row = int(falls[0])
        raise FormatError(
            f"{where}: indptr falls from {int(indptr[row]):,} to {int(indptr[row + 1]):,} at row "
            f"{row:,}: the file is damaged, or cut short"
        )
