"""Caches in memory: the values of modes "eager" and "cached", which all workers of a process share,
or all ranks of a machine; and the storage blocks in use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.arguments import check_integer
from headrace.core.decoder import Decoder
from headrace.core.values import Access, Use, ValueSource, as_rows, read_many, used
from headrace.display import progress_bar
from headrace.dtypes import AnyArray, ArraySpec, IntArray, distinct
from headrace.errors import BudgetError, SampleError, WriteError
from headrace.formats.source import Source, is_prefetched
from headrace.memory.budget import MemoryBudget, Reservation, format_size, parse_size
from headrace.memory.limits import PERIOD, PressureWatch, usable_cpus
from headrace.memory.machine import open_machine_store
from headrace.memory.store import MISSING, TABLE, HeldRows, RowLayout, SampleStore

OVERHEAD = 512
"""Overhead in bytes of a cached sample: the store's header, pickle, padding and table, rounded
up.
"""
CACHE_SHARE = 0.75
"""Share of the remaining budget that a cache takes if its size is not known in advance. The rest
is for batches and prefetching.
"""
CHUNK_BYTES = 64 << 20
"""Decoded chunks that each process caches where the order does not say how many are of use."""
Load = Callable[[Sequence[int]], list[Any] | AnyArray]
"""Reads values by index, as `headrace.core.values.read_many` does."""

_GROUP = 32  # values that a thread reads together
_MEASURED = 32  # values that are read to estimate the bytes of all
_MOST = 4096  # small rows that a thread reads together, of so many bytes
_MOST_BYTES = 256 << 10


class Sharing(NamedTuple):
    """The ranks that share a store: this one alone, or all of its machine."""

    rank: int = 0
    """This process among them."""
    ranks: int = 1
    folder: Path | None = None
    """Folder of a store that is shared."""
    key: str = ""
    """Names what is cached there."""

    def make_store(
        self, length: int, capacity: int, policy: str = "keep", max_items: int | None = None
    ) -> SampleStore:
        """Makes or opens the store, to which each rank brings `capacity` bytes of its budget."""
        if self.folder is None:
            return SampleStore(length, capacity, policy, max_items)
        capacity *= self.ranks
        return open_machine_store(self.folder, self.key, length, capacity, policy, max_items)


ALONE = Sharing()


class Held(ValueSource):
    """Values cached in a store. Missing ones are read from the parent, and offered to the store.

    It travels to workers with its store.

    Args:
        parent: the source of the values.
        store: caches them.
        reserved: the reservation for the store.
        ranks: number of processes that share the store.
        policy: the `cache_policy` in mode "cached", whose store may shrink for others. None: the
            mode is "eager".
    """

    def __init__(
        self,
        parent: ValueSource,
        store: SampleStore,
        reserved: Reservation,
        ranks: int = 1,
        policy: str | None = None,
    ) -> None:
        super().__init__(parent)
        self.store: SampleStore | None = store  # None: closed
        self._reserved = reserved
        self._ranks = ranks
        self._policy = policy
        self._watch = PressureWatch()

    def get(self, indices: Sequence[int]) -> list[Any]:
        """Returns a copy of each value that is held, and MISSING for the others."""
        store = self.store
        if store is None:
            return [MISSING] * len(indices)
        self._follow_pressure(store)
        return [store.get(index) for index in indices]

    def admit(self, indices: Sequence[int], values: list[Any] | AnyArray) -> bool:
        """Offers values that were read; an error is not held. False: there is no room for all."""
        if isinstance(values, list):
            sound = [
                number for number, value in enumerate(values) if not isinstance(value, SampleError)
            ]
            indices = [indices[number] for number in sound]
            values = [values[number] for number in sound]
        if not len(indices):
            return True
        return self.store is not None and self.store.put_many(indices, values)

    def each(self, indices: Sequence[int], use: Use, access: Access) -> list[Any]:
        values = self.get(indices)
        missing = [position for position, value in enumerate(values) if value is MISSING]
        access.reader.counts["cache_hits"] += len(values) - len(missing)
        if missing:
            wanted = [indices[position] for position in missing]
            read = read_many(self.parent, wanted, access)
            if isinstance(read, np.ndarray):
                read = list(as_rows(read))
            for position, value in zip(missing, read, strict=True):
                values[position] = value
            each_once = dict(zip(wanted, read, strict=True))
            self.admit(list(each_once), list(each_once.values()))
        return used(values, use, access)

    def row_spec(self, decoder: Decoder) -> ArraySpec | None:
        return self.parent.row_spec(decoder)

    def rows(self, indices: IntArray) -> HeldRows | None:
        store = self.store
        if store is None:
            return None
        self._follow_pressure(store)
        return store.rows(indices)

    def fill(
        self,
        load: Load,
        groups: Sequence[Sequence[int]],
        threads: int,
        progress: bool | None,
    ) -> None:
        """Loads the values of the groups that are not cached yet, in threads."""
        store = self.store
        assert store is not None
        total = sum(map(len, groups))
        bar = progress_bar(progress, total=total, desc="eager: reading", unit="sample")
        with bar, ThreadPoolExecutor(threads, "headrace-eager") as pool:

            def load_group(group: Sequence[int]) -> None:
                missing = store.missing(group)
                if missing:
                    self.put(missing, load(missing), total)
                bar.update(len(group))

            for _ in pool.map(load_group, groups):
                pass  # an error of one cancels the others

    def put(self, indices: Sequence[int], values: list[Any] | AnyArray, total: int) -> None:
        """Caches values, all of which must fit. (`total`: the number of all, for the message.)

        Raises:
            BudgetError: there is no room for them.
            WriteError: the file that all ranks share can't be written.
        """
        store = self.store
        assert store is not None
        if self.admit(indices, values):
            return
        if store.write_error is not None:
            raise WriteError(
                "loading_mode='eager': the file that all ranks share can't be written: "
                f"{store.write_error}"
            )
        raise BudgetError(
            f"loading_mode='eager': the samples are larger than the budget: {len(store):,} of "
            f"{total:,} fill {format_size(store.nbytes)}: use loading_mode='cached' or 'lazy', or "
            "raise max_memory_usage"
        )

    def _follow_pressure(self, store: SampleStore) -> None:
        """Evicts values while memory is short, and lets the store grow again afterwards."""
        if not store.is_time_to_look(PERIOD):
            return
        excess = self._watch.excess()
        if (excess > 0 and store.nbytes) or (excess < 0 and store.limit < store.ceiling):
            store.adjust(excess)

    def shrink(self, nbytes: int) -> None:
        """Releases up to `nbytes` of the budget, which a loader needs for its batches."""
        if self._policy is None or self.store is None:
            return
        spared = min(nbytes, self._reserved.nbytes, -(-self.store.ceiling // self._ranks))
        self.store.cap(self.store.ceiling - spared * self._ranks)
        self._reserved.resize(self._reserved.nbytes - spared)

    def expect_skew(self) -> None:
        """Announces that some samples will be drawn much more often than others."""
        if self._policy == "auto" and self.store is not None:
            self.store.use_lru()

    def stats(self) -> dict[str, int]:
        return {} if self.store is None else self.store.stats()

    def close(self) -> None:
        self.store = None
        self._reserved.close()


# -- cached


def cached(
    parent: ValueSource,
    length: int,
    budget: MemoryBudget,
    cache_size: int | str | None = None,
    policy: str = "auto",
    nbytes: int | None = None,
    sharing: Sharing = ALONE,
) -> Held:
    """Caches values at their first use, as many as fit.

    Args:
        parent: the source of the values.
        length: number of values.
        budget: memory budget.
        cache_size: limit as a number of values (int) or bytes ("2GB"). None: limited by the budget
            only.
        policy: "keep": admit until the cache is full, and never evict. "lru": evict the least
            recently used values. "auto": "keep", or "lru" under a loader that draws samples
            repeatedly (`expect_skew`). "keep" is the default because under a fresh permutation each
            epoch an LRU of half of the samples has 15 % hits, and "keep" 50 %.
        nbytes: bytes of all values, if known.
        sharing: the ranks that share the store.
    """
    items, most = check_cache_size(cache_size)
    ranks = sharing.ranks
    table = TABLE * length // ranks
    capacity = max(0, int(budget.available * CACHE_SHARE) - table)
    if nbytes is not None:
        capacity = min(capacity, (nbytes + length * OVERHEAD) // ranks + (1 << 20))
    if most is not None:
        capacity = min(capacity, most // ranks)
    store = sharing.make_store(length, capacity, "lru" if policy == "lru" else "keep", items)
    needed = -(-store.capacity // ranks) + table  # of an open store its own
    reserved = budget.reserve(min(needed, budget.available), "cached samples")
    return Held(parent, store, reserved, ranks, policy)


def check_cache_size(cache_size: int | str | None) -> tuple[int | None, int | None]:
    """The maximum number of samples and of bytes to cache; None: no limit."""
    if isinstance(cache_size, str):
        return None, parse_size(cache_size, "cache_size, given as a string,")
    name = "cache_size, a number of samples (of bytes: a string such as '2GB'),"
    return check_integer(name, cache_size, 1, optional=True), None


# -- eager


def eager(
    parent: ValueSource,
    length: int,
    load: Load,
    budget: MemoryBudget,
    nbytes: int | None = None,
    progress: bool | None = None,
    *,
    chosen: IntArray | None = None,
    threads: int | None = None,
    sharing: Sharing = ALONE,
    spec: ArraySpec | None = None,
) -> Held:
    """Reads all values now, in parallel, and caches them.

    Args:
        parent: the source of the values, in case memory pressure evicts some.
        length: number of values.
        load: reads values. It is called by several threads.
        budget: memory budget.
        nbytes: bytes of all values. None: not known before they are read.
        progress: show a progress bar. None: only on a terminal.
        chosen: indices of the values to cache. None: all.
        threads: number of threads that call `load`. None: one per usable CPU.
        sharing: the ranks that fill the store together.
        spec: shape and dtype of all values, if they are arrays of one kind. If one differs, all are
            cached in the general form.

    Raises:
        BudgetError: they don't fit the budget.
        WriteError: the file that all ranks share can't be written.
    """
    numbers = range(length) if chosen is None else distinct(chosen).tolist()
    ranks = sharing.ranks
    size = _GROUP
    first: dict[int, Any] = {}
    layout = None if spec is None or nbytes is None else RowLayout.of(spec)
    if layout is not None:
        needed = len(numbers) * layout.entry + TABLE * length + (1 << 20)
        size = min(_MOST, max(_GROUP, _MOST_BYTES // layout.entry))
    elif nbytes is None:
        first, needed = _measured(load, numbers, budget.available)
    else:
        needed = nbytes + len(numbers) * OVERHEAD + (1 << 20)
    part = -(-needed // ranks)
    if not budget.fits(part):
        raise BudgetError(
            f"loading_mode='eager' needs {format_size(needed)} for {len(numbers):,} samples, and "
            f"{format_size(budget.available)} are left of the budget: use loading_mode='cached' "
            f"or 'lazy', or raise max_memory_usage.\n{budget.explain()}"
        )
    reserved = budget.reserve(part, "eager samples")
    try:
        store = sharing.make_store(length, budget.available + part)
        held = Held(parent, store, reserved, ranks)
        held.put(list(first), list(first.values()), len(numbers))
        first.clear()
        groups = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        # each rank begins elsewhere, and skips what the others have read by then
        begin = len(groups) * sharing.rank // ranks
        groups = groups[begin:] + groups[:begin]
        held.fill(load, groups, threads or usable_cpus(), progress)
        if store.is_mixed and len(store) < len(numbers):
            # rows that left for a value of another kind are read again
            held.fill(load, groups, threads or usable_cpus(), progress)
        taken = -(-store.nbytes // ranks)
        if nbytes is None or taken > part:
            reserved.resize(taken)
    except BaseException:
        reserved.close()
        raise
    return held


def _measured(load: Load, numbers: Sequence[int], available: int) -> tuple[dict[int, Any], int]:
    """Reads values spread over the dataset, as many as fit, and estimates the bytes of all."""
    values: dict[int, Any] = {}
    sizes: list[int] = []
    for position in np.linspace(0, len(numbers) - 1, min(_MEASURED, len(numbers))).astype(int):
        if sum(sizes) <= available:
            (value,) = load([numbers[position]])
            values[numbers[position]] = value
            if not isinstance(value, SampleError):
                sizes.append(SampleStore.nbytes_of(value))
    total = sum(sizes) / max(1, len(sizes)) * len(numbers)
    return values, int(total * 1.05) + (1 << 20)


# -- blocks


class BlockMemory:
    """Reservations for the blocks of a source, which a dataset and its views share.

    Args:
        source: the source.
        streams: True if the dataset's mode is streaming, which prefetches.
        budget: the memory budget.
    """

    def __init__(self, source: Source, streams: bool, budget: MemoryBudget) -> None:
        self._source = source
        self._streams = streams
        self._budget = budget
        self.prefetches_whole: bool = False
        """True if there is room to prefetch remote blocks as a whole."""
        # for each purpose by owner, as long as it lives: bytes for each of its processes, and what
        # is reserved for all
        self._shares: dict[str, MutableMapping[Any, tuple[int, Reservation]]] = {}

    def settle(self) -> None:
        """Reserves memory for whoever reads without a Loader, which knows its order.

        Raises:
            BudgetError: not even one chunk fits the budget.
        """
        block = self._source.block_nbytes
        budget = self._budget
        if block:
            if block > budget.limit:
                raise BudgetError(
                    f"a chunk of {type(self._source).__name__} takes {format_size(block)} when it "
                    f"is decoded, and the memory budget is {format_size(budget.limit)}: pack the "
                    "data again in smaller chunks, or raise max_memory_usage"
                )
            most = budget.available // 8
            wanted = max(CHUNK_BYTES, block)
            if self._source.decoded_nbytes <= most:
                wanted = max(wanted, self._source.decoded_nbytes)
            self.hold_chunks(min(wanted, most))
        if self._streams:
            two = self.remote_nbytes(2)
            if two:
                self.prefetch(min(max(CHUNK_BYTES, two), budget.available // 8))

    def hold_chunks(self, nbytes: int, workers: int = 0, owner: Any = None) -> None:
        """Lets each of an owner's `workers`, or this process, cache `nbytes` of decoded chunks;
        raises a BudgetError if they don't fit. Of several owners, the largest number counts.
        """
        self._source.hold_chunks(self._reserve("decoded chunks", nbytes, workers, owner))

    def prefetch(self, nbytes: int, workers: int = 0, owner: Any = None) -> None:
        """Lets each worker, or this process, hold `nbytes` of remote blocks. 0: it fetches what
        each batch needs.
        """
        nbytes = self._reserve("blocks fetched ahead", nbytes, workers, owner)
        self.prefetches_whole = nbytes > 0
        if is_prefetched(self._source):
            self._source.files.hold_prefetched(nbytes)

    def _reserve(self, what: str, nbytes: int, workers: int, owner: Any) -> int:
        """Reserves what an owner needs instead of what it had, which without a Loader is this
        dataset; returns the bytes that each process may hold.
        """
        shares = self._shares.setdefault(what, weakref.WeakKeyDictionary())
        shares.pop(self, None)
        shares.pop(owner or self, None)
        if nbytes:
            reservation = self._budget.reserve(nbytes * max(1, workers), what)
            shares[owner or self] = (nbytes, reservation)
        return max((each for each, _ in shares.values()), default=0)

    def remote_nbytes(self, count: int) -> int:
        """Stored bytes of the `count` largest blocks, if they are remote and prefetched as a whole;
        else 0.
        """
        source = self._source
        if not self._streams or not is_prefetched(source):
            return 0
        sizes = source.blocks()
        if sizes is None or not len(sizes):
            return 0
        return int(-(-source.stored_nbytes // len(source))) * int(np.sort(sizes)[-count:].sum())

    def __getstate__(self) -> dict[str, Any]:
        # reservations are of the process that made them
        return {**self.__dict__, "_shares": {}}
