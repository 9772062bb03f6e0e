"""Eager and cached: values held in memory that all workers of a process share, or all ranks of a
machine.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.core.decoder import Decoder
from headrace.core.values import Access, Use, ValueSource, as_it_is
from headrace.display import progress_bar
from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import BudgetError, ConfigError, SampleError, WriteError
from headrace.formats.source import Rows as WritableRows, row_at
from headrace.memory.anonymous import is_spawning
from headrace.memory.budget import MemoryBudget, Reservation, format_size, parse_size
from headrace.memory.limits import PERIOD, PressureWatch, usable_cpus
from headrace.memory.machine import open_machine_store
from headrace.memory.store import MISSING, TABLE, Layout, Rows, SampleStore
from headrace.sorting import distinct

OVERHEAD = 512
"""Overhead in bytes of a cached sample: the store's header, pickle, padding and table, rounded
up.
"""
SHARE = 0.75
"""Share of the remaining budget that a cache takes if its size is not known in advance. The rest
is for batches and prefetching.
"""
Load = Callable[[Sequence[int]], list[Any]]
"""Reads values by index; a SampleError for each that can't be read and may be left out."""

_GROUP = 32
_MEASURED = 32
_MOST = 4096
_MOST_BYTES = 256 << 10  # of small rows that are read together


class MachineShare(NamedTuple):
    """A rank's part in a store that all ranks of a machine share."""

    folder: Path
    key: str
    """Names what is cached."""
    rank: int
    """This process among those of its machine."""
    ranks: int


