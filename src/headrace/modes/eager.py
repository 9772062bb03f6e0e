"""Eager: all samples are read once, at the start, in parallel, cached, and shared by all
workers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.display import progress_bar
from headrace.dtypes import ArraySpec
from headrace.errors import BudgetError, SampleError, WriteError
from headrace.memory.budget import MemoryBudget, Reservation, format_size
from headrace.memory.limits import PressureWatch, usable_cpus
from headrace.memory.store import TABLE, Layout, SampleStore
from headrace.modes.stored import OVERHEAD, MachineShare, Stored, make_store
from headrace.sorting import distinct

Load = Callable[[Sequence[int]], list[Any]]
"""Reads and decodes samples: returns a value or a SampleError for each index."""

_GROUP = 32
_MEASURED = 32
_MOST, _MOST_BYTES = 4096, 256 << 10  # of small rows that are read together


class Eager(Stored):
    """Caches all samples at the start.

    Args:
        length: number of samples.
        load: reads and decodes samples. It is called by several threads.
        budget: memory budget.
        nbytes: bytes of all cached samples. None: not known before they are read.
        progress: show a progress bar. None: only on a terminal.
        threads: number of threads that call `load`. None: one per usable CPU.
        share: a store that all ranks of the machine fill together. None: a store of this rank.
        spec: shape and dtype of all samples, if they are arrays of one kind. If a sample differs,
            all are cached in the general form.
    """

    def __init__(
        self,
        length: int,
        load: Load,
        budget: MemoryBudget,
        nbytes: int | None = None,
        progress: bool | None = None,
        *,
        threads: int | None = None,
        share: MachineShare | None = None,
        spec: tuple[tuple[int, ...], np.dtype[Any]] | None = None,
    ) -> None:
        filling = _Filling(
            length, load, budget, nbytes, progress, max(1, threads or usable_cpus()), share
        )
        layout = None
        if spec is not None and nbytes is not None:
            layout = Layout.of(ArraySpec(*spec))
        try:
            self._store, self._reserved = filling.fill(layout)
        except _UnlikeError:
            filling.rows = False
            self._store, self._reserved = filling.fill(None)
        self._errors = filling.errors
        self._watch = PressureWatch()

    def get(self, indices: Sequence[int]) -> list[Any]:
        values = super().get(indices)
        return (
            [self._errors.get(i, value) for i, value in zip(indices, values, strict=True)]
            if self._errors
            else values
        )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {
            **state,
            "_errors": {
                i: (error, _if_picklable(error.__cause__)) for i, error in self._errors.items()
            },
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._errors = {}
        for index, (error, cause) in state["_errors"].items():
            # which a pickle of an exception leaves out, and `on_error` callables are given
            error.__cause__ = cause
            self._errors[index] = error


class _UnlikeError(Exception):
    """A sample is no array of the shape and dtype of those before it."""


@dataclass
class _Filling:
    """Reads all samples into a store; see `Eager`."""

    length: int
    load: Load
    budget: MemoryBudget
    nbytes: int | None
    progress: bool | None
    threads: int
    share: MachineShare | None
    rows: bool = True  # False: the samples are known not to be
    errors: dict[int, SampleError] = field(default_factory=dict)

    def fill(self, layout: Layout | None) -> tuple[SampleStore, Reservation]:
        """The store with all samples, and what is reserved for it; an _UnlikeError, if they do not
        have the layout, or rows had to leave for a sample that is another.
        """
        self.errors.clear()
        budget, ranks = self.budget, 1 if self.share is None else self.share.ranks
        first: dict[int, Any] = {}
        if layout is not None:
            needed = self.length * (layout.entry + TABLE) + (1 << 20)
        elif self.nbytes is None:
            first, needed = self._measure(budget.available)
        else:
            needed = self.nbytes + self.length * OVERHEAD + (1 << 20)
        part = -(-needed // ranks)
        if not budget.fits(part):
            raise BudgetError(
                f"loading_mode='eager' needs {format_size(needed)} for {self.length:,} samples, "
                "and "
                f"{format_size(budget.available)} are left of the budget: take "
                "loading_mode='cached' or 'lazy', "
                f"or raise max_memory_usage.\n{budget.explain()}"
            )
        reserved = budget.reserve(part, "eager samples")
        try:
            store = make_store(
                self.share,
                self.length,
                budget.available + part if self.nbytes is None else part,
                rows=self.rows,
            )
            self._put(first, store, layout)
            first.clear()
            self._load_all(store, layout)
            if self.nbytes is None:
                reserved.resize(-(-store.nbytes // ranks))
        except BaseException:
            reserved.close()
            raise
        return store, reserved

    def _measure(self, available: int) -> tuple[dict[int, Any], int]:
        """Samples spread over the dataset, and the bytes of all that follow from them."""
        picked = distinct(
            np.linspace(0, self.length - 1, min(_MEASURED, self.length)).astype(int)
        ).tolist()
        first: dict[int, Any] = {}
        total = count = 0
        for part in (picked[:1], picked[1:]):
            # the first one says how many may be read at once
            fitting = part if not total else part[: available // total]
            for index, value in zip(fitting, self.load(fitting) if fitting else [], strict=True):
                first[index] = value
                if not isinstance(value, SampleError):
                    total, count = total + SampleStore.nbytes_of(value), count + 1
        return first, int(total / max(1, count) * self.length * 1.05) + (1 << 20)

    def _load_all(self, store: SampleStore, layout: Layout | None) -> None:
        size = _GROUP
        if layout is not None:
            size = min(_MOST, max(_GROUP, _MOST_BYTES // layout.entry))
        groups = [range(s, min(s + size, self.length)) for s in range(0, self.length, size)]
        # each rank begins elsewhere, and skips what the others have read by then
        if self.share is not None:
            begin = len(groups) * self.share.rank // self.share.ranks
            groups = groups[begin:] + groups[:begin]
        with (
            progress_bar(
                self.progress, total=self.length, desc="eager: reading", unit="sample"
            ) as bar,
            ThreadPoolExecutor(self.threads, "headrace-eager") as pool,
        ):

            def load_group(group: range) -> None:
                missing = [i for i in group if i not in store and i not in self.errors]
                if missing:
                    values = dict(zip(missing, self.load(missing), strict=True))
                    self._put(values, store, layout)
                bar.update(len(group))

            tasks = [pool.submit(load_group, group) for group in groups]
            try:
                done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
                for task in done:
                    task.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _put(self, values: dict[int, Any], store: SampleStore, layout: Layout | None) -> None:
        failed = {index: value for index, value in values.items() if isinstance(value, SampleError)}
        self.errors.update(failed)
        sound = (
            {index: value for index, value in values.items() if index not in failed}
            if failed
            else values
        )
        if not sound:
            return
        are_cached = store.put_many(list(sound), list(sound.values()))
        if layout is not None:
            is_unlike = store.layout != layout
        else:
            is_unlike = self.rows and store.is_mixed and store.stats()["evicted"] > 0
        if is_unlike:
            raise _UnlikeError
        if are_cached:
            return
        if store.write_error is not None:
            raise WriteError(
                "loading_mode='eager': the file that all ranks share can't be written: "
                f"{store.write_error}"
            )
        raise BudgetError(
            f"loading_mode='eager': the samples are larger than the budget: {len(store):,} of "
            f"{self.length:,} fill {format_size(store.nbytes)}: take loading_mode='cached' or "
            "'lazy', "
            "or raise max_memory_usage"
        )


def _if_picklable(error: BaseException | None) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error
