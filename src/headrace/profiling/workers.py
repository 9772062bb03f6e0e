"""Measures how many workers a loader needs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Unpack

from torch.utils.data import DataLoader, IterableDataset

from headrace.arguments import check_integer, checks_keywords
from headrace.core.construction import classes_of, joined_class
from headrace.core.dataset import BaseDataset
from headrace.core.modes import LoadingMode
from headrace.display import Lines
from headrace.errors import BudgetError, ConfigError, HeadraceWarning
from headrace.loader.config import DataLoaderConfig, PathOptions, check_options
from headrace.loader.create import open_path
from headrace.loader.data import check_dataset, is_path
from headrace.loader.loader import Loader
from headrace.memory.limits import usable_cpus
from headrace.memory.per_process import is_daemonic
from headrace.order import detect_world
from headrace.order.seeding import SampleSeeder, preserved_rng
from headrace.profiling.room import finish_kernels

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

    def __new__(cls, number: int, rates: Mapping[int, float], reason: str) -> SuggestedWorkers:
        made = super().__new__(cls, number)
        made.rates, made.reason = dict(rates), reason
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return int(self), self.rates, self.reason

    def explain(self) -> str:
        """A table of the rates, and the reason."""
        best = max(self.rates.values())
        rows = [
            f"{number:>11}  {rate:>11,.1f}  {rate / best:>7.0%}{'  <--' if number == self else ''}"
            for number, rate in self.rates.items()
        ]
        return Lines(
            "\n".join(
                [
                    "num_workers  batches/s   of best",
                    *rows,
                    f"num_workers={int(self)}: {self.reason}",
                ]
            )
        )

    def __repr__(self) -> str:
        rates = {number: float(f"{rate:.4g}") for number, rate in self.rates.items()}
        return f"SuggestedWorkers({int(self)}, rates={rates}, reason={self.reason!r})"

    def __str__(self) -> str:
        return str(int(self))


@checks_keywords
def suggest_num_workers(
    data: Any,
    config: DataLoaderConfig | None = None,
    *,
    step: Callable[[Any], Any] | float | None = None,
    seconds: float = 2.0,
    most: int | None = None,
    **overrides: Unpack[PathOptions],
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
    options: dict[str, Any] = {**overrides}
    _check(data, config, step, seconds, most, options)
    if not isinstance(data, DataLoader):
        check_dataset("suggest_num_workers", "data", data)
        check_options("suggest_num_workers", config, options if not is_path(data) else ())
    dataset, opened = data, None
    if is_path(data):
        dataset, options = open_path("suggest_num_workers", data, config, options)
        opened = dataset
    if most is None:
        most = 0 if is_daemonic() else cores_of_rank()
    jobs = _Jobs(dataset, config, options)
    target = 1 / step if isinstance(step, (int, float)) and not callable(step) else None
    try:
        with preserved_rng(drawn_from(data)):
            rates = _measured(
                jobs,
                _numbers(most, jobs.turns()),
                target,
                lambda job: _rate(job, step if callable(step) else None, seconds),
            )
    finally:
        if opened is not None:
            opened.close()
    return _chosen(rates, target)


def _check(
    data: Any, config: Any, step: Any, seconds: Any, most: Any, overrides: dict[str, Any]
) -> None:
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not 0 < seconds < math.inf
    ):
        raise ConfigError(f"suggest_num_workers: seconds must be a number above 0, not {seconds!r}")
    check_integer("suggest_num_workers: most", most, 0, optional=True)
    is_time = isinstance(step, (int, float)) and not isinstance(step, bool) and 0 < step < math.inf
    if not (step is None or callable(step) or is_time):
        raise ConfigError(
            "suggest_num_workers: step must be a callable that takes a batch, or seconds above "
            f"0, not {step!r}"
        )
    if "num_workers" in overrides:
        raise ConfigError(
            "suggest_num_workers: num_workers is what it looks for; most= says how many it may try"
        )
    if isinstance(data, DataLoader) and (config is not None or overrides):
        raise ConfigError(
            "suggest_num_workers: a loader has its options: pass its dataset to try others"
        )


def _numbers(most: int, turns: int | None) -> list[int]:
    """The numbers to try, up to `most`."""
    numbers = range(most + 1) if turns is not None else _NUMBERS
    return [
        number
        for number in numbers
        if number <= most and (turns is None or not number or turns % number == 0)
    ]


def _measured(
    jobs: Callable[[int, int], Any],
    numbers: Iterable[int],
    target: float | None,
    rate_of: Callable[[Any], float],
) -> dict[int, float]:
    """The rate with each number, until nothing is gained any more.

    Args:
        jobs: makes the loader, as a context, for a number of workers and an epoch; None: the memory
            budget has no room for so many.
        numbers: to try, in growing order.
        target: a rate that suffices.
        rate_of: measures a loader.
    """
    rates: dict[int, float] = {}
    idle = 0
    for epoch, number in enumerate(itertools.chain([None], numbers)):
        with jobs(number or 0, epoch) as loader:
            if loader is None:
                break
            rate = rate_of(loader)
        if number is None:
            continue  # the first run opens files and imports modules
        idle = idle + 1 if rates and rate * _NEAR <= max(rates.values()) else 0
        rates[number] = rate
        logger.info("num_workers=%d: %.1f batches/s", number, rate)
        if idle == _PATIENCE or (target is not None and rate >= target):
            break
    return rates


def _chosen(rates: dict[int, float], target: float | None) -> SuggestedWorkers:
    """The least number that suffices."""
    best = max(rates.values())
    if target is not None and best >= target:
        number = min(n for n, rate in rates.items() if rate >= target)
        return SuggestedWorkers(
            number,
            rates,
            f"the fewest that keep up with a step of {1 / target:.4g} s, {target:,.1f} batches/s",
        )
    number = min(n for n, rate in rates.items() if rate >= _NEAR * best)
    slow = (
        f"nothing keeps up with a step of {1 / target:.4g} s, {target:,.1f} batches/s: "
        if target is not None
        else ""
    )
    return SuggestedWorkers(
        number, rates, f"{slow}the fewest within 5 % of the best rate, {best:,.1f} batches/s"
    )


def _rate(
    loader: Iterable[Any],
    step: Callable[[Any], Any] | None,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Batches a second, once the workers are at it and what they have made ahead is used up."""
    prefetched = max(
        1, getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", None) or 1)
    )
    first: float | None = None  # when the first batch came: workers have started
    since, counted = None, 0
    with contextlib.closing(endless(loader)) as batches:
        for number in itertools.count(1):
            batch = next(batches)
            if step is not None:
                step(batch)
            now = clock()
            first = now if first is None else first
            if since is None:
                if number >= prefetched or now - first >= seconds:
                    finish_kernels()
                    since, counted = clock(), number
            elif now - since >= seconds:
                finish_kernels()
                return (number - counted) / (clock() - since)
    raise AssertionError("not reached: the batches have no end")


def endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    """Batches, epoch after epoch. Closed, it ends the workers."""
    while True:
        batches, running = 0, iter(loader)
        try:
            for batch in running:
                batches += 1
                yield batch
        except BaseException:
            end(running)
            raise
        if not batches:
            raise ConfigError(
                "an epoch has no batch: the dataset is empty, or drop_last leaves nothing"
            )


def end(running: Any) -> None:
    """Ends the workers of an iterator now, whoever still holds it, such as the traceback of an
    error.
    """
    deliveries = getattr(running, "_deliveries", running)  # a Loader's has torch's inside
    shut_down = getattr(deliveries, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


class _Jobs:
    """Makes loaders over a dataset that differ in their number of workers alone.

    Args:
        data: a dataset, or a loader.
        config, overrides: of a dataset's loader.
    """

    def __init__(
        self, data: Any, config: DataLoaderConfig | None, overrides: dict[str, Any]
    ) -> None:
        self._data, self._is_plain = (
            data,
            isinstance(data, DataLoader) and not isinstance(data, Loader),
        )
        self._config = (
            data.given
            if isinstance(data, Loader)
            else (config or DataLoaderConfig()).with_(**overrides)
        )
        self._dataset = data.dataset if isinstance(data, DataLoader) else data

    def turns(self) -> int | None:
        """That of a block shuffle, whose workers should divide it; None without one."""
        if self._is_plain:
            return None
        with self(0, 0) as loader:
            turns: int | None = loader.state_dict().get("turns")
            return turns

    @contextlib.contextmanager
    def __call__(self, number: int, epoch: int) -> Iterator[Any]:
        """The loader with so many workers, about to begin an epoch; None: the memory budget has
        no room for so many.
        """
        try:
            loader = self._make(number)
        except BudgetError:
            if not number:
                raise
            loader = None
        fits = not isinstance(loader, Loader) or loader.config.num_workers == number
        try:
            if isinstance(loader, Loader):
                loader.set_epoch(epoch)
            yield loader if fits else None
        finally:
            if isinstance(loader, Loader):
                loader.close()

    def _make(self, number: int) -> Any:
        if self._is_plain:
            return plain_loader(self._data, number)
        dataset = self._dataset
        if isinstance(dataset, BaseDataset) and dataset.loading_mode is LoadingMode.CACHED:
            dataset = in_mode(dataset, LoadingMode.LAZY)
        cls = type(self._data) if isinstance(self._data, Loader) else Loader
        with warnings.catch_warnings():
            # of options that mean nothing with this number: the user's loader says them
            warnings.simplefilter("ignore", HeadraceWarning)
            return cls(dataset, self._config.with_(num_workers=number))


def in_mode(dataset: BaseDataset, mode: LoadingMode) -> BaseDataset:
    """The dataset in another mode, which is not streaming: handles, store and budget stay
    behind.
    """
    other = copy.copy(dataset)
    other.__class__ = joined_class(*classes_of(type(other)))
    other.loading_mode = mode
    return other


def cores_of_rank() -> int:
    """The cores of this machine for each of its ranks."""
    return max(1, usable_cpus() // detect_world().local_world_size)


def drawn_from(data: Any) -> SampleSeeder | None:
    """Finds the user's generators that a torch DataLoader draws its order from; None of a `Loader`
    or a dataset, whose orders draw from none.
    """
    if isinstance(data, Loader) or not isinstance(data, DataLoader):
        return None
    return SampleSeeder(data.generator, data.sampler, data.batch_sampler)


def plain_loader(loader: DataLoader[Any], number: int, **options: Any) -> DataLoader[Any]:
    """A torch DataLoader with the options of another, so many workers, and some options of its
    own.
    """
    names = ["collate_fn", "pin_memory", "worker_init_fn", "generator"]
    if number:
        names += ["timeout", "prefetch_factor", "persistent_workers", "multiprocessing_context"]
    if isinstance(loader.dataset, IterableDataset):
        names += ["batch_size", "drop_last"]
    elif loader.batch_sampler is not None:
        names += ["batch_sampler"]
    else:  # the dataset yields batches
        names += ["batch_size", "sampler"]
    return DataLoader(
        loader.dataset,
        num_workers=number,
        **{**{name: getattr(loader, name) for name in names}, **options},
    )
