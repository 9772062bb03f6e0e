"""Plans the packing of any dataset's samples as arrays: a first pass finds their shapes and
targets.
"""

from __future__ import annotations

import math
from array import array
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.arguments import described
from headrace.core.dataset import BaseDataset
from headrace.datasets.memory_efficient import ALONE
from headrace.dtypes import BFLOAT16, IntArray
from headrace.errors import BudgetError, ConfigError
from headrace.formats.arrays.packed import PackedInfo
from headrace.memory.budget import format_size
from headrace.packing.columns import (
    COLUMNS_LAYOUT,
    check_names,
    columns_of,
    names_of,
    target_columns_of,
)
from headrace.packing.plan import Plan, Rows, checksums_of
from headrace.sorting import distinct

Array = npt.NDArray[Any]


class Look(NamedTuple):
    """What a plan needs of a sample."""

    row: Array
    """As it is stored, or an array like it."""
    target: Array | None
    values: str | None
    """ "bytes" or "str": what it is; None: an array."""


def look_at(what: str, value: Any, target: Any) -> Look:
    """The look of a sample of input and target (None or `ALONE`: it has none); `what` it is in
    messages.
    """
    row = as_stored(what, value)
    values = next((kind.__name__ for kind in (bytes, str) if isinstance(value, kind)), None)
    target_row = None
    if target is not None and target is not ALONE:
        target_row = as_row(f"the target of {what}", target)
    # the shape of its values, without their memory
    return Look(np.broadcast_to(np.zeros((), row.dtype), row.shape), target_row, values)


class ValuesPlanner:
    """Collects what a plan needs of all samples: memory is 8 bytes and a target a sample.

    All samples have one dtype and one shape, but for the length of their first axis.

    Args:
        dataset: of these samples.
        rows: what they have in common with samples of other files; None: these are all.
    """

    def __init__(self, dataset: BaseDataset, rows: Rows | None = None) -> None:
        self._count = len(dataset)
        self._budget = dataset.budget
        self._given = rows
        self._rows = _Alike(_SAMPLES, 1)
        self._targets = _Alike("targets one dtype and one shape", 0)
        self._target_bytes = bytearray()
        self._values: str | None = None
        if rows is not None:
            self._values = rows.values
            shape = (0, *rows.shape) if rows.store == "ragged" else rows.shape
            self._rows.fixed = 1 if rows.store == "ragged" else 0
            self._rows.expect("a sample of the other parts", shape, rows.dtype)

    def add(self, index: int, look: Look) -> None:
        """Adds the next sample.

        Raises:
            ConfigError: the sample or its target is of another kind than those before.
            BudgetError: the targets of all samples don't fit memory.
        """
        if not self._rows.first:
            self._values = look.values
        if look.values != self._values:
            raise ConfigError(
                f"sample {index} can't be packed with the others: it is "
                f"{look.values or 'an array'}, and they are {self._values or 'arrays'}: give all "
                "samples one type, or pack a subset() of those that are alike"
            )
        self._rows.add(f"sample {index}", look.row)
        if look.target is None:
            return
        nbytes = look.target.nbytes * self._count
        if not self._targets.lengths and not self._budget.fits(nbytes):
            raise BudgetError(
                f"the targets of {self._count:,} samples take {format_size(nbytes)}, and "
                f"{format_size(self._budget.available)} of memory are available, where targets "
                "lie, also when the pack is read: make large ones part of the samples, such as "
                "{'image': ..., 'labels': ...} in decode or __getitem__, or raise max_memory_usage"
            )
        self._targets.add(f"the target of sample {index}", look.target)
        self._target_bytes += look.target.tobytes()

    def plan(self, dataset: BaseDataset) -> Plan:
        """The plan for a dataset of exactly the samples that were added."""
        row = self._rows
        count = len(self._targets.lengths)
        if count not in (0, len(dataset)):
            raise ConfigError(
                f"{count:,} of {len(dataset):,} samples have a target: give one to all, or to none"
            )
        targets: Any = None
        if not dataset.sample_decoder.splits_targets:
            targets = dataset.targets
        elif count:
            flat = np.frombuffer(self._target_bytes, self._targets.dtype)
            targets = flat.reshape(count, *self._targets.shape)
        lengths: IntArray = np.array(row.lengths, np.int64)
        is_ragged = self._values is not None or len(distinct(lengths)) > 1
        if self._given is not None:
            is_ragged = self._given.store == "ragged"
        columns = columns_of(lengths if is_ragged else None, names_of(dataset), targets)
        names: Any = getattr(dataset, "classes", None)
        is_named = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        target_columns = target_columns_of(dataset, targets)
        version = 1
        if target_columns is not None:
            version = COLUMNS_LAYOUT
        elif is_ragged:
            version = 2 if self._values is None else 3
        info = PackedInfo(
            "array",
            "ragged" if is_ragged else "decoded",
            len(dataset),
            dataset.fingerprint,
            list(names) if is_named else None,
            checksums=checksums_of(columns),
            values=self._values,
            target_columns=target_columns,
            version=version,
        )
        shape = (len(lengths), *row.shape)
        if is_ragged:
            shape = (int(lengths.sum()), *row.shape[1:])
        sizes = lengths * (math.prod(row.shape[1:]) * row.dtype.itemsize)
        return Plan(info, shape, row.dtype, sizes, sizes, columns)


_SAMPLES = (
    "samples one dtype and one shape (only the first axis of arrays may differ), or pack a "
    "subset() of those that are alike"
)


class _Alike:
    """The shape and dtype of arrays that are alike: of one dtype and one shape, but for its first
    axes where `fixed` is not 0. `remedy`: what to give all of them, in words.
    """

    def __init__(self, remedy: str, fixed: int) -> None:
        self.remedy = remedy
        self.fixed = fixed
        self.first = ""
        self.shape: tuple[int, ...] = (0,)
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self.lengths = array("q")  # 1 of a number

    def expect(self, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Says what all arrays are like, by one of them."""
        self.first = what
        self.shape = shape
        self.dtype = dtype

    def add(self, what: str, value: Array) -> None:
        """Adds an array."""
        if not self.first:
            self.expect(what, value.shape, value.dtype)
        is_like = len(value.shape) == len(self.shape) and value.dtype == self.dtype
        if not is_like or value.shape[self.fixed :] != self.shape[self.fixed :]:
            raise ConfigError(
                f"{what} can't be packed with the others: it is {value.dtype} of shape "
                f"{list(value.shape)}, and {self.first} is {self.dtype} of shape "
                f"{list(self.shape)}: give all {self.remedy}"
            )
        self.lengths.append(value.shape[0] if value.shape else 1)


def as_stored(what: str, value: Any) -> Array:
    """The array that is stored of a sample: of bytes these, of a str its UTF-8 (uint8 [n]); else
    `as_row`.

    Raises:
        ConfigError: it can't be packed.
    """
    if isinstance(value, str):
        try:
            value = value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{what} can't be packed: it is no text that UTF-8 has ({error}): pack bytes"
            ) from error
    return np.frombuffer(value, np.uint8) if isinstance(value, bytes) else as_row(what, value)


def as_row(what: str, value: Any) -> Array:
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
    made: Array | None = None
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
            "str: convert it in decode or __getitem__; of a table choose columns=, "
            "ImageDataset(column=) or TextDataset(column=); of a tar give what is packed by "
            "split_target (docs/packing.md)"
        )
    return made
