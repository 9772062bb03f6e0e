"""The numbers of `get_stats()` are true."""

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

from headrace.memory.limits import memory_limits, tightest
from headrace.monitor import stats as stats_module
from headrace.monitor.stats import LoadingStats, pss_of
from headrace.testing.contract import RandomProbe
from tests.loader.datasets import Stream
from tests.testing.test_contract import SquareDataset

WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
ALWAYS = """
dataset_size num_batches batch_size num_workers queued_batches queued_bytes batches samples
total_time avg_batch_time batches_per_second samples_per_second wait_time wait_fraction p50_wait
p90_wait p99_wait transfer_time cache_hits cache_misses chunks_decoded chunk_hits bytes_read
errors skipped read_seconds decode_seconds work_seconds work_cpu_seconds transform_seconds
collate_seconds sample_seconds avg_memory_bytes avg_memory_usage
peak_memory_bytes avg_cpu_usage
"""


def test_average_memory_is_bytes_and_percent(loader_of: Any) -> None:
    loader = loader_of(SquareDataset(), enable_monitoring=True)
    list(loader)
    stats = loader.get_stats()
    share = stats["avg_memory_bytes"] / tightest(memory_limits()).total
    assert stats["avg_memory_usage"] == pytest.approx(100 * share) and 0 < share < 1


@pytest.mark.parametrize(("mode", "workers"), [("lazy", 0), ("eager", 1), ("cached", 2)])
def test_hits_and_misses_add_up(loader_of: Any, workers: int, mode: str) -> None:
    with SquareDataset(loading_mode=mode, progress=False, transform=RandomProbe()) as dataset:
        loader = loader_of(dataset, num_workers=workers)
        for epoch in range(1, 4):
            list(loader)
            stats = loader.get_stats()
            hits = {"eager": 42 * epoch, "cached": 42 * (epoch - 1)}.get(mode, 0)
            assert (stats["cache_hits"], stats["cache_misses"]) == (hits, 42 * epoch - hits)
            assert stats["bytes_read"] == (0 if mode == "eager" else 16 * stats["cache_misses"])
            if mode != "lazy":
                assert stats["held"] == 42 and stats["held_bytes"] >= 42 * 16
        loader.close()


@WORKERS
def test_errors_are_counted_also_where_the_batch_is_lost(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(bad=[5, 6, 30]), num_workers=workers, shuffle=False)
    iterator, raised = iter(loader), 0
    for _ in range(11):
        try:
            next(iterator)
        except OSError:
            raised += 1
    assert raised == 2
    stats = loader.get_stats()
    assert stats["errors"] == 2 and stats["batches"] == 9 and stats["skipped"] == 0
    skipping = loader_of(SquareDataset(bad=[5, 6, 30], on_error="skip"), num_workers=workers)
    list(skipping)
    stats = skipping.get_stats()
    assert stats["errors"] == 3 == stats["skipped"] and stats["samples"] == 39


@pytest.mark.parametrize("workers", [0, 1])
def test_queued_batches(loader_of: Any, workers: int) -> None:
    loader = loader_of(SquareDataset(), num_workers=workers, prefetch_factor=2 if workers else None)
    iterator = iter(loader)
    next(iterator)
    stats = loader.get_stats()
    assert stats["queued_batches"] == 2 * workers
    assert stats["queued_bytes"] == 2 * workers * 4 * 16
    list(iterator)
    assert loader.get_stats()["queued_batches"] == 0


