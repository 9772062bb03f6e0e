"""Cached: bytes move at the first access; what fits the budget is held, shared by all workers, and the rest is read each time."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.memory.anonymous import is_spawning
from headrace.memory.budget import MemoryBudget, Reservation, parse_size
from headrace.memory.store import MISSING, TABLE, SampleStore
from headrace.modes.eager import OVERHEAD
from headrace.modes.mode import Mode

SHARE = 0.75
"""The part of what is left of the budget that a cache of unknown need takes; the rest is for batches and read-ahead."""


class Cached(Mode):
    """Holds samples as they come, as many as fit.

    Args:
        length: number of samples.
        budget: what may be held.
        cache_size: at most so many samples (int) or bytes ("2GB"); None: the budget alone.
        policy: "keep" admits until it is full and never evicts; "lru" makes room for what is read; "auto" is "keep", since under
            a fresh permutation each epoch an LRU that holds half of the samples hits 15 %, and "keep" 50 %.
        nbytes: bytes of all samples when held, where they are known.
    """

    def __init__(
        self,
        length: int,
        budget: MemoryBudget,
        cache_size: int | str | None = None,
        policy: str = "auto",
        nbytes: int | None = None,
    ) -> None:
        items, nbytes_wanted = _check_size(cache_size)
        table = TABLE * length
        capacity = max(0, int(budget.available * SHARE) - table)
        if nbytes is not None:
            capacity = min(capacity, nbytes + length * OVERHEAD + (1 << 20))
        if nbytes_wanted is not None:
            capacity = min(capacity, nbytes_wanted)
        self._reserved: Reservation | None = budget.reserve(capacity + min(table, budget.available - capacity), "cached samples")
        self._store: SampleStore | None = SampleStore(length, capacity, "lru" if policy == "lru" else "keep", items)

    def get(self, indices: Sequence[int]) -> list[Any]:
        store = self._store
        return [MISSING] * len(indices) if store is None else [store.get(i) for i in indices]

    def keep(self, index: int, value: Any) -> None:
        if self._store is not None:
            self._store.put(index, value)

    def close(self) -> None:
        self._store = None
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def stats(self) -> dict[str, int]:
        return {} if self._store is None else self._store.stats()

    def __getstate__(self) -> dict[str, Any]:
        if not is_spawning():
            raise TypeError("the samples held by loading_mode='cached' stay behind in a pickle")
        return {"_store": self._store, "_reserved": None}


def _check_size(cache_size: int | str | None) -> tuple[int | None, int | None]:
    """The most samples, and the most bytes, that are to be held; None where there is no limit."""
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
            "cache_size must be a number of samples (an int of at least 1), a size such as '2GB', or None for what the budget "
            f"allows, not {cache_size!r} (loading_mode='lazy' holds none)"
        )
    return items, None
