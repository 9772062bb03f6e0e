"""Modes move bytes when they say they do, and hold no more than they may."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from headrace import (
    BaseDataset,
    BudgetError,
    ConfigError,
    LoadingMode,
    MemoryBudget,
    SampleError,
    Source,
)
from headrace.memory.anonymous import SharedInt
from headrace.memory.budget import size_of
from headrace.memory.limits import Limit
from headrace.memory.store import MISSING, SampleStore
from headrace.modes import eager as eager_module
from headrace.modes import stored as stored_module
from headrace.modes.cached import SHARE, Cached
from headrace.modes.eager import Eager
from headrace.modes.lazy import Lazy
from headrace.modes.streaming import Streaming

pytestmark = pytest.mark.quick_every(4)

MB = 1_000_000


class Numbers(Source):
    """Record i is an array full of i. Counts the records read, in all processes; some of them can't
    be read.

    Exact as long as one process reads at a time.
    """

    lock = threading.Lock()

    def __init__(self, n: int = 40, nbytes: int = 1000, broken: Sequence[int] = ()) -> None:
        self.n, self.nbytes, self.broken = n, nbytes, tuple(broken)
        self.reads = SharedInt()

    def __len__(self) -> int:
        return self.n

    def read(self, indices: Sequence[int]) -> list[Any]:
        with self.lock:
            self.reads.value += len(indices)
        if bad := set(indices) & set(self.broken):
            raise OSError(f"record {min(bad)} is broken")
        return [self.record(i) for i in indices]

    def record(self, index: int) -> Any:
        return np.full(self.nbytes // 8, index, np.int64)

    def fingerprint(self) -> str:
        return f"numbers {self.n}"


def budget_of(nbytes: int) -> MemoryBudget:
    """A budget with a ledger of its own."""
    return MemoryBudget(1.0, limits=[Limit("the test's", nbytes, 0)])


class Load:
    """What eager calls: notes which samples it was asked for."""

    def __init__(self, make: Callable[[int], Any] = lambda i: np.full(125, i)) -> None:
        self.make, self.asked = make, Counter[int]()
        self.lock = threading.Lock()

    def __call__(self, indices: Sequence[int]) -> list[Any]:
        with self.lock:
            self.asked.update(indices)
        return [self.make(i) for i in indices]


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("stays here")


def _failing(index: int) -> SampleError:
    error = SampleError(f"sample {index}")
    error.__cause__ = OSError(f"cause {index}") if index < 3 else Unpicklable()
    return error


def values(dataset: Any, indices: Sequence[int]) -> list[int]:
    return [int(sample[0]) for sample in dataset.__getitems__(list(indices))]


@pytest.fixture
def closing() -> Iterator[Callable[..., Any]]:
    """Makes datasets, and closes them at the end."""
    made: list[BaseDataset] = []

    def make(source: Source | None = None, **options: Any) -> Any:
        made.append(BaseDataset(Numbers() if source is None else source, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


class TestLoadingMode:
    @pytest.mark.parametrize("name", ["lazy", "eager", "cached", "streaming"])
    def test_names_in_any_case(self, name: str) -> None:
        mode = LoadingMode(name)
        assert (
            LoadingMode.of(name.upper())
            is LoadingMode.of(name.title())
            is LoadingMode.of(mode)
            is mode
        )
        assert mode == name and f"{mode}" == name and isinstance(mode, str)

    @pytest.mark.parametrize("wrong", ["", "fast", " lazy", None, 3, "LoadingMode.LAZY"])
    def test_an_unknown_name_lists_the_four(self, wrong: Any) -> None:
        with pytest.raises(ConfigError, match="'lazy', 'eager', 'streaming', 'cached'") as caught:
            LoadingMode.of(wrong)
        assert isinstance(caught.value, ValueError) and repr(wrong) in str(caught.value)
        with pytest.raises(ConfigError, match="loading_mode"):
            BaseDataset(Numbers(), loading_mode=wrong)


class TestLazy:
    def test_reads_at_each_access_and_holds_nothing(self, closing: Any) -> None:
        dataset = closing(loading_mode="lazy")
        assert dataset.sample_source.reads.value == 0
        for round in (1, 2, 3):
            assert values(dataset, [3, 1, 3]) == [3, 1, 3]
            assert dataset.sample_source.reads.value == 3 * round
        assert Lazy().get([1, 2]) == [MISSING] * 2 and Lazy().stats() == {}


class TestEager:
    @pytest.mark.parametrize("known", [True, False])
    @pytest.mark.parametrize("n", [0, 1, 31, 33, 200])
    def test_each_sample_is_read_once(self, n: int, known: bool) -> None:
        load, budget = Load(), budget_of(10 * MB)
        mode = Eager(n, load, budget, n * 1000 if known else None)
        assert load.asked == Counter(range(n))
        assert [int(v[0]) for v in mode.get(range(n))] == list(range(n))
        assert mode.stats()["held"] == n
        mode.close()

    def test_the_store_fits_in_what_was_reserved(self) -> None:
        budget = budget_of(10 * MB)
        mode = Eager(100, Load(), budget, 100 * 1000)
        assert (
            mode.stats()["held_bytes"]
            <= budget.reserved
            <= 100 * 1000 + 100 * eager_module.OVERHEAD + (1 << 20)
        )
        mode.close()
        assert budget.reserved == 0 and mode.get([1]) == [MISSING]
        unknown = Eager(100, Load(), budget)
        assert budget.reserved == unknown.stats()["held_bytes"]
        del unknown
        gc.collect()
        assert budget.reserved == 0

    def test_small_rows_reserve_little_more_than_themselves(self) -> None:
        budget = budget_of(100 * MB)
        load = Load(lambda i: np.full(4, i, np.float32))
        mode = Eager(20_000, load, budget, 20_000 * 16, spec=((4,), np.dtype(np.float32)))
        assert budget.reserved <= 20_000 * 40 + (1 << 20) and load.asked == Counter(range(20_000))
        assert [int(v[0]) for v in mode.get([0, 19_999])] == [0, 19_999]
        mode.close()

    def test_rows_that_are_not_as_they_were_said_are_held_too(self) -> None:
        def load(indices: Sequence[int]) -> list[Any]:
            return [
                _failing(i) if i == 7 else np.full(4 if i < 900 else 3, i, np.float32)
                for i in indices
            ]

        mode = Eager(1000, load, budget_of(10 * MB), 16_000, spec=((4,), np.dtype(np.float32)))
        assert mode.stats()["held"] == 999 and isinstance(mode.get([7])[0], SampleError)
        assert [v.tolist() for v in mode.get([899, 999])] == [[899] * 4, [999] * 3]
        mode.close()

    @pytest.mark.parametrize("nbytes", [0, 1, 100, 511, 512, 5000])
    @pytest.mark.parametrize("kind", [lambda n: bytes(n), lambda n: np.zeros(n, np.uint8)])
    def test_the_overhead_is_enough_for_samples_of_any_size(self, nbytes: int, kind: Any) -> None:
        mode = Eager(3000, Load(lambda i: kind(nbytes)), budget_of(100 * MB), 3000 * nbytes)
        assert mode.stats()["held"] == 3000
        mode.close()

    def test_several_threads_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(eager_module, "usable_cpus", lambda: 2)
        both = threading.Barrier(2, timeout=30)
        load = Load()

        def together(indices: Sequence[int]) -> list[Any]:
            both.wait()  # breaks if nobody else comes
            return load(indices)

        Eager(4 * eager_module._GROUP, together, budget_of(10 * MB), 130_000).close()
        assert load.asked == Counter(range(4 * eager_module._GROUP))

    def test_what_does_not_fit_is_refused_before_it_is_read(self) -> None:
        load, budget = Load(), budget_of(MB)
        with pytest.raises(
            BudgetError,
            match=(
                r"loading_mode='eager' needs 152\.\d MB for 100,000 samples, and 1\.0 MB are "
                r"left"
            ),
        ) as caught:
            Eager(100_000, load, budget, 100 * MB - 1)
        assert not load.asked and budget.reserved == 0
        text = str(caught.value)
        assert (
            "'cached'" in text
            and "'lazy'" in text
            and "max_memory_usage" in text
            and isinstance(caught.value, MemoryError)
        )

    def test_of_unknown_size_a_few_are_read_to_measure_them(self) -> None:
        load, budget = Load(), budget_of(3 * MB)
        with pytest.raises(BudgetError, match="for 100,000 samples"):
            Eager(100_000, load, budget)
        assert (
            2 <= len(load.asked) <= 32 and {0, 99_999} <= set(load.asked) and budget.reserved == 0
        )

    def test_sizing_reads_few_large_samples_at_once(self) -> None:
        load, budget = Load(lambda i: np.zeros(MB, np.uint8)), budget_of(3 * MB)
        with pytest.raises(BudgetError, match="for 1,000 samples"):
            Eager(1000, load, budget)
        assert len(load.asked) <= 4

    def test_a_guess_that_was_too_low_takes_more_of_the_budget(self) -> None:
        measured = set(np.linspace(0, 319, 32).astype(int).tolist())
        load, budget = (
            Load(lambda i: np.zeros(10 if i in measured else 50_000, np.uint8)),
            budget_of(30 * MB),
        )
        mode = Eager(320, load, budget)
        assert budget.reserved == mode.stats()["held_bytes"] > 14 * MB
        mode.close()
        small = budget_of(5 * MB)
        with pytest.raises(BudgetError, match=r"larger than the budget: \d+ of 320 fill \d\.\d MB"):
            Eager(320, load, small)
        assert small.reserved == 0

    @pytest.mark.parametrize("known", [True, False])
    def test_an_error_while_it_fills_comes_through(self, known: bool) -> None:
        def broken(indices: Sequence[int]) -> list[Any]:
            if 700 in indices:
                raise KeyError("sample 700")
            return [np.zeros(10)] * len(indices)

        budget = budget_of(10 * MB)
        with pytest.raises(KeyError, match="sample 700"):
            Eager(1000, broken, budget, 80_000 if known else None)
        assert budget.reserved == 0

    def test_samples_that_cannot_be_read_are_held_as_such(self) -> None:
        errors = {i: SampleError(f"sample {i}") for i in (0, 5, 99)}
        mode = Eager(100, Load(lambda i: errors.get(i, i)), budget_of(10 * MB))
        assert mode.get([0, 1, 5, 99]) == [errors[0], 1, errors[5], errors[99]]
        mode.close()

    def test_a_worker_gets_their_causes_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that an `on_error` callable is given the same error everywhere."""
        mode = Eager(4, Load(_failing), budget_of(10 * MB))
        mode.close()
        monkeypatch.setattr(stored_module, "is_spawning", lambda: True)
        there = pickle.loads(pickle.dumps(mode))
        assert [str(there._errors[i]) for i in range(4)] == [f"sample {i}" for i in range(4)]
        assert [repr(there._errors[i].__cause__) for i in range(4)] == [
            "OSError('cause 0')",
            "OSError('cause 1')",
            "OSError('cause 2')",
            "None",
        ]

    def test_none_that_can_be_read(self) -> None:
        mode = Eager(50, Load(lambda i: SampleError(f"sample {i}")), budget_of(10 * MB))
        assert (
            all(isinstance(v, SampleError) for v in mode.get(range(50)))
            and mode.stats()["held"] == 0
        )
        mode.close()

    def test_no_sample_is_asked_for_again(self, closing: Any) -> None:
        dataset = closing(loading_mode="eager", progress=False)
        assert dataset.sample_source.reads.value == 40
        assert values(dataset, range(40)) == values(dataset, range(40)) == list(range(40))
        assert dataset.sample_source.reads.value == 40

    def test_progress(self, capsys: pytest.CaptureFixture[str]) -> None:
        for progress, shown in {None: False, False: False, True: True}.items():
            Eager(64, Load(), budget_of(10 * MB), 64_000, progress).close()
            out, err = capsys.readouterr()
            assert out == "" and ("eager: reading" in err) is shown
            assert shown or err == ""

    def test_the_datasets_budget_counts(self) -> None:
        with pytest.raises(BudgetError, match=r"needs 4\d\.\d MB for 40 samples") as caught:
            BaseDataset(Numbers(40, MB), loading_mode="eager", max_memory_usage="1MB")
        assert "1.0 MB" in str(caught.value)


