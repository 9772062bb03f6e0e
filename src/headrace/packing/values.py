"""Plans the packing of any dataset's samples as arrays: a first pass finds their shapes and
targets.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.arguments import described
from headrace.core.dataset import BaseDataset
from headrace.datasets.memory_efficient import ALONE
from headrace.dtypes import BFLOAT16
from headrace.errors import BudgetError, ConfigError
from headrace.memory.budget import MemoryBudget, format_size
from headrace.packing.beside.targets import LAYOUT as COLUMNS_LAYOUT, check_names, said_of_columns
from headrace.packing.plan import Plan, Rows, columns_of, info_of, names_of
from headrace.sorting import distinct
from headrace.storage.tar.index import RESERVED

Array = npt.NDArray[Any]


class Look(NamedTuple):
    """What a plan needs of a sample."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    target: Array | None
    values: str | None
    """ "bytes" or "str": what it is; None: an array."""

    @classmethod
    def of(cls, what: str, value: Any, target: Any) -> Look:
        """The look of a sample of input and target (None or `ALONE`: it has none); `what` it is
        in messages.
        """
        row, has_target = as_stored(what, value), target is not None and target is not ALONE
        values = next((kind.__name__ for kind in (bytes, str) if isinstance(value, kind)), None)
        return cls(
            row.shape,
            row.dtype,
            as_row(f"the target of {what}", target) if has_target else None,
            values,
        )


class ValuesPlanner:
    """Collects what a plan needs of all samples: memory is 8 bytes and a target a sample.

    All samples have one dtype and one shape, but for the length of their first axis.

    Args:
        count: how many samples there are.
        budget: that their targets must fit: they lie in memory.
        rows: what they have in common with samples of other files; None: these are all.
    """

    def __init__(self, count: int, budget: MemoryBudget, rows: Rows | None = None) -> None:
        self._count, self._budget = count, budget
        self._rows = _Alike(_SAMPLES, has_one_shape=rows is not None and rows.store == "decoded")
        self._targets = _Alike("targets one dtype and one shape", has_one_shape=True)
        self._target_bytes, self._given = bytearray(), rows
        self._values: list[str | None] = [] if rows is None else [rows.values]
        if rows is not None:
            self._rows.expect(
                "a sample of the other parts",
                (0, *rows.shape) if rows.store == "ragged" else rows.shape,
                rows.dtype,
            )

    def add(self, index: int, look: Look) -> None:
        """Adds the next sample.

        Raises:
            ConfigError: the sample or its target is of another kind than those before.
            BudgetError: the targets of all samples don't fit memory.
        """
        self._values = self._values or [look.values]
        if look.values != self._values[0]:
            raise ConfigError(
                f"sample {index} can't be packed with the others: it is "
                f"{look.values or 'an array'}, and they are "
                f"{self._values[0] or 'arrays'}: give all samples one type, or pack a subset() of "
                "those that are alike"
            )
        self._rows.add(f"sample {index}", look.shape, look.dtype)
        if look.target is not None:
            if not self._targets.lengths:
                self._check_room(look.target.nbytes)
            self._targets.add(f"the target of sample {index}", look.target.shape, look.target.dtype)
            self._target_bytes += look.target.tobytes()

    def _check_room(self, nbytes: int) -> None:
        """Raises a BudgetError where targets of so many bytes don't fit memory."""
        if not self._budget.fits(nbytes * self._count):
            raise BudgetError(
                f"the targets of {self._count:,} samples take "
                f"{format_size(nbytes * self._count)}, and "
                f"{format_size(self._budget.available)} of memory are available, where targets "
                "lie, also when the pack is read: make large "
                "ones part of the samples, such as {'image': ..., 'labels': ...} in decode or "
                "__getitem__, or raise max_memory_usage"
            )

    def plan(self, dataset: BaseDataset) -> Plan:
        """The plan for a dataset of exactly the samples that were added."""
        rows, count = self._rows, len(self._targets.lengths)
        if count not in (0, len(dataset)):
            raise ConfigError(
                f"{count:,} of {len(dataset):,} samples have a target: give one to all, or to none"
            )
        targets = (
            np.frombuffer(self._target_bytes, self._targets.dtype).reshape(
                count, *self._targets.shape
            )
            if count
            else None
        )
        if not dataset.sample_decoder.splits_targets:
            targets = dataset.targets
        lengths = np.array(rows.lengths, np.int64)
        values = self._values[0] if self._values else None
        is_ragged = values is not None or len(distinct(lengths)) > 1
        if self._given is not None:
            is_ragged = self._given.store == "ragged"
        columns = columns_of(lengths if is_ragged else None, names_of(dataset), targets)
        names: Any = getattr(dataset, "classes", None)
        is_named = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        store = "ragged" if is_ragged else "decoded"
        of_columns = said_of_columns(dataset, targets)
        version = (
            COLUMNS_LAYOUT if of_columns else 3 if values is not None else 2 if is_ragged else 1
        )
        info = info_of(
            dataset,
            columns,
            "array",
            store,
            classes=list(names) if is_named else None,
            values=values,
            version=version,
            **of_columns,
        )
        shape = (int(lengths.sum()), *rows.shape[1:]) if is_ragged else (len(lengths), *rows.shape)
        sizes = lengths * (int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.dtype.itemsize)
        return Plan(info, shape, rows.dtype, sizes, sizes, columns)


