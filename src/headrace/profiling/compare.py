"""Measures how fast data come out of a path here: the loading modes side by side, and the disk
or server alone.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.core.dataset import BaseDataset
from headrace.core.modes import LoadingMode
from headrace.datasets.open import open_dataset
from headrace.datasets.shards.streaming import StreamingDataset
from headrace.errors import BudgetError, ConfigError
from headrace.io.paths import is_url
from headrace.loader.create import create_dataloader
from headrace.loader.loader import Loader

_LIMIT_S, _PIECE, _SIZED = 3.0, 8 << 20, 1_000_000
_LEAST_BATCHES = 3  # that are timed, however long they take
_LEAST_S = 1.0  # for each mode


@dataclass(frozen=True, slots=True)
class ModeRate:
    """The speed of one loading mode.

    Attributes:
        mode: its name.
        first_batch_s: seconds from opening the data to the first batch, workers' start and an eager
            fill included; None: there was none.
        samples_per_second: from the second batch on; in modes "cached" and "eager" of the last
            epoch that was begun.
        mb_per_second: megabytes of tensors a second.
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
        samples: of the dataset; None: it is not known.
        batch_size, num_workers: of the loaders.
        sample_mb: megabytes of a sample's tensors.
        read_mb_per_second: of the files alone, from their beginning on, in one thread; None: they
            are remote.
        limit: samples a second of which the files are read so; None: it is not known.
        modes: the rates.
    """

    samples: int | None
    batch_size: int
    num_workers: int
    sample_mb: float = 0.0
    read_mb_per_second: float | None = None
    limit: float | None = None
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
    seed: int = 42,
    modes: Sequence[str] = ("lazy", "cached", "eager", "streaming"),
    on_mode: Callable[[ModeRate], object] = lambda _: None,
    **options: Any,
) -> Comparison:
    """Opens a path in each loading mode, and times its batches.

    The files are read once from their beginning, for a few seconds, before: so that all modes find
    in the page cache what fits there.

    Args:
        data_path: as `open_dataset` takes it.
        seconds: for all of it, about; each mode gets at least a second and a few batches.
        batch_size, num_workers, seed: of the loaders.
        modes: which.
        on_mode: called with each rate when it is known.
        **options: of `open_dataset`.

    Raises:
        ConfigError: options that don't fit; no samples.
        HeadraceError: what opening and reading raise; that a mode does not fit memory is a note.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds must be above 0, not {seconds!r}")
    limit = (
        None
        if is_url(os.fspath(data_path))
        else _read_rate(os.fspath(data_path), min(_LIMIT_S, seconds / 10))
    )
    found = Comparison(None, batch_size, num_workers or 0, read_mb_per_second=limit)
    each = max(_LEAST_S, seconds / max(1, len(modes)))
    loading = {"batch_size": batch_size, "num_workers": num_workers, "seed": seed}
    is_shards = _is_shards(data_path, options)
    for name in modes:
        mode = LoadingMode(name)
        opening = options if is_shards else {**options, "loading_mode": mode.value}
        try:
            if is_shards and mode is not LoadingMode.STREAMING:
                rate = ModeRate(str(mode.value), note="shards are streamed")
            else:
                rate = _rate_of(data_path, mode, each, found, loading, opening)
        except BudgetError as error:
            rate = ModeRate(str(mode.value), note=" ".join(str(error).split()))
        found.modes.append(rate)
        on_mode(rate)
    return found


def _rate_of(
    data_path: Any,
    mode: LoadingMode,
    seconds: float,
    found: Comparison,
    loading: Mapping[str, Any],
    options: Mapping[str, Any],
) -> ModeRate:
    start = time.perf_counter()
    dataset: Any = open_dataset(data_path, **options)
    loader: Loader | None = None
    try:
        if not isinstance(dataset, StreamingDataset) and not len(dataset):
            raise ConfigError(f"{dataset!r} has no samples to time")
        loader = create_dataloader(dataset, **loading)
        found.num_workers = loader.num_workers
        if found.samples is None:
            found.samples = len(dataset)
            if found.read_mb_per_second is not None and found.samples:
                found.limit = (
                    found.read_mb_per_second
                    * 1e6
                    * found.samples
                    / max(1, _stored(os.fspath(data_path)))
                )
        return _timed(loader, mode, start, seconds, found)
    finally:
        if loader is not None:
            loader.close()
        dataset.close()


