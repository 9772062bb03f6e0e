"""Runs loaders for some seconds, with a step or alone, and counts what they do."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from headrace.loader.loader import Loader
from headrace.memory.limits import usable_cpus
from headrace.memory.tree import map_tensors
from headrace.monitor.hooks import BatchTimes
from headrace.monitor.stats import TIMES, pss_of
from headrace.profiling.room import finish_kernels
from headrace.profiling.workers import endless

Step = Callable[[Any], Any]
_LOOK_EVERY = 0.25  # seconds between two looks at memory
_KEPT = 400  # batches of the time line


@dataclass(slots=True)
class Turn:
    """What happened while a loader ran.

    Attributes:
        samples, batches: that came.
        seconds: from the first of them to the last.
        wait: seconds blocked in ``next``.
        own_cpu: seconds that this process computed.
        others: cores that other processes of the machine kept busy; 0 where that can't be told.
        queued: seconds that workers were ready to compute and had no core; 0 where the system does
            not say.
        times: of the workers, by name: see `Loader.get_stats()`; of a loader that is not headrace's
            only what they computed.
        told: each batch.
        series: seconds since the beginning, samples a second, and bytes of memory.
    """

    samples: int = 0
    batches: int = 0
    seconds: float = 0.0
    wait: float = 0.0
    own_cpu: float = 0.0
    others: float = 0.0
    queued: float = 0.0
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    told: deque[BatchTimes] = field(default_factory=lambda: deque(maxlen=_KEPT))
    series: list[tuple[float, float, int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / max(self.seconds, 1e-9)

    def a_sample(self, name: str) -> float:
        """Seconds of a stage for each sample."""
        return self.times.get(name, 0.0) / max(self.samples, 1)


class Running:
    """A loader that is asked for batches in turns, epoch after epoch; between two turns its workers
    fill their queue, and rest.

    Args:
        loader: of headrace's or of torch's; ended by `close`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader: Any = loader
        self._told: deque[BatchTimes] = deque(maxlen=_KEPT)
        self._count, self._own_pid = 0, os.getpid()
        self._pids: set[int] = set()
        if isinstance(loader, Loader):
            loader.on_batch(self._tell)
        self._batches: Generator[Any, None, None] | None = None

    def _tell(self, times: BatchTimes) -> None:
        self._told.append(times)
        self._count = times.samples
        if times.worker_pid != self._own_pid:
            self._pids.add(times.worker_pid)

    def _next(self) -> Any:
        if self._batches is None:
            self._batches = endless(self.loader)
        return next(self._batches)

    def _samples_of(self, batch: Any) -> int:
        """The samples of the last batch; of a list of samples only headrace's loaders say how
        many they are.
        """
        return self._count if isinstance(self.loader, Loader) else samples_of(batch)

    def first(self, number: int) -> list[tuple[Any, int]]:
        """Some batches, to be kept, and how many samples each has."""
        kept = []
        for _ in range(number):
            batch = self._next()
            kept.append((batch, self._samples_of(batch)))
        return kept

    def run(self, seconds: float, step: Step | None = None, *, looks: bool = False) -> Turn:
        """Takes batches for some seconds, after those that were made ahead.

        Args:
            seconds: a batch that takes longer is waited for.
            step: called with each.
            looks: sample memory too.
        """
        turn, prefetched = Turn(), self._prefetched()
        began, begun_at, looked = time.perf_counter(), None, 0.0
        seen, before, cpu, busy, paused = 0, self._times(), 0.0, 0.0, 0.0
        queued: dict[int, float] = {}
        while True:
            asked = time.perf_counter()
            batch = self._next()
            got = time.perf_counter()
            count = self._samples_of(batch)
            if step is not None:
                step(batch)
            del batch
            now = time.perf_counter()
            seen += 1
            if begun_at is None:
                if seen >= prefetched or now - began >= 0.4 * seconds:
                    finish_kernels()
                    self._told.clear()
                    queued = {pid: _queued(pid) for pid in self._pids}
                    before, cpu, busy = self._times(), time.process_time(), _busy()
                    begun_at = looked = time.perf_counter()
                continue
            turn.batches, turn.samples = turn.batches + 1, turn.samples + count
            turn.wait += got - asked
            if looks and now - looked >= _LOOK_EVERY:
                elapsed = now - begun_at - paused
                turn.series.append((elapsed, turn.samples / max(elapsed, 1e-9), self._memory()))
                looked = time.perf_counter()
                paused += looked - now
            if now - begun_at >= seconds:
                break
        finish_kernels()
        turn.seconds, turn.own_cpu = (
            time.perf_counter() - begun_at - paused,
            time.process_time() - cpu,
        )
        turn.queued = sum(max(0.0, _queued(pid) - before_it) for pid, before_it in queued.items())
        after = self._times()
        turn.times = {name: after[name] - before[name] for name in after}
        busy, own = _busy() - busy, turn.own_cpu + turn.times["work_cpu_seconds"]
        if isinstance(self.loader, Loader) and usable_cpus() == psutil.cpu_count():
            turn.others = max(0.0, (busy - own) / max(turn.seconds, 1e-9))
        turn.told = deque(self._told, _KEPT)
        if turn.series:
            turn.series = _differences(turn.series)
        return turn

    def _prefetched(self) -> int:
        workers = getattr(self.loader, "num_workers", 0)
        return max(1, workers * (getattr(self.loader, "prefetch_factor", None) or 1))

    def _times(self) -> dict[str, float]:
        if not isinstance(self.loader, Loader):
            return {**dict.fromkeys(TIMES, 0.0), "work_cpu_seconds": _computed_by_children()}
        stats = self.loader.get_stats()
        return {name: float(stats.get(name, 0.0)) for name in TIMES}

    def _memory(self) -> int:
        """Bytes of this process and its workers (PSS)."""
        pids = self._pids
        if not isinstance(self.loader, Loader):
            with contextlib.suppress(psutil.Error):
                pids = {child.pid for child in psutil.Process().children()}
        return sum(map(pss_of, (self._own_pid, *pids)))

    def close(self) -> None:
        """Ends the workers."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None
        if isinstance(self.loader, Loader):
            self.loader.close()


def _queued(pid: int) -> float:
    """Seconds that a process's first thread was ready and had no core, since it began; 0 where
    the system does not say.
    """
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _computed_by_children() -> float:
    """Seconds that the children of this process have computed."""
    seconds = 0.0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds


def _busy() -> float:
    """Seconds that the machine's cores have computed, all together."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


