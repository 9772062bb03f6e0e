"""Decoding in threads: how many samples at once, and nothing but the time changes."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace import BaseDataset, SampleError
from headrace.datasets.core import threads as threads_module
from headrace.datasets.core.threads import WorkerThreads, threads_of
from headrace.storage.source import Source


@pytest.mark.parametrize(
    ("workers", "cores", "ranks", "number"),
    [
        (1, 1, 1, 1),
        (1, 2, 1, 1),
        (2, 2, 1, 1),
        (1, 4, 1, 3),
        (2, 8, 1, 3),
        (8, 16, 1, 1),
        (8, 64, 1, 6),
        (8, 64, 8, 1),
        (1, 64, 1, 8),
        (3, 2, 4, 1),
    ],
)
def test_the_cores_that_are_left(workers: int, cores: int, ranks: int, number: int) -> None:
    assert threads_of(workers, cores, ranks) == number


def several(monkeypatch: pytest.MonkeyPatch, number: int = 3) -> None:
    """As if this process, and each worker, had so many threads."""
    monkeypatch.setattr(threads_module, "threads_of", lambda *_: number)
    monkeypatch.setattr(
        threads_module, "get_worker_info", lambda: type("Info", (), {"num_workers": 1})
    )


def ended(threads: WorkerThreads) -> None:
    assert threads._pool is not None
    threads._pool.shutdown()


def test_in_the_training_s_process_threads_copy_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads_module.torch, "get_num_threads", lambda: 3)
    names: list[str] = []
    threads = WorkerThreads()
    assert (
        threads.map(lambda number: names.append(threading.current_thread().name), 5) == [None] * 5
    )
    assert names == [threading.current_thread().name] * 5
    barrier, seen = threading.Barrier(3, timeout=30), []

    def copy(number: int) -> None:
        seen.append(number)
        barrier.wait()

    threads.copy(copy, 30, nbytes=10 << 20)
    assert sorted(seen) == list(range(30))
    with pytest.raises(ZeroDivisionError):
        threads.copy(lambda number: 1 // (number - 7), 30, nbytes=10 << 20)
    ended(threads)


class Clock(threading.local):
    """Seconds of each thread, which a function lets go by."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("number", [1, 3])
def test_each_number_is_timed_by_itself(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, threads = Clock(), WorkerThreads()
    several(monkeypatch, number)
    monkeypatch.setattr(threads_module.time, "perf_counter", clock)

    def linger(one: int) -> int:
        clock.now += one
        return 2 * one

    made, seconds = threads.timed_map(linger, 40)
    assert (
        made == [2 * one for one in range(40)]
        and seconds == list(range(40))
        and threads.timed_map(linger, 0) == ([], [])
    )
    if number > 1:
        ended(threads)


@pytest.mark.parametrize(("torchs", "nbytes"), [(1, 10 << 20), (4, 1 << 20)])
def test_none_where_torch_has_one_or_little_is_to_copy(
    monkeypatch: pytest.MonkeyPatch, torchs: int, nbytes: int
) -> None:
    monkeypatch.setattr(threads_module.torch, "get_num_threads", lambda: torchs)
    threads, names = WorkerThreads(), set()
    threads.copy(lambda _: names.add(threading.current_thread().name), 9, nbytes)
    assert threads._pool is None and names == {threading.current_thread().name}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 12, 13, 100])
def test_results_come_in_order(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    several(monkeypatch)
    threads = WorkerThreads()
    assert threads.map(lambda number: number * number, count) == [
        number * number for number in range(count)
    ]
    if count > 1:
        ended(threads)


def test_they_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    several(monkeypatch)
    barrier, threads = threading.Barrier(3, timeout=30), WorkerThreads()
    threads.map(lambda _: barrier.wait(), 3)
    ended(threads)


def test_the_first_error_is_raised_when_nothing_runs_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several(monkeypatch)
    threads, running = WorkerThreads(), []

    def work(number: int) -> None:
        running.append(number)
        try:
            if number in (4, 40):
                raise KeyError(number)
        finally:
            running.remove(number)

    with pytest.raises(KeyError, match="4") as raised:
        threads.map(work, 60)
    assert raised.value.args == (4,) and not running
    ended(threads)


def test_copies_begin_without(monkeypatch: pytest.MonkeyPatch) -> None:
    several(monkeypatch)
    threads = WorkerThreads()
    threads.map(abs, 4)
    for other in (pickle.loads(pickle.dumps(threads)), copy.deepcopy(threads)):
        assert other._pool is None
    ended(threads)


class Numbers(Source):
    def __len__(self) -> int:
        return 40

    def read(self, indices: Any) -> list[Any]:
        return [np.full((3, 4), i, np.uint8) for i in indices]

    def fingerprint(self) -> str:
        return "numbers"


class Slow(BaseDataset):
    """Says which threads decoded."""

    def __init__(self, bad: int = -1, **options: Any) -> None:
        super().__init__(Numbers(), targets=np.arange(40), **options)
        self.bad = bad

    def decode(self, record: Any) -> Any:
        if record[0, 0] == self.bad:
            raise ValueError("broken")
        return record * 2

    def value_spec(self) -> Any:
        return (3, 4), np.dtype(np.uint8)


class Listed(Slow):
    def value_spec(self) -> Any:
        return None


@pytest.mark.parametrize("kind", [Slow, Listed])
@pytest.mark.parametrize("number", [1, 3])
def test_a_dataset_gives_the_same_with_them(
    monkeypatch: pytest.MonkeyPatch, make_loader: Callable[..., Any], kind: type[Slow], number: int
) -> None:
    several(monkeypatch, number)  # workers are forked, and see it too
    loader = make_loader(kind(), batch_size=16, num_workers=1, multiprocessing_context="fork")
    seen = torch.cat(
        [targets for values, targets in loader if (values == 2 * targets[:, None, None]).all()]
    )
    assert sorted(seen.tolist()) == list(range(40))
    loader = make_loader(
        kind(bad=7), batch_size=16, num_workers=1, multiprocessing_context="fork", shuffle=False
    )
    with pytest.raises(SampleError, match="sample 7 can't be decoded"):
        list(loader)
    loader = make_loader(
        kind(bad=7, on_error="skip"),
        batch_size=16,
        num_workers=1,
        multiprocessing_context="fork",
        shuffle=False,
    )
    assert [len(targets) for _, targets in loader] == [15, 16, 8]
    assert loader.get_stats()["skipped"] == loader.get_stats()["errors"] == 1
