"""Sizes that count what is kept alive, and a cache that behaves like a simple model of one."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import sys
import threading
from array import array
from collections import OrderedDict

import cachetools
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.errors import ConfigError
from headrace.memory.lru import LRUCache, held_bytes


class TestHeldBytes:
    def test_arrays_and_buffers(self) -> None:
        assert held_bytes(np.zeros((10, 10), np.float32)) == 400
        assert held_bytes(b"12345") == 5
        assert held_bytes(bytearray(7)) == 7
        assert held_bytes(memoryview(bytearray(9))) == 9
        assert held_bytes(memoryview(array("d", [1, 2, 3]))) == 24

    def test_a_view_counts_what_it_keeps_alive(self) -> None:
        base = np.zeros(1000, np.uint8)
        assert held_bytes(base[:1]) == 1000
        assert held_bytes(base[10:20].reshape(2, 5)[1:]) == 1000
        assert held_bytes(np.broadcast_to(base[:1], (10**6,))) == 1000
        assert held_bytes(memoryview(bytes(50))[3:5]) == 50
        assert held_bytes(np.frombuffer(bytes(80), np.uint8)[:2]) == 80
        assert held_bytes(np.frombuffer(memoryview(bytearray(90))[:10], np.uint8)[:2]) == 90

    def test_one_buffer_counts_once(self) -> None:
        chunk = np.zeros((128, 10), np.uint8)
        assert held_bytes(list(chunk)) == 1280
        assert held_bytes({"a": chunk[:3], "b": (chunk, chunk.T)}) == 1280

    def test_containers_are_summed(self) -> None:
        array = np.zeros(4, np.int64)
        assert held_bytes({"a": b"123", "b": [array, (b"4", bytearray(2))]}) == 32 + 6
        assert held_bytes([]) == 0

    def test_cycles_end(self) -> None:
        loop: list[object] = [b"123"]
        loop.append(loop)
        assert held_bytes(loop) == 3

    def test_object_arrays_count_their_items(self) -> None:
        items = np.array([b"123", np.zeros(5, np.uint8)], dtype=object)
        assert held_bytes(items) == items.nbytes + 3 + 5

    def test_a_mapped_file_counts_what_is_viewed(self) -> None:
        with mmap.mmap(-1, 8192) as mapped:
            view = np.frombuffer(mapped, np.uint8)[:100]
            assert held_bytes(view[:10]) == 8192  # the array under the view spans the mapping
            del view

    def test_other_objects(self) -> None:
        assert held_bytes("abc") == sys.getsizeof("abc")
        assert held_bytes(np.float64(1)) == 8

        class Tensor:
            nbytes = 640

        assert held_bytes([Tensor(), Tensor()]) == 1280


def new(max_bytes: int | None, max_items: int | None = None) -> LRUCache[str, bytes]:
    return LRUCache(max_bytes, max_items)


class TestLRUCache:
    def test_evicts_the_least_recently_used(self) -> None:
        cache = new(10)
        for key in "abc":
            assert cache.put(key, b"123")
        assert cache.get("a") == b"123"
        assert cache.put("d", b"123")
        assert [key for key in "abcd" if key in cache] == ["a", "c", "d"]
        assert (cache.hits, cache.misses, cache.evicted, cache.bypassed) == (1, 0, 1, 0)
        assert cache.get("b") is None
        assert cache.get("b", 5) == 5
        assert cache.misses == 2

    def test_contains_is_no_use(self) -> None:
        cache = new(2)
        cache.put("a", b"1")
        cache.put("b", b"2")
        assert "a" in cache
        cache.put("c", b"3")
        assert "a" not in cache
        assert cache.hits == cache.misses == 0

    def test_too_large_is_bypassed_and_drops_the_old_value(self) -> None:
        cache = new(4)
        cache.put("a", b"1")
        cache.put("b", b"2")
        assert not cache.put("a", b"12345")
        assert "a" not in cache
        assert cache.get("b") == b"2"
        assert (cache.bypassed, cache.evicted, cache.nbytes) == (1, 0, 1)

    def test_replacing_evicts_no_more_than_it_must(self) -> None:
        cache = new(10)
        cache.put("a", b"1234")
        cache.put("b", b"1234")
        cache.put("b", b"123456")
        assert (len(cache), cache.nbytes, cache.evicted) == (2, 10, 0)
        cache.put("b", b"1234567")
        assert (len(cache), cache.nbytes, cache.evicted) == (1, 7, 1)

    def test_items_are_bounded_too(self) -> None:
        cache = new(None, 2)
        for key in "abc":
            cache.put(key, bytes(10**6))
        assert len(cache) == 2
        assert cache.nbytes == 2 * 10**6
        assert not new(None, 0).put("a", b"")

    def test_resize_evicts_down_to_the_target(self) -> None:
        cache = new(100)
        for key in "abcde":
            cache.put(key, bytes(20))
        cache.get("a")
        cache.resize(45)
        assert [key for key in "abcde" if key in cache] == ["a", "e"]
        assert cache.evicted == 3
        assert not cache.put("f", bytes(46))
        cache.resize(None)
        assert cache.put("f", bytes(1000))
        assert len(cache) == 3

    def test_pop_and_clear(self) -> None:
        cache = new(10)
        cache.put("a", b"1")
        assert cache.pop("a") == b"1"
        assert cache.pop("a") is None
        assert cache.pop("a", b"0") == b"0"
        cache.put("a", b"1")
        cache.clear()
        assert (len(cache), cache.nbytes, cache.evicted, cache.hits, cache.misses) == (0, 0, 0, 0, 0)

    def test_none_is_a_value(self) -> None:
        cache: LRUCache[str, None] = LRUCache(1000)
        cache.put("a", None)
        assert cache.get("a", 5) is None
        assert cache.hits == 1

    def test_the_size_is_asked_once(self) -> None:
        value = bytearray(10)
        cache: LRUCache[str, bytearray] = LRUCache(100)
        cache.put("a", value)
        value += bytes(90)
        cache.pop("a")
        assert cache.nbytes == 0

    @pytest.mark.parametrize("bad", [-1, 1.5, "1GB", True])
    def test_bounds_are_checked(self, bad: int) -> None:
        with pytest.raises(ConfigError, match="max_bytes"):
            LRUCache(bad)
        with pytest.raises(ConfigError, match="max_items"):
            LRUCache(None, bad)
        with pytest.raises(ConfigError, match="max_bytes"):
            LRUCache(5).resize(bad)

    def test_a_pickle_arrives_empty_with_the_same_limits(self) -> None:
        cache: LRUCache[str, str] = LRUCache(100, 3, sizeof=len)
        cache.put("a", "12345")
        cache.get("a")
        other = pickle.loads(pickle.dumps(cache))
        assert (other.max_bytes, other.max_items, len(other), other.nbytes, other.hits) == (100, 3, 0, 0, 0)
        other.put("a", "123")
        assert other.nbytes == 3  # by len, too
        assert len(cache) == 1

    def test_dropped_values_may_use_the_cache(self) -> None:
        cache: LRUCache[str, Nosy] = LRUCache(None, 1)
        Nosy.seen.clear()
        cache.put("a", Nosy(cache))
        cache.put("b", Nosy(cache))
        cache.clear()
        assert Nosy.seen == [0, 0]

    def test_threads(self) -> None:
        cache: LRUCache[int, bytes] = LRUCache(1000, 60)
        faults: list[str] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for key in rng.integers(0, 100, 600).tolist():
                if (value := cache.get(key)) is None:
                    cache.put(key, bytes([key]) * (key + 1))
                elif value != bytes([key]) * (key + 1):
                    faults.append(f"wrong value for {key}")
                if cache.nbytes > 1000 or len(cache) > 60:
                    faults.append(f"{cache!r} is too full")
                if key % 10 == 0:
                    cache.pop(key + 1)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert cache.hits + cache.misses == 4 * 600
        assert cache.nbytes == sum(key + 1 for key in range(100) if key in cache)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.parametrize("held", [False, True])
    def test_fork_keeps_contents_unless_being_changed(self, held: bool) -> None:
        cache = new(10)
        cache.put("a", b"1")
        taken, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with cache._lock:
                taken.set()
                leave.wait()

        thread = threading.Thread(target=hold)
        if held:
            thread.start()
            taken.wait()
        child = os.fork()
        if child == 0:
            correct = False
            signal.alarm(60)  # a child that hangs is a failure, not a wait
            try:
                correct = len(cache) == (0 if held else 1) and cache.put("b", b"2") and cache.get("b") == b"2"
            finally:
                os._exit(0 if correct else 1)
        leave.set()
        if held:
            thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(cache) == 1


class Nosy:
    """A value that looks at its cache when it is dropped."""

    seen: list[int] = []  # noqa: RUF012

    def __init__(self, cache: LRUCache[str, Nosy]) -> None:
        self.cache = cache

    def __del__(self) -> None:
        self.seen.append(len(self.cache))


class Model(RuleBasedStateMachine):
    """An ordered dict with the rules written out, next to the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: LRUCache[int, bytes] = LRUCache(20, 6)
        self.model: OrderedDict[int, bytes] = OrderedDict()
        self.bound = 20
        self.hits = self.misses = self.evicted = self.bypassed = 0

    def shrink(self, size: int, items: int) -> None:
        while self.model and (sum(map(len, self.model.values())) > self.bound - size or len(self.model) > 6 - items):
            self.model.popitem(last=False)
            self.evicted += 1

    @rule(key=st.integers(0, 9), size=st.integers(0, 25))
    def put(self, key: int, size: int) -> None:
        self.model.pop(key, None)
        fits = size <= self.bound
        if fits:
            self.shrink(size, 1)
            self.model[key] = bytes(size)
        self.bypassed += not fits
        assert self.cache.put(key, bytes(size)) is fits

    @rule(key=st.integers(0, 9))
    def get(self, key: int) -> None:
        if key in self.model:
            self.model.move_to_end(key)
            self.hits += 1
        else:
            self.misses += 1
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
        counted = (self.cache.hits, self.cache.misses, self.cache.evicted, self.cache.bypassed)
        assert counted == (self.hits, self.misses, self.evicted, self.bypassed)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 100))
def test_never_above_the_bound_whatever_is_put(sizes: list[int], bound: int) -> None:
    cache: LRUCache[int, np.ndarray] = LRUCache(bound)
    for key, size in enumerate(sizes):
        assert cache.put(key, np.zeros(size, np.uint8)) == (size <= bound)
        assert cache.nbytes <= bound
        assert (key in cache) == (size <= bound)


def test_it_is_a_cache_of_cachetools() -> None:
    cache: LRUCache[str, bytes] = LRUCache(10, 2)
    assert isinstance(cache, cachetools.LRUCache)
    cache["a"] = b"12345"
    cache["b"] = b"12345"
    assert cache["a"] == b"12345"
    cache["c"] = b"1"
    assert list(cache) == ["a", "c"] and (cache.currsize, cache.maxsize, cache.evicted) == (6, 10, 1)
    with pytest.raises(ValueError, match="too large"):
        cache["d"] = bytes(11)
    assert cache.bypassed == 1
    with pytest.raises(KeyError):
        _ = cache["b"]
    cache.resize(5)
    assert list(cache) == ["c"] and cache.maxsize == 5
