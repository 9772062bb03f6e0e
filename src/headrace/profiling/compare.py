"""Measures the rate of batches, by the number of workers and by loading mode."""

from __future__ import annotations

import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from headrace.arguments import check_integer, check_seconds, checks_keywords
from headrace.core.dataset import BaseDataset
from headrace.core.options import LoadingMode
from headrace.datasets.open import open_dataset
from headrace.datasets.streaming import StreamingDataset
from headrace.display import Lines
from headrace.errors import BudgetError, ConfigError, HeadraceWarning, one_line
from headrace.io.paths import is_url
from headrace.loader.config import DataLoaderConfig, check_dataset
from headrace.loader.loader import Loader, create_dataloader, open_paths
from headrace.memory.processes import is_daemonic
from headrace.memory.tree import tensors_of
from headrace.order.seeding import preserved_rng
from headrace.profiling.running import Running, copy_of, cores_of_rank, drawn_from, in_mode

logger: logging.Logger = logging.getLogger("headrace.profiling")

_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_NEAR = 0.95  # of the best rate is as good: measurements differ by as much
_PATIENCE = 2  # numbers in a row that gain nothing: more are not tried


class SuggestedWorkers(int):
    """A suggested number of workers, with the measurements behind it. It is an `int`.

    Attributes:
        rates: batches per second for each number that was tried.
        reason: why this number was chosen.
    """

    rates: dict[int, float]
    reason: str

    # a copy is made of the number alone, and gets its attributes then
    def __new__(
        cls, number: int, rates: Mapping[int, float] | None = None, reason: str = ""
    ) -> SuggestedWorkers:
        made = super().__new__(cls, number)
        made.rates = dict(rates or {})
        made.reason = reason
        return made

    def explain(self) -> str:
        """A table of the rates, and the reason."""
        best = max(self.rates.values())
        lines = ["num_workers  batches/s   of best"]
        for number, rate in self.rates.items():
            mark = "  <--" if number == self else ""
            lines.append(f"{number:>11}  {rate:>11,.1f}  {rate / best:>7.0%}{mark}")
        lines.append(f"num_workers={int(self)}: {self.reason}")
        return Lines("\n".join(lines))


@checks_keywords
def suggest_num_workers(
    data: Any,
    config: DataLoaderConfig | None = None,
    *,
    step: Callable[[Any], Any] | float | None = None,
    seconds: float = 2.0,
    most: int | None = None,
    **overrides: Any,
) -> SuggestedWorkers:
    """Measures the smallest number of workers that loads at full speed.

    The real loader runs with 0, 1, 2, ... workers, for `seconds` each. The result is the smallest
    number within 5 % of the best rate, or, if the time of a training step is known, the smallest
    number that keeps up with it. Numbers that can't improve the result are not tried.

    ```python
    workers = suggest_num_workers(dataset, batch_size=64)
    print(workers.explain())
    loader = create_dataloader(dataset, batch_size=64, num_workers=workers)
    ```

    Each number is measured in a separate epoch, after a warm-up run. So for data in the system's
    page cache the speed of the cache is measured, and for much larger data mostly that of the disk,
    unless they are read in order (``shuffle=False``). A dataset in mode "cached" is measured with
    an empty cache, as in its first epoch, and its own cache is not changed; inside of another
    dataset it is not recognised, and its cache fills. The global random generators are restored.
    With several ranks call it on all of them at once, since they share cores and disk; their
    results may differ.

    Args:
        data: a dataset or path, as in `create_dataloader`; or a `Loader` or torch `DataLoader`,
            which is measured with its own options and not changed.
        config: options of the loader; only with a dataset or path.
        step: work per batch: a callable, which is called with each batch during the measurement,
            since it takes cores and time from the workers; or its duration in seconds. None:
            loading alone.
        seconds: measuring time for each number, after its first batches. A batch that takes longer
            is waited for.
        most: largest number to try. None: the number of cores of this rank. With a block shuffle
            only numbers that divide `turns` are tried.
        **overrides: see `create_dataloader`.

    Returns:
        The number, with `rates`, `reason` and `explain()`.

    Raises:
        ConfigError: an argument is invalid, or there is no batch.
        BudgetError: batches don't fit the memory budget even without workers.
        Exception: any error of loading or of `step`.
    """
    door = "suggest_num_workers"
    check_seconds(f"{door}: seconds", seconds, 0.001)
    check_integer(f"{door}: most", most, 0, optional=True)
    if step is not None and not callable(step):
        check_seconds(f"{door}: step, which is no callable,", step, 1e-6)
    if "num_workers" in overrides:
        raise ConfigError(
            f"{door}: num_workers is what it looks for; most= says how many it may try"
        )
    opened: dict[str, Any] = {}
    if not isinstance(data, DataLoader):
        check_dataset("data", data)
        opened, config = open_paths(door, {"data": data}, config, overrides)
    elif config is not None or overrides:
        raise ConfigError(f"{door}: a loader has its options: pass its dataset to try others")
    if most is None:
        most = 0
        if not is_daemonic():
            most = cores_of_rank()
    try:
        with preserved_rng(drawn_from(data)):
            return _measured(opened.get("data", data), config, step, seconds, most)
    finally:
        for dataset in opened.values():
            dataset.close()


def _measured(
    data: Any, config: DataLoaderConfig | None, step: Any, seconds: float, most: int
) -> SuggestedWorkers:
    """Measures one number of workers after the other."""
    turns = None  # of a block shuffle, whose workers should divide it
    loader = _loader(data, config, 0)
    if isinstance(loader, Loader):
        turns = loader.state_dict().get("turns")
        loader.close()
    target = None
    if step is not None and not callable(step):
        target = 1 / step
        step = None

    def rate(number: int, epoch: int) -> float | None:
        loader = _loader(data, config, number)
        if loader is None:
            return None
        with Running(loader) as running:
            if isinstance(loader, Loader):
                loader.set_epoch(epoch)
            turn = running.run(seconds, step)
        return turn.batches / turn.seconds

    rate(0, 0)  # opens files and imports modules
    return _chosen(_rates(rate, _numbers(most, turns), target), target)


