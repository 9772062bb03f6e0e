"""What a dataset takes of its memory budget for the blocks that are in use."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np

from headrace.errors import BudgetError
from headrace.formats.source import Source, is_prefetched
from headrace.memory.budget import MemoryBudget, Reservation, format_size

CHUNK_BYTES = 64 << 20
"""Decoded chunks that each process caches where the order does not say how many are of use."""

_Shares = MutableMapping[Any, tuple[int, Reservation]]
"""By owner, as long as it lives: bytes for each of its processes, and what is reserved for all."""


class BlockMemory:
    """What is reserved for the blocks of a source. A dataset and its views share it.

    Args:
        source: whose blocks they are.
        streams: True if the dataset's mode is streaming, which prefetches.
        budget: in which it is reserved.
    """

    def __init__(self, source: Source, streams: bool, budget: MemoryBudget) -> None:
        self._source = source
        self._streams = streams
        self._budget = budget
        self._held = 0
        self.prefetches_whole = False
        """True if there is room to prefetch remote blocks as a whole."""
        self.stays_decoded = False
        """True if there is room for all blocks of a table, which each process decodes once for
        all epochs.
        """
        self._begin()

    def _begin(self) -> None:
        self._chunks: _Shares = weakref.WeakKeyDictionary()
        self._fetched: _Shares = weakref.WeakKeyDictionary()

    def settle(self) -> None:
        """Reserves memory for whoever reads without a Loader, which knows its order.

        Raises:
            BudgetError: not even one chunk fits the budget.
        """
        block = self._source.block_nbytes
        budget = self._budget
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

    def hold_chunks(self, nbytes: int, workers: int = 0, owner: Any = None) -> None:
        """Each of so many workers of an owner, or this process, may cache `nbytes` of decoded
        chunks; a BudgetError, if they don't fit. Of several owners the largest number counts.
        """
        self._held = self._reserve(self._chunks, "decoded chunks", nbytes, workers, owner)
        self._source.hold_chunks(self._held)
        self.stays_decoded = 0 < self._source.decoded_nbytes <= self._held

    def prefetch(self, nbytes: int, workers: int = 0, owner: Any = None) -> None:
        """Each of so many workers, or this process, may hold `nbytes` of remote blocks; 0: it
        fetches what each batch takes.
        """
        nbytes = self._reserve(self._fetched, "blocks fetched ahead", nbytes, workers, owner)
        self.prefetches_whole = nbytes > 0
        if is_prefetched(self._source):
            self._source.files.hold_prefetched(nbytes)

    def _reserve(self, shares: _Shares, what: str, nbytes: int, workers: int, owner: Any) -> int:
        """Reserves what an owner needs instead of what it had, which without a Loader is this
        dataset; returns the bytes that each process may hold.
        """
        shares.pop(self, None)
        shares.pop(owner or self, None)
        if nbytes:
            reservation = self._budget.reserve(nbytes * max(1, workers), what)
            shares[owner or self] = (nbytes, reservation)
        return max((each for each, _ in shares.values()), default=0)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Meanwhile all samples are read in order: a block stays decoded until they have passed
        it, if the budget has room for one.
        """
        more = self._source.block_nbytes - self._held
        if more <= 0 or not self._budget.fits(more):
            yield  # else it is decoded as often as it is read
            return
        with self._budget.reserve(more, "decoded chunks"):
            self._source.hold_chunks(self._held + more)
            try:
                yield
            finally:
                self._source.hold_chunks(self._held)

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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunks": None, "_fetched": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()  # reservations are of the process that made them
