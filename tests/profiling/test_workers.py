"""suggest_num_workers gives the number that the measured rates speak for, and leaves everything
as it was.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from headrace import (
    BudgetError,
    ConfigError,
    DataLoaderConfig,
    ImageDataset,
    SampleError,
    create_dataloader,
    suggest_num_workers,
)
from headrace.profiling.compare import SuggestedWorkers, _chosen, _loader, _numbers, _rates
from headrace.profiling.running import Running, copy_of
from headrace.testing.contract import same
from tests.conftest import living_children
from tests.loader.datasets import Stream
from tests.testing.test_contract import SquareDataset

QUICK: dict[str, Any] = {"seconds": 0.01, "most": 0, "batch_size": 8}

# --- which number ---------------------------------------------------------------------------------


def test_the_fewest_that_suffice() -> None:
    rows: list[tuple[dict[int, float], float | None, int, str]] = [
        ({0: 10.0, 1: 9.0, 2: 18.0, 3: 20.0, 4: 20.5}, None, 3, "within 5 %"),
        ({0: 100.0, 1: 90.0, 2: 104.0}, None, 0, "within 5 %"),
        ({0: 10.0, 1: 12.0, 2: 21.0}, 11.0, 1, "0.09091 s"),
        ({0: 10.0, 1: 12.0, 2: 21.0}, 10.0, 0, "keep up"),
        ({0: 10.0, 1: 20.0, 2: 20.5}, 40.0, 1, "none keep up with a step of 0.025 s"),
    ]
    for rates, target, expected, reason in rows:
        found = _chosen(rates, target)
        assert found == expected and reason in found.reason and found.rates == rates


def test_which_numbers_are_tried() -> None:
    assert _numbers(17, None) == [0, 1, 2, 3, 4, 6, 8, 12, 16]
    assert _numbers(0, None) == _numbers(0, 12) == [0]
    assert _numbers(8, 12) == [0, 1, 2, 3, 4, 6]  # each worker has lanes of its own
    assert _numbers(8, 7) == [0, 1, 7]


def measured(
    speeds: dict[int, float], target: float | None = None, room: int = 99
) -> tuple[dict[int, float], list[tuple[int, int]]]:
    """What is measured of loaders with these rates, and the numbers and epochs in which that was
    done.
    """
    tried: list[tuple[int, int]] = []

    def rate(number: int, epoch: int) -> float | None:
        if number > room:
            return None
        tried.append((number, epoch))
        return speeds[number]

    return _rates(rate, sorted(speeds), target), tried


def test_what_is_measured() -> None:
    rates, tried = measured({0: 10, 1: 10, 2: 20, 3: 30, 4: 31})
    assert rates == {0: 10, 1: 10, 2: 20, 3: 30, 4: 31}
    # each has an epoch of its own, and none the first, in which all is opened
    assert tried == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    # two in a row that gain nothing end it, but not one
    assert list(measured({0: 10, 1: 20, 2: 20.5, 3: 20, 4: 90})[0]) == [0, 1, 2, 3]
    assert len(measured({0: 10, 1: 9, 2: 18, 3: 18, 4: 30, 6: 30})[0]) == 6
    assert list(measured({0: 10, 1: 12, 2: 20, 3: 30}, target=11)[0]) == [0, 1], "enough is enough"
    assert list(measured({0: 10, 1: 20, 2: 30, 3: 40}, room=1)[0]) == [0, 1], "no room for more"


class Clock:
    """The module `time`, in which only what is made takes time."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter


class Timed:
    """A loader whose workers make a batch each so many seconds, and that has some made ahead."""

    def __init__(self, clock: Clock, seconds: float, workers: int, length: int = 7) -> None:
        self.clock, self.seconds, self.num_workers, self.length = clock, seconds, workers, length
        self.prefetch_factor = 2 if workers else None
        self.handed_out = 0
        self.done = clock.now + 5  # the workers start

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            if self.handed_out >= 2 * self.num_workers:
                self.done += self.seconds
            self.clock.now = max(self.clock.now, self.done)
            self.handed_out += 1
            yield number


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("headrace.profiling.running.time", clock)
    return clock


def test_the_rate_is_that_of_the_long_run(clock: Clock) -> None:
    for workers, length in ((0, 1), (1, 7), (4, 1), (4, 1000)):
        loader = Timed(clock, 0.125, workers, length)
        assert Running(loader).run(4.0).rate == pytest.approx(8.0)
        assert loader.handed_out == max(1, 2 * workers) + 32


# --- what is given back ---------------------------------------------------------------------------


def test_it_is_an_int_that_explains_itself() -> None:
    found = SuggestedWorkers(2, {0: 101.23456, 1: 99.0, 2: 198.5}, "because")
    assert found == 2 and f"{found}" == str(found) == "2" and range(5)[found] == 2
    *_, best, reason = found.explain().splitlines()
    assert best.split() == ["2", "198.5", "100%", "<--"] and reason == "num_workers=2: because"
    for other in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert type(other) is SuggestedWorkers and other == 2
        assert (other.rates, other.reason) == (found.rates, "because")
    assert create_dataloader(SquareDataset(), num_workers=found).num_workers == 2
    assert DataLoader(TensorDataset(torch.zeros(3)), num_workers=found).num_workers == 2


