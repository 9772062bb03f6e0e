"""Sizes that count what is kept alive, and a cache that behaves like a simple model of one."""

from __future__ import annotations

import pickle
import re
import sys
import types
from array import array
from collections import OrderedDict

import cachetools
import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.errors import ConfigError
from headrace.memory.lru import LRUCache, held_bytes
from tests.memory.forks import held_by_a_thread, in_child, needs_fork


class TestHeldBytes:
    def test_a_value_counts_what_it_keeps_alive(self) -> None:
        base, loop = np.zeros(1000, np.uint8), list[object]([b"123"])
        loop.append(loop)
        chunk = np.zeros((128, 10), np.uint8)
        items = np.array([b"123", np.zeros(5, np.uint8)], dtype=object)
        for value, nbytes in (
            (np.zeros((10, 10), np.float32), 400),
            (b"12345", 5),
            ([], 0),
            (np.float64(1), 8),
            (memoryview(array("d", [1, 2, 3])), 24),
            (memoryview(bytes(50))[3:5], 50),
            (base[10:20].reshape(2, 5)[1:], 1000),
            (np.broadcast_to(base[:1], (10**6,)), 1000),
            (np.frombuffer(memoryview(bytearray(90))[:10], np.uint8)[:2], 90),
            (list(chunk), 1280),  # one buffer counts once
            ({"a": chunk[:3], "b": (chunk, chunk.T)}, 1280),
            (loop, 3),
            (items, items.nbytes + 8),
            ("abc", sys.getsizeof("abc")),
            ([types.SimpleNamespace(nbytes=640) for _ in range(2)], 1280),
        ):
            assert held_bytes(value) == nbytes, repr(value)


def new(max_bytes: int | None, max_items: int | None = None) -> LRUCache[str, bytes]:
    return LRUCache(max_bytes, max_items)


class TestLRUCache:
    def test_bad_bounds(self) -> None:
        for bad in (-1, 1.5, "1GB", True):
            for call in (LRUCache, lambda bad: LRUCache(None, bad), LRUCache(5).resize):
                with pytest.raises(ConfigError, match=re.escape(repr(bad))):
                    call(bad)  # type: ignore[arg-type]

    def test_a_pickle_arrives_empty_with_the_same_limits(self) -> None:
        cache: LRUCache[str, str] = LRUCache(100, 3, sizeof=len)
        cache.put("a", "12345")
        other = pickle.loads(pickle.dumps(cache))
        assert (other.max_bytes, other.max_items) == (100, 3)
        assert len(other) == other.nbytes == 0
        other.put("a", "123")
        assert other.nbytes == 3  # by len, too
        assert len(cache) == 1


@needs_fork
def test_a_fork_drops_what_a_thread_was_changing() -> None:
    cache = new(10)
    cache.put("a", b"1")
    with held_by_a_thread(cache._lock):
        assert in_child(lambda: not len(cache) and cache.put("b", b"2") and cache.get("b") == b"2")
    assert len(cache) == 1


class Model(RuleBasedStateMachine):
    """An ordered dict with the rules written out, next to the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: LRUCache[int, bytes] = LRUCache(20, 6)
        self.model: OrderedDict[int, bytes] = OrderedDict()
        self.bound = 20

    def shrink(self, size: int, items: int) -> None:
        while self.model and (
            sum(map(len, self.model.values())) > self.bound - size or len(self.model) > 6 - items
        ):
            self.model.popitem(last=False)

    @rule(key=st.integers(0, 9), size=st.integers(0, 25))
    def put(self, key: int, size: int) -> None:
        self.model.pop(key, None)
        fits = size <= self.bound
        if fits:
            self.shrink(size, 1)
            self.model[key] = bytes(size)
        assert self.cache.put(key, bytes(size)) is fits

    @rule(key=st.integers(0, 9))
    def get(self, key: int) -> None:
        if key in self.model:
            self.model.move_to_end(key)
        if key % 2:
            assert self.cache.get_many([key]) == [self.model.get(key)]
        else:
            assert self.cache.get(key) == self.model.get(key)

    @rule(key=st.integers(0, 9))
    def pop(self, key: int) -> None:
        assert self.cache.pop(key) == self.model.pop(key, None)

    @rule(bound=st.integers(0, 40))
    def resize(self, bound: int) -> None:
        self.bound = bound
        self.shrink(0, 0)
        self.cache.resize(bound)

    @precondition(lambda self: len(self.model) > 4)
    @rule()
    def clear(self) -> None:
        self.model.clear()
        self.cache.clear()

    @invariant()
    def same(self) -> None:
        assert [key for key in range(10) if key in self.cache] == sorted(self.model)
        assert len(self.cache) == len(self.model)
        assert self.cache.nbytes == sum(map(len, self.model.values())) <= self.bound


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_it_is_a_cache_of_cachetools() -> None:
    cache: LRUCache[str, bytes] = LRUCache(10, 2)
    assert isinstance(cache, cachetools.LRUCache)
    cache["a"] = b"12345"
    cache["b"] = b"12345"
    assert cache["a"] == b"12345"
    cache["c"] = b"1"
    assert list(cache) == ["a", "c"]
    assert (cache.currsize, cache.maxsize) == (6, 10)
    with pytest.raises(ValueError, match="too large"):
        cache["d"] = bytes(11)
    with pytest.raises(KeyError):
        _ = cache["b"]
    cache.resize(5)
    assert list(cache) == ["c"] and cache.maxsize == 5