def test_a_pause_between_epochs_is_no_waiting(
    loader_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()  # each look at the clock takes a second
    monkeypatch.setattr("headrace.loader.epoch.time.perf_counter", lambda: float(next(clock)))
    loader = loader_of(SquareDataset())
    list(loader)
    before = loader.get_stats()["total_time"]
    for _ in range(1000):
        next(clock)
    list(loader)
    assert loader.get_stats()["total_time"] == pytest.approx(2 * before)


def test_waits_and_batches() -> None:
    stats = LoadingStats()
    assert not any(stats.as_dict().values()) and stats.counts["skipped"] == 0
    for wait in range(1, 101):
        stats.add_batch(3, wait / 100, wait / 25)
    found = stats.as_dict()
    assert (found["batches"], found["samples"]) == (100, 300)
    assert (found["wait_fraction"], found["total_time"]) == pytest.approx((0.25, 202))
    assert [found[f"p{q}_wait"] for q in (50, 90, 99)] == pytest.approx([0.505, 0.901, 0.9901])
    assert "avg_memory_bytes" not in found and "skipped_samples" not in found


def test_no_more_than_a_thousand_are_listed() -> None:
    stats = LoadingStats()
    for start in range(0, 2500, 99):
        some = [(i, "path", "error") for i in range(start, start + 99)]
        stats.add_report({"skipped": 99, "skipped_samples": some})
    assert [entry["index"] for entry in stats.skipped] == list(range(1000))
    assert stats.counts["skipped"] == 26 * 99


def test_memory_is_looked_at_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looked = [100.0], []
    monkeypatch.setattr(stats_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stats_module, "pss_of", lambda pid: looked.append(pid) or 10)
    stats = LoadingStats()
    for step in (0.0, 0.5, 0.4, 0.2, 0.1, 5.0):
        now[0] += step
        stats.look([])
    assert len(looked) == 3 and set(looked) == {os.getpid()}
    stats.add_batch(1, 0.0, 1.0)
    assert stats.as_dict()["avg_memory_bytes"] == 10 == stats.as_dict()["peak_memory_bytes"]


def test_without_pss_it_is_rss(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=77))
    monkeypatch.setattr("builtins.open", no_file)
    monkeypatch.setattr(psutil, "Process", lambda pid: process)
    assert pss_of(1) == 77


@WORKERS
def test_what_is_counted(loader_of: Any, workers: int) -> None:
    dataset = SquareDataset(bad=[5, 30], on_error="skip")
    loader = loader_of(dataset, num_workers=workers, enable_monitoring=True)
    assert loader.get_stats() == {}
    for epoch in range(1, 3):
        list(loader)
        stats = loader.get_stats()
        counts = {"batches": 11 * epoch, "samples": 40 * epoch, "skipped": 2 * epoch}
        fixed = {"dataset_size": 42, "num_batches": 11, "batch_size": 4, "num_workers": workers}
        nothing = {"queued_batches": 0, "queued_bytes": 0}
        assert stats.items() >= (counts | fixed | nothing).items()
    assert set(stats) >= set(ALWAYS.split()) and stats["avg_memory_bytes"] > 1 << 20
    plain = {type(value) for name, value in stats.items() if name != "skipped_samples"}
    assert plain == {int, float}
    assert stats["peak_memory_bytes"] >= stats["avg_memory_bytes"]
    assert {entry["index"] for entry in stats["skipped_samples"]} == {5, 30}
    for entry in stats["skipped_samples"]:
        assert "Squares" in entry["path"] and "can't be read" in entry["error"]
    stats["skipped_samples"].clear()
    assert loader.get_stats()["skipped_samples"] and loader.state_dict()["skipped_samples"]


def test_foreign_datasets_and_streams(loader_of: Any) -> None:
    for dataset, size, batches in ((TensorDataset(torch.zeros(10)), 10, 3), (Stream(10), 0, 0)):
        loader = loader_of(dataset, enable_monitoring=False)
        list(loader)
        stats = loader.get_stats()
        assert (stats["dataset_size"], stats["num_batches"]) == (size, batches)
        assert (stats["batches"], stats["samples"]) == (3, 10)
        assert "avg_memory_bytes" not in stats and len(str(stats).splitlines()) == len(stats)


def test_memory_of_a_dead_worker_is_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert pss_of(process.pid) == 0 < pss_of(os.getpid())
    stats = LoadingStats()
    stats.look([process.pid])
    stats.add_report({"work_cpu_seconds": 0.5})
    stats.add_batch(4, 0.0, 2.0)
    found = stats.as_dict()
    assert found["peak_memory_bytes"] > 0 and found["avg_cpu_usage"] == pytest.approx(25)