class TestCached:
    def test_a_second_pass_reads_nothing(self, closing: Any) -> None:
        dataset = closing(loading_mode="cached")
        assert dataset.sample_source.reads.value == 0
        for _ in range(3):
            assert values(dataset, range(40)) == list(range(40))
        assert dataset.sample_source.reads.value == 40
        report = dataset.sample_reader.take_report()
        assert (report["cache_hits"], report["cache_misses"]) == (80, 40)
        assert dataset.sample_reader.take_report().get("cache_hits", 0) == 0

    def test_a_batch_may_hold_some_of_both(self, closing: Any) -> None:
        dataset = closing(loading_mode="cached")
        assert values(dataset, [3, 5]) == [3, 5]
        assert values(dataset, [5, 7, 3, 7, 9]) == [5, 7, 3, 7, 9]
        assert values(dataset, [9, 3, 7]) == [9, 3, 7]
        assert dataset.sample_source.reads.value == 5

    @pytest.mark.parametrize(
        ("size", "most_items", "most_bytes"),
        [
            (7, 7, 10**9),
            (np.int64(7), 7, 10**9),
            ("20KB", 40, 20_000),
            ("1 B", 0, 1),
            (10**6, 40, 10**9),
        ],
    )
    @pytest.mark.parametrize("policy", ["auto", "keep", "lru"])
    def test_cache_size(
        self, closing: Any, size: Any, most_items: int, most_bytes: int, policy: str
    ) -> None:
        dataset = closing(loading_mode="cached", cache_size=size, cache_policy=policy)
        for _ in range(2):
            assert values(dataset, range(40)) == list(range(40))
        stats = dataset.mode.stats()
        assert stats["held"] <= most_items and stats["held_bytes"] <= most_bytes
        assert stats["held"] >= min(most_items, 40, most_bytes // 1500)

    @pytest.mark.parametrize("size", [0, -1, 1.5, "lots", "-5MB", True, False, [3], b"2MB"])
    def test_a_cache_size_that_makes_no_sense(self, size: Any) -> None:
        with pytest.raises(ConfigError, match="cache_size"):
            BaseDataset(Numbers(), loading_mode="cached", cache_size=size)

    def test_the_budget_bounds_it(self) -> None:
        budget = budget_of(100_000)
        cached = Cached(1000, budget)
        assert int(100_000 * SHARE) - 64 <= budget.reserved <= int(100_000 * SHARE)
        for i in range(1000):
            cached.admit(i, np.zeros(100))
        assert (
            cached.stats()["held"] > 40
            and cached.stats()["held_bytes"] + 9 * 1000 <= budget.reserved
        )
        second = Cached(1000, budget)  # has what is left
        assert budget.reserved <= 100_000
        third = Cached(10**9, budget_of(MB))  # not even the table fits: holds nothing, and works
        third.admit(3, b"x")
        assert third.get([3]) == [MISSING]
        for mode in (cached, second, third):
            mode.close()
        assert budget.reserved == 0 and cached.get([1]) == [MISSING] and cached.stats() == {}
        cached.admit(1, b"late")  # a worker that is slow to hear of it

    def test_no_more_is_reserved_than_all_samples_take(self) -> None:
        budget = budget_of(100 * MB)
        cached = Cached(100, budget, nbytes=100 * 1000)
        assert budget.reserved < 2 * MB
        for i in range(100):
            cached.admit(i, bytes(1000))
        assert cached.stats()["held"] == 100
        cached.close()

    def test_keep_admits_until_it_is_full_and_lru_what_came_last(self) -> None:
        room = 10 * SampleStore.nbytes_of(np.zeros(100))
        for policy, held in {"auto": range(10), "keep": range(10), "lru": range(90, 100)}.items():
            mode = Cached(100, budget_of(10 * MB), f"{room} B", policy)
            for i in range(100):
                mode.admit(i, np.zeros(100))
            assert [i for i in range(100) if mode.get([i])[0] is not MISSING] == list(held), policy
            mode.close()

    def test_under_permutations_keep_hits_its_part_and_lru_less(self) -> None:
        """Half of the samples held: keep hits each of them once an epoch; an LRU has thrown most
        of them away by then.
        """
        hits = {}
        for policy in ("keep", "lru"):
            mode = Cached(200, budget_of(10 * MB), 100, policy)
            rng, hits[policy] = np.random.default_rng(0), 0
            for epoch in range(6):
                for i in rng.permutation(200).tolist():
                    found = mode.get([i])[0] is not MISSING
                    hits[policy] += found and epoch > 0
                    if not found:
                        mode.admit(i, b"x")
            mode.close()
        assert hits["keep"] == 5 * 100 and hits["lru"] < 300


class _Blocking:
    """A read that answers only when it is told to, and knows what it was asked for."""

    def __init__(self, nbytes: int = 10, blocked: bool = False) -> None:
        self.nbytes, self.asked, self.lock = nbytes, [], threading.Lock()  # type: ignore[var-annotated]
        self.go = threading.Event()
        if not blocked:
            self.go.set()

    def __call__(self, indices: Sequence[int]) -> list[bytes]:
        with self.lock:
            self.asked.append(tuple(indices))
        assert self.go.wait(30)
        if -1 in indices:
            raise OSError("broken")
        return [bytes([i]) * self.nbytes for i in indices]

    def wait_for(self, *batches: tuple[int, ...]) -> None:
        deadline = time.monotonic() + 20
        while not set(batches) <= set(self.asked):
            assert time.monotonic() < deadline, (batches, self.asked)
            time.sleep(0.002)


BATCHES = [[2 * i, 2 * i + 1] for i in range(10)]


@pytest.fixture
def streaming() -> Iterator[Streaming]:
    mode = Streaming(window=1000)
    yield mode
    mode.close()


class TestStreaming:
    def test_what_comes_is_read_before_it_is_asked_for(self, streaming: Streaming) -> None:
        read = _Blocking()
        for number in range(8):
            streaming.prefetch_records(BATCHES[number : number + 3], read)
            if number:
                read.wait_for(*map(tuple, BATCHES[number : number + 3]))
            assert streaming.read(BATCHES[number], read) == [
                bytes([i]) * 10 for i in BATCHES[number]
            ]
        assert Counter(read.asked) == Counter(map(tuple, BATCHES))  # and each of them once

    def test_threads_read_at_the_same_time(self, streaming: Streaming) -> None:
        first, read = _Blocking(), _Blocking(blocked=True)
        streaming.prefetch_records(BATCHES[:1], first)
        streaming.read(BATCHES[0], first)
        streaming.prefetch_records(BATCHES[1:4], read)
        read.wait_for(*map(tuple, BATCHES[1:4]))  # while none has been answered
        read.go.set()
        assert streaming.read(BATCHES[2], read) == [b"\4" * 10, b"\5" * 10]

    @pytest.mark.parametrize(
        ("nbytes", "ahead"), [(10, 8), (100, 5), (200, 2), (400, 1), (10_000, 1)]
    )
    def test_the_window_bounds_the_bytes(
        self, streaming: Streaming, nbytes: int, ahead: int
    ) -> None:
        read = _Blocking(nbytes)
        streaming.prefetch_records(BATCHES[:8], read)
        assert streaming.stats() == {"ahead": 1}  # nobody knows yet how large records are
        streaming.read(BATCHES[0], read)
        streaming.prefetch_records(BATCHES[1:9], read)
        assert streaming.stats() == {"ahead": ahead}
        assert ahead * 2 * nbytes <= 1000 or ahead == 1

    @pytest.mark.parametrize(
        "record",
        [
            np.zeros(100),
            (np.zeros(50), bytes(400)),
            {"a": np.zeros(99), "b": [bytes(8)]},
            bytes(800),
        ],
    )
    def test_the_size_of_a_record(self, record: Any) -> None:
        assert size_of(record) == 800

    def test_other_sizes(self) -> None:
        assert (
            size_of(np.array(1.0)) == 8
            and size_of(object()) == 64
            and size_of("four") == 4
            and size_of([]) == 0
        )

    def test_what_was_not_expected_is_read_at_once(self, streaming: Streaming) -> None:
        read = _Blocking()
        assert streaming.read([7, 8], read) == [b"\7" * 10, b"\x08" * 10]
        streaming.prefetch_records(BATCHES[:1], read)
        # another order is another batch
        assert streaming.read([1, 0], read) == [b"\1" * 10, b"\0" * 10]

    def test_a_failing_read_ahead_fails_where_it_is_asked_for(self, streaming: Streaming) -> None:
        read = _Blocking()
        streaming.prefetch_records([[0, 1], [2, -1], [4, 5]], read)
        assert len(streaming.read([0, 1], read)) == 2
        streaming.prefetch_records([[2, -1], [4, 5]], read)
        read.wait_for((2, -1), (4, 5))
        with pytest.raises(OSError, match="broken"):
            streaming.read([2, -1], read)
        assert len(streaming.read([4, 5], read)) == 2

    def test_an_epoch_left_early_drops_what_was_on_its_way(self, streaming: Streaming) -> None:
        read = _Blocking()
        streaming.prefetch_records(BATCHES[:1], read)
        streaming.read(BATCHES[0], read)
        streaming.prefetch_records(BATCHES[1:4], read)
        assert streaming.stats() == {"ahead": 3}
        streaming.prefetch_records(BATCHES[3:6], read)
        assert streaming.stats() == {"ahead": 3} and set(streaming._pending) == set(
            map(tuple, BATCHES[3:6])
        )

    def test_close_and_use_again(self, streaming: Streaming) -> None:
        read = _Blocking()
        streaming.prefetch_records(BATCHES[:2], read)
        streaming.close()
        assert streaming.stats() == {"ahead": 0}
        streaming.prefetch_records(BATCHES[:1], read)
        assert len(streaming.read(BATCHES[0], read)) == 2

    def test_a_pickle_has_the_window_alone(self, streaming: Streaming) -> None:
        streaming.prefetch_records(BATCHES[:3], _Blocking())
        copy = pickle.loads(pickle.dumps(streaming))
        assert copy.window == 1000 and copy.stats() == {"ahead": 0}

    def test_of_a_dataset_the_sample_at_fault_is_named(self, closing: Any) -> None:
        dataset = closing(Numbers(200, broken=[150]), loading_mode="streaming")
        with pytest.raises(SampleError, match=r"sample 150 can't be read.*record 150 is broken"):
            list(dataset)
        skipping = closing(Numbers(200, broken=[150, 3]), loading_mode="streaming", on_error="skip")
        assert sorted(int(s[0]) for s in skipping) == sorted({*range(200)} - {3, 150})

    def test_a_dataset_left_early_goes_on_in_the_next_epoch(self, closing: Any) -> None:
        dataset = closing(Numbers(500), loading_mode="streaming")
        early = iter(dataset)
        first = [int(next(early)[0]) for _ in range(70)]
        assert len(set(first)) == 70
        for epoch in (1, 0):
            dataset.set_epoch(epoch)
            assert sorted(int(s[0]) for s in dataset) == list(range(500))
        del early


class TestPickles:
    @pytest.mark.parametrize("mode", ["eager", "cached"])
    def test_a_plain_pickle_leaves_what_is_held_behind(self, closing: Any, mode: str) -> None:
        dataset = closing(Numbers(40, 10_000), loading_mode=mode, progress=False)
        assert values(dataset, range(40)) == list(range(40))
        data = pickle.dumps(dataset)
        assert len(data) < 5000
        copy = pickle.loads(data)
        assert copy._mode is None and copy.sample_source.reads is not dataset.sample_source.reads
        before = copy.sample_source.reads.value
        assert values(copy, [5, 6]) == values(copy, [5, 6]) == [5, 6]
        assert copy.sample_source.reads.value - before == (40 if mode == "eager" else 2)
        assert dataset.sample_source.reads.value == 40
        copy.close()

    @pytest.mark.parametrize("mode", ["eager", "cached"])
    def test_modes_refuse_a_plain_pickle(self, closing: Any, mode: str) -> None:
        dataset = closing(loading_mode=mode, progress=False)
        with pytest.raises(TypeError, match="stay behind"):
            pickle.dumps(dataset.mode)

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_workers_share_what_is_held(self, closing: Any, method: str) -> None:
        held = closing(loading_mode="eager", progress=False)
        fills = closing(loading_mode="cached")
        fills.__getitems__([0, 1, 2])
        both = _Pairs(held, fills)
        loader = DataLoader(
            both, batch_size=5, num_workers=2, multiprocessing_context=method, collate_fn=list
        )
        assert [pair for batch in loader for pair in batch] == [(i, i) for i in range(40)]
        assert held.sample_source.reads.value == 40  # read by the parent, before
        # three by the parent, the rest by one worker or the other
        assert fills.mode.stats()["admitted"] == 40
        before = fills.sample_source.reads.value
        assert (
            values(fills, range(40)) == list(range(40))
            and fills.sample_source.reads.value == before
        )


class _Pairs:
    """Two datasets as one, so that workers are started once."""

    def __init__(self, *datasets: BaseDataset) -> None:
        self.datasets = datasets

    def __len__(self) -> int:
        return len(self.datasets[0])

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(int(dataset[index][0]) for dataset in self.datasets)
