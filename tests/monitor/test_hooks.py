"""Hooks tell what each batch took, and what was slow in it; monitors of other loops and
docs/profiling.md.
"""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from headrace import ConfigError
from headrace.monitor import BatchTimes, LoadingMonitor, SlowStage
from headrace.monitor.stats import STAGES
from tests.testing.test_contract import SquareDataset

PAGE = Path(__file__).parents[2] / "docs" / "profiling.md"
MONITORING = PAGE.read_text(encoding="utf-8").partition("\n## Monitoring\n")[2]
WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
SLOW = 17
"""The sample that takes long."""


class Clock(threading.local):
    """Seconds of each thread that go by where code lingers, and a little with each look: other
    work on the machine takes none.
    """

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is `CLOCK`'s time, in forked workers too."""
    monkeypatch.setattr(time, "perf_counter", CLOCK)


def linger(value: Any) -> Any:
    if int(np.asarray(value).reshape(-1)[0]) == SLOW:
        CLOCK.now += 60
    return value


def linger_collating(samples: list[Any]) -> Any:
    CLOCK.now += 30
    return torch.stack([torch.as_tensor(np.asarray(sample)) for sample in samples])


class LingeringDecode(SquareDataset):
    """Its `decode` is slow for one sample."""

    def decode(self, record: Any) -> Any:
        return linger(super().decode(record))


class Foreign(Dataset[Any]):
    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> Any:
        return linger(np.array([index, 0]))


# -- each batch


@WORKERS
def test_each_batch_is_told(loader_of: Any, workers: int) -> None:
    loader, told = loader_of(SquareDataset(), num_workers=workers), []
    loader.on_batch(told.append)
    for epoch in range(2):
        for step, _ in enumerate(loader):
            assert len(told) == 11 * epoch + step + 1
    steps = [(epoch, step) for epoch in range(2) for step in range(11)]
    assert [(one.epoch, one.step) for one in told] == steps
    assert all(isinstance(one, BatchTimes) for one in told)
    assert sum(one.samples for one in told) == 84
    assert {one.worker_pid == os.getpid() for one in told} == {not workers}
    stats = loader.get_stats()
    for stage in (*STAGES, "work"):
        name = f"{stage}_seconds"
        assert sum(getattr(one, name) for one in told) == pytest.approx(stats[name])
    assert sum(one.wait_seconds for one in told) == pytest.approx(stats["wait_time"])
    assert all(one.began < one.received and one.wait_seconds > 0 for one in told)


# -- what was slow


@pytest.mark.parametrize(
    ("stage", "workers"),
    [
        ("decode", 0),
        ("transform", 0),
        ("sample", 0),
        pytest.param("decode", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("clock")
def test_the_slow_stage_is_named(loader_of: Any, workers: int, stage: str) -> None:
    dataset: Any = LingeringDecode()
    if stage != "decode":
        dataset = Foreign() if stage == "sample" else SquareDataset(transform=linger)
    options = {"multiprocessing_context": "fork"} if workers else {}
    loader, told = loader_of(dataset, num_workers=workers, **options), list[SlowStage]()
    loader.on_slow(59, told.append)
    list(loader)
    [slow] = told
    assert slow.stage == stage and slow.seconds == pytest.approx(60, abs=0.1)


@pytest.mark.usefixtures("clock")
def test_a_slow_collate_function_is_of_the_batch(loader_of: Any) -> None:
    loader, told = loader_of(SquareDataset(), collate_fn=linger_collating), []
    loader.on_slow(29, told.append)
    list(loader)
    assert [one.stage for one in told] == ["collate"] * 11


# -- other loops


class Ticks:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture
def monitor(ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> LoadingMonitor:
    monkeypatch.setattr(time, "perf_counter", ticks)
    return LoadingMonitor(enable_monitoring=False)


def test_a_monitor_watches_any_loop(ticks: Ticks, monitor: LoadingMonitor) -> None:
    assert monitor.get_stats() == {}

    def batches() -> Any:
        for _ in range(4):
            ticks.now += 1
            yield [0] * 8

    for _ in range(2):
        for _batch in monitor.watch(batches(), samples=len):
            ticks.now += 3
        ticks.now += 100  # validation
    stats = monitor.get_stats()
    assert (stats["batches"], stats["samples"]) == (8, 64)
    assert (stats["wait_time"], stats["total_time"]) == (8.0, 2 * (4 + 3 * 3))
    assert (stats["wait_fraction"], stats["avg_batch_time"]) == (8 / 26, 26 / 8)
    assert stats["p50_wait"] == 1.0


def test_numbers_of_samples_are_checked(monitor: LoadingMonitor) -> None:
    for wrong in (-1, 0.5, None):
        with pytest.raises(ConfigError):
            list(monitor.watch([1], samples=lambda batch, wrong=wrong: wrong))


# -- docs


def test_the_page_runs(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "train").symlink_to(photos, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", MONITORING, re.DOTALL):
        exec(compile(block, "docs/profiling.md", "exec"), names)
    assert "batch 0: waited" in capsys.readouterr().out
    lines = names["text"].splitlines()
    assert {'headrace_batches{job="train"} 6.0', 'headrace_batches{job="train"} 2.0'} & {*lines}
    line = r'# TYPE headrace_\w+ gauge|headrace_\w+\{job="train"\} [-+.\de]+'
    assert all(re.fullmatch(line, each) for each in lines)
    written: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda name, *_: written.append(name))
    names["to_tensorboard"](names["loader"], writer, every=1)
    list(names["loader"])
    assert {"loader/samples_per_second", "loader/queued_batches"} <= {*written}
    names["loader"].close()


def test_a_hook_is_removed_and_its_error_ends_the_loop(loader_of: Any) -> None:
    loader, told = loader_of(TensorDataset(torch.arange(42.0))), []
    handles = [loader.on_batch(told.append), loader.on_slow(0.0, told.append)]
    iterator = iter(loader)
    next(iterator)
    for handle in handles:
        handle.remove()
    count = len(told)
    list(iterator)
    assert count == len(told) > 1
    loader.on_batch(lambda times: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(iter(loader))


def test_bad_arguments(loader_of: Any) -> None:
    hooks = loader_of(TensorDataset(torch.arange(42.0)))
    for threshold in (-1, float("nan"), float("inf"), True, "1", None):
        with pytest.raises(ConfigError):
            hooks.on_slow(threshold, print)
    with pytest.raises(ConfigError):
        hooks.on_batch(None)
    with pytest.raises(ConfigError):
        hooks.on_slow(1, 3)
