"""Joins the columns of several matrices by name, and chooses some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.arguments import described
from headrace.errors import ConfigError, FormatError, MissingNameError
from headrace.io.nearest_names import listed_names

Join = Literal["inner", "outer"]


class Columns(NamedTuple):
    """The columns that samples have."""

    width: int
    """How many."""
    names: list[str] | None
    """None: the files name none."""
    numbers: list[npt.NDArray[np.int32] | None]
    """For each file the number in a sample of each of its columns, -1 where it is left out;
    None: its columns are those of samples.
    """


class FileColumns(NamedTuple):
    """The columns of a file."""

    path: str
    width: int
    names: npt.NDArray[Any] | None


def join_columns(files: Sequence[FileColumns], join: Join | None, columns: Any) -> Columns:
    """The columns that samples of some files have.

    Args:
        files: one at least.
        join: "inner": those that all files have, in the order of the first; "outer": those that any
            has, in the order in which files name them. None: all files must have the same, in any
            order, or those at least that `columns` names.
        columns: names or numbers of those to take, in this order; or a mask. None: all.

    Raises:
        ConfigError: `columns` or `join` makes no sense.
        MissingNameError: there is no column of that name.
        FormatError: the files can't be joined.
    """
    if join not in (None, "inner", "outer"):
        raise ConfigError(f"join must be 'inner', 'outer' or None, not {join!r}")
    chosen = _as_array(columns)
    first = files[0]
    are_alike = all(
        file.width == first.width and np.array_equal(file.names, first.names)  # type: ignore[arg-type]
        for file in files
    )
    names: list[str] | None
    if are_alike:
        names = None if first.names is None else first.names.tolist()
    else:
        names = _joined(files, join, chosen is not None and chosen.dtype == object)
    width = first.width if names is None else len(names)
    if chosen is not None:
        picked = _picked(chosen, names, width, files)
        if names is not None:
            names = [names[number] for number in picked.tolist()]
        if are_alike:
            numbers = np.full(width, -1, np.int32)
            numbers[picked] = np.arange(len(picked), dtype=np.int32)
            return Columns(len(picked), names, [_unless_all(numbers, width)] * len(files))
    if are_alike or names is None:
        return Columns(width, names, [None] * len(files))
    new = {name: number for number, name in enumerate(names)}
    tables = []
    for file in files:
        numbers = np.array([new.get(name, -1) for name in _names_of(file)], np.int32)
        tables.append(_unless_all(numbers, len(names)))
    return Columns(len(names), names, tables)


def _unless_all(numbers: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32] | None:
    """None if columns are taken as they are."""
    return None if np.array_equal(numbers, np.arange(width)) else numbers


def _names_of(file: FileColumns) -> list[str]:
    """The names of the columns of a file, none of which comes twice."""
    if file.names is None:
        raise FormatError(
            f"{file.path} does not name its {file.width:,} columns (there is no var), so they "
            "can't be found by name"
        )
    names: list[str] = file.names.tolist()
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise FormatError(
            f"{file.path}: more than one column is called {name!r}, so columns can't be found by "
            "name: make names unique (anndata: adata.var_names_make_unique()), or choose columns "
            "by number"
        )
    return names


def _joined(files: Sequence[FileColumns], join: Join | None, are_named: bool) -> list[str]:
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
            f"{file.path} and {files[0].path} differ in {len(odd):,} columns, such as "
            f"{listed_names(odd[:3], show=repr)}: pass join='inner' (columns that all files have) "
            "or join='outer' (columns that any has, zeros where a file has none)"
        )
    if not common:
        raise FormatError(
            f"{files[0].path} and the other files have no column in common: are their names of "
            "one kind?"
        )
    return common


def _as_array(columns: Any) -> npt.NDArray[Any] | None:
    """Names as objects, numbers as int64, a mask as bool."""
    if columns is None:
        return None
    if not isinstance(columns, (str, bytes)) and hasattr(columns, "__len__"):
        array = np.asarray(columns)
        if array.ndim == 1 and not len(array):
            raise ConfigError("columns is empty: name at least one, or leave it out")
        if array.ndim == 1 and array.dtype.kind == "b":
            return array
        if array.ndim == 1 and array.dtype.kind in "iu":
            return array.astype(np.int64)
        if array.ndim == 1 and all(isinstance(name, str) for name in array.tolist()):
            return array.astype(object)
    raise ConfigError(
        f"columns must be names or numbers of columns, or a mask, not {described(columns)}"
    )


def _picked(
    chosen: npt.NDArray[Any], names: list[str] | None, width: int, files: Sequence[FileColumns]
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
                f"columns holds names, and {files[0].path} does not name its columns (there is no "
                "var): pass numbers"
            )
        known = {name: number for number, name in enumerate(names)}
        for file in files:
            own = set(_names_of(file))
            absent = [name for name in chosen.tolist() if name not in own and name not in known]
            if absent:
                raise MissingNameError(
                    f"{file.path} has no column {absent[0]!r}; it has: "
                    f"{listed_names(names, absent[0], repr)}"
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
