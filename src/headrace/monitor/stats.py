"""Statistics of a loader.

`LoadingStats` counts in the parent: its own waits, and the reports that come with each batch from
the workers. `Stats` is the dict that users get, and shows itself as a table. Hooks get the times of
each batch, or its slow stages.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.arguments import check_integer, checks_keywords
from headrace.memory.budget import format_size
from headrace.memory.limits import memory_limits, tightest

SKIPPED_LISTED = 1000
_WAITS_KEPT = 10_000
_SECOND_LOOK = 0.1  # seconds after the first one, so that short jobs have a CPU usage
# seconds between two looks at memory and CPU, which costs about a millisecond, and more with many
# pages
_SAMPLE_EVERY = 1.0
_COUNTS = (
    "cache_hits",
    "cache_misses",
    "chunks_decoded",
    "chunk_hits",
    "bytes_read",
    "requests",
    "retries",
    "bytes_fetched",
    "refetched",
    "disk_hits",
    "disk_puts",
    "disk_evicted",
    "disk_damaged",
    "errors",
    "skipped",
    "fallbacks",
    "normalized_on_device",
)
STAGES = ("read", "decode", "transform", "sample", "collate")
"""Stages of a worker's work on a batch, in this order; "sample" is all work of a dataset of
another library for its samples.
"""
TIMES = (*(f"{stage}_seconds" for stage in STAGES), "work_seconds", "work_cpu_seconds")
"""Names of the seconds that a worker counts."""


class Stats(dict[str, Any]):
    """Statistics by name, which print as a table. Values are plain numbers: seconds, bytes,
    percent, fractions of 1.
    """

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        rows = []
        for name, value in self.items():
            if isinstance(value, Stats):  # of one loader of several
                rows.append(f"{name}:\n  " + repr(value).replace("\n", "\n  "))
            else:
                rows.append(f"{name:<{width}}  {_in_words(name, value)}")
        return "\n".join(rows) or "{}"


def _in_words(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value):,} listed"
    if "bytes" in name:
        return format_size(value)
    return f"{value:,.4g}" if isinstance(value, float) else f"{value}"


class LoadingStats:
    """Counts of one loader over all its epochs.

    Times are seconds, sizes bytes, CPU percent of one core. Time counts from the first request for
    a batch of an epoch to its end, so pauses between epochs don't.
    """

    def __init__(self) -> None:
        self.is_begun: bool = False
        """True once a batch was requested, even one that failed."""
        self.batches: int = 0
        self.samples: int = 0
        self.total_time: float = 0.0
        self.wait_time: float = 0.0
        self.transfer_time: float = 0.0
        self.skipped: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self._waits: deque[float] = deque(maxlen=_WAITS_KEPT)
        self._memory: list[int] = []
        self._limit = 0  # bytes that the machine, a cgroup or the process may use
        self._cpu: list[float] = []
        self._look_next = 0.0
        self._processes: dict[int, Any] = {}  # of psutil

    def add_report(self, report: dict[str, Any]) -> None:
        """Adds what a worker counted while it made a batch."""
        for name, value in report.items():
            if name != "skipped_samples":
                self.counts[name] += value
                continue
            # each once, however many epochs it was left out of
            listed = {(entry["index"], entry["path"]) for entry in self.skipped}
            for index, path, error in value:
                if len(self.skipped) < SKIPPED_LISTED and (index, path) not in listed:
                    self.skipped.append({"index": index, "path": path, "error": error})
                    listed.add((index, path))

    def add_batch(self, samples: int, wait: float, elapsed: float) -> None:
        """Adds a batch: its number of samples, the seconds that the user waited for it, and
        those since the batch before.
        """
        self.batches += 1
        self.samples += samples
        self.wait_time += wait
        self.total_time += elapsed
        self._waits.append(wait)

    def look(self, worker_pids: Iterable[int] | None) -> None:
        """Samples memory and CPU of this process and its workers (None: all its children), at most
        once a second, and for a hundredth of the time at most: to count the pages of a process that
        maps large files takes long. This process may be among `worker_pids`.
        """
        now = time.monotonic()
        if now < self._look_next:
            return
        import psutil  # late, since it takes a while

        if worker_pids is None:
            worker_pids = [child.pid for child in psutil.Process().children(recursive=True)]
        pids = dict.fromkeys((os.getpid(), *worker_pids))
        self._limit = self._limit or tightest(memory_limits()).total
        self._memory.append(sum(map(pss_of, pids)))
        cpu = 0.0
        for pid in pids:
            with contextlib.suppress(psutil.Error):  # it has ended since
                process = self._processes.setdefault(pid, psutil.Process(pid))
                cpu += process.cpu_percent(None)
        self._cpu.append(cpu)
        interval = _SECOND_LOOK
        if len(self._cpu) > 1:
            interval = _SAMPLE_EVERY
        self._look_next = now + max(interval, 100 * (time.monotonic() - now))

    def as_dict(self) -> dict[str, Any]:
        """The numbers of `Loader.get_stats()` that were counted."""
        stats = self.outside()
        stats |= {name: self.counts[name] for name in (*_COUNTS, *TIMES)}
        if self.skipped:
            stats["skipped_samples"] = list(self.skipped)
        return stats

    def outside(self) -> dict[str, Any]:
        """The numbers that can be measured from outside of a loader."""
        batches = max(self.batches, 1)
        total = max(self.total_time, 1e-9)
        waits = np.array(self._waits or [0.0])
        p50, p90, p99 = np.percentile(waits, (50, 90, 99)).tolist()
        stats: dict[str, Any] = {
            "batches": self.batches,
            "samples": self.samples,
            "total_time": self.total_time,
            "avg_batch_time": self.total_time / batches,
            "batches_per_second": self.batches / total,
            "samples_per_second": self.samples / total,
            "wait_time": self.wait_time,
            "wait_fraction": self.wait_time / total,
            "p50_wait": p50,
            "p90_wait": p90,
            "p99_wait": p99,
            "transfer_time": self.transfer_time,
        }
        if self._memory:
            stats["avg_memory_bytes"] = sum(self._memory) / len(self._memory)
            stats["avg_memory_usage"] = 100 * stats["avg_memory_bytes"] / max(self._limit, 1)
            stats["peak_memory_bytes"] = max(self._memory)
            # The first look measures no CPU time; a job that ends before the second one has that
            # of the work on its batches.
            looks = self._cpu[1:] or [100 * self.counts["work_cpu_seconds"] / total]
            stats["avg_cpu_usage"] = sum(looks) / len(looks)
        return stats


def pss_of(pid: int) -> int:
    """Bytes of a process's memory, shared pages counted in proportion (PSS); RSS where the
    system has no PSS; 0 when it is gone.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


