"""Copies loaders with other options, runs them for some seconds, and counts what they do."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset

from headrace.core.dataset import BaseDataset
from headrace.core.options import LoadingMode, classes_of, joined_class
from headrace.errors import ConfigError, HeadraceWarning
from headrace.loader.loader import Loader
from headrace.memory.limits import usable_cpus
from headrace.memory.tree import tensors_of
from headrace.monitor.stats import TIMES, BatchTimes
from headrace.order import detect_world
from headrace.order.seeding import SampleSeeder

Step = Callable[[Any], Any]


@dataclass(slots=True)
class Turn:
    """The measurements of a loader while it ran.

    Attributes:
        samples, batches: number of samples and batches received.
        seconds: from the first of them to the last.
        wait: seconds blocked in ``next``.
        starts: seconds blocked in the first ``next`` of each epoch.
        cpu: seconds that this process computed.
        times: seconds by name, see `Loader.get_stats()`, and "transfer_time".
    """

    samples: int = 0
    batches: int = 0
    seconds: float = 0.0
    wait: float = 0.0
    starts: list[float] = field(default_factory=list)
    cpu: float = 0.0
    times: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / max(self.seconds, 1e-9)

    def per_sample(self, name: str) -> float:
        """Seconds of a stage for each sample."""
        return self.times.get(name, 0.0) / max(self.samples, 1)

    def add(self, other: Turn) -> None:
        """Adds another turn of the same loader."""
        self.samples += other.samples
        self.batches += other.batches
        self.seconds += other.seconds
        self.wait += other.wait
        self.starts += other.starts
        self.cpu += other.cpu
        for name, seconds in other.times.items():
            self.times[name] = self.times.get(name, 0.0) + seconds


class Running:
    """A loader that is asked for batches in turns, epoch after epoch. Between two turns its workers
    fill their queue, and rest.

    Args:
        loader: of headrace or of torch; ended by `close`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Any = None
        self._last: BatchTimes | None = None
        if isinstance(loader, Loader):
            loader.on_batch(self._note)

    def _note(self, times: BatchTimes) -> None:
        self._last = times

    def next(self) -> tuple[Any, int]:
        """The next batch, and how many samples it has."""
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.loader)
            for batch in self._iterator:
                # of a list of samples only headrace's loaders say how many they are
                return batch, samples_of(batch) if self._last is None else self._last.samples
            self._iterator = None
        raise ConfigError(
            "an epoch has no batch: the dataset is empty, or drop_last leaves nothing"
        )

    def run(self, seconds: float, step: Step | None = None, most: int | None = None) -> Turn:
        """Takes batches for some seconds, but at most `most`, after those that were made ahead. A
        batch that takes longer is waited for.
        """
        workers = getattr(self.loader, "num_workers", 0)
        prefetched = workers * (getattr(self.loader, "prefetch_factor", None) or 1)
        self._take(Turn(), step)
        first = time.perf_counter()
        for _ in range(prefetched - 1):
            if time.perf_counter() - first >= 0.5 * seconds:
                break
            self._take(Turn(), step)
        finish_kernels()
        turn = Turn()
        before = self._times()
        cpu = time.process_time()
        start = time.perf_counter()
        while time.perf_counter() - start < seconds and turn.batches != most:
            self._take(turn, step)
        finish_kernels()
        turn.seconds = time.perf_counter() - start
        turn.cpu = time.process_time() - cpu
        turn.times = {name: value - before[name] for name, value in self._times().items()}
        return turn

    def _take(self, turn: Turn, step: Step | None) -> None:
        asked = time.perf_counter()
        batch, samples = self.next()
        waited = time.perf_counter() - asked
        if step is not None:
            step(batch)
        turn.batches += 1
        turn.samples += samples
        turn.wait += waited
        if self._last is not None and self._last.step == 0:
            turn.starts.append(waited)

    def _times(self) -> dict[str, float]:
        if isinstance(self.loader, Loader):
            stats = self.loader.get_stats()
            return {name: float(stats.get(name, 0.0)) for name in (*TIMES, "transfer_time")}
        computed = 0.0
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                computed += times.user + times.system
        return {"work_cpu_seconds": computed}

    def close(self) -> None:
        """Ends the workers now, whoever still holds the iterator, such as the traceback of an
        error.
        """
        if isinstance(self.loader, Loader):
            if self._iterator is not None:
                self._iterator.close()
            self.loader.close()
        elif hasattr(self._iterator, "_shutdown_workers"):
            self._iterator._shutdown_workers()
        self._iterator = None

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_step(batches: Sequence[tuple[Any, int]], step: Step, seconds: float) -> Turn:
    """Calls a step for some seconds with batches in memory, each with its number of samples."""
    turn = Turn()
    step(batches[0][0])  # the first call allocates and compiles
    finish_kernels()
    cpu = time.process_time()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch, samples = batches[turn.batches % len(batches)]
        step(batch)
        turn.batches += 1
        turn.samples += samples
    finish_kernels()
    turn.seconds = time.perf_counter() - start
    turn.cpu = time.process_time() - cpu
    return turn


def samples_of(batch: Any) -> int:
    """The samples of a batch: the length of its first tensor, or of its list."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return len(tensor)
    if isinstance(batch, (list, tuple)):
        return len(batch)
    return 1


def devices_in_use() -> list[Any]:
    """Torch's modules of the devices that this process uses."""
    devices: list[Any] = [
        device
        for device in (torch.cuda, torch.xpu)
        if device.is_available() and device.is_initialized()
    ]
    if torch.backends.mps.is_available():
        devices.append(torch.mps)
    return devices


def finish_kernels() -> None:
    """Waits for the work of all devices in use. Errors of this work are raised here."""
    for device in devices_in_use():
        device.synchronize()


def copy_of(loader: Any, dataset: Any = None, **options: Any) -> Any:
    """A loader like another, with other options, or over another dataset."""
    if isinstance(loader, Loader):
        with warnings.catch_warnings():
            # options without an effect: the user's loader has warned of them
            warnings.simplefilter("ignore", HeadraceWarning)
            data = dataset
            if dataset is None:
                data = loader.dataset
            return type(loader)(data, loader.given.with_(**options))
    names = ["collate_fn", "pin_memory", "worker_init_fn", "generator"]
    if options.get("num_workers", loader.num_workers):
        names += ["num_workers", "timeout", "prefetch_factor", "persistent_workers"]
        names += ["multiprocessing_context"]
    if isinstance(loader.dataset, IterableDataset):
        names += ["batch_size", "drop_last"]
    elif loader.batch_sampler is not None:
        names += ["batch_sampler"]
    else:  # the dataset yields batches
        names += ["batch_size", "sampler"]
    same = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, **{**same, **options})


def in_mode(dataset: BaseDataset, mode: LoadingMode) -> BaseDataset:
    """A copy of the dataset in a mode other than streaming, without handles, store and budget."""
    other = copy.copy(dataset)
    other.__class__ = joined_class(*classes_of(type(other)))
    other.loading_mode = mode
    return other


def cores_of_rank() -> int:
    """The cores of this machine for each of its ranks."""
    return max(1, usable_cpus() // detect_world().local_world_size)


def drawn_from(data: Any) -> SampleSeeder | None:
    """The user's generators that a torch DataLoader draws its order from. None of a `Loader` or a
    dataset, whose orders draw from none.
    """
    if isinstance(data, Loader) or not isinstance(data, DataLoader):
        return None
    return SampleSeeder(data.generator, data.sampler, data.batch_sampler)
