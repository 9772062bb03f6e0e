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
_SHOWN = 3  # names that a message shows


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
    by_name = chosen is not None and chosen.dtype == object
    first = files[0]
    is_same = all(
        file.width == first.width and _same(file.names, first.names) for file in files[1:]
    )
    if is_same:
        joint = None if first.names is None else first.names.tolist()
        count = first.width
    else:
        joint = _joined(files, join, needs=by_name)
        count = len(joint)
    numbers = np.arange(count, dtype=np.int32)
    if chosen is not None:
        picked = _picked(chosen, joint, count, files)
        numbers = np.full(count, -1, np.int32)
        numbers[picked] = np.arange(len(picked), dtype=np.int32)
        joint, count = (
            None if joint is None else [joint[number] for number in picked.tolist()],
            len(picked),
        )
    if is_same:
        whole = (
            None if chosen is None or np.array_equal(numbers, np.arange(first.width)) else numbers
        )
        return Columns(count, joint, [whole] * len(files))
    assert joint is not None
    new = {name: number for number, name in enumerate(joint)}
    each = [
        np.array([new.get(name, -1) for name in file.names.tolist()], np.int32)
        for file in files
        if file.names is not None
    ]
    return Columns(
        count, joint, [None if np.array_equal(one, np.arange(count)) else one for one in each]
    )


def _same(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _joined(files: Sequence[FileColumns], join: Join | None, needs: bool) -> list[str]:
    """The names of the joint columns of files that don't have the same. (`needs`: columns are
    named, and looked for among those of all.)
    """
    for file in files:
        if file.names is None:
            raise FormatError(
                f"{file.path} does not name its {file.width:,} columns (there is no var), so they "
                "can't be joined with those of "
                f"{(files[0] if file is not files[0] else files[1]).path}"
            )
        _check_unique(file)
    names = [dict.fromkeys(file.names.tolist()) for file in files if file.names is not None]
    if join == "outer":
        return list({name: None for one in names for name in one})
    common = [name for name in names[0] if all(name in one for one in names[1:])]
    if join is None and not needs:
        for file, one in zip(files[1:], names[1:], strict=True):
            if one.keys() != names[0].keys():
                differences = [
                    _lacks(files[0], names[0], file, one),
                    _lacks(file, one, files[0], names[0]),
                ]
                raise FormatError(
                    f"{' and '.join(filter(None, differences))}: pass join='inner' (columns that "
                    "all files have) or join='outer' (columns "
                    "that any has, zeros where a file has none)"
                )
    if not common:
        raise FormatError(
            f"{files[0].path} and the other files have no column in common: are their names of "
            "one kind?"
        )
    return common


def _lacks(
    file: FileColumns, names: dict[str, None], other: FileColumns, others: dict[str, None]
) -> str:
    missing = [name for name in others if name not in names]
    return (
        f"{file.path} lacks {len(missing):,} columns of {other.path}, such as "
        f"{', '.join(map(repr, missing[:_SHOWN]))}"
        if missing
        else ""
    )


def _check_unique(file: FileColumns) -> None:
    assert file.names is not None
    seen = set[str]()
    for name in file.names.tolist():
        if name in seen:
            raise FormatError(
                f"{file.path}: more than one column is called {name!r}, so columns can't be found "
                "by name: make names unique (anndata: "
                "adata.var_names_make_unique()), or choose columns by number"
            )
        seen.add(name)


def _as_array(columns: Any) -> npt.NDArray[Any] | None:
    """Names as objects, numbers as int64, a mask as bool."""
    if columns is None:
        return None
    if isinstance(columns, (str, bytes)) or not hasattr(columns, "__len__"):
        raise ConfigError(
            f"columns must be names or numbers of columns, or a mask, not {described(columns)}"
        )
    array = np.asarray(columns)
    if array.ndim == 1 and not len(array):
        raise ConfigError("columns is empty: name at least one, or leave it out")
    if array.ndim == 1 and array.dtype.kind in "iub":
        return array if array.dtype.kind == "b" else array.astype(np.int64)
    if (
        array.ndim == 1
        and array.dtype.kind in "UOT"
        and all(isinstance(name, str) for name in array.tolist())
    ):
        return array.astype(object)
    raise ConfigError(
        "columns must hold either names (str) or numbers (int) of columns, or be a mask"
    )


def _picked(
    chosen: npt.NDArray[Any], names: list[str] | None, count: int, files: Sequence[FileColumns]
) -> npt.NDArray[np.int64]:
    """The numbers of the chosen columns among the joint ones."""
    if chosen.dtype == bool:
        if len(chosen) != count:
            raise ConfigError(
                f"columns is a mask of {len(chosen):,}, and there are {count:,} columns"
            )
        if not chosen.any():
            raise ConfigError("columns is a mask that takes no column")
        return np.flatnonzero(chosen)
    if chosen.dtype == object:
        if names is None:
            raise ConfigError(
                f"columns holds names, and {files[0].path} does not name its columns (there is no "
                "var): pass numbers"
            )
        for file in files:
            _check_unique(file)
        known = {name: number for number, name in enumerate(names)}
        for name in chosen.tolist():
            if name not in known:
                without = [
                    file.path
                    for file in files
                    if file.names is not None and name not in set(file.names.tolist())
                ]
                raise MissingNameError(
                    f"{without[0] if without else files[0].path} has no column {name!r}; it has: "
                    f"{listed_names(names, name, repr)}"
                )
        picked = np.array([known[name] for name in chosen.tolist()], np.int64)
    else:
        if chosen.min() < -count or chosen.max() >= count:
            raise ConfigError(
                f"columns reach from {chosen.min():,} to {chosen.max():,}, and there are {count:,}"
            )
        picked = chosen % count
    unique, counts = np.unique(picked, return_counts=True)
    if (counts > 1).any():
        number = int(unique[np.argmax(counts > 1)])
        raise ConfigError(
            f"columns takes {repr(names[number]) if names is not None else f'column {number:,}'} "
            "more than once"
        )
    return picked
