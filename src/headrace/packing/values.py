"""Samples that have to be decoded to know their shapes: values of any dataset."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import BudgetError, ConfigError, SampleError
from headrace.formats.arrays.packed import bytes_of
from headrace.memory.budget import format_size
from headrace.packing.columns import Column
from headrace.packing.contents import Contents, Survey, Value
from headrace.packing.part import PartFile
from headrace.packing.parts import PartsPlan
from headrace.packing.plan import GROUP_BYTES, Packing, Plan, Rows, Spool

_UNKNOWN_SAMPLES = 16  # a task decodes so many, whose sizes are not known, or fewer large ones


class ValueContents(Contents):
    """Values of one dtype and one shape, but for the length of their first axis. They go through a
    spool; memory is 8 bytes and a target a sample.
    """

    def is_plan(self, frozen: PartsPlan) -> bool:
        rows = frozen.rows
        if rows is None:
            return False
        seen = {name: frozen.options.get(name) for name in ("rows", "target_columns")}
        options = {**seen, **self._given_options(), **self.layout_options(rows)}
        return options == {**seen, **frozen.options}

    def _survey(self, source_sizes: IntArray | None) -> Survey:
        packing = self.packing(None)
        plan = packing.plan
        sizes = np.zeros(len(self.dataset), np.int64)
        sizes[np.setdiff1d(np.arange(len(sizes)), list(packing.left_out))] = plan.sizes
        options = {"rows": plan.rows.as_json(), **self.layout_options(plan.rows)}
        return Survey(plan.info, sizes, None, options)

    def packing(self, part: PartFile | None, source_sizes: IntArray | None = None) -> Packing:
        """See `Contents.packing`.

        Raises:
            ConfigError: samples or targets are no arrays, or not alike; the message names one.
            BudgetError: the targets of all samples don't fit memory.
        """
        budget = self.dataset.budget
        spool = None if part is None else Spool(part)
        samples = _Alike(_SAMPLES, 1)
        targets = _Alike("targets one dtype and one shape", 0)
        target_bytes = bytearray()
        if self.rows is not None:
            is_ragged = self.rows.store == "ragged"
            samples.fixed = int(is_ragged)
            shape = (0, *self.rows.shape) if is_ragged else self.rows.shape
            samples.expect("a sample of the other parts", shape, self.rows.dtype, self.rows.values)

        def groups() -> Iterator[range]:
            start = 0
            while start < len(self.dataset):
                # one by one until it is known how large they are
                some = min(_UNKNOWN_SAMPLES, GROUP_BYTES // samples.largest) or 1
                yield range(start, min(start + some, len(self.dataset)))
                start += some

        def use(number: int, sample: Value) -> None:
            samples.add(f"sample {number}", sample.row, sample.values)
            if spool is not None:
                spool.append(bytes_of(sample.row))
            if sample.target is not None:
                nbytes = sample.target.nbytes * len(self.dataset)
                if not targets.lengths and not budget.fits(nbytes):
                    raise BudgetError(
                        f"the targets of {len(self.dataset):,} samples take {format_size(nbytes)}, "
                        f"and {format_size(budget.available)} of memory are available, where "
                        "targets lie, also when the pack is read: make large ones part of the "
                        "samples, such as {'image': ..., 'labels': ...} in decode or __getitem__, "
                        "or raise max_memory_usage"
                    )
                targets.add(f"the target of sample {number}", sample.target)
                target_bytes.extend(sample.target.tobytes())

        def task(group: range) -> list[Value | SampleError]:
            return self.each(group, self._value)

        left_out = self.made(task, groups(), "reading samples", use)
        plan = self.without(left_out)._values_plan(samples, targets, target_bytes)
        return Packing(plan, (lambda group: []) if spool is None else spool.reader(), left_out)

    def _values_plan(self, samples: _Alike, of_targets: _Alike, target_bytes: bytearray) -> Plan:
        """The plan for exactly these samples."""
        dataset = self.dataset
        count = len(of_targets.lengths)
        if count not in (0, len(dataset)):
            raise ConfigError(
                f"{count:,} of {len(dataset):,} samples have a target: give one to all, or to none"
            )
        targets: Any = None
        if not dataset.sample_decoder.splits_targets:
            targets = dataset.targets
        elif count:
            flat = np.frombuffer(target_bytes, of_targets.dtype)
            targets = flat.reshape(count, *of_targets.shape)
        is_ragged = samples.values is not None or len(set(samples.lengths)) > 1
        if self.rows is not None:
            is_ragged = self.rows.store == "ragged"
        lengths = None
        rows = Rows("decoded", samples.dtype, samples.shape)
        if is_ragged:
            lengths = np.array(samples.lengths, np.int64)
            rows = Rows("ragged", samples.dtype, samples.shape[1:], samples.values)
        return self._plan(rows, lengths, targets, **self._about(targets))


_SAMPLES = (
    "samples one dtype and one shape (only the first axis of arrays may differ), or pack a "
    "subset() of those that are alike"
)


class _Alike:
    """What arrays have in common: one dtype and one shape, but for its first axes where `fixed` is
    not 0; and what `Rows.values` says of them. `remedy`: what to give all of them, in words.
    """

    def __init__(self, remedy: str, fixed: int) -> None:
        self.remedy = remedy
        self.fixed = fixed
        self.first = ""
        self.shape: tuple[int, ...] = (0,)
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self.values: str | None = None
        self.lengths = array("q")  # 1 of a number
        self.largest = GROUP_BYTES  # bytes of one

    def expect(
        self, what: str, shape: tuple[int, ...], dtype: np.dtype[Any], values: str | None
    ) -> None:
        """Says what all arrays are like, by one of them."""
        self.first = what
        self.shape = shape
        self.dtype = dtype
        self.values = values

    def add(self, what: str, value: Column, values: str | None = None) -> None:
        """Adds an array.

        Raises:
            ConfigError: it is of another kind than those before.
        """
        if not self.first:
            self.expect(what, value.shape, value.dtype, values)
        if values != self.values:
            raise ConfigError(
                f"{what} can't be packed with the others: it is {values or 'an array'}, and they "
                f"are {self.values or 'arrays'}: give all samples one type, or pack a subset() of "
                "those that are alike"
            )
        is_like = len(value.shape) == len(self.shape) and value.dtype == self.dtype
        if not is_like or value.shape[self.fixed :] != self.shape[self.fixed :]:
            raise ConfigError(
                f"{what} can't be packed with the others: it is {value.dtype} of shape "
                f"{list(value.shape)}, and {self.first} is {self.dtype} of shape "
                f"{list(self.shape)}: give all {self.remedy}"
            )
        if not self.lengths:
            self.largest = 1
        self.largest = max(self.largest, value.nbytes)
        self.lengths.append(value.shape[0] if value.shape else 1)