def joined(turns: Sequence[Turn]) -> Turn:
    """Several turns of one loader as one."""
    whole = Turn()
    for turn in turns:
        whole.series += [
            (whole.seconds + seconds, rate, memory) for seconds, rate, memory in turn.series
        ]
        for name in ("samples", "batches", "seconds", "wait", "own_cpu", "queued"):
            setattr(whole, name, getattr(whole, name) + getattr(turn, name))
        whole.times = {name: whole.times[name] + turn.times[name] for name in turn.times}
        whole.told = turn.told or whole.told  # of one stretch: the time line has no holes
        whole.others += turn.others / len(turns)
    return whole


def _differences(series: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """From rates since the beginning to those of each stretch."""
    made, last, done = [], 0.0, 0.0
    for seconds, rate, memory in series:
        made.append((seconds, (rate * seconds - done) / max(seconds - last, 1e-9), memory))
        last, done = seconds, rate * seconds
    return made


def run_step(batches: Sequence[tuple[Any, int]], step: Step, seconds: float) -> Turn:
    """Calls a step with batches that lie in memory, for some seconds. (`batches`: as
    `Running.first` gives them.)
    """
    turn = Turn()
    step(batches[0][0])  # what is made once is made
    finish_kernels()
    cpu, began = time.process_time(), time.perf_counter()
    while turn.seconds < seconds:
        batch, samples = batches[turn.batches % len(batches)]
        step(batch)
        turn.batches, turn.samples = turn.batches + 1, turn.samples + samples
        turn.seconds = time.perf_counter() - began
    finish_kernels()
    turn.seconds, turn.own_cpu = time.perf_counter() - began, time.process_time() - cpu
    return turn


def samples_of(batch: Any) -> int:
    """The samples of a batch: the length of its first tensor, or of its first list."""
    lengths: list[int] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim():
            lengths.append(len(tensor))
        return tensor

    map_tensors(batch, look)
    if lengths:
        return lengths[0]
    return len(batch) if isinstance(batch, (list, tuple)) else 1
