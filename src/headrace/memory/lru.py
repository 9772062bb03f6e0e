"""A cache bounded in bytes and items that evicts the least recently used item first.

It has a bound in bytes *and* in items, can shrink, has locks and counters, and an honest size of numpy views, which keep the whole array
under them alive.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar, overload

import numpy as np

from headrace.arguments import check_integer
from headrace.memory.per_process import renew_after_fork

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
D = TypeVar("D")

_BUFFERS = (np.ndarray, bytes, bytearray, memoryview)


def held_bytes(value: object) -> int:
    """Return how many bytes of payload stay in memory as long as `value` does.

    A view counts the whole array or buffer that it keeps alive, which counts once however many views of it `value`
    holds. Lists, tuples, dicts (their values) and object arrays count what is in them; anything else counts its
    `nbytes` or, where it has none, `sys.getsizeof`.
    """
    total, seen, todo = 0, set[int](), [value]
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
    """Follow views down to what owns the memory, short of a mapped file: there only the part that is viewed counts."""
    while isinstance(item, (np.ndarray, memoryview)):
        under = item.base if isinstance(item, np.ndarray) else item.obj
        if not isinstance(under, _BUFFERS):
            break
        item = under
    return item


class LRUCache(Generic[K, V]):
    """A bounded mapping that forgets the least recently used item first.

    Thread-safe. Pickled, it arrives empty with the same limits; a forked child keeps the contents.

    Args:
        max_bytes: bound on the summed sizes of the values, None for no bound.
        max_items: bound on their number, None for no bound.
        sizeof: `value -> bytes`; by default `held_bytes`. It is asked once, when the value is put.

    Attributes:
        hits, misses: calls of `get` that found, and did not find, their key.
        evicted: values dropped to make room.
        bypassed: values that were never taken in, because each is larger than the cache.

    Raises:
        ConfigError: a bound is negative or not an integer.
    """

    def __init__(self, max_bytes: int | None, max_items: int | None = None, *, sizeof: Callable[[V], int] | None = None) -> None:
        self.max_bytes = check_integer("max_bytes", max_bytes, 0, optional=True)
        self.max_items: int | None = check_integer("max_items", max_items, 0, optional=True)
        self.hits: int = 0
        self.misses: int = 0
        self.evicted: int = 0
        self.bypassed: int = 0
        self._sizeof: Callable[[V], int] = sizeof or held_bytes
        self._lock = threading.RLock()  # re-entrant: dropping a value may run its owner's finalizers
        self._forget()
        renew_after_fork(self)

    @property
    def nbytes(self) -> int:
        """Summed sizes of the values held."""
        with self._lock:
            return self._nbytes

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V | D) -> V | D: ...
    def get(self, key: K, default: object = None) -> object:
        """Return the value of `key`, now the most recently used one; `default` where it is not held."""
        with self._lock:
            entry = self._items.get(key)
            if entry is None:
                self.misses += 1
                return default
            self._items.move_to_end(key)
            self.hits += 1
            return entry[0]

    def get_many(self, keys: Iterable[K]) -> list[V | None]:
        """The values of some keys, None for those that are not held; the last one is now the most recently used."""
        with self._lock:
            find, use, found, misses = self._items.get, self._items.move_to_end, list[V | None](), self.misses
            for key in keys:
                if (entry := find(key)) is None:
                    misses += 1
                    found.append(None)
                else:
                    use(key)
                    found.append(entry[0])
            self.hits, self.misses = self.hits + len(found) - (misses - self.misses), misses
            return found

    def put(self, key: K, value: V) -> bool:
        """Hold `value` as the most recently used one and evict what no longer fits beside it.

        Returns:
            False where the value alone is larger than the cache: an older value of `key` is dropped as well.
        """
        size = self._sizeof(value)
        with self._lock:
            self._drop(key)
            if self.max_items == 0 or (self.max_bytes is not None and size > self.max_bytes):
                self.bypassed += 1
                return False
            self._make_room(size, 1)
            self._items[key] = (value, size)
            self._nbytes += size
            return True

    @overload
    def pop(self, key: K) -> V | None: ...
    @overload
    def pop(self, key: K, default: V | D) -> V | D: ...
    def pop(self, key: K, default: object = None) -> object:
        """Remove `key` and return its value, `default` where it is not held. Not counted."""
        with self._lock:
            entry = self._drop(key)
            return default if entry is None else entry[0]

    def clear(self) -> None:
        """Drop everything. The counters stay; what is dropped here does not count as evicted."""
        with self._lock:
            self._items.clear()
            self._nbytes = 0

    def resize(self, max_bytes: int | None) -> None:
        """Change the bound on bytes; a smaller one takes effect at once.

        Raises:
            ConfigError: the bound is negative or not an integer.
        """
        with self._lock:
            self.max_bytes = check_integer("max_bytes", max_bytes, 0, optional=True)
            self._make_room(0, 0)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._items

    def __len__(self) -> int:
        with self._lock:
            return len(self._items)

    def __repr__(self) -> str:
        return f"LRUCache({self.max_bytes}, {self.max_items})  # {len(self)} items, {self.nbytes} bytes"

    def __reduce__(self) -> tuple[Callable[..., LRUCache[K, V]], tuple[int | None, int | None]]:
        return partial(type(self), sizeof=self._sizeof), (self.max_bytes, self.max_items)

    def _make_room(self, size: int, items: int) -> None:
        while self._items and (
            (self.max_bytes is not None and self._nbytes + size > self.max_bytes)
            or (self.max_items is not None and len(self._items) + items > self.max_items)
        ):
            self._drop(next(iter(self._items)))
            self.evicted += 1

    def _drop(self, key: K) -> tuple[V, int] | None:
        entry = self._items.pop(key, None)
        if entry is not None:
            self._nbytes -= entry[1]
        return entry

    def _forget(self) -> None:
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()  # the one that was not used for longest first
        self._nbytes = 0

    def after_fork(self) -> None:
        """See `renew_after_fork`."""
        if not self._lock.acquire(blocking=False):  # by a thread that is not here: it may have been half-way through a change
            self._forget()
        self._lock = threading.RLock()
