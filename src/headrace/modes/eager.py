"""Eager: bytes move once, at the start, in parallel; every sample is held, shared by all workers."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from headrace.display import progress_bar
from headrace.errors import BudgetError, SampleError, WriteError
from headrace.memory.budget import MemoryBudget, format_size
from headrace.memory.limits import PressureWatch, usable_cpus
from headrace.memory.row_store import RowStore, row_layout
from headrace.memory.rows import Layout
from headrace.memory.store import TABLE, SampleStore
from headrace.modes.held import OVERHEAD, Held, Place, make_store

Load = Callable[[Sequence[int]], list[Any]]
"""Reads and decodes: a value, or a SampleError, for each index."""

_GROUP = 32
_SAMPLED = 32
_MOST, _MOST_BYTES = 4096, 256 << 10  # of small rows that are read together


class _UnlikeError(Exception):
    """A sample is no array of the shape and dtype that all were said to have."""


class Eager(Held):
    """Holds all samples.

    Args:
        length: number of samples.
        load: reads and decodes some samples (called by several threads).
        budget: what may be held.
        nbytes: bytes of all samples when held, or None where nobody knows before they are read.
        like: shape and dtype of all samples, if they are arrays of one kind; where one is not, all are held in the general way.
        progress: show a progress bar; None: only on a terminal.
        threads: that `load` is called by; None: one for each usable CPU.
        place: of a store that all ranks of the machine fill together; None: of this rank's own.
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
        place: Place | None = None,
        like: tuple[tuple[int, ...], np.dtype[Any]] | None = None,
    ) -> None:
        self._length = length
        self._errors: dict[int, SampleError] = {}
        layout = None if like is None or nbytes is None else row_layout(*like)
        filling = load, budget, nbytes, progress, max(1, threads or len(usable_cpus())), place
        with contextlib.suppress(_UnlikeError):
            self._fill(*filling, layout)
        if self._store is None:
            self._errors = {}
            self._fill(*filling, None)
        self._watch = PressureWatch()

    def _fill(
        self,
        load: Load,
        budget: MemoryBudget,
        nbytes: int | None,
        progress: bool | None,
        threads: int,
        place: Place | None,
        layout: Layout | None,
    ) -> None:
        ranks = 1 if place is None else place.ranks
        first: dict[int, Any] = {}
        if layout is not None:
            needed = self._length * (layout.entry + TABLE) + (1 << 20)
        elif nbytes is None:
            first, needed = self._measure(load, budget.available)
        else:
            needed = nbytes + self._length * OVERHEAD + (1 << 20)
        part = -(-needed // ranks)
        if not budget.fits(part):
            raise BudgetError(
                f"loading_mode='eager' needs {format_size(needed)} for {self._length:,} samples, and "
                f"{format_size(budget.available)} are left of the budget: take loading_mode='cached' or 'lazy', "
                f"or raise max_memory_usage.\n{budget.explain()}"
            )
        reserved = budget.reserve(part, "eager samples")
        try:
            store = make_store(place, self._length, budget.available + part if nbytes is None else part, layout=layout)
            self._hold(first, store)
            first.clear()
            self._load_all(load, store, progress, threads, place)
            if nbytes is None:
                reserved.resize(-(-store.nbytes // ranks))
        except BaseException:
            reserved.close()
            raise
        self._store, self._reserved = store, reserved

    def _measure(self, load: Load, room: int) -> tuple[dict[int, Any], int]:
        """Some samples spread over the dataset, and the bytes of all that follow from them."""
        picked = np.unique(np.linspace(0, self._length - 1, min(_SAMPLED, self._length)).astype(int)).tolist()
        first: dict[int, Any] = {}
        total = count = 0
        for part in (picked[:1], picked[1:]):
            fitting = part if not total else part[: room // total]  # the first one says how many may be read at once
            for index, value in zip(fitting, load(fitting) if fitting else [], strict=True):
                first[index] = value
                if not isinstance(value, SampleError):
                    total, count = total + SampleStore.nbytes_of(value), count + 1
        return first, int(total / max(1, count) * self._length * 1.05) + (1 << 20)

    def _load_all(self, load: Load, store: SampleStore, progress: bool | None, threads: int, place: Place | None) -> None:
        size = min(_MOST, max(_GROUP, _MOST_BYTES // store.row_nbytes)) if isinstance(store, RowStore) else _GROUP
        groups = [range(s, min(s + size, self._length)) for s in range(0, self._length, size)]
        if place is not None:  # each rank begins elsewhere, and skips what the others have read by then
            begin = len(groups) * place.rank // place.ranks
            groups = groups[begin:] + groups[:begin]
        with (
            progress_bar(progress, total=self._length, desc="eager: reading", unit="sample") as bar,
            ThreadPoolExecutor(threads, "headrace-eager") as pool,
        ):

            def fill(group: range) -> None:
                missing = [i for i in group if i not in store and i not in self._errors]
                if missing:
                    self._hold(dict(zip(missing, load(missing), strict=True)), store)
                bar.update(len(group))

            tasks = [pool.submit(fill, group) for group in groups]
            try:
                done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
                for task in done:
                    task.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _hold(self, values: dict[int, Any], store: SampleStore) -> None:
        failed = {index: value for index, value in values.items() if isinstance(value, SampleError)}
        self._errors.update(failed)
        sound = {index: value for index, value in values.items() if index not in failed} if failed else values
        if not isinstance(store, RowStore):
            are_held = all(store.put(index, value) for index, value in sound.items())
        elif all(map(store.fits, sound.values())):
            are_held = store.put_rows(list(sound), list(sound.values()))
        else:
            raise _UnlikeError
        if are_held:
            return
        if store.write_error is not None:
            raise WriteError(f"loading_mode='eager': the file that all ranks share can't be written: {store.write_error}")
        raise BudgetError(
            f"loading_mode='eager': the samples are larger than the budget: {len(store):,} of "
            f"{self._length:,} fill {format_size(store.nbytes)}: take loading_mode='cached' or 'lazy', "
            "or raise max_memory_usage"
        )

    def get(self, indices: Sequence[int]) -> list[Any]:
        found = super().get(indices)
        return [self._errors.get(i, value) for i, value in zip(indices, found, strict=True)] if self._errors else found

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "_errors": {i: (error, _if_picklable(error.__cause__)) for i, error in self._errors.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._errors = {}
        for index, (error, cause) in state["_errors"].items():
            error.__cause__ = cause  # which a pickle of an exception leaves out, and `on_error` callables are given
            self._errors[index] = error


def _if_picklable(error: BaseException | None) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error
