"""A dataset's memory budget, and what it takes of it beside samples: blocks that are in use, and
one large image at a time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from headrace.errors import BudgetError
from headrace.memory.anonymous import is_spawning
from headrace.memory.budget import MemoryBudget, Reservation, format_size
from headrace.order import detect_world
from headrace.storage.source import Source, is_prefetched

CHUNK_BYTES = 64 << 20
"""Decoded chunks that each process caches where the order does not say how many are of use."""


class DatasetBudget:
    """The memory budget under a dataset's `max_memory_usage`. Called, it gives the bytes that are
    left to this process, a worker among others, for what it needs a short time.
    """

    def __init__(self, max_memory_usage: float | int | str) -> None:
        self._max_memory_usage = max_memory_usage
        # a spawned worker's ledger knows nothing of its parent's reservations
        self._at_spawn: int | None = None

    @property
    def budget(self) -> MemoryBudget:
        """This process's."""
        return MemoryBudget(
            self._max_memory_usage, local_world_size=detect_world().local_world_size
        )

    def __call__(self) -> int:
        info = get_worker_info()
        workers = 1 if info is None else info.num_workers
        return self._available() // workers

    def _available(self) -> int:
        return self.budget.available if self._at_spawn is None else self._at_spawn

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_at_spawn": self._available() if is_spawning() else self._at_spawn,
        }


class _Share:
    """What is reserved for one purpose, by the needs of several owners.

    Args:
        budget: in which it is reserved.
        what: the purpose.
    """

    def __init__(self, budget: DatasetBudget, what: str) -> None:
        self._budget = budget
        self._what = what
        self._begin()

    def _begin(self) -> None:
        self._reservation: Reservation | None = None
        # bytes and workers, as long as the owner lives
        self._needs: MutableMapping[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return 0 if self._reservation is None else self._reservation.nbytes

    def take(self, nbytes: int, workers: int, owner: Any) -> int:
        """Reserves what all owners need, where it fits, or what this one needs; returns how many
        bytes each process may hold.

        Raises:
            BudgetError: what this one needs doesn't fit.
        """
        budget = self._budget.budget
        needed = nbytes * max(1, workers)
        if owner is not None:
            self._needs[owner] = (nbytes, workers)
            largest = max(each for each, _ in self._needs.values())
            counts = [count for _, count in self._needs.values()]
            processes = sum(counts)
            if 0 in counts:  # all that have no workers load in this process
                processes += 1
            if largest * processes <= budget.available + self.nbytes:
                nbytes = largest
                needed = largest * processes
        if self._reservation is not None:
            self._reservation.resize(needed)
        elif needed:
            self._reservation = budget.reserve(needed, self._what)
        return nbytes

    def __getstate__(self) -> dict[str, Any]:
        return {"_budget": self._budget, "_what": self._what}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()  # reservations are of the process that made them


class BlockMemory:
    """What is reserved for the blocks of a source. A dataset and its views share it.

    Args:
        source: whose blocks they are.
        streams: True if the dataset's mode is streaming, which prefetches.
        budget: in which it is reserved.
    """

    def __init__(self, source: Source, streams: bool, budget: DatasetBudget) -> None:
        self._source = source
        self._streams = streams
        self._budget = budget
        self._chunks = _Share(budget, "decoded chunks")
        self._fetched = _Share(budget, "blocks fetched ahead")
        self._held = 0
        self.prefetches_whole = False
        """True if there is room to prefetch remote blocks as a whole."""
        self.stays_decoded = False
        """True if there is room for all blocks of a table, which each process decodes once for
        all epochs.
        """

    def settle(self) -> None:
        """Reserves memory for whoever reads without a Loader, which knows its order.

        Raises:
            BudgetError: not even one chunk fits the budget.
        """
        block = self._source.block_nbytes
        budget = self._budget.budget
        if block > budget.limit:
            raise BudgetError(
                f"a chunk of {type(self._source).__name__} takes {format_size(block)} when it is "
                f"decoded, and the memory budget is {format_size(budget.limit)}: pack the data "
                "again in smaller chunks, or raise max_memory_usage"
            )
        if block:
            most = budget.available // 8
            wanted = max(CHUNK_BYTES, block)
            if self._source.decoded_nbytes <= most:
                wanted = max(wanted, self._source.decoded_nbytes)
            self.hold_chunks(min(wanted, most))
        two = self.remote_nbytes(2)
        if two:
            self.prefetch(min(max(CHUNK_BYTES, two), budget.available // 8))

    @property
    def chunk_nbytes(self) -> int:
        """Bytes that are reserved for decoded chunks."""
        return self._chunks.nbytes

    @property
    def prefetched_nbytes(self) -> int:
        """Bytes that are reserved for remote blocks."""
        return self._fetched.nbytes

    def hold_chunks(self, nbytes: int, workers: int = 0, owner: Any = None) -> None:
        """Each of so many workers, or this process, may cache `nbytes` of decoded chunks; a
        BudgetError, if they don't fit.

        The workers of several owners add up, and the largest number of bytes counts, as long as
        these live and all fit.
        """
        self._held = self._chunks.take(nbytes, workers, owner)
        self._source.hold_chunks(self._held)
        self.stays_decoded = 0 < self._source.decoded_nbytes <= self._held

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Meanwhile all samples are read in order: a block stays decoded until they have passed
        it, if the budget has room for one.
        """
        before = self._held
        block = self._source.block_nbytes
        if block <= before:
            yield
            return
        with contextlib.suppress(BudgetError):  # then it is decoded as often as it is read
            self.hold_chunks(block)
        try:
            yield
        finally:
            self.hold_chunks(before)

    def prefetch(self, nbytes: int, workers: int = 0, owner: Any = None) -> None:
        """Each of so many workers, or this process, may hold `nbytes` of remote blocks; 0: it
        fetches what each batch takes. Owners: as for `hold_chunks`.
        """
        nbytes = self._fetched.take(nbytes, workers, owner)
        self.prefetches_whole = nbytes > 0
        if is_prefetched(self._source):
            self._source.files.hold_prefetched(nbytes)

    def remote_nbytes(self, count: int) -> int:
        """Stored bytes of the so many largest blocks, if they are remote and prefetched as a whole;
        else 0.
        """
        source = self._source
        if not self._streams or not is_prefetched(source):
            return 0
        sizes = source.blocks()
        if sizes is None or not len(sizes):
            return 0
        return int(-(-source.stored_nbytes // len(source))) * int(np.sort(sizes)[-count:].sum())