# --- real loaders ---------------------------------------------------------------------------------


def test_a_dataset_is_measured_and_left_as_it_was(photos: Path) -> None:
    drawn = []
    for measures in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if measures:
            with ImageDataset(photos, image_size=32, loading_mode="cached") as dataset:
                found = suggest_num_workers(dataset, **{**QUICK, "most": 1})
                assert set(found.rates) == {0, 1} and min(found.rates.values()) > 0
                assert dataset.held.stats()["held"] == 0, "its cache is not filled"
        drawn.append((torch.rand(1), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1] and not living_children()


def test_paths_and_datasets_of_torch(photos: Path) -> None:
    assert suggest_num_workers(photos, image_size=16, loading_mode="eager", **QUICK) == 0
    with SquareDataset(loading_mode="cached") as inner:
        assert suggest_num_workers(ConcatDataset([inner]), **QUICK) == 0


def test_a_loader_is_measured_with_its_options() -> None:
    seen: list[Any] = []
    loader = create_dataloader(SquareDataset(), batch_size=5, num_workers=1, drop_last=True, seed=9)
    state = loader.state_dict()
    step = seen.append
    assert suggest_num_workers(loader, seconds=0.01, most=0, step=step) == 0
    assert {len(batch) for batch in seen} == {5} and loader.state_dict() == state
    loader.close()


def test_a_torch_loader_is_copied() -> None:
    data = TensorDataset(torch.arange(10))
    for loader in [
        DataLoader(data, batch_size=4, drop_last=True),
        DataLoader(data, batch_sampler=[[1, 2], [3]], collate_fn=list),
        DataLoader(data, batch_size=None, sampler=[3, 1]),
        DataLoader(Stream(6), batch_size=4),
        DataLoader(Stream(6), batch_size=None),
    ]:
        other = copy_of(loader, num_workers=0)
        assert other is not loader and same(list(other), list(loader))
    options: dict[str, Any] = {"prefetch_factor": 3, "timeout": 50}
    loader = DataLoader(data, 3, num_workers=1, multiprocessing_context="fork", **options)
    other = copy_of(loader, num_workers=2)
    assert (other.num_workers, other.prefetch_factor, other.timeout) == (2, 3, 50)
    assert set(suggest_num_workers(loader, seconds=0.01, most=1).rates) == {0, 1}


def test_workers_that_the_budget_has_no_room_for_are_not_tried() -> None:
    class Large(SquareDataset):
        def sample_nbytes(self) -> int:
            return 100_000

    def loader(batches: int, number: int) -> Any:
        config = DataLoaderConfig(batch_size=8, max_memory_usage=batches * 800_000)
        return _loader(Large(), config, number)

    assert loader(4, 0).num_workers == 0 and loader(4, 3) is None
    with pytest.raises(BudgetError):
        loader(1, 0)


# --- errors ---------------------------------------------------------------------------------------


class Failing(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if torch.utils.data.get_worker_info() is not None:
            raise KeyError("only in a worker")
        return index


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_errors_pass_and_no_worker_stays(kind: str) -> None:
    """Those of a worker, and of the step."""
    failing: Any = Failing() if kind == "ours" else DataLoader(Failing(), batch_size=2)
    with pytest.raises(KeyError, match="only in a worker"):
        suggest_num_workers(failing, seconds=0.01, most=1)
    assert not living_children()

    def step(batch: Any) -> None:
        if living_children():
            raise KeyboardInterrupt

    data: Any = SquareDataset() if kind == "ours" else DataLoader(TensorDataset(torch.zeros(9)))
    try:
        suggest_num_workers(data, seconds=0.01, most=1, step=step)
    except KeyboardInterrupt as caught:
        assert caught.__traceback__ is not None
        assert not living_children(), "while the error is held"
    else:
        raise AssertionError("it passed")


def test_samples_that_cannot_be_read_are_named() -> None:
    with pytest.raises(SampleError, match="sample 7"):
        suggest_num_workers(SquareDataset(bad=[7]), seconds=0.01, most=0, shuffle=False)


def test_what_makes_no_sense() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"seconds": 0}, "seconds"),
        ({"seconds": float("inf")}, "seconds"),
        ({"most": -1}, "most"),
        ({"most": 1.5}, "most"),
        ({"step": 0}, "step"),
        ({"step": "fast"}, "step"),
        ({"step": True}, "step"),
        ({"num_workers": 2}, "num_workers"),
        ({"batchsize": 2}, "batchsize"),
        ({"batch_size": 64, "drop_last": True}, "no batch"),
    ]
    for options, word in rows:
        with pytest.raises(ConfigError, match=word):
            suggest_num_workers(SquareDataset(), **{"seconds": 0.01, "most": 0, **options})
    for options in ({"config": DataLoaderConfig()}, {"batch_size": 3}):
        with pytest.raises(ConfigError, match="a loader has its options"):
            suggest_num_workers(create_dataloader(SquareDataset(), num_workers=0), **options)
