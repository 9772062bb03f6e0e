"""A cache bounded in bytes and items that evicts the least recently used item first.

It can shrink, and is thread-safe. The size of a NumPy view is that of the whole array that it keeps
alive.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, TypeVar

import cachetools
import numpy as np

from headrace.arguments import check_integer
from headrace.memory.processes import renew_after_fork

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
D = TypeVar("D")

_BUFFERS = (np.ndarray, bytes, bytearray, memoryview)


def held_bytes(value: object) -> int:
    """Return how many bytes stay in memory as long as `value` does.

    A view counts the whole array or buffer that it keeps alive, once for all views of it in
    `value`. Lists, tuples, dicts (their values) and object arrays count their contents. Anything
    else counts its `nbytes`, or `sys.getsizeof` if it has none.
    """
    total = 0
    seen = set[int]()
    todo = [value]
    while todo:
        item = _root(todo.pop())
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (list, tuple)):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, (bytes, bytearray)):
            total += len(item)
        else:
            nbytes = getattr(item, "nbytes", None)
            total += nbytes if isinstance(nbytes, int) else sys.getsizeof(item)
            if isinstance(item, np.ndarray) and item.dtype == object:
                todo.extend(item.flat)
    return total


def _root(item: Any) -> Any:
    """Follow views down to what owns the memory, short of a mapped file: there only the part
    that is viewed counts.
    """
    while isinstance(item, (np.ndarray, memoryview)):
        under = item.base if isinstance(item, np.ndarray) else item.obj
        if not isinstance(under, _BUFFERS):
            break
        item = under
    return item


class LRUCache(cachetools.LRUCache[K, V]):
    """A bounded mapping that evicts the least recently used item first.

    A `cachetools.LRUCache` that is thread-safe and can shrink. A pickle contains the limits, but no
    items; a forked child keeps the items.

    Args:
        max_bytes: maximum sum of the sizes of the values. None: no limit.
        max_items: maximum number of items. None: no limit.
        sizeof: a callable `value -> bytes`, which is called when a value is put. Default:
            `held_bytes`.

    Raises:
        ConfigError: a limit is negative or not an integer.
    """

    def __init__(
        self,
        max_bytes: int | None,
        max_items: int | None = None,
        *,
        sizeof: Callable[[V], int] = held_bytes,
    ) -> None:
        self.max_bytes = check_integer("max_bytes", max_bytes, 0, optional=True)
        self.max_items: int | None = check_integer("max_items", max_items, 0, optional=True)
        self._sizeof = sizeof
        # re-entrant: dropping a value may run its owner's finalizers
        self._lock = threading.RLock()
        super().__init__(math.inf, sizeof)  # which has no way to another limit
        renew_after_fork(self)

    @property
    def maxsize(self) -> float:
        """`max_bytes`, as cachetools calls it; infinite if there is no limit."""
        if self.max_bytes is None:
            return math.inf
        return self.max_bytes

    @property
    def nbytes(self) -> int:
        """Sum of the sizes of the cached values."""
        return int(self.currsize)

    def get(  # type: ignore[override]
        self, key: K, default: D | None = None
    ) -> V | D | None:
        """Return the value of `key` and mark it as most recently used; `default` if it is not
        cached.
        """
        with self._lock:
            try:
                return super().__getitem__(key)
            except KeyError:  # cheaper than asking first, since most are hits
                return default

    def get_many(self, keys: Iterable[K]) -> list[V | None]:
        """Return the values of several keys, with None for keys that are not cached. The last
        one is now the most recently used.
        """
        found = list[V | None]()
        with self._lock:
            take = super().__getitem__
            for key in keys:
                try:
                    found.append(take(key))
                except KeyError:
                    found.append(None)
        return found

    def put(self, key: K, value: V) -> bool:
        """Cache `value` as the most recently used one, and evict what no longer fits.

        Returns:
            False if the value alone is larger than the cache. An older value of `key` is then
            removed as well.
        """
        with self._lock:
            if key in self:
                super().__delitem__(key)
            before = self.currsize
            super().__setitem__(key, value)
            if self.currsize - before > self.maxsize or self.max_items == 0:
                super().__delitem__(key)
                return False
            self._make_room()
            return True

    def _make_room(self) -> None:
        most = math.inf if self.max_items is None else self.max_items
        while self.currsize > self.maxsize or super().__len__() > most:
            self.popitem()

    def pop(self, key: K, default: D | None = None) -> V | D | None:  # type: ignore[override]
        """Remove `key` and return its value; `default` if it is not cached."""
        with self._lock:
            return super().pop(key, default)

    def popitem(self) -> tuple[K, V]:
        """Evict the least recently used item, and return its key and value.

        Raises:
            KeyError: the cache is empty.
        """
        with self._lock:
            return super().popitem()

    def clear(self) -> None:
        """Remove all items."""
        with self._lock:
            super().clear()

    def resize(self, max_bytes: int | None) -> None:
        """Change `max_bytes`. A smaller limit takes effect at once.

        Raises:
            ConfigError: the limit is negative or not an integer.
        """
        with self._lock:
            self.max_bytes = check_integer("max_bytes", max_bytes, 0, optional=True)
            self._make_room()

    def __getitem__(self, key: K) -> V:
        with self._lock:
            return super().__getitem__(key)

    def __setitem__(self, key: K, value: V) -> None:
        if not self.put(key, value):
            raise ValueError("value too large")  # as cachetools does

    def __delitem__(self, key: K) -> None:
        with self._lock:
            super().__delitem__(key)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return (
            f"LRUCache({self.max_bytes}, {self.max_items})  # {len(self)} items, {self.nbytes} "
            "bytes"
        )

    def __reduce__(self) -> tuple[Callable[..., LRUCache[K, V]], tuple[int | None, int | None]]:
        return partial(type(self), sizeof=self._sizeof), (self.max_bytes, self.max_items)

    def after_fork(self) -> None:
        """See `renew_after_fork`."""
        is_free = self._lock.acquire(blocking=False)
        self._lock = threading.RLock()
        # held by a thread that is not here: it may have been half-way through a change
        if not is_free:
            super().__init__(math.inf, self._sizeof)
