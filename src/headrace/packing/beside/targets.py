"""Targets as packs hold them: one array, or where they are dicts one for each of their columns,
named by `target_named`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.dataset import BaseDataset
from headrace.core.views import ColumnTargets
from headrace.errors import ConfigError
from headrace.storage.arrays.packed import TARGETS, PackedInfo, bytes_of, target_named

Column = npt.NDArray[Any]
LAYOUT = 7
"""The version of packs whose targets are dicts."""


def target_arrays(targets: Any) -> dict[str, Column]:
    """The arrays that a pack has of the targets, by name; {}: there are none.

    Raises:
        ConfigError: see `as_column`, `check_names`.
    """
    if targets is None:
        return {}
    if (columns := _columns_in(targets)) is None:
        return {TARGETS: as_column(targets)}
    check_names(columns)
    return {
        target_named(number): as_column(column, name)
        for number, (name, column) in enumerate(columns.items())
    }


def crc_of_columns(columns: Mapping[str, Column]) -> int:
    """One CRC of all columns."""
    crc = 0
    for _, column in sorted(columns.items()):
        crc = zlib.crc32(bytes_of(column).data, crc)
    return crc


def said_of_columns(
    dataset: BaseDataset, targets: Any, packed: PackedInfo | None = None
) -> dict[str, Any]:
    """What `PackedInfo` says of targets that are dicts; {}: they are none.

    Args:
        dataset: what is packed.
        targets: its targets.
        packed: what the pack says that they are from; None: they are from none.
    """
    if (columns := _columns_in(targets)) is None:
        return {}
    classes: Any = getattr(dataset, "column_classes", None)
    if not isinstance(classes, Mapping):
        classes = {} if packed is None else dict(packed.target_columns or ())
    return {
        "target_columns": [
            [name, list(classes[name]) if classes.get(name) else None] for name in columns
        ]
    }


def _columns_in(targets: Any) -> Mapping[str, Any] | None:
    """The columns of targets that are dicts with the same names; None: they are something else."""
    if isinstance(targets, ColumnTargets):
        return targets.columns
    if isinstance(targets, np.ndarray):
        return (
            None
            if targets.dtype.names is None
            else {name: targets[name] for name in targets.dtype.names}
        )
    if (
        not isinstance(targets, Sequence)
        or not len(targets)
        or not all(isinstance(one, dict) for one in targets)
    ):
        return None
    first = targets[0]
    if not first or any(one.keys() != first.keys() for one in targets):
        return None
    return {name: [one[name] for one in targets] for name in first}


def check_names(names: Iterable[Any], what: str = "these targets") -> None:
    """Raises a ConfigError where one of the names in dicts is no text, as which it would come
    back, or is empty.
    """
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{what} can't be packed: names in dicts must be texts of one character at least, "
                f"and {name!r} is none: rename it"
            )


def as_column(targets: Sequence[Any] | Column, name: str | None = None) -> Column:
    """Targets as an array whose rows give back the same targets.

    Args:
        targets: one a sample.
        name: of the column that they are; None: they are no columns.

    Raises:
        ConfigError: they are not all numbers, or all arrays of one shape.
    """
    try:
        column = np.asarray(targets)
    except ValueError:  # rows of different lengths
        column = np.empty(0, object)
    types = set() if isinstance(targets, np.ndarray) else {type(t) for t in targets}
    rows = (
        column.ndim == 1
        or isinstance(targets, np.ndarray)
        or all(isinstance(t, np.ndarray) for t in targets)
    )
    # NumPy rounds integers that neither int64 nor uint64 holds together
    is_rounded = int in types and column.dtype.kind == "f"
    if column.dtype.kind not in "biufc" or len(types) > 1 or not rows or is_rounded:
        what = "these targets" if name is None else f"the column {name!r} of these targets"
        raise ConfigError(
            f"{what} can't be packed: they must be numbers of one dtype, or NumPy arrays of one "
            "shape, or dicts of these with the same "
            "names; choose such columns of a table of labels by target_name=, or pack without any "
            "(images: targets=None; texts: no "
            "target_field=) and look them up by the numbers of the samples, which return_index "
            "gives"
        )
    return np.ascontiguousarray(column)
