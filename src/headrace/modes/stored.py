"""The common part of eager and cached: a sample store, its share of the budget, and its size
under memory pressure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.memory.anonymous import is_spawning
from headrace.memory.budget import Reservation
from headrace.memory.limits import PERIOD, PressureWatch
from headrace.memory.machine import open_machine_store
from headrace.memory.store import MISSING, Rows, SampleStore

OVERHEAD = 512
"""Overhead in bytes of a cached sample: the store's header, pickle, padding and table, rounded
up.
"""


class MachineShare(NamedTuple):
    """A rank's part in a store that all ranks of a machine share."""

    folder: Path
    key: str
    """Names what is cached."""
    rank: int
    """This process among those of its machine."""
    ranks: int


class Stored:
    """Caches samples in a store that all workers share."""

    _store: SampleStore | None = None
    _reserved: Reservation | None = None
    _watch: PressureWatch | None = None

    def get(self, indices: Sequence[int]) -> list[Any]:
        """Returns for each index a copy of the cached sample, or MISSING."""
        store = self._store
        if store is None:
            return [MISSING] * len(indices)
        self._follow_pressure(store)
        values = [store.get(i) for i in indices]
        missing = sum(value is MISSING for value in values)
        store.count(len(values) - missing, missing)
        return values

    def rows(self, indices: npt.NDArray[np.int64]) -> Rows | None:
        """The cached samples as arrays of one shape and dtype, without a copy. None: not all of
        them are cached in this form.
        """
        store = self._store
        if store is None:
            return None
        self._follow_pressure(store)
        rows = store.rows(indices)
        if rows is not None:
            store.count(len(indices), 0)
        return rows

    def _follow_pressure(self, store: SampleStore) -> None:
        if self._watch is not None and store.is_time_to_look(PERIOD):
            follow_pressure(store, self._watch)

    def admit(self, index: int, value: Any) -> None:
        """Offers a sample that was read."""
        if self._store is not None:
            self._store.put(index, value)

    def expect_skew(self) -> None:
        """Announces that some samples will be drawn much more often than others."""

    def shrink(self, nbytes: int) -> None:
        """Releases up to `nbytes` of the budget, which a loader needs for its batches."""

    def close(self) -> None:
        """Frees what is cached."""
        self._store = None
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def stats(self) -> dict[str, int]:
        """Counters for `explain()`."""
        return {} if self._store is None else self._store.stats()

    def __getstate__(self) -> dict[str, Any]:
        if not is_spawning():
            raise TypeError(f"the samples held by {type(self).__name__} stay behind in a pickle")
        return {**self.__dict__, "_reserved": None}


def follow_pressure(store: SampleStore, watch: PressureWatch) -> None:
    """Evicts samples where memory is short, and lets a store that did so grow again when it is
    not.
    """
    excess = watch.excess()
    if excess > 0 and store.nbytes:
        store.release(excess)
    elif excess < 0 and store.limit < store.ceiling:
        store.grow(-excess)


def make_store(
    share: MachineShare | None,
    length: int,
    capacity: int,
    policy: str = "keep",
    max_items: int | None = None,
    rows: bool = True,
) -> SampleStore:
    """A store of this rank alone; or one of all ranks of the machine, each of which brings
    `capacity` bytes of its budget.
    """
    if share is not None:
        return open_machine_store(
            share.folder, share.key, length, capacity * share.ranks, policy, max_items, rows
        )
    return SampleStore(length, capacity, policy, max_items, rows=rows)
