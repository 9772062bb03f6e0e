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
from headrace.formats.arrays.reader import ArrayReader
from headrace.formats.arrays.values import long_doubles_in
from headrace.formats.tree import Tree, join

_FORMATS = {"csr_matrix": "csr", "csc_matrix": "csc", "csr": "csr", "csc": "csc"}


class Matrix(NamedTuple):
    """A CSR matrix in a file."""

    group: str
    shape: tuple[int, int]
    indptr: npt.NDArray[Any]
    """[rows + 1] int32 or int64, from 0 on and never falling."""
    indices: ArrayReader
    data: ArrayReader
    chunks: tuple[int | None, int | None]
    """Elements of a chunk of `indices` and of `data`; None: there are no chunks."""


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
        layers = [name for name in sparse_groups(tree) if name.startswith("layers/")]
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
    if kind is None:
        raise _no_matrix(tree, group)
    where = f"{tree.shown}: {group or '/'!r}"
    if kind == "csc":
        raise FormatError(
            f"{where} is a CSC matrix, whose values are stored by column: convert it once, with "
            "anndata: adata.X = adata.X.tocsr(), and write the file again"
        )
    tree.check_has(group, "indptr", "indices", "data")
    rows, columns = _shape(tree, group, where)
    indptr = tree.column(join(group, "indptr"))
    indices = tree.numbers(join(group, "indices"))
    data = tree.numbers(join(group, "data"))
    if data.dtype.kind not in "biufc":
        raise FormatError(f"{where}: data are {data.dtype}, and no numbers")
    if long_doubles_in(data.dtype) is not None:
        raise FormatError(
            f"{where}: data are long doubles ({data.dtype}), which torch does not have: convert "
            "them to float64"
        )
    damage = _damage(indptr, rows, indices, data)
    if damage:
        raise FormatError(f"{where}: {damage}: the file is damaged, or cut short")
    chunks = (
        tree.chunk_length(join(group, "indices"), indices),
        tree.chunk_length(join(group, "data"), data),
    )
    return Matrix(group, (rows, columns), indptr, indices, data, chunks)


def _damage(
    indptr: npt.NDArray[Any], rows: int, indices: ArrayReader, data: ArrayReader
) -> str | None:
    """What is wrong with the arrays of a matrix."""
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
        return (
            f"there are {indices.shape[0]:,} indices and {data.shape[0]:,} data, and each value "
            "has one index"
        )
    if indptr[-1] > data.shape[0]:
        return f"indptr ends at {int(indptr[-1]):,}, and there are {data.shape[0]:,} values"
    return None


def _no_matrix(tree: Tree, group: str) -> Exception:
    """The error of a group that is no sparse matrix."""
    where = f"{tree.shown}: {group or '/'!r}"
    others = sparse_groups(tree)
    kind = tree.kind(group)
    if kind is None and others:
        return tree.missing("group", group, others)
    if kind is None:
        return tree.missing("sparse matrix", group, tree.children(""))
    also = ""
    if others:
        also = f"; sparse matrices of this file: {', '.join(map(repr, others[:10]))}"
    if kind == "array":
        return ConfigError(
            f"{where} is a dense array, {tree.described(group)}, and no sparse matrix: use "
            f"{tree.dataset_class}(path, {group!r}){also}"
        )
    encoding = tree.text(group, "encoding-type")
    return ConfigError(
        f"{where} is no sparse matrix: its encoding-type is {encoding!r}, not 'csr_matrix'{also}"
    )


def sparse_groups(tree: Tree) -> list[str]:
    """The names of all sparse matrices of a file."""
    return [name for name in ["", *tree.nodes()] if format_of(tree, name) is not None]


def _shape(tree: Tree, group: str, where: str) -> tuple[int, int]:
    attributes = tree.attrs(group)
    shape = attributes.get("shape")
    if shape is None:
        shape = attributes.get("h5sparse_shape")
    try:
        rows, columns = (int(extent) for extent in shape)  # type: ignore[union-attr]
        if rows < 0 or columns < 0:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise FormatError(
            f"{where}: its attribute shape is {shape!r}, and not the numbers of rows and columns: "
            "the file is damaged"
        ) from None
    return rows, columns
