"""Cached: samples are read at the first access. What fits the budget is cached and shared by all
workers; the rest is read each time.
"""

from __future__ import annotations

import operator

from headrace.errors import ConfigError
from headrace.memory.budget import MemoryBudget, parse_size
from headrace.memory.limits import PressureWatch
from headrace.memory.store import TABLE
from headrace.modes.stored import OVERHEAD, MachineShare, Stored, make_store

SHARE = 0.75
"""Share of the remaining budget that a cache takes if its size is not known in advance. The rest
is for batches and prefetching.
"""


class Cached(Stored):
    """Caches samples at their first access, as many as fit.

    Args:
        length: number of samples.
        budget: memory budget.
        cache_size: limit as a number of samples (int) or bytes ("2GB"). None: limited by the budget
            only.
        policy: "keep": admit until the cache is full, and never evict. "lru": evict the least
            recently used samples. "auto": "keep", or "lru" under a loader that draws samples
            repeatedly (`expect_skew`). "keep" is the default because under a fresh permutation each
            epoch an LRU of half of the samples has 15 % hits, and "keep" 50 %.
        nbytes: bytes of all cached samples, if known.
        share: a store for all ranks of the machine. None: a store of this rank.
    """

    def __init__(
        self,
        length: int,
        budget: MemoryBudget,
        cache_size: int | str | None = None,
        policy: str = "auto",
        nbytes: int | None = None,
        share: MachineShare | None = None,
    ) -> None:
        items, most = check_cache_size(cache_size)
        self._ranks = ranks = 1 if share is None else share.ranks
        table = TABLE * length // ranks
        capacity = max(0, int(budget.available * SHARE) - table)
        if nbytes is not None:
            capacity = min(capacity, (nbytes + length * OVERHEAD) // ranks + (1 << 20))
        if most is not None:
            capacity = min(capacity, most // ranks)
        self._store = make_store(
            share, length, capacity, "lru" if policy == "lru" else "keep", items
        )
        needed = -(-self._store.capacity // ranks) + table  # of an open store its own
        self._reserved = budget.reserve(min(needed, budget.available), "cached samples")
        self._watch = PressureWatch()
        self._is_auto = policy == "auto"

    def shrink(self, nbytes: int) -> None:
        if self._store is None or self._reserved is None:
            return
        spared = min(nbytes, self._reserved.nbytes, -(-self._store.ceiling // self._ranks))
        self._store.cap(self._store.ceiling - spared * self._ranks)
        self._reserved.resize(self._reserved.nbytes - spared)

    def expect_skew(self) -> None:
        if self._is_auto and self._store is not None:
            self._store.use_lru()


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
            "or None for what the budget "
            f"allows, not {cache_size!r} (loading_mode='lazy' holds none)"
        )
    return items, None
