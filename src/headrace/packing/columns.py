"""Arrays of values: of samples one by one, and of the targets beside them.

Targets are one array or, where they are dicts, one for each of their columns, named by
`target_named`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.arguments import described
from headrace.core.views import ColumnTargets
from headrace.dtypes import BFLOAT16
from headrace.errors import ConfigError
from headrace.formats.arrays.packed import TARGETS, bytes_of, target_named

Column = npt.NDArray[Any]


def target_arrays(targets: Any) -> dict[str, Column]:
    """The arrays that a pack has of the targets, by name; {}: there are none.

    Raises:
        ConfigError: see `as_column`, `check_names`.
    """
    if targets is None:
        return {}
    columns = columns_in(targets)
    if columns is None:
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


def columns_in(targets: Any) -> Mapping[str, Any] | None:
    """The columns of targets that are dicts with the same names; None: they are something else."""
    if isinstance(targets, ColumnTargets):
        return targets.columns
    if isinstance(targets, np.ndarray):
        names = targets.dtype.names
        return None if names is None else {name: targets[name] for name in names}
    is_of_dicts = (
        isinstance(targets, Sequence)
        and len(targets) > 0
        and all(isinstance(one, dict) for one in targets)
    )
    if not is_of_dicts or not targets[0]:
        return None
    if any(one.keys() != targets[0].keys() for one in targets):
        return None
    return {name: [one[name] for one in targets] for name in targets[0]}


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
    types = set[type]()
    if not isinstance(targets, np.ndarray):
        types = {type(target) for target in targets}
    # NumPy rounds integers that neither int64 nor uint64 holds together
    is_rounded = int in types and column.dtype.kind == "f"
    is_sound = column.ndim == 1 or types <= {np.ndarray}
    if column.dtype.kind not in "biufc" or len(types) > 1 or not is_sound or is_rounded:
        what = "these targets" if name is None else f"the column {name!r} of these targets"
        raise ConfigError(
            f"{what} can't be packed: they must be numbers of one dtype, or NumPy arrays of one "
            "shape, or dicts of these with the same names; choose such columns of a table of "
            "labels by target_name=, or pack without any (images: targets=None; texts: no "
            "target_field=) and look them up by the numbers of the samples, which return_index "
            "gives"
        )
    return np.ascontiguousarray(column)


def as_row(what: str, value: Any) -> Column:
    """The array of a number, an array or a tensor; of a dict of these a compound, whose fields are
    sorted by name.

    Raises:
        ConfigError: it is something else, or a dict whose names are no texts.
    """
    if isinstance(value, dict) and value:
        check_names(value, what)
        what = what.rstrip(",")
        fields = {name: as_row(f"{what}, {name!r},", value[name]) for name in sorted(value)}
        row = np.zeros((), [(name, field.dtype, field.shape) for name, field in fields.items()])
        for name, field in fields.items():
            row[name] = field
        return row
    made: Column | None = None
    if isinstance(value, torch.Tensor):
        try:
            made = value.numpy(force=True)
        # a dtype that NumPy doesn't have, or no strided tensor
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"{what} can't be packed: {error}: convert it in decode, or in __getitem__"
            ) from error
    elif isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        made = np.asarray(value)
    if made is None or made.dtype.kind not in "biufc" or made.dtype.char in "gG":
        shown = described(value)
        if made is not None:
            shown = f"an array of {'bfloat16' if made.dtype == BFLOAT16 else made.dtype}"
        raise ConfigError(
            f"{what} can't be packed: it is {shown}. Samples are arrays, tensors, numbers, dicts "
            "of these, bytes, str, and (input, target) tuples; fields and targets are no bytes or "
            "str: convert it in decode or __getitem__; of a table choose columns= "
            "or column=; of a tar give what is packed by "
            "split_target (docs/packing.md)"
        )
    return made
