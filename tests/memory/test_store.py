"""The sample store: what comes out is what was put in, with many writers, while they die."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cachetools
import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.memory.store import MISSING, SampleStore, _pieces_of
from headrace.testing.contract import same
from tests.memory.forks import held_by_a_thread

posix = pytest.mark.skipif(sys.platform == "win32", reason="a store is a process's own on Windows")
POLICIES = ("keep", "lru")
both_policies = pytest.mark.parametrize("policy", POLICIES)
fork = multiprocessing.get_context("fork" if sys.platform != "win32" else None)
BIG = 1 << 20


def content(index: int) -> bytes:
    """A sample that says which one it is in every byte; sizes differ from index to index."""
    return np.random.default_rng(index).bytes(40 + (index * 7919) % 3000)


def used(store: SampleStore) -> set[int]:
    return {i for i in range(store.length) if i in store}


DTYPES = [*"?bBhHiIlLqQefdFDgG", "M8[ns]", "m8[s]", "S5", "U7", ">i4", ">f8", "V3"]
DTYPES += [[("a", "<i4"), ("b", "f4", (3,))]]  # type: ignore[list-item]
GRID = np.arange(60 * 70, dtype=np.int32).reshape(60, 70)
VALUES: list[Any] = [
    *(None, 0, "déjà \udce9 vu", "x" * 10_000),
    *(bytes(range(256)) * 40, b"", bytearray(b"abc" * 1000)),
    (np.arange(1000), 3, "t"),
    {"image": np.ones((3, 20, 30), np.float32), "boxes": [np.zeros((0, 4)), (1, None)]},
    [np.full(600, i, np.uint8) for i in range(9)],
    [np.arange(900)] * 2,
    [{1, 2}, 3.5, complex(1, 2), range(3), np.float32(0.1)],
    *(GRID[::2], GRID.T, GRID[:, ::-1], np.broadcast_to(GRID[:1], GRID.shape)),
    *(np.empty(shape, dtype) for shape in ((), (0,), (3, 0, 2)) for dtype in ("?", ">f8")),
    *(
        np.frombuffer(bytes(range(240)), np.dtype(d))
        for d in DTYPES
        if 240 % np.dtype(d).itemsize == 0
    ),
]


class TestRoundTrip:
    def test_values_of_all_kinds(self) -> None:
        for policy, value in itertools.product(POLICIES, VALUES):
            store = SampleStore(3, BIG, policy)
            assert store.put(1, value)
            assert same(value, store.get(1)), repr(value)
            assert store.get(0) is MISSING and store.get(2) is MISSING
            assert store.nbytes == SampleStore.nbytes_of(value)

    def test_a_sample_is_a_copy_and_outlives_its_store(self) -> None:
        for n in (10, 5000):
            store, array = SampleStore(1, BIG), np.zeros(n, np.uint8)
            store.put(0, {"a": array})
            array[:] = 1
            first = store.get(0)["a"]
            assert not first.any()
            first[:] = 2
            second = store.get(0)["a"]
            del store
            assert not second.any()


class TestCapacity:
    def test_bad_arguments(self) -> None:
        with pytest.raises(IndexError):
            SampleStore(0, BIG).get(0)
        with pytest.raises(TypeError):
            pickle.dumps(SampleStore(1, 100))

    def test_the_largest_sample_that_fits_does(self) -> None:
        for policy in POLICIES:
            for capacity in (-5, 0, 31):
                store = SampleStore(3, capacity, policy)
                assert not store.put(0, None) and store.get(0) is MISSING
                assert (len(store), store.nbytes) == (0, 0)
            value = bytes(10_000)
            exactly = SampleStore.nbytes_of(value)
            assert SampleStore(1, exactly, policy).put(0, value)
            store = SampleStore(2, exactly - 1, policy)
            assert not store.put(0, value)
            assert store.put(1, b"small") and not store.header.full


@both_policies
def test_no_more_samples_than_its_limit(policy: str) -> None:
    store = SampleStore(9, BIG, policy, max_items=3)
    accepted = [store.put(index, b"x") for index in range(9)]
    assert sum(accepted) == (9 if policy == "lru" else 3)
    assert used(store) == ({6, 7, 8} if policy == "lru" else {0, 1, 2})


def test_the_policy_changes_for_all_processes() -> None:
    store = SampleStore(10, SampleStore.nbytes_of(bytes(1000)))
    assert store.put(0, bytes(1000)) and not store.put(5, bytes(1000))
    store.use_lru()
    assert store.header.lru and store.put(5, bytes(1000)) and 0 not in store


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        capacity=st.integers(0, 8192),
        max_items=st.none() | st.integers(1, 5),
    )
    def make(self, policy: str, capacity: int, max_items: int | None) -> None:
        self.store = SampleStore(12, capacity, policy, max_items)
        self.store.header.kind = 2  # entries of any kind
        self.max_items = max_items
        self.last: dict[int, Any] = {}
        self.versions = itertools.count()

    @rule(index=st.integers(0, 11), size=st.one_of(st.integers(0, 600), st.integers(0, 9000)))
    def put(self, index: int, size: int) -> None:
        held = index in self.store
        value = np.random.default_rng(next(self.versions)).bytes(size)
        accepted = self.store.put(index, value)
        fits = SampleStore.nbytes_of(value) <= self.store.capacity
        if self.store.header.lru:
            assert accepted is (fits or held)
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
        assert sum(SampleStore.nbytes_of(self.last[i]) for i in held) <= store.nbytes
        assert store.nbytes <= store.capacity
        assert self.max_items is None or len(held) <= self.max_items
        assert store.header.lru or store.stats()["evicted"] == 0


StoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase


def test_hot_samples_survive_as_in_a_true_lru() -> None:
    n, room, size = 500, 50, 300
    drawn = np.random.default_rng(0).zipf(1.2, 8_000)
    accesses = (drawn[drawn <= n] - 1).tolist()
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
    @posix
    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_what_one_process_puts_all_others_get(self, method: str) -> None:
        store = SampleStore(10, 100_000)
        store.put(0, content(0))
        worker = multiprocessing.get_context(method).Process(target=_put_in_worker, args=(store,))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
        assert used(store) == {0, 1, 2}
        assert same(store.get(1), content(1)) and same(store.get(2), content(2))

    def test_a_sample_evicted_while_read_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = SampleStore(2, BIG)
        store.put(0, content(0))
        fences = itertools.count()

        def evicted_meanwhile() -> None:
            if next(fences):  # after the sample was copied
                store.adjust(BIG)

        store.put(1, "general entries, which are looked at twice")
        store.put(0, content(0))
        assert not same(store.get(0), MISSING)
        monkeypatch.setattr("headrace.memory.store._fence", evicted_meanwhile)
        assert store.get(0) is MISSING

    @posix
    @pytest.mark.slow
    @both_policies
    def test_killed_writers_leave_the_rest_right(self, policy: str) -> None:
        store = SampleStore(80, 20_000, policy)
        rng = np.random.default_rng(5)
        for _ in range(20):
            with _workers(_churn, [(store, int(rng.integers(1 << 30)), 10**9)]) as (victim,):
                before = store.stats()["admitted"]
                if policy == "lru":
                    _wait_for(lambda before=before: store.stats()["admitted"] > before)
                time.sleep(float(rng.uniform(0, 0.01)))
                victim.kill()
                victim.join()
            assert 0 <= store.nbytes <= store.capacity
            assert 0 <= len(store) <= len(used(store))
            assert all(same(store.get(i), content(i)) for i in used(store))
        for i in range(80):  # all that the dead had written is written over
            assert store.put(i, content(i)) or policy == "keep"
            assert store.get(i) is MISSING or same(store.get(i), content(i))

    @posix
    def test_a_stopped_writer_stops_nobody_nor_a_dead_one(self) -> None:
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
        """The child must not wait for a lock that a thread of the parent held."""
        store = SampleStore(4, 8192)
        with (
            held_by_a_thread(store._lock._threads.get()),
            _workers(_put_in_worker, [(store,)]) as (child,),
        ):
            child.join(20)
            assert child.exitcode == 0
        assert used(store) == {1, 2}


def _put_in_worker(store: SampleStore) -> None:
    if 0 in store and not same(store.get(0), content(0)):
        raise SystemExit(2)
    for i in (1, 2):
        if not store.put(i, content(i)):
            raise SystemExit(3)


def _churn(store: SampleStore, seed: int, accesses: int) -> list[int]:
    """Gets samples at random, and puts those that are missing; returns those that were wrong."""
    rng = np.random.default_rng(seed)
    truth = [content(i) for i in range(store.length)]
    wrong = []
    for _ in range(accesses):
        i = int(rng.integers(store.length))
        found = store.get(i)
        if found is MISSING:
            store.put(i, truth[i])
        elif not same(found, truth[i]):
            wrong.append(i)
    return wrong


def _hold_the_lock(store: SampleStore) -> None:
    with store._lock.held() as locked:
        assert locked
        store._decide(None)
        store._append(3, _pieces_of("written"))
        time.sleep(60)


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
            if worker.is_alive():
                worker.kill()
            worker.join()


def filled(policy: str = "keep") -> SampleStore:
    store = SampleStore(40, 1 << 20, policy)
    for i in range(40):
        assert store.put(i, np.full(20_000, i, np.uint8))
    return store


class TestPressure:
    @both_policies
    def test_a_limit_lowered_before_the_lock_is_held(
        self, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process may release memory between the first look at the limit and the lock."""
        store = filled(policy)
        held, lowered = type(store._lock).held, list[bool]()

        def late(lock: Any, *arguments: Any) -> Any:
            if not lowered:
                lowered.append(True)
                store.adjust(1 << 30)
            return held(lock, *arguments)

        monkeypatch.setattr(type(store._lock), "held", late)
        assert not store.put(0, np.zeros(20_000, np.uint8)) and store.nbytes == 0

    def test_a_cap_is_for_ever(self) -> None:
        store = filled()
        store.cap(200_000)
        assert store.nbytes <= 200_000 and store.ceiling == 200_000 and len(store) == 9
        store.adjust(-1 << 30)
        assert store.limit == 200_000
        store.cap(500_000)
        assert store.ceiling == 200_000
        store.cap(0)
        assert len(store) == store.nbytes == 0
        assert not store.put(1, b"x") and store.get(39) is MISSING

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others keep shared pages")
    def test_the_system_gets_the_pages(self) -> None:
        store = SampleStore(40, 64 << 20)
        for i in range(40):
            store.put(i, np.full(1 << 20, i, np.uint8))
        before = os.fstat(store._memory.fd).st_blocks
        store.adjust(20 << 20)
        assert before - os.fstat(store._memory.fd).st_blocks >= 19 * 2048  # blocks of 512 bytes
        assert all((store.get(i) == i).all() for i in used(store))

    @pytest.mark.slow
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
                store.adjust(400_000)
                store.adjust(-1 << 20)
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