def _is_shards(data_path: Any, options: Mapping[str, Any]) -> bool:
    """True if the path opens as shards, which know one mode."""
    dataset: BaseDataset = open_dataset(data_path, **options)
    try:
        return isinstance(dataset, StreamingDataset)
    finally:
        dataset.close()


def _timed(
    loader: Loader, mode: LoadingMode, start: float, seconds: float, found: Comparison
) -> ModeRate:
    """Rates from the second batch on. What is cached is worth something from the second epoch
    on: then that counts.
    """
    first_s, epochs, total, nbytes, batches = None, 0, 0, 0, 0
    began, end, note = 0.0, start + seconds, ""
    elapsed, whole_epochs = 0.0, 0
    for epoch, batch in _batches(loader):
        now = time.perf_counter()
        if first_s is None:
            first_s, began, epochs, end = now - start, now, 1, max(end, now + _LEAST_S)
            found.sample_mb = found.sample_mb or _nbytes(batch) / max(1, _length(batch)) / 1e6
            continue
        if epoch >= epochs:
            whole_epochs, epochs = epoch, epoch + 1
            if mode is LoadingMode.CACHED and epoch == 1:  # all of the first epoch was read
                began, total, nbytes, batches = now, 0, 0, 0
                continue
        total, nbytes, batches, elapsed = (
            total + _length(batch),
            nbytes + _nbytes(batch),
            batches + 1,
            now - began,
        )
        if now >= end and batches >= _LEAST_BATCHES:
            break
    if mode is LoadingMode.CACHED and not whole_epochs:
        note = (
            "in its first epoch, in which all is read: later ones come from memory, as far as it "
            "fits"
        )
    if not total or not elapsed:
        return ModeRate(
            str(mode.value),
            first_s,
            epochs=epochs,
            note="too few batches to be timed: use a smaller batch size",
        )
    return ModeRate(
        str(mode.value), first_s, total / elapsed, nbytes / elapsed / 1e6, epochs, total, note
    )


def _batches(loader: Loader) -> Iterator[tuple[int, Any]]:
    """Batches of one epoch after the other, with its number; an end only where an epoch has
    none.
    """
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        count = 0
        for batch in loader:
            count += 1
            yield epoch, batch
        if not count:
            return
        epoch += 1


def _length(batch: Any) -> int:
    """Samples of a batch."""
    if isinstance(batch, torch.Tensor | list):
        return len(batch)
    if isinstance(batch, Mapping):
        return max(map(_length, batch.values()), default=0)
    if isinstance(batch, tuple):
        return max(map(_length, batch), default=0)
    return 0


def _nbytes(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        return sum(map(_nbytes, batch.values()))
    return sum(map(_nbytes, batch)) if isinstance(batch, tuple | list) else 0


def _read_rate(path: str, seconds: float) -> float | None:
    """Megabytes a second of local files, read from their beginning on, in one thread; None:
    there are none.
    """
    place, start, count = os.path.expanduser(path), time.perf_counter(), 0
    for name in _files_below(place):
        try:
            with open(name, "rb", buffering=0) as file:
                while piece := file.read(_PIECE):
                    count += len(piece)
                    if time.perf_counter() - start > seconds:
                        return count / (time.perf_counter() - start) / 1e6
        except OSError:  # reading samples will say so
            continue
    return count / max(1e-9, time.perf_counter() - start) / 1e6 if count else None


def _stored(path: str) -> int:
    """Bytes of local files, of the first ones where there are very many."""
    some = list(itertools.islice(_files_below(os.path.expanduser(path)), _SIZED))
    return sum(os.path.getsize(name) for name in some if os.path.exists(name))


def _files_below(place: str) -> Iterator[str]:
    if os.path.isfile(place):
        yield place
    elif os.path.isdir(place):
        for folder, _, names in os.walk(place):
            paths = (os.path.join(folder, name) for name in sorted(names))
            yield from filter(os.path.isfile, paths)  # not a pipe, which may never end