class LoadingMonitor:
    """Collects the statistics of `Loader.get_stats()` for any loop: over a plain DataLoader, a
    generator, or your own reader.

    ```python
    monitor = LoadingMonitor()
    for images, targets in monitor.watch(loader, samples=lambda batch: len(batch[0])):
        ...
    print(monitor.get_stats())
    ```

    Time counts from the request for the first batch of each loop to its last batch, so pauses
    between epochs don't count. Use it from one thread only.

    Args:
        enable_monitoring: sample memory and CPU usage of this process and its children, at most
            once a second.
    """

    @checks_keywords
    def __init__(self, *, enable_monitoring: bool = True) -> None:
        self._enabled = enable_monitoring
        self._stats = LoadingStats()

    def watch(
        self, batches: Iterable[Any], samples: Callable[[Any], int] | None = None
    ) -> Iterator[Any]:
        """Iterates over the batches of one epoch, and counts each with the time that the loop was
        blocked for it.

        Args:
            batches: a loader, or any iterable.
            samples: a callable from a batch to its number of samples. None: each batch counts as
                one.
        """
        last = asked = time.perf_counter()
        for batch in batches:
            now = time.perf_counter()
            count = 1
            if samples is not None:
                count = check_integer("watch: samples", samples(batch), 0)
            self._stats.add_batch(count, now - asked, now - last)
            if self._enabled:
                self._stats.look(None)
            last = now
            yield batch
            asked = time.perf_counter()

    def get_stats(self) -> Stats:
        """Returns those statistics of `Loader.get_stats()` that can be measured from outside. Times
        are in seconds. It is empty before the first batch.
        """
        return Stats(self._stats.outside() if self._stats.batches else {})


class BatchTimes(NamedTuple):
    """Times of one batch, in seconds. Times of stages are those of the worker."""

    epoch: int
    step: int
    """Number of the batch in the epoch."""
    samples: int
    wait_seconds: float
    """Time that the loop was blocked in ``next``."""
    step_seconds: float
    """Time from the previous batch to the request for this one: the loop's own work."""
    read_seconds: float
    decode_seconds: float
    transform_seconds: float
    sample_seconds: float
    """For a dataset of another library: all its work for the samples."""
    collate_seconds: float
    work_seconds: float
    """Time from the worker's first step to its last."""
    worker_pid: int
    """Process that made the batch."""
    began: float
    """Start of the worker's work, by `time.perf_counter`, which is the same clock in all
    processes of a machine.
    """
    received: float
    """Time at which the loop received the batch, by the same clock."""


@dataclass(frozen=True, slots=True)
class SlowStage:
    """A stage of a batch that took longer than a threshold."""

    stage: str
    """One of `STAGES`."""
    seconds: float
    """Seconds of the whole batch."""
    epoch: int
    step: int
    """Number of the batch in the epoch."""
    worker_pid: int


OnBatch = Callable[[BatchTimes], Any]
OnSlow = Callable[[SlowStage], Any]


def times_of(report: dict[str, Any], wait: float, step: float, received: float) -> BatchTimes:
    """The times of a batch that the user is about to get.

    Args:
        report: the worker's.
        wait, step: seconds blocked in ``next``, and of the loop before that.
        received: when the batch came.
    """
    counts = report["counts"]
    return BatchTimes(
        epoch=report["epoch"],
        step=report["step"],
        samples=report["samples"],
        wait_seconds=wait,
        step_seconds=step,
        worker_pid=report["pid"],
        began=report["began"],
        received=received,
        **{name: counts.get(name, 0.0) for name in TIMES if name in BatchTimes._fields},
    )


def slow_stages(threshold: float, function: OnSlow) -> OnBatch:
    """A hook that calls a function with each stage that takes longer than so many seconds."""

    def tell(times: BatchTimes) -> None:
        for stage in STAGES:
            seconds = getattr(times, f"{stage}_seconds")
            if seconds > threshold:
                function(SlowStage(stage, seconds, times.epoch, times.step, times.worker_pid))

    return tell