class Held(ValueSource):
    """Values that a store holds; those that it doesn't are read, and offered to it.

    It travels to workers with its store.

    Args:
        parent: gives the values.
        store: holds them.
        reserved: what is reserved for the store.
        ranks: number of processes that share the store.
        errors: by index, those of samples that can't be read.
        is_cache: True if the store may give its room to others.
        is_auto: True if the store may choose what it evicts.
    """

    def __init__(
        self,
        parent: ValueSource,
        store: SampleStore,
        reserved: Reservation,
        ranks: int = 1,
        *,
        errors: dict[int, SampleError] | None = None,
        is_cache: bool = False,
        is_auto: bool = False,
    ) -> None:
        super().__init__(parent)
        self.store: SampleStore | None = store  # None: closed
        self._reserved: Reservation | None = reserved
        self._ranks = ranks
        self._errors = errors or {}
        self._is_cache = is_cache
        self._is_auto = is_auto
        self._watch = PressureWatch()

    def get(self, indices: Sequence[int]) -> list[Any]:
        """Returns for each index a copy of the held value, the error of the sample, or MISSING."""
        store = self.store
        values = [MISSING] * len(indices)
        if store is not None:
            self._follow_pressure(store)
            values = [store.get(index) for index in indices]
        if self._errors:
            pairs = zip(indices, values, strict=True)
            return [self._errors.get(index, value) for index, value in pairs]
        return values

    def admit(self, index: int, value: Any) -> None:
        """Offers a value that was read."""
        if self.store is not None:
            self.store.put(index, value)

    def each(self, indices: Sequence[int], use: Use, access: Access) -> list[Any]:
        made = self.get(indices)
        missing = [position for position, value in enumerate(made) if value is MISSING]
        held = [position for position, value in enumerate(made) if value is not MISSING]
        access.reader.counts["cache_hits"] += len(held)
        if held and use is not as_it_is:

            def present(number: int) -> Any:
                value = made[held[number]]
                return value if isinstance(value, SampleError) else use(held[number], value)

            results = access.reader.timed("decode", present, len(held), held)
            for position, result in zip(held, results, strict=True):
                made[position] = result
        if missing:
            wanted = [indices[position] for position in missing]

            def admit(number: int, value: Any) -> Any:
                self.admit(wanted[number], value)
                return use(missing[number], value)

            results = self.parent.each(wanted, admit, access._replace(positions=missing))
            for position, result in zip(missing, results, strict=True):
                made[position] = result
        return made

    def row_spec(self, decoder: Decoder) -> ArraySpec | None:
        return self.parent.row_spec(decoder)

    def read_into(self, indices: Sequence[int], rows: WritableRows, access: Access) -> None:
        held = self.get(indices)
        missing = [position for position, value in enumerate(held) if value is MISSING]
        if missing:
            wanted = [indices[position] for position in missing]
            some = rows
            if len(missing) < len(held):
                some = [row_at(rows, position) for position in missing]
            self.parent.read_into(wanted, some, access)
        for position, value in enumerate(held):
            row = row_at(rows, position)
            if value is MISSING:
                self.admit(indices[position], row)
            else:
                row[...] = value
        access.reader.counts["cache_hits"] += len(held) - len(missing)

    def rows(self, indices: IntArray) -> Rows | None:
        store = self.store
        if store is None:
            return None
        self._follow_pressure(store)
        return store.rows(indices)

    def _follow_pressure(self, store: SampleStore) -> None:
        """Evicts values where memory is short, and lets a store that did so grow again when it is
        not.
        """
        if not store.is_time_to_look(PERIOD):
            return
        excess = self._watch.excess()
        if excess > 0 and store.nbytes:
            store.release(excess)
        elif excess < 0 and store.limit < store.ceiling:
            store.grow(-excess)

    def shrink(self, nbytes: int) -> None:
        """Releases up to `nbytes` of the budget, which a loader needs for its batches."""
        if not self._is_cache or self.store is None or self._reserved is None:
            return
        spared = min(nbytes, self._reserved.nbytes, -(-self.store.ceiling // self._ranks))
        self.store.cap(self.store.ceiling - spared * self._ranks)
        self._reserved.resize(self._reserved.nbytes - spared)

    def expect_skew(self) -> None:
        """Announces that some samples will be drawn much more often than others."""
        if self._is_auto and self.store is not None:
            self.store.use_lru()

    def stats(self) -> dict[str, int]:
        return {} if self.store is None else self.store.stats()

    def close(self) -> None:
        self.store = None
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def __getstate__(self) -> dict[str, Any]:
        if not is_spawning():
            raise TypeError(f"the samples held by {type(self).__name__} stay behind in a pickle")
        # a pickle of an exception leaves out its cause, which `on_error` callables are given
        causes: dict[int, BaseException | None] = {}
        for index, error in self._errors.items():
            with contextlib.suppress(Exception):
                pickle.loads(pickle.dumps(error.__cause__))
                causes[index] = error.__cause__
        return {**self.__dict__, "_reserved": None, "causes": causes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for index, cause in state.pop("causes").items():
            state["_errors"][index].__cause__ = cause
        self.__dict__.update(state)


# -- cached


def cached(
    parent: ValueSource,
    length: int,
    budget: MemoryBudget,
    cache_size: int | str | None = None,
    policy: str = "auto",
    nbytes: int | None = None,
    share: MachineShare | None = None,
) -> Held:
    """Holds values from their first use on, as many as fit.

    Args:
        parent: gives the values.
        length: number of values.
        budget: memory budget.
        cache_size: limit as a number of values (int) or bytes ("2GB"). None: limited by the budget
            only.
        policy: "keep": admit until the cache is full, and never evict. "lru": evict the least
            recently used values. "auto": "keep", or "lru" under a loader that draws samples
            repeatedly (`expect_skew`). "keep" is the default because under a fresh permutation each
            epoch an LRU of half of the samples has 15 % hits, and "keep" 50 %.
        nbytes: bytes of all values, if known.
        share: a store for all ranks of the machine. None: a store of this rank.
    """
    items, most = check_cache_size(cache_size)
    ranks = 1 if share is None else share.ranks
    table = TABLE * length // ranks
    capacity = max(0, int(budget.available * SHARE) - table)
    if nbytes is not None:
        capacity = min(capacity, (nbytes + length * OVERHEAD) // ranks + (1 << 20))
    if most is not None:
        capacity = min(capacity, most // ranks)
    evicts = "lru" if policy == "lru" else "keep"
    store = _make_store(share, length, capacity, evicts, items)
    needed = -(-store.capacity // ranks) + table  # of an open store its own
    reserved = budget.reserve(min(needed, budget.available), "cached samples")
    return Held(parent, store, reserved, ranks, is_cache=True, is_auto=policy == "auto")


def check_cache_size(cache_size: int | str | None) -> tuple[int | None, int | None]:
    """The maximum number of samples and of bytes to cache; None: no limit."""
    if isinstance(cache_size, str):
        return None, parse_size(cache_size, "cache_size, given as a string,")
    if cache_size is None:
        return None, None
    try:
        items = operator.index(cache_size)
    except TypeError:
        items = 0
    if items < 1 or isinstance(cache_size, bool):
        raise ConfigError(
            "cache_size must be a number of samples (an int of at least 1), a size such as '2GB', "
            f"or None for what the budget allows, not {cache_size!r} (loading_mode='lazy' holds "
            "none)"
        )
    return items, None


def _make_store(
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
    if share is None:
        return SampleStore(length, capacity, policy, max_items, rows=rows)
    return open_machine_store(
        share.folder, share.key, length, capacity * share.ranks, policy, max_items, rows
    )


# -- eager


def eager(
    parent: ValueSource,
    length: int,
    load: Load,
    budget: MemoryBudget,
    nbytes: int | None = None,
    progress: bool | None = None,
    *,
    threads: int | None = None,
    share: MachineShare | None = None,
    spec: ArraySpec | None = None,
) -> Held:
    """Reads all values now, in parallel, and holds them.

    Args:
        parent: gives the values, should memory pressure evict some.
        length: number of values.
        load: reads values. It is called by several threads.
        budget: memory budget.
        nbytes: bytes of all values. None: not known before they are read.
        progress: show a progress bar. None: only on a terminal.
        threads: number of threads that call `load`. None: one per usable CPU.
        share: a store that all ranks of the machine fill together. None: a store of this rank.
        spec: shape and dtype of all values, if they are arrays of one kind. If one differs, all are
            held in the general form.

    Raises:
        BudgetError: they don't fit the budget.
        WriteError: the file that all ranks share can't be written.
    """
    filling = _Filling(length, load, budget, share)
    filling.nbytes = nbytes
    filling.progress = progress
    filling.threads = threads or usable_cpus()
    if spec is not None and nbytes is not None:
        filling.layout = Layout.of(spec)
    try:
        filling.fill()
    except _UnlikeError:
        filling.layout = None
        filling.may_be_rows = False
        filling.fill()
    return Held(parent, filling.store, filling.reserved, filling.ranks, errors=filling.errors)


class _UnlikeError(Exception):
    """A sample is no array of the shape and dtype of those before it."""


class _Filling:
    """Reads all values into a store; see `eager`."""

    store: SampleStore
    reserved: Reservation
    nbytes: int | None = None
    progress: bool | None = None
    threads: int = 1
    layout: Layout | None = None
    """Of all values, if it is known."""
    may_be_rows = True

    def __init__(
        self, length: int, load: Load, budget: MemoryBudget, share: MachineShare | None
    ) -> None:
        self.length = length
        self.load = load
        self.budget = budget
        self.share = share
        self.ranks: int = 1 if share is None else share.ranks
        self.errors: dict[int, SampleError] = {}

    def fill(self) -> None:
        """Sets `store` and `reserved`.

        Raises:
            _UnlikeError: a value does not have the layout, or rows had to leave for another one.
        """
        self.errors.clear()
        budget = self.budget
        first: dict[int, Any] = {}
        if self.layout is not None:
            needed = self.length * (self.layout.entry + TABLE) + (1 << 20)
        elif self.nbytes is None:
            first, needed = self._measure(budget.available)
        else:
            needed = self.nbytes + self.length * OVERHEAD + (1 << 20)
        part = -(-needed // self.ranks)
        if not budget.fits(part):
            raise BudgetError(
                f"loading_mode='eager' needs {format_size(needed)} for {self.length:,} samples, "
                f"and {format_size(budget.available)} are left of the budget: take "
                "loading_mode='cached' or 'lazy', or raise max_memory_usage.\n"
                f"{budget.explain()}"
            )
        self.reserved = budget.reserve(part, "eager samples")
        capacity = budget.available + part if self.nbytes is None else part
        try:
            self.store = _make_store(self.share, self.length, capacity, rows=self.may_be_rows)
            self._put(first)
            first.clear()
            self._load_all()
            if self.nbytes is None:
                self.reserved.resize(-(-self.store.nbytes // self.ranks))
        except BaseException:
            self.reserved.close()
            raise

    def _measure(self, available: int) -> tuple[dict[int, Any], int]:
        """Values spread over the dataset, and the bytes of all that follow from them."""
        spread = np.linspace(0, self.length - 1, min(_MEASURED, self.length))
        picked = distinct(spread.astype(int)).tolist()
        first: dict[int, Any] = {}
        total = 0
        count = 0
        for part in (picked[:1], picked[1:]):
            if total:  # the first one says how many may be read at once
                part = part[: available // total]
            if not part:
                continue
            for index, value in zip(part, self.load(part), strict=True):
                first[index] = value
                if not isinstance(value, SampleError):
                    total += SampleStore.nbytes_of(value)
                    count += 1
        return first, int(total / max(1, count) * self.length * 1.05) + (1 << 20)

    def _load_all(self) -> None:
        size = _GROUP
        if self.layout is not None:
            size = min(_MOST, max(_GROUP, _MOST_BYTES // self.layout.entry))
        starts = range(0, self.length, size)
        groups = [range(start, min(start + size, self.length)) for start in starts]
        # each rank begins elsewhere, and skips what the others have read by then
        if self.share is not None:
            begin = len(groups) * self.share.rank // self.ranks
            groups = groups[begin:] + groups[:begin]
        bar = progress_bar(self.progress, total=self.length, desc="eager: reading", unit="sample")
        with bar, ThreadPoolExecutor(self.threads, "headrace-eager") as pool:

            def load_group(group: range) -> None:
                missing = [i for i in group if i not in self.store and i not in self.errors]
                if missing:
                    self._put(dict(zip(missing, self.load(missing), strict=True)))
                bar.update(len(group))

            tasks = [pool.submit(load_group, group) for group in groups]
            try:
                done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
                for task in done:
                    task.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _put(self, values: dict[int, Any]) -> None:
        for index, value in values.items():
            if isinstance(value, SampleError):
                self.errors[index] = value
        sound = values
        if self.errors:
            sound = {index: values[index] for index in values if index not in self.errors}
        if not sound:
            return
        store = self.store
        are_held = store.put_many(list(sound), list(sound.values()))
        if self.layout is not None:
            is_unlike = store.layout != self.layout
        else:
            is_unlike = self.may_be_rows and store.is_mixed and store.stats()["evicted"] > 0
        if is_unlike:
            raise _UnlikeError
        if are_held:
            return
        if store.write_error is not None:
            raise WriteError(
                "loading_mode='eager': the file that all ranks share can't be written: "
                f"{store.write_error}"
            )
        raise BudgetError(
            f"loading_mode='eager': the samples are larger than the budget: {len(store):,} of "
            f"{self.length:,} fill {format_size(store.nbytes)}: take loading_mode='cached' or "
            "'lazy', or raise max_memory_usage"
        )
