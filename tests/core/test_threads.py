"""Decoding in threads: how many samples at once, and nothing but the time changes."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace import BaseDataset, SampleError
from headrace.core import reader as threads_module
from headrace.core.reader import WorkerThreads, threads_of
from tests.core.test_filling import Arrays


@pytest.fixture
def threads() -> Iterator[WorkerThreads]:
    made = WorkerThreads()
    yield made
    if made._pool is not None:
        made._pool.shutdown()


def several(monkeypatch: pytest.MonkeyPatch, number: int = 3) -> None:
    """As if this process, and each worker, had so many threads."""
    worker = type("Info", (), {"num_workers": 1})
    monkeypatch.setattr(threads_module, "threads_of", lambda *_: number)
    monkeypatch.setattr(threads_module, "get_worker_info", lambda: worker)


def test_the_cores_that_are_left() -> None:
    for workers, cores, ranks, number in (
        (1, 1, 1, 1),
        (1, 2, 1, 1),
        (1, 4, 1, 3),
        (2, 8, 1, 3),
        (8, 16, 1, 1),
        (8, 64, 1, 6),
        (8, 64, 8, 1),
        (1, 64, 1, 8),
        (3, 2, 4, 1),
    ):
        assert threads_of(workers, cores, ranks) == number, (workers, cores, ranks)


def test_in_the_training_s_process_threads_copy_and_no_more(
    threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.current_thread().name
    names: list[str] = []

    def name(_: int) -> None:
        names.append(threading.current_thread().name)

    # none where torch has one, or little is to copy
    for number, nbytes in ((1, 10 << 20), (4, 1 << 20)):
        monkeypatch.setattr(threads_module.torch, "get_num_threads", lambda n=number: n)
        WorkerThreads().map(name, 9, nbytes)
    monkeypatch.setattr(threads_module.torch, "get_num_threads", lambda: 3)
    assert threads.map(name, 5) == [None] * 5
    assert names == [main] * 23
    barrier = threading.Barrier(3, timeout=30)
    copied: list[int] = []

    def copy_one(number: int) -> None:
        copied.append(number)
        barrier.wait()

    threads.map(copy_one, 36, 10 << 20)
    assert sorted(copied) == list(range(36))
    with pytest.raises(ZeroDivisionError):
        threads.map(lambda number: 1 // (number - 7), 30, 10 << 20)


def test_they_work_at_the_same_time_and_in_order(
    threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    several(monkeypatch)
    barrier = threading.Barrier(3, timeout=30)
    threads.map(lambda _: barrier.wait(), 3)
    for count in (0, 1, 2, 12, 13, 100):
        squares = [number * number for number in range(count)]
        assert threads.map(lambda number: number * number, count) == squares
    for copied in (pickle.loads(pickle.dumps(threads)), copy.deepcopy(threads)):
        assert copied is not threads  # and begins without


NUMBERS = np.repeat(np.arange(40, dtype=np.uint8), 12).reshape(40, 3, 4)


class Doubled(BaseDataset):
    def __init__(self, bad: int = -1, **options: Any) -> None:
        super().__init__(Arrays(NUMBERS), targets=np.arange(40), **options)
        self.bad = bad

    def decode(self, record: Any) -> Any:
        if record[0, 0] == self.bad:
            raise ValueError("broken")
        return record * 2

    def value_spec(self) -> Any:
        return (3, 4), np.dtype(np.uint8)


def test_a_dataset_gives_the_same_with_them(
    monkeypatch: pytest.MonkeyPatch, make_loader: Callable[..., Any]
) -> None:
    several(monkeypatch)  # workers are forked, and see it too

    def loader_of(**options: Any) -> Any:
        return make_loader(
            Doubled(**options),
            batch_size=16,
            num_workers=1,
            multiprocessing_context="fork",
            shuffle=False,
        )

    batches = list(loader_of())
    targets = torch.cat([targets for _, targets in batches])
    assert targets.tolist() == list(range(40))
    assert (torch.cat([values for values, _ in batches]) == 2 * targets[:, None, None]).all()
    with pytest.raises(SampleError, match="sample 7 "):
        list(loader_of(bad=7))
    loader = loader_of(bad=7, on_error="skip")
    assert [len(targets) for _, targets in loader] == [15, 16, 8]
    assert loader.get_stats()["skipped"] == loader.get_stats()["errors"] == 1