def _loader(data: Any, config: DataLoaderConfig | None, number: int) -> Any:
    """The loader with so many workers. None: the memory budget has no room for so many."""
    dataset = data
    if isinstance(data, DataLoader):
        dataset = data.dataset
    if isinstance(dataset, BaseDataset) and dataset.loading_mode is LoadingMode.CACHED:
        dataset = in_mode(dataset, LoadingMode.LAZY)
    try:
        if isinstance(data, DataLoader):
            loader = copy_of(data, dataset, num_workers=number)
        else:
            assert config is not None
            with warnings.catch_warnings():
                # options without an effect with this number
                warnings.simplefilter("ignore", HeadraceWarning)
                loader = Loader(dataset, config.with_(num_workers=number))
    except BudgetError:
        if not number:
            raise
        return None
    if isinstance(loader, Loader) and loader.config.num_workers != number:
        loader.close()
        return None
    return loader


def _numbers(most: int, turns: int | None) -> list[int]:
    """The numbers to try, up to `most`."""
    if turns is None:
        return [number for number in _NUMBERS if number <= most]
    return [0, *(number for number in range(1, most + 1) if turns % number == 0)]


def _rates(
    rate_of: Callable[[int, int], float | None], numbers: Iterable[int], target: float | None
) -> dict[int, float]:
    """The rate with each number, until nothing is gained any more.

    Args:
        rate_of: measures a number of workers in an epoch. None: there is no memory for so many.
        numbers: to try, in growing order.
        target: a rate that suffices.
    """
    rates: dict[int, float] = {}
    idle = 0
    for epoch, number in enumerate(numbers, 1):
        rate = rate_of(number, epoch)
        if rate is None:
            break
        if rates and rate * _NEAR <= max(rates.values()):
            idle += 1
        else:
            idle = 0
        rates[number] = rate
        logger.info("num_workers=%d: %.1f batches/s", number, rate)
        if idle == _PATIENCE or (target is not None and rate >= target):
            break
    return rates


def _chosen(rates: dict[int, float], target: float | None) -> SuggestedWorkers:
    """The least number that suffices."""
    best = max(rates.values())
    slow = ""
    if target is not None:
        keeping_up = f"keep up with a step of {1 / target:.4g} s, {target:,.1f} batches/s"
        if best >= target:
            number = min(n for n, rate in rates.items() if rate >= target)
            return SuggestedWorkers(number, rates, f"the fewest that {keeping_up}")
        slow = f"none {keeping_up}: "
    number = min(n for n, rate in rates.items() if rate >= _NEAR * best)
    return SuggestedWorkers(
        number, rates, f"{slow}the fewest within 5 % of the best rate, {best:,.1f} batches/s"
    )


_READING = 3.0  # seconds, at most, in which files are read without headrace
_LEAST_S = 1.0  # for each mode


@dataclass(slots=True)
class ModeRate:
    """The speed of one loading mode.

    Attributes:
        mode: its name.
        first_batch_s: seconds from opening the data to the first batch, with the start of workers
            and an eager fill. None: there was no batch.
        samples_per_second: after the batches that were made ahead; in mode "cached" after the
            first epoch, if there was time for it. None: see `note`.
        mb_per_second: megabytes of tensors per second.
        samples: that were timed.
        note: why there is no rate, or what limits it.
    """

    mode: str
    first_batch_s: float | None = None
    samples_per_second: float | None = None
    mb_per_second: float | None = None
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
            rate.note = one_line(error)
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
    """Times one mode after its first batch, in mode "cached" after its first epoch."""
    opened = time.perf_counter()
    with (
        open_dataset(data_path, **options) as dataset,
        create_dataloader(dataset, **loading) as loader,
        Running(loader) as running,
    ):
        result.num_workers = loader.num_workers
        if result.samples is None and not isinstance(dataset, StreamingDataset):
            if not len(dataset):
                raise ConfigError(f"{dataset!r} has no samples to time")
            result.samples = len(dataset)
        batch, samples = running.next()
        now = time.perf_counter()
        rate.first_batch_s = now - opened
        result.sample_mb = _nbytes_of(batch) / max(1, samples) / 1e6
        end = max(opened + seconds, now + _LEAST_S)
        sizes: list[int] = []

        def count(batch: Any) -> None:
            sizes.append(_nbytes_of(batch))

        if rate.mode == LoadingMode.CACHED.value:
            turn = running.run(end - now, count, most=len(loader))
            if turn.batches == len(loader):
                turn = running.run(max(end - time.perf_counter(), _LEAST_S), count)
            else:
                rate.note = "in its first epoch, in which all is read"
        else:
            turn = running.run(end - now, count)
    rate.samples = turn.samples
    rate.samples_per_second = turn.rate
    # the first batches, which were made ahead, are not timed
    rate.mb_per_second = sum(sizes[-turn.batches :]) / turn.seconds / 1e6


def _nbytes_of(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(batch))


def _read_rate(path: str, seconds: float) -> float | None:
    """Megabytes a second of local files, read in one thread. None: there are none."""
    start = time.perf_counter()
    end = start + seconds
    count = 0
    for name in itertools.takewhile(lambda _: time.perf_counter() < end, _files_below(path)):
        with open(name, "rb", buffering=0) as file:
            while time.perf_counter() < end and (block := file.read(8 << 20)):
                count += len(block)
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
