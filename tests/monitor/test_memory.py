"""MemoryMonitor: numbers are those of the limit that counts, measured when they should be."""

import os
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace import ConfigError
from headrace.memory.limits import Limit
from headrace.monitor import MemoryMonitor, memory as module

MB, GB = 10**6, 10**9
HOST = Limit("host", 64 * GB, 8 * GB)


class World:
    """A machine with a clock and a limit that a test sets, and which counts how often it is
    looked at.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.used, self.pss, self.looks = 100.0, 1 * GB, 300 * MB, 0
        self.others: list[Limit] = [HOST]
        monkeypatch.setattr(module, "pss_of", lambda pid: self.pss if pid == os.getpid() else 1 / 0)
        monkeypatch.setattr(module, "memory_limits", self.limits)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def limits(self) -> Sequence[Limit]:
        self.looks += 1
        return [*self.others, Limit("cgroup", 4 * GB, self.used)]

    def monitor(self, interval: float = 1.0) -> MemoryMonitor:
        return MemoryMonitor(interval)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_of_the_tightest_limit(world: World) -> None:
    assert world.monitor().get_memory_stats() == {
        "used_gb": 1.0,
        "available_gb": 3.0,
        "percent": 25.0,
        "limit_gb": 4.0,
        "limit_source": "cgroup",
        "process_pss_gb": 0.3,
        "peak_used_gb": 1.0,
        "peak_process_pss_gb": 0.3,
    }
    world.others = [Limit("parent", 10 * GB, 9 * GB), HOST]
    assert figures(world) == ("parent", 10.0, 1.0, 90.0)
    world.others = [Limit("small", GB, 2 * GB)]
    assert figures(world) == ("small", 1.0, 0.0, 200.0)
    world.others = [Limit("small", 0, 0)]
    assert figures(world) == ("small", 0.0, 0.0, 100.0)


def figures(world: World) -> tuple[Any, ...]:
    stats = world.monitor().get_memory_stats()
    return tuple(stats[k] for k in ("limit_source", "limit_gb", "available_gb", "percent"))


def test_it_measures_by_time_and_not_by_batch(world: World) -> None:
    monitor, always = world.monitor(interval=2.0), world.monitor(interval=0)
    assert world.looks == 0
    monitor.start_monitoring()
    assert world.looks == 1
    measured = []
    for tick in range(1, 101):
        world.now = 100.0 + tick / 16  # exact in binary
        if monitor.update():
            measured.append(world.now)
    assert measured == [102.0, 104.0, 106.0] and world.looks == 4
    world.used = 2 * GB
    assert monitor.get_memory_stats()["used_gb"] == 1.0
    assert always.update() and always.update()


def test_peaks(world: World) -> None:
    monitor = world.monitor()
    monitor.start_monitoring()
    for used, pss in ((3 * GB, 100 * MB), (2 * GB, 900 * MB), (1 * GB, 50 * MB)):
        world.used, world.pss, world.now = used, pss, world.now + 1
        monitor.update()
    stats = monitor.get_memory_stats()
    assert (stats["used_gb"], stats["peak_used_gb"]) == (1.0, 3.0)
    assert (stats["process_pss_gb"], stats["peak_process_pss_gb"]) == (0.05, 0.9)
    monitor.start_monitoring()
    stats = monitor.get_memory_stats()
    assert (stats["peak_used_gb"], stats["peak_process_pss_gb"]) == (1.0, 0.05)


def test_would_it_fit(world: World) -> None:
    fits: dict[Any, bool] = {
        0: True,
        3 * GB: True,
        3 * GB + 1: False,
        np.int64(5): True,
        "3GB": True,
        "3.1GB": False,
        "1TiB": False,
    }
    for nbytes, expected in fits.items():
        assert world.monitor().check_memory_constraint(nbytes) is expected, nbytes


def test_it_travels_and_begins_anew() -> None:
    monitor = MemoryMonitor(interval=1e9)
    monitor.start_monitoring()
    other = pickle.loads(pickle.dumps(monitor))
    assert other.interval == 1e9
    assert repr(other) == repr(monitor) == "MemoryMonitor(interval=1000000000.0)"
    assert not monitor.update() and other.update()
    assert other.get_memory_stats().keys() == monitor.get_memory_stats().keys()


def test_bad_arguments(world: World) -> None:
    for nbytes in (-1, "many", 1.5, None, True):
        with pytest.raises(ConfigError):
            world.monitor().check_memory_constraint(nbytes)  # type: ignore[arg-type]
    for interval in (-0.1, float("nan"), "1", None, True):
        with pytest.raises(ConfigError):
            MemoryMonitor(interval)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_measures_itself() -> None:
    monitor = MemoryMonitor(interval=1e9)
    monitor.start_monitoring()
    assert not monitor.update()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if monitor.update() and not monitor.update() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
