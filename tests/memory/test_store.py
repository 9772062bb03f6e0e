"""The sample store: what comes out is what was put in, with many writers, while they die."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cachetools
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.errors import ConfigError
from headrace.memory.rows import encode
from headrace.memory.store import MISSING, POLICIES, SampleStore

pytestmark = pytest.mark.quick_every(3)

posix = pytest.mark.skipif(sys.platform == "win32", reason="a store is a process's own on Windows")
fork = multiprocessing.get_context("fork") if sys.platform != "win32" else multiprocessing.get_context()
BIG = 1 << 20


def content(index: int, version: int = 0) -> np.ndarray[Any, Any]:
    """A sample that says which one it is in every byte; sizes differ from index to index."""
    n = 40 + (index * 7919) % 3000
    return np.random.default_rng((index, version)).integers(0, 256, n, dtype=np.uint8)


def used(store: SampleStore) -> set[int]:
    return {i for i in range(store.length) if i in store}


def same(a: Any, b: Any) -> bool:
    """Equal in type, dtype, shape and value."""
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


DTYPES = [*"?bBhHiIlLqQefdFDgG", "M8[ns]", "m8[s]", "S5", "U7", ">i4", ">f8", "V3", [("a", "<i4"), ("b", "f4", (3,))]]
VALUES: dict[str, Any] = {
    "none": None,
    "zero": 0,
    "text": "déjà \udce9 vu",
    "long text": "x" * 10_000,
    "bytes": bytes(range(256)) * 40,
    "no bytes": b"",
    "bytearray": bytearray(b"abc" * 1000),
    "tuple": (np.arange(1000), 3, "t"),
    "nested": {"image": np.ones((3, 20, 30), np.float32), "boxes": [np.zeros((0, 4)), (1, None)], "more": {"k": b"v"}},
    "many buffers": [np.full(600, i, np.uint8) for i in range(9)],
    "one array twice": [np.arange(900)] * 2,
    "objects": [{1, 2}, 3.5, complex(1, 2), range(3)],
}


class TestRoundTrip:
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("name", VALUES)
    def test_of_all_kinds_of_values(self, name: str, policy: str) -> None:
        store = SampleStore(3, BIG, policy)
        assert store.put(1, VALUES[name])
        assert same(VALUES[name], store.get(1))
        assert store.get(0) is MISSING and store.get(2) is MISSING

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (40, 30)], ids=str)
    def test_of_arrays(self, dtype: Any, shape: tuple[int, ...]) -> None:
        kind = np.dtype(dtype)
        raw = np.random.default_rng(0).integers(0, 2, math.prod(shape) * kind.itemsize, dtype=np.uint8)
        array = np.frombuffer(raw.tobytes() or bytes(0), kind, math.prod(shape)).reshape(shape) if raw.size else np.empty(shape, kind)
        store = SampleStore(1, BIG)
        assert store.put(0, array)
        assert same(array, store.get(0))

    @pytest.mark.parametrize(
        "view",
        [lambda a: a[::2], lambda a: a.T, lambda a: a[:, ::-1], lambda a: np.broadcast_to(a[:1], a.shape), np.asfortranarray],
    )
    def test_of_arrays_that_are_not_contiguous(self, view: Any) -> None:
        array = view(np.arange(60 * 70, dtype=np.int32).reshape(60, 70))
        store = SampleStore(1, BIG)
        assert store.put(0, array)
        found = store.get(0)
        assert found.shape == array.shape and (found == array).all()

    def test_of_object_arrays_and_numpy_scalars(self) -> None:
        store = SampleStore(2, BIG)
        assert store.put(0, np.array(["a", None, 3], dtype=object)) and store.put(1, np.float32(0.1))
        assert store.get(0).tolist() == ["a", None, 3]
        assert same(np.float32(0.1), store.get(1))

    def test_what_cannot_be_pickled_changes_nothing(self) -> None:
        store = SampleStore(2, BIG)
        with pytest.raises((pickle.PicklingError, AttributeError)):
            store.put(0, lambda: None)
        assert (len(store), store.nbytes) == (0, 0)
        assert store.put(0, "fine") and store.get(0) == "fine"

    @pytest.mark.parametrize("n", [10, 5000])
    def test_a_sample_is_a_copy_on_both_sides(self, n: int) -> None:
        store, array = SampleStore(1, BIG), np.zeros(n, np.uint8)
        store.put(0, {"a": array})
        array[:] = 1
        first = store.get(0)["a"]
        assert not first.any()
        first[:] = 2
        second = store.get(0)["a"]
        assert not second.any() and not np.shares_memory(first, second)

    def test_a_sample_outlives_its_store(self) -> None:
        store = SampleStore(1, BIG)
        store.put(0, np.arange(5000))
        found = store.get(0)
        del store
        gc.collect()
        assert (found == np.arange(5000)).all()


class TestCapacity:
    def test_arguments(self) -> None:
        with pytest.raises(ConfigError, match="keep, lru"):
            SampleStore(1, 100, "fifo")
        with pytest.raises(ConfigError, match="max_items"):
            SampleStore(1, 100, "lru", max_items=0)

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("capacity", [-5, 0, 63, 64, 100])
    def test_no_room_at_all(self, capacity: int, policy: str) -> None:
        store = SampleStore(3, capacity, policy)
        assert not store.put(0, None)
        assert store.get(0) is MISSING
        assert (len(store), store.nbytes, store.stats()["held_bytes"]) == (0, 0, 0)

    def test_no_samples_at_all(self) -> None:
        store = SampleStore(0, BIG)
        assert len(store) == 0
        with pytest.raises(IndexError):
            store.get(0)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_the_largest_sample_that_fits_does(self, policy: str) -> None:
        value = bytes(10_000)
        exactly = SampleStore.nbytes_of(value)
        assert SampleStore(1, exactly, policy).put(0, value)
        assert not SampleStore(1, exactly - 1, policy).put(0, value)

    def test_nbytes_of_is_what_is_taken(self) -> None:
        for value in VALUES.values():
            store = SampleStore(1, BIG)
            store.put(0, value)
            assert store.nbytes == SampleStore.nbytes_of(value)

    def test_keep_admits_until_it_is_full_and_never_evicts(self) -> None:
        store = SampleStore(100, 20_000)
        admitted = [i for i in range(100) if store.put(i, content(i))]
        assert store.is_full and 0 < len(admitted) < 100
        assert store.nbytes <= store.capacity
        assert used(store) == set(admitted)
        for i in admitted:
            assert same(store.get(i), content(i))
            assert store.put(i, "another value")  # it is held already
            assert same(store.get(i), content(i))
        counted = {"held": len(admitted), "held_bytes": store.nbytes, "admitted": len(admitted), "evicted": 0, "released_bytes": 0}
        assert store.stats() == {**counted, "hits": 0, "misses": 0}

    def test_keep_refuses_what_is_too_large_and_goes_on(self) -> None:
        store = SampleStore(3, 4096)
        assert not store.put(0, bytes(5000))
        assert store.put(1, b"small") and not store.is_full

    @pytest.mark.parametrize("policy", POLICIES)
    def test_items_are_bounded(self, policy: str) -> None:
        store = SampleStore(20, BIG, policy, max_items=4)
        for i in range(20):
            store.put(i, content(i))
            assert len(store) == len(used(store)) <= 4
        assert used(store) == ({0, 1, 2, 3} if policy == "keep" else {16, 17, 18, 19})

    def test_lru_makes_room_at_the_end_of_the_log(self) -> None:
        """An empty log that stands in its middle has room for a sample only from its start on."""
        store = SampleStore(10, 64 * 20, "lru")
        assert store.put(0, bytes(64 * 9))
        assert store.put(1, bytes(64 * 12))
        assert store.get(1) == bytes(64 * 12) and store.get(0) is MISSING
        assert store.put(2, bytes(64 * 17)) and used(store) == {2}

    def test_a_spared_sample_does_not_push_out_the_new_one(self) -> None:
        store = SampleStore(10, 64 * 20, "lru")
        store.put(0, bytes(64 * 3))
        store.get(0)
        assert store.put(1, bytes(64 * 17))
        assert store.get(1) == bytes(64 * 17)
        stats = store.stats()
        assert [stats[name] for name in ("held", "held_bytes", "admitted", "evicted")] == [1, store.nbytes, 2, 1]

    def test_lru_spares_what_was_read(self) -> None:
        store = SampleStore(100, 10 * SampleStore.nbytes_of(bytes(1000)), "lru")
        for i in range(10):
            store.put(i, bytes(1000))
        for i in range(10, 60):
            store.get(3)
            store.put(i, bytes(1000))
            assert 3 in store and i in store
        assert store.stats()["evicted"] == 50

    def test_sizes_above_half_of_the_capacity(self) -> None:
        store = SampleStore(50, 64 * 50, "lru")
        for i, blocks in enumerate([30, 29, 45, 1, 1, 46, 2, 47, 24, 24, 25, 26, 40] * 3):
            assert store.put(i, bytes([i]) * (64 * blocks))
            assert store.get(i) == bytes([i]) * (64 * blocks)
            assert store.nbytes <= store.capacity


class StoreMachine(RuleBasedStateMachine):
    """Any order of puts and gets: what comes out is what went in, and the numbers add up."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        capacity=st.integers(0, 8192),
        max_items=st.none() | st.integers(1, 5),
    )
    def make(self, policy: str, capacity: int, max_items: int | None) -> None:
        self.store = SampleStore(12, capacity, policy, max_items)
        self.max_items = max_items
        self.last: dict[int, Any] = {}
        self.versions = itertools.count()

    @rule(index=st.integers(0, 11), size=st.one_of(st.integers(0, 600), st.integers(0, 9000)))
    def put(self, index: int, size: int) -> None:
        held = index in self.store
        value = np.random.default_rng(next(self.versions)).integers(0, 256, size, dtype=np.uint8)
        accepted = self.store.put(index, value)
        fits = SampleStore.nbytes_of(value) <= self.store.capacity
        if self.store.policy == "lru":
            assert accepted is fits
        if held:
            assert not accepted or index in self.store
        elif accepted:
            self.last[index] = value
            assert same(self.store.get(index), value)

    @rule(index=st.integers(0, 11))
    def get(self, index: int) -> None:
        found = self.store.get(index)
        assert (found is MISSING) == (index not in self.store)
        if found is not MISSING:
            assert same(found, self.last[index])

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "store"):
            return
        store = self.store
        held = used(store)
        assert len(store) == len(held) == store.stats()["admitted"] - store.stats()["evicted"]
        assert sum(SampleStore.nbytes_of(self.last[i]) for i in held) <= store.nbytes <= store.capacity
        assert self.max_items is None or len(held) <= self.max_items
        assert store.policy == "lru" or store.stats()["evicted"] == 0


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase


def test_hot_samples_survive_as_in_a_true_lru() -> None:
    n, room, size = 2000, 200, 300
    accesses = np.random.default_rng(0).zipf(1.2, 30_000)
    accesses = (accesses[accesses <= n] - 1).tolist()
    store = SampleStore(n, room * SampleStore.nbytes_of(bytes(size)), "lru")
    model: cachetools.LRUCache[int, int] = cachetools.LRUCache(room)
    hits = model_hits = 0
    for i in accesses:
        hits += store.get(i) is not MISSING
        store.put(i, bytes(size))
        model_hits += model.get(i) is not None
        model[i] = i
    assert 0.5 < model_hits / len(accesses) < 0.95  # else it would say nothing
    assert abs(hits - model_hits) < 0.03 * len(accesses)


class TestManyAtOnce:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_threads(self, policy: str) -> None:
        store = SampleStore(300, 60_000, policy)
        wrong: list[int] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for i in rng.integers(0, 300, 1500).tolist():
                found = store.get(i)
                if found is MISSING:
                    store.put(i, content(i))
                elif not same(found, content(i)):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert len(store) == len(used(store)) and store.nbytes <= store.capacity
        assert all(same(store.get(i), content(i)) for i in used(store))

    @posix
    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_what_one_process_puts_all_others_get(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        store = SampleStore(10, 100_000)
        store.put(0, content(0))
        worker = context.Process(target=_put_in_worker, args=(store,))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
        assert used(store) == {0, 1, 2}
        assert same(store.get(1), content(1)) and same(store.get(2), content(2))

    @posix
    @pytest.mark.slow
    def test_processes_that_wrap_all_the_time(self) -> None:
        """Three processes write and read a log that holds a few samples, so that most reads run into a writer."""
        store = SampleStore(60, 16_384, "lru")
        results = fork.Queue()
        with _workers(_churn, [(store, seed, 1.5, results) for seed in range(3)]) as workers:
            outcomes = [results.get(timeout=60) for _ in workers]
        assert [o["wrong"] for o in outcomes] == [[], [], []]
        assert all(o["hits"] > 50 and o["puts"] > 50 for o in outcomes), outcomes
        assert store.stats()["evicted"] > 500
        assert all(same(store.get(i), content(i)) for i in used(store))
        assert len(store) == len(used(store))
        results.close()
        results.join_thread()

    @pytest.mark.slow
    @posix
    @pytest.mark.parametrize("policy", POLICIES)
    def test_killed_writers_leave_the_rest_right_and_able_to_write(self, policy: str) -> None:
        store = SampleStore(80, 20_000, policy)
        rng = np.random.default_rng(5)
        for _ in range(20):
            with _workers(_churn_for_ever, [(store, int(rng.integers(1 << 30)))]) as (victim,):
                deadline = time.monotonic() + 10
                before = store.stats()["admitted"]
                while store.stats()["admitted"] == before and policy == "lru" and time.monotonic() < deadline:
                    time.sleep(0.0005)
                time.sleep(float(rng.uniform(0, 0.01)))
                victim.kill()
                victim.join()
            assert 0 <= store.nbytes <= store.capacity
            assert 0 <= len(store) <= len(used(store))
            for i in used(store):
                assert same(store.get(i), content(i))
            if policy == "lru":
                free = next(i for i in range(80) if i not in store)
                assert store.put(free, content(free)) and same(store.get(free), content(free))
        for i in range(80):  # all that the dead had written is written over
            assert store.put(i, content(i)) or policy == "keep"
            assert store.get(i) is MISSING or same(store.get(i), content(i))

    @posix
    def test_a_killed_writer_holds_no_lock(self) -> None:
        store = SampleStore(4, 8192)
        with _workers(_hold_the_lock, [(store,)]) as (holder,):
            _wait_for(lambda: 3 in store)
            holder.kill()
            holder.join()
            assert store.put(1, "mine")

    @posix
    def test_a_stopped_writer_stops_nobody(self) -> None:
        store = SampleStore(4, 8192)
        store.put(0, "held")
        with _workers(_hold_the_lock, [(store,)]) as (holder,):
            _wait_for(lambda: 3 in store)  # written inside the lock
            os.kill(holder.pid, signal.SIGSTOP)
            assert store.put(1, "mine") is False
            assert store.get(0) == "held" and store.get(1) is MISSING
            os.kill(holder.pid, signal.SIGKILL)
            holder.join()
            assert store.put(1, "mine") and store.get(1) == "mine"

    @posix
    def test_a_fork_while_a_thread_writes(self) -> None:
        """The child must not wait for a lock that a thread of the parent held when it was forked."""
        store = SampleStore(4, 8192)
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with store._lock.of_threads():
                entered.set()
                leave.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait(30)
        with _workers(_put_in_worker, [(store,)]) as (child,):
            child.join(20)
            exitcode = child.exitcode
        leave.set()
        thread.join()
        assert exitcode == 0 and used(store) == {1, 2}

    def test_a_plain_pickle_is_refused(self) -> None:
        with pytest.raises(TypeError, match="only while multiprocessing starts a worker"):
            pickle.dumps(SampleStore(1, 100))


def _put_in_worker(store: SampleStore) -> None:
    if 0 in store and not same(store.get(0), content(0)):
        raise SystemExit(2)
    for i in (1, 2):
        if not store.put(i, content(i)):
            raise SystemExit(3)


def _churn(store: SampleStore, seed: int, seconds: float, results: Any) -> None:
    rng = np.random.default_rng(seed)
    truth = {i: content(i) for i in range(store.length)}
    wrong, hits, puts = [], 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for i in rng.integers(0, store.length, 50).tolist():
            found = store.get(i)
            if found is MISSING:
                puts += store.put(i, truth[i])
            else:
                hits += 1
                if not same(found, truth[i]):
                    wrong.append(i)
    results.put({"wrong": wrong, "hits": hits, "puts": puts})


def _churn_for_ever(store: SampleStore, seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = [content(i) for i in range(store.length)]
    while True:
        i = int(rng.integers(store.length))
        if store.get(i) is MISSING:
            store.put(i, truth[i])


def _hold_the_lock(store: SampleStore) -> None:
    with store._lock.held() as locked:
        assert locked
        store._append(*_entry(3, "written"))
        time.sleep(60)


def _entry(index: int, value: Any) -> tuple[list[int], list[memoryview]]:
    return encode(index, value)


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def _workers(target: Any, arguments: list[tuple[Any, ...]]) -> Iterator[list[Any]]:
    workers = [fork.Process(target=target, args=a) for a in arguments]
    for worker in workers:
        worker.start()
    try:
        yield workers
    finally:
        for worker in workers:
            worker.join(5 if target is _churn else 0)
            if worker.is_alive():
                worker.kill()
            worker.join()


class TestPressure:
    def filled(self, policy: str = "keep") -> SampleStore:
        store = SampleStore(40, 1 << 20, policy)
        for i in range(40):
            assert store.put(i, np.full(20_000, i, np.uint8))
        return store

    @pytest.mark.parametrize("policy", POLICIES)
    def test_samples_are_given_back_the_oldest_first(self, policy: str) -> None:
        store = self.filled(policy)
        before = store.nbytes
        released = store.release(300_000)
        assert 300_000 <= released < 300_000 + 21_000 and store.nbytes == before - released == store.stats()["held_bytes"]
        assert store.limit <= before - 300_000 and store.stats()["released_bytes"] == released
        held = used(store)
        assert held == set(range(40 - len(held), 40))
        assert all((store.get(i) == i).all() for i in held)

    def test_reduced_store_admits_nothing_until_it_may_grow(self) -> None:
        store = self.filled()
        store.release(300_000)
        assert not store.put(0, np.zeros(20_000, np.uint8)) and store.is_full
        store.grow(100_000)
        assert (not store.is_full and store.limit == store.nbytes + 100_000 // 64 * 64) or store.limit <= store.nbytes + 100_000
        accepted = [store.put(i, np.full(20_000, i, np.uint8)) for i in range(10)]
        assert accepted == [True] * 4 + [False] * 6
        store.grow(1 << 30)
        assert store.limit == store.capacity

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.timeout(60)
    @pytest.mark.quick_every(1)
    def test_a_limit_that_is_lowered_before_the_lock_is_held(self, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another process may release memory between the first look at the limit and the lock."""
        store = self.filled(policy)
        held, lowered = type(store._lock).held, list[bool]()

        def late(lock: Any, *arguments: Any) -> Any:
            if not lowered:
                lowered.append(True)
                store.release(1 << 30)
            return held(lock, *arguments)

        monkeypatch.setattr(type(store._lock), "held", late)
        assert not store.put(0, np.zeros(20_000, np.uint8)) and store.nbytes == 0
        store.grow(1 << 30)
        assert store.put(0, np.zeros(20_000, np.uint8)) or policy == "keep"

    def test_lru_goes_on_within_less(self) -> None:
        store = self.filled("lru")
        store.release(600_000)
        for i in range(200):
            assert store.put(i % 40, np.full(20_000, i % 40, np.uint8))
            assert store.nbytes <= store.limit
        assert all((store.get(i) == i).all() for i in used(store))

    def test_a_cap_is_for_ever(self) -> None:
        store = self.filled()
        store.cap(200_000)
        assert store.nbytes <= 200_000 and store.ceiling == 200_000 and len(store) == 9
        store.grow(1 << 30)
        assert store.limit == 200_000
        store.cap(500_000)
        assert store.ceiling == 200_000
        store.cap(0)
        assert len(store) == store.nbytes == 0 and not store.put(1, b"x") and store.get(39) is MISSING

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux gives pages of shared memory back")
    def test_the_system_gets_the_pages(self) -> None:
        store = SampleStore(40, 64 << 20)
        for i in range(40):
            store.put(i, np.full(1 << 20, i, np.uint8))
        before = os.fstat(store._memory.fd).st_blocks
        store.release(20 << 20)
        assert before - os.fstat(store._memory.fd).st_blocks >= 19 * 2048  # blocks of 512 bytes
        assert all((store.get(i) == i).all() for i in used(store))

    @pytest.mark.quick_every(1)
    @posix
    def test_readers_never_see_half_a_sample(self) -> None:
        """While others give samples back and take new ones in."""
        store = SampleStore(30, 700_000, "lru")
        wrong = multiprocessing.get_context("fork").Value("i", 0)
        with _workers(_read_for_a_while, [(store, wrong)] * 2):
            deadline = time.monotonic() + 2
            rounds = 0
            while time.monotonic() < deadline:
                for i in range(30):
                    store.put(i, np.full(20_000, i, np.uint8))
                store.release(400_000)
                store.grow(1 << 20)
                rounds += 1
            store.put(29, "end") if 29 not in store else None
            _end(store)
        assert wrong.value == 0 and rounds > 3


def _end(store: SampleStore) -> None:
    store.cap(0)


def _read_for_a_while(store: SampleStore, wrong: Any) -> None:
    while store.ceiling:
        for i in range(30):
            found = store.get(i)
            if found is not MISSING and not (found == i).all():
                wrong.value += 1


class TestCounts:
    def test_of_one_process(self) -> None:
        store = SampleStore(4, 1000)
        store.count(3, 1)
        store.count(0, 2)
        assert (store.stats()["hits"], store.stats()["misses"]) == (3, 3)

    @pytest.mark.slow
    @posix
    def test_of_many_processes_one_after_the_other(self) -> None:
        """More than there are cells: those of dead processes are taken over, and their counts stay."""
        store = SampleStore(4, 1000)
        store.count(1, 0)
        for _ in range(8):
            with _workers(_count, [(store,)] * 10) as workers:
                for worker in workers:
                    worker.join(30)
        assert (store.stats()["hits"], store.stats()["misses"]) == (1 + 80 * 100, 80 * 200)

    def test_nobody_looks_too_often(self) -> None:
        store = SampleStore(4, 1000)
        assert [store.is_time_to_look(30) for _ in range(5)] == [True] + [False] * 4
        assert store.is_time_to_look(0)


def _count(store: SampleStore) -> None:
    for _ in range(100):
        store.count(1, 2)


def test_the_policy_may_change_for_all_processes() -> None:
    store = SampleStore(10, 5 * SampleStore.nbytes_of(bytes(1000)))
    for i in range(6):
        store.put(i, bytes(1000))
    assert store.policy == "keep" and 5 not in store
    store.use_lru()
    assert store.policy == "lru" and store.put(5, bytes(1000)) and 5 in store