_SAMPLES = (
    "samples one dtype and one shape (only the first axis of arrays may differ), or pack a "
    "subset() of those that are alike"
)


class _Alike:
    """The shape and dtype of arrays that are alike: of one dtype and, but for the length of the
    first axis, one shape.

    Args:
        remedy: what to give all of them, in words.
        has_one_shape: True if the first axis must be as long, too.
    """

    def __init__(self, remedy: str, has_one_shape: bool = False) -> None:
        self._remedy, self._first_fixed, self._first = remedy, 0 if has_one_shape else 1, ""
        self.shape: tuple[int, ...] = (0,)
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self.lengths = array("q")  # 1 of a number

    def expect(self, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Says what all arrays are like, by one of them."""
        self._first, self.shape, self.dtype = what, shape, dtype

    def add(self, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Adds an array."""
        if not self._first:
            self.expect(what, shape, dtype)
        fixed = self._first_fixed
        if (
            dtype != self.dtype
            or len(shape) != len(self.shape)
            or shape[fixed:] != self.shape[fixed:]
        ):
            raise ConfigError(
                f"{what} can't be packed with the others: it is {dtype} of shape {list(shape)}, "
                f"and {self._first} is {self.dtype} of "
                f"shape {list(self.shape)}: give all {self._remedy}"
            )
        self.lengths.append(shape[0] if shape else 1)


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
    """The array of a value: itself; of a dict of arrays a compound, whose fields are sorted by
    name.

    Raises:
        ConfigError: it is neither an array, a tensor, a number, nor a dict of these, whose names
            are texts.
    """
    if not isinstance(value, dict) or not value:
        return as_array(what, value)
    check_names(value, what)
    if value.keys() >= set(RESERVED):
        raise ConfigError(
            f"{what} can't be packed: it is that of a tar, a dict with "
            f"{' and '.join(sorted(RESERVED))}. Subclass StreamingDataset, and "
            "give what is to be packed by split_target, such as value['jpg'], value['cls'] "
            "(docs/packing.md)"
        )
    fields = {name: as_row(f"{what.rstrip(',')}, {name!r},", value[name]) for name in sorted(value)}
    row = np.zeros((), [(name, field.dtype, field.shape) for name, field in fields.items()])
    for name, field in fields.items():
        row[name] = field
    return row


def as_array(what: str, value: Any) -> Array:
    """A number, an array or a tensor as an array.

    Raises:
        ConfigError: it is something else.
    """
    made: Any = None
    if isinstance(value, (bytes, str)):
        raise ConfigError(
            f"{what} can't be packed: it is {described(value)}. Bytes and str are packed as "
            "samples of their own, not as fields or "
            "targets: leave the column of a table out by columns=, decode one of images by "
            "image_column=, open one of texts as TextDataset(column=), or convert it in decode, or "
            "in __getitem__"
        )
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
        what_it_is = (
            described(value)
            if made is None
            else f"an array of {'bfloat16' if made.dtype == BFLOAT16 else made.dtype}"
        )
        raise ConfigError(
            f"{what} can't be packed: it is {what_it_is}. Packing takes arrays, tensors and "
            "numbers, dicts of these, bytes, str, and "
            "(input, target) tuples of these, where no field and no target is bytes or str: "
            "convert it in decode, or in __getitem__"
        )
    result: Array = made
    return result
