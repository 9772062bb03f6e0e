"""Modes move bytes when they say they do, and hold no more than they may."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from headrace import BaseDataset, BudgetError, ConfigError, LoadingMode, SampleError, Source
from headrace.core import held as held_module
from headrace.core.ahead import Ahead
from headrace.core.held import CACHE_SHARE, Held, cached, eager
from headrace.core.values import Records
from headrace.dtypes import ArraySpec
from headrace.memory import MemoryBudget
from headrace.memory.anonymous import SharedInt
from headrace.memory.limits import Limit
from headrace.memory.store import MISSING

MB = 1_000_000


class Numbers(Source):
    """Record i is an array full of i. Counts the records read, by one process at a time."""

    lock = threading.Lock()

    def __init__(self, n: int = 40, nbytes: int = 1000) -> None:
        self.n, self.nbytes = n, nbytes
        self.reads = SharedInt()

    def __len__(self) -> int:
        return self.n

    def read(self, indices: Sequence[int]) -> list[Any]:
        with self.lock:
            self.reads.value += len(indices)
        return [np.full(self.nbytes // 8, i, np.int64) for i in indices]

    def fingerprint(self) -> str:
        return f"numbers {self.n}"


def budget_of(nbytes: int) -> MemoryBudget:
    return MemoryBudget(1.0, limits=[Limit("the test's", nbytes, 0)])


class Load:
    def __init__(self, make: Callable[[int], Any] = lambda i: np.full(125, i)) -> None:
        self.make, self.asked = make, Counter[int]()
        self.lock = threading.Lock()

    def __call__(self, indices: Sequence[int]) -> list[Any]:
        with self.lock:
            self.asked.update(indices)
        return [self.make(i) for i in indices]


def eager_of(length: int, load: Load, *given: Any, **options: Any) -> Held:
    """Values held from the start, over nothing."""
    return eager(Records(Numbers(length)), length, load, *given, **options)


def cached_of(length: int, *given: Any, **options: Any) -> Held:
    return cached(Records(Numbers(length)), length, *given, **options)


def values(dataset: Any, indices: Sequence[int]) -> list[int]:
    return [int(sample[0]) for sample in dataset.__getitems__(list(indices))]


@pytest.fixture
def dataset_of() -> Iterator[Callable[..., Any]]:
    with ExitStack() as stack:
        yield lambda mode, source=None, **options: stack.enter_context(
            BaseDataset(source or Numbers(), loading_mode=mode, progress=False, **options)
        )


def test_names_of_modes_in_any_case() -> None:
    mode = LoadingMode("cached")
    for name in (mode, "CACHED", "Cached"):
        assert LoadingMode(name) is mode
    assert mode == "cached" and f"{mode}" == "cached"
    for wrong in ("", "fast", " lazy", None, 3, "LoadingMode.LAZY"):
        with pytest.raises(ConfigError) as refused:
            LoadingMode(wrong)
        assert repr(wrong) in str(refused.value)
    with pytest.raises(ConfigError, match="loading_mode"):
        BaseDataset(Numbers(), loading_mode="fast")


def test_how_often_each_mode_reads(dataset_of: Any) -> None:
    for mode, reads in {
        "lazy": [0, 40, 80, 120],
        "eager": [40, 40, 40, 40],
        "cached": [0, 40, 40, 40],
    }.items():
        dataset = dataset_of(mode)
        found = [dataset.sample_source.reads.value]
        for _ in range(3):
            assert values(dataset, range(40)) == list(range(40))
            found.append(dataset.sample_source.reads.value)
        assert found == reads, mode
    report = dataset.sample_reader.take_report()
    assert (report["cache_hits"], report["cache_misses"]) == (80, 40)
    assert dataset.sample_reader.take_report().get("cache_hits", 0) == 0


class TestEager:
    def test_each_sample_is_read_once(self) -> None:
        for n in (0, 1, 33, 200):
            for nbytes in (n * 1000, None):
                load = Load()
                mode = eager_of(n, load, budget_of(10 * MB), nbytes)
                assert load.asked == Counter(range(n))
                assert [int(value[0]) for value in mode.get(range(n))] == list(range(n))
                assert mode.stats()["held"] == n
                mode.close()

    def test_the_store_fits_in_what_was_reserved(self) -> None:
        budget = budget_of(10 * MB)
        mode = eager_of(100, Load(), budget, 100 * 1000)
        most = 100 * 1000 + 100 * held_module.OVERHEAD + (1 << 20)
        assert mode.stats()["held_bytes"] <= budget.reserved <= most
        mode.close()
        assert budget.reserved == 0 and mode.get([1]) == [MISSING]
        unknown = eager_of(100, Load(), budget)
        assert budget.reserved == unknown.stats()["held_bytes"]
        del unknown
        gc.collect()
        assert budget.reserved == 0

    def test_small_rows_reserve_little_more_than_themselves(self) -> None:
        budget = budget_of(100 * MB)
        load = Load(lambda i: np.full(4, i, np.float32))
        mode = eager_of(
            20_000, load, budget, 20_000 * 16, spec=ArraySpec((4,), np.dtype(np.float32))
        )
        assert budget.reserved <= 20_000 * 40 + (1 << 20) and load.asked == Counter(range(20_000))
        assert [int(value[0]) for value in mode.get([0, 19_999])] == [0, 19_999]
        mode.close()

    def test_rows_that_are_not_as_they_were_said_are_held_too(self) -> None:
        samples: dict[int, Any] = {i: np.full(4, i, np.float32) for i in range(1000)}
        samples |= {7: SampleError("sample 7"), 999: np.full(3, 999, np.float32)}
        load = Load(samples.__getitem__)
        spec = ArraySpec((4,), np.dtype(np.float32))
        mode = eager_of(1000, load, budget_of(10 * MB), 16_000, spec=spec)
        assert mode.stats()["held"] == 999 and mode.get([7]) == [MISSING]
        assert [value.tolist() for value in mode.get([899, 999])] == [[899] * 4, [999] * 3]
        mode.close()

    def test_several_threads_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(held_module, "usable_cpus", lambda: 2)
        both = threading.Barrier(2, timeout=30)
        load = Load()

        def together(indices: Sequence[int]) -> list[Any]:
            both.wait()  # breaks if nobody else comes
            return load(indices)

        eager_of(4 * held_module._GROUP, together, budget_of(10 * MB), 130_000).close()
        assert load.asked == Counter(range(4 * held_module._GROUP))

    @pytest.mark.parametrize(
        ("n", "sample_nbytes", "nbytes", "asked"),
        [
            (100_000, 1000, 100 * MB - 1, range(1)),
            (100_000, 1000, None, range(2, 33)),  # of unknown size a few are read to measure them
            (1000, MB, None, range(1, 5)),
        ],
    )
    def test_what_does_not_fit_is_refused_before_it_is_read(
        self, n: int, sample_nbytes: int, nbytes: int | None, asked: range
    ) -> None:
        load, budget = Load(lambda i: np.zeros(sample_nbytes, np.uint8)), budget_of(3 * MB)
        with pytest.raises(BudgetError, match=rf"{n:,} samples, and 3\.0 MB "):
            eager_of(n, load, budget, nbytes)
        assert len(load.asked) in asked and budget.reserved == 0
        assert not load.asked or max(load.asked) == n - 1 or sample_nbytes == MB

    def test_a_guess_that_was_too_low_takes_more_of_the_budget(self) -> None:
        measured = set(np.linspace(0, 319, 32).astype(int).tolist())
        load = Load(lambda i: np.zeros(10 if i in measured else 50_000, np.uint8))
        budget, small = budget_of(30 * MB), budget_of(5 * MB)
        mode = eager_of(320, load, budget)
        assert budget.reserved == mode.stats()["held_bytes"] > 14 * MB
        mode.close()
        with pytest.raises(BudgetError, match=r"\d+ of 320 fill \d\.\d MB"):
            eager_of(320, load, small)
        assert small.reserved == 0

    def test_an_error_while_it_fills_comes_through(self) -> None:
        samples = {i: np.zeros(10) for i in range(1000) if i != 700}
        for nbytes in (80_000, None):
            budget = budget_of(10 * MB)
            with pytest.raises(KeyError, match="700"):
                eager_of(1000, Load(samples.__getitem__), budget, nbytes)
            assert budget.reserved == 0

    def test_samples_that_cannot_be_read_are_not_held(self) -> None:
        errors = {i: SampleError(f"sample {i}") for i in range(100)}
        mode = eager_of(
            100, Load(lambda i: errors[i] if i in (0, 5, 99) else i), budget_of(10 * MB)
        )
        assert mode.get([0, 1, 5, 99]) == [MISSING, 1, MISSING, MISSING]
        mode.close()
        none = eager_of(100, Load(errors.__getitem__), budget_of(10 * MB))
        assert none.stats()["held"] == 0
        none.close()

    def test_the_datasets_budget_counts(self) -> None:
        with pytest.raises(BudgetError, match=r"40 samples, and 1\.0 MB "):
            BaseDataset(Numbers(40, MB), loading_mode="eager", max_memory_usage="1MB")


class TestCached:
    def test_a_batch_may_hold_some_of_both(self, dataset_of: Any) -> None:
        dataset = dataset_of("cached")
        for indices in ([3, 5], [5, 7, 3, 7, 9], [9, 3, 7]):
            assert values(dataset, indices) == indices
        assert dataset.sample_source.reads.value == 5 and dataset.held.stats()["held"] == 4

    @pytest.mark.parametrize("policy", ["auto", "lru"])
    def test_cache_size(self, dataset_of: Any, policy: str) -> None:
        most: dict[Any, tuple[int, int]] = {
            7: (7, 10**9),
            np.int16(9): (9, 10**9),
            "20KB": (40, 20_000),
            "1 B": (0, 1),
        }
        for size, (most_items, most_bytes) in most.items():
            dataset = dataset_of("cached", cache_size=size, cache_policy=policy)
            for _ in range(2):
                assert values(dataset, range(40)) == list(range(40))
            stats = dataset.held.stats()
            assert min(most_items, most_bytes // 1500) <= stats["held"] <= most_items, size
            assert stats["held_bytes"] <= most_bytes, size

    def test_a_cache_size_that_makes_no_sense(self) -> None:
        for size in (0, -1, 1.5, "lots", "-5MB", True, [3], b"2MB"):
            with pytest.raises(ConfigError, match="2GB"):
                BaseDataset(Numbers(), loading_mode="cached", cache_size=size)

    def test_the_budget_bounds_it(self) -> None:
        budget = budget_of(100_000)
        first = cached_of(1000, budget)
        assert int(100_000 * CACHE_SHARE) - 64 <= budget.reserved <= int(100_000 * CACHE_SHARE)
        for i in range(1000):
            first.admit([i], [np.zeros(100)])
        stats = first.stats()
        assert stats["held"] > 40 and stats["held_bytes"] + 9 * 1000 <= budget.reserved
        second = cached_of(1000, budget)  # has what is left
        assert budget.reserved <= 100_000
        third = cached_of(10**9, budget_of(MB))  # not even the table fits: holds nothing, and works
        third.admit([3], [b"x"])
        assert third.get([3]) == [MISSING]
        for mode in (first, second, third):
            mode.close()
        assert budget.reserved == 0 and first.get([1]) == [MISSING] and first.stats() == {}
        first.admit([1], [b"late"])  # a worker that is slow to hear of it

    def test_no_more_is_reserved_than_all_samples_take(self) -> None:
        budget = budget_of(100 * MB)
        first = cached_of(100, budget, nbytes=100 * 1000)
        assert budget.reserved < 2 * MB
        for i in range(100):
            first.admit([i], [bytes(1000)])
        assert first.stats()["held"] == 100
        first.close()


class Blocking(Source):
    """A read that answers only when it is told to, and knows what it was asked for."""

    def __init__(self, nbytes: int = 10, blocked: bool = False) -> None:
        self.nbytes, self.asked = nbytes, list[tuple[int, ...]]()
        self.lock, self.go = threading.Lock(), threading.Event()
        if not blocked:
            self.go.set()

    def read(self, indices: Sequence[int]) -> list[bytes]:
        with self.lock:
            self.asked.append(tuple(indices))
        assert self.go.wait(30)
        if -1 in indices:
            raise OSError("broken")
        return [self.record(i) for i in indices]

    def __len__(self) -> int:
        return 20

    def fingerprint(self) -> str:
        return "blocking"

    def __reduce__(self) -> Any:
        return Blocking, (self.nbytes,)

    def record(self, index: int) -> bytes:
        return bytes([index]) * self.nbytes

    def wait_for(self, *batches: Sequence[int]) -> None:
        deadline = time.monotonic() + 20
        while not set(map(tuple, batches)) <= set(self.asked):
            assert time.monotonic() < deadline, (batches, self.asked)
            time.sleep(0.002)


BATCHES = [[2 * i, 2 * i + 1] for i in range(10)]


class TestStreaming:
    @pytest.fixture
    def read(self) -> Blocking:
        return Blocking()

    @pytest.fixture
    def ahead(self, read: Blocking) -> Iterator[Ahead]:
        ahead = Ahead(read, window=1000)
        yield ahead
        ahead.close()

    def test_what_comes_is_read_before_it_is_asked_for(self, ahead: Ahead, read: Blocking) -> None:
        assert ahead.read_records([19, 18]) == [read.record(19), read.record(18)]
        read.asked.clear()
        for number in range(8):
            ahead.read_ahead(BATCHES[number : number + 3])
            if number:
                read.wait_for(*BATCHES[number : number + 3])
            assert ahead.read_records(BATCHES[number]) == [read.record(i) for i in BATCHES[number]]
        assert Counter(read.asked) == Counter(map(tuple, BATCHES))  # and each of them once
        # another order is another batch
        assert ahead.read_records([19, 18]) == [read.record(19), read.record(18)]

    def test_threads_read_at_the_same_time(self, ahead: Ahead, read: Blocking) -> None:
        ahead.read_ahead(BATCHES[:1])
        ahead.read_records(BATCHES[0])
        read.go.clear()
        ahead.read_ahead(BATCHES[1:4])
        read.wait_for(*BATCHES[1:4])  # while none has been answered
        read.go.set()
        assert ahead.read_records(BATCHES[2]) == [read.record(4), read.record(5)]

    def test_the_window_bounds_the_bytes(self) -> None:
        for nbytes, count in [(10, 8), (100, 5), (200, 2), (10_000, 1)]:
            ahead = Ahead(Blocking(nbytes), window=1000)
            ahead.read_ahead(BATCHES[:8])
            assert len(ahead._pending) == 1  # nobody knows yet how large records are
            ahead.read_records(BATCHES[0])
            ahead.read_ahead(BATCHES[1:9])
            assert len(ahead._pending) == count, nbytes
            ahead.close()

    def test_a_failing_read_ahead_fails_where_it_is_asked_for(
        self, ahead: Ahead, read: Blocking
    ) -> None:
        ahead.read_ahead([[0, 1], [2, -1], [4, 5]])
        assert len(ahead.read_records([0, 1])) == 2
        ahead.read_ahead([[2, -1], [4, 5]])
        read.wait_for([2, -1], [4, 5])
        with pytest.raises(OSError, match="broken"):
            ahead.read_records([2, -1])
        assert len(ahead.read_records([4, 5])) == 2

    def test_a_closed_one_and_a_pickle_have_nothing_ahead(
        self, ahead: Ahead, read: Blocking
    ) -> None:
        ahead.read_ahead(BATCHES[:2])
        copy = pickle.loads(pickle.dumps(ahead))
        assert copy.window == 1000 and not copy._pending
        ahead.close()
        assert not ahead._pending
        ahead.read_ahead(BATCHES[:1])
        assert len(ahead.read_records(BATCHES[0])) == 2

    def test_a_dataset_left_early_goes_on_in_the_next_epoch(self, dataset_of: Any) -> None:
        dataset = dataset_of("streaming", Numbers(500))
        early = iter(dataset)
        assert len({int(next(early)[0]) for _ in range(70)}) == 70
        for epoch in (1, 0):
            dataset.set_epoch(epoch)
            assert sorted(int(sample[0]) for sample in dataset) == list(range(500))
        del early


class TestPickles:
    @pytest.mark.parametrize(("mode", "reads"), [("eager", 40), ("cached", 2)])
    def test_a_pickle_leaves_what_is_held(self, dataset_of: Any, mode: str, reads: int) -> None:
        dataset = dataset_of(mode, Numbers(40, 10_000))
        assert values(dataset, range(40)) == list(range(40))
        data = pickle.dumps(dataset)
        assert len(data) < 5000
        with pickle.loads(data) as copy:
            before = copy.sample_source.reads.value
            assert values(copy, [5, 6]) == values(copy, [5, 6]) == [5, 6]
            assert copy.sample_source.reads.value - before == reads
        assert dataset.sample_source.reads.value == 40
        with pytest.raises(TypeError, match="only while"):
            pickle.dumps(dataset.held)

    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_workers_share_what_is_held(self, dataset_of: Any, method: str) -> None:
        held, fills = dataset_of("eager"), dataset_of("cached")
        fills.__getitems__([0, 1, 2])
        options = {"num_workers": 2, "multiprocessing_context": method, "collate_fn": list}
        loader: Any = DataLoader(Pairs(held, fills), batch_size=5, **options)
        assert [pair for batch in loader for pair in batch] == [(i, i) for i in range(40)]
        assert held.sample_source.reads.value == 40  # read by the parent, before
        # three by the parent, the rest by one worker or the other
        assert fills.held.stats()["admitted"] == 40
        before = fills.sample_source.reads.value
        assert values(fills, range(40)) == list(range(40))
        assert fills.sample_source.reads.value == before


class Pairs:
    """Two datasets as one, so that workers are started once."""

    def __init__(self, *datasets: BaseDataset) -> None:
        self.datasets = datasets

    def __len__(self) -> int:
        return len(self.datasets[0])

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(int(dataset[index][0]) for dataset in self.datasets)
