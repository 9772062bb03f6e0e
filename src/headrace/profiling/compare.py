"""Measures how fast data come out of a path here: the loading modes side by side, and the disk
alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.core.options import LoadingMode
from headrace.datasets.open import open_dataset
from headrace.datasets.shards.streaming import StreamingDataset
from headrace.errors import BudgetError, ConfigError
from headrace.io.paths import is_url
from headrace.loader.loader import Loader, create_dataloader
from headrace.profiling.running import samples_of, tensors_of

_READING = 3.0  # seconds, at most, in which files are read without headrace
_LEAST_BATCHES = 3  # that are timed, however long they take
_LEAST_S = 1.0  # for each mode


@dataclass(slots=True)
class ModeRate:
    """The speed of one loading mode.

    Attributes:
        mode: its name.
        first_batch_s: seconds from opening the data to the first batch, with the start of workers
            and an eager fill. None: there was no batch.
        samples_per_second: from the second batch on; in mode "cached" from the second epoch on, if
            there was time for it. None: see `note`.
        mb_per_second: megabytes of tensors per second.
        epochs: that were begun.
        samples: that were timed.
        note: why there is no rate, or what limits it.
    """

    mode: str
    first_batch_s: float | None = None
    samples_per_second: float | None = None
    mb_per_second: float | None = None
    epochs: int = 0
    samples: int = 0
    note: str = ""


@dataclass(slots=True)
class Comparison:
    """Loading modes side by side.

    Attributes:
        samples: of the dataset. None: not known.
        batch_size, num_workers: of the loaders.
        sample_mb: megabytes of a sample's tensors.
        read_mb_per_second: of the files alone, in one thread. None: they are remote.
        modes: the rates.
    """

    samples: int | None
    batch_size: int
    num_workers: int
    sample_mb: float = 0.0
    read_mb_per_second: float | None = None
    modes: list[ModeRate] = field(default_factory=list)

    @property
    def fastest(self) -> ModeRate | None:
        """The mode with the most samples a second."""
        rated = [rate for rate in self.modes if rate.samples_per_second]
        return max(rated, key=lambda rate: rate.samples_per_second or 0.0, default=None)


def compare_modes(
    data_path: str | os.PathLike[str],
    *,
    seconds: float = 60.0,
    batch_size: int = 64,
    num_workers: int | None = None,
    modes: Sequence[str] = ("lazy", "cached", "eager", "streaming"),
    on_mode: Callable[[ModeRate], object] = lambda _: None,
    **options: Any,
) -> Comparison:
    """Opens a path in each loading mode, and times its batches.

    Local files are read once before, for a few seconds, so that all modes find in the page cache
    what fits there.

    Args:
        data_path: as `open_dataset` takes it.
        seconds: for all modes, about; each gets at least a second and a few batches.
        batch_size, num_workers: of the loaders.
        modes: which.
        on_mode: called with each rate when it is known.
        **options: of `open_dataset`.

    Raises:
        ConfigError: options that don't fit; no samples.
        HeadraceError: any error of opening and reading. A mode that does not fit memory is a note.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds must be above 0, not {seconds!r}")
    path = os.fspath(data_path)
    result = Comparison(None, batch_size, num_workers or 0)
    if not is_url(path):
        result.read_mb_per_second = _read_rate(path, min(_READING, seconds / 10))
    loading = {"batch_size": batch_size, "num_workers": num_workers}
    with open_dataset(data_path, **options) as dataset:
        is_shards = isinstance(dataset, StreamingDataset)  # they have one mode
    for name in modes:
        rate = ModeRate(name)
        try:
            if is_shards and name != LoadingMode.STREAMING.value:
                rate.note = "shards are streamed"
            else:
                if not is_shards:
                    options["loading_mode"] = name
                limit = max(_LEAST_S, seconds / max(1, len(modes)))
                _time_mode(data_path, rate, limit, result, loading, options)
        except BudgetError as error:
            rate.note = " ".join(str(error).split())
        result.modes.append(rate)
        on_mode(rate)
    return result


def _time_mode(
    data_path: Any,
    rate: ModeRate,
    seconds: float,
    result: Comparison,
    loading: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Times one mode from the second batch on, in mode "cached" from the second epoch on."""
    opened = time.perf_counter()
    start = end = opened
    batches = nbytes = 0
    is_filled = rate.mode != "cached"  # the first epoch, in which all is read, does not count
    with (
        open_dataset(data_path, **options) as dataset,
        create_dataloader(dataset, **loading) as loader,
    ):
        result.num_workers = loader.num_workers
        if result.samples is None and not isinstance(dataset, StreamingDataset):
            if not len(dataset):
                raise ConfigError(f"{dataset!r} has no samples to time")
            result.samples = len(dataset)
        for epoch, batch in _batches(loader):
            now = time.perf_counter()
            rate.epochs = epoch + 1
            size = sum(tensor.nbytes for tensor in tensors_of(batch))
            if rate.first_batch_s is None:
                rate.first_batch_s = now - opened
                result.sample_mb = size / max(1, samples_of(batch)) / 1e6
                start = now
                end = max(opened + seconds, now + _LEAST_S)
                continue
            if epoch == 1 and not is_filled:
                is_filled = True
                start = now
                batches = nbytes = rate.samples = 0
                continue
            rate.samples += samples_of(batch)
            nbytes += size
            batches += 1
            if now >= end and batches >= _LEAST_BATCHES:
                break
    elapsed = 0.0
    if batches:
        elapsed = now - start
    if not is_filled:
        rate.note = "in its first epoch, in which all is read"
    if not elapsed:
        rate.note = "too few batches to be timed: use a smaller batch size"
        return
    rate.samples_per_second = rate.samples / elapsed
    rate.mb_per_second = nbytes / elapsed / 1e6


def _batches(loader: Loader) -> Iterator[tuple[int, Any]]:
    """Batches of one epoch after the other, each with its epoch. Ends where an epoch has none."""
    epoch = 0
    has_batches = True
    while has_batches:
        loader.set_epoch(epoch)
        has_batches = False
        for batch in loader:
            has_batches = True
            yield epoch, batch
        epoch += 1


def _read_rate(path: str, seconds: float) -> float | None:
    """Megabytes a second of local files, read in one thread. None: there are none."""
    start = time.perf_counter()
    count = 0
    for name in _files_below(path):
        with open(name, "rb", buffering=0) as file:
            while block := file.read(8 << 20):
                count += len(block)
                if time.perf_counter() - start > seconds:
                    break
        if time.perf_counter() - start > seconds:
            break
    if count:
        return count / max(1e-9, time.perf_counter() - start) / 1e6
    return None


def _files_below(path: str) -> Iterator[str]:
    """The file, or the files of the folder, that this process may read."""
    path = os.path.expanduser(path)
    files = [path]
    for folder, _, names in os.walk(path):
        files += [os.path.join(folder, name) for name in sorted(names)]
    for file in files:
        if os.path.isfile(file) and os.access(file, os.R_OK):  # a pipe may never end
            yield file
