"""Measures what limits the speed of a training loop, and what would make it faster."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from headrace.arguments import check_callable, check_seconds, checks_keywords, described
from headrace.core.options import LoadingMode
from headrace.errors import ConfigError, HeadraceError
from headrace.loader.config import inner_datasets
from headrace.loader.loader import Loader
from headrace.monitor.stats import STAGES
from headrace.order.seeding import preserved_rng
from headrace.profiling.advice import Costs, Measured, advise, find_limit
from headrace.profiling.result import WORTH, Advice, Profile, Stage
from headrace.profiling.running import (
    Running,
    Step,
    Turn,
    copy_of,
    cores_of_rank,
    drawn_from,
    in_mode,
    run_step,
)

_OPTIONS = ("batch_size", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_ROUNDS = 3
_KEPT = 4  # batches in memory that stand for data that cost nothing
_LONGEST = {"loop": 8.0, "free": 3.0, "alone": 4.0}  # seconds: longer turns say no more
_FILLING = 0.55  # of the time of a trial: for an epoch that fills a cache


@checks_keywords
def profile_dataloader(
    loader: DataLoader[Any], step: Step | None = None, seconds: float = 60.0, *, apply: bool = False
) -> Profile:
    """Measures what limits a training loop, the step or a stage of loading, and what would help, by
    how much.

    The loop runs as in training, with the step. For comparison, the step also runs with batches
    that are already in memory, which is the best that faster loading can achieve. Then the loader
    runs alone. A copy of the loader is measured; the loader itself is not touched, and the global
    random generators are restored. A dataset in mode "cached" or "eager" fills its cache, as in
    training. Files in the system's page cache are read from there.

    ```python
    profile = headrace.profile_dataloader(loader, step, apply=True)
    print(profile)
    profile.save_html("profile.html")
    ```

    Args:
        loader: a `Loader` or a torch `DataLoader`.
        step: the training step, a callable that is called with each batch. It is called some
            hundred times, and changes the model. None: measure loading alone.
        seconds: approximate total time. Batches that take longer are waited for.
        apply: also measure the first advice, next to the unchanged loader. This takes half of the
            time.

    Raises:
        ConfigError: an argument is invalid, or there is no batch.
        Exception: any error of loading or of the step.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            "profile_dataloader: loader must be a Loader or a torch DataLoader, not "
            f"{described(loader)}: pass create_dataloader(dataset), or one of the loaders of a "
            "MultiDataLoader or a DataModule"
        )
    check_callable("profile_dataloader: step", step)
    check_seconds("profile_dataloader: seconds", seconds, 1)
    began = time.perf_counter()
    with preserved_rng(drawn_from(loader)):
        try:
            measured = _measure(loader, step, seconds * (0.45 if apply else 0.9))
            limit = find_limit(measured)
            advice = advise(measured, limit)
            first = next((one for one in advice if one.options), None)
            if apply and first is not None:
                _try(loader, first, step, began + 0.97 * seconds - time.perf_counter())
                refuted = first.measured is not None and first.measured < WORTH
                if limit == "workers" and first.name == "num_workers" and refuted:
                    limit = find_limit(measured, may_be_workers=False)
        finally:
            # what was counted here is not the loader's
            for dataset in inner_datasets(loader.dataset):
                dataset.sample_reader.take_report()
    name = repr(loader)
    if not isinstance(loader, Loader):
        name = f"DataLoader({type(loader.dataset).__name__})"
    return Profile(
        loader=name,
        verdict=_verdict(measured, limit, advice),
        limit=limit,
        has_step=step is not None,
        samples_per_second=measured.loop.rate,
        loading_per_second=measured.alone.rate,
        free_per_second=None if measured.free is None else measured.free.rate,
        most_gain=measured.most_gain,
        wait_fraction=measured.loop.wait / max(measured.loop.seconds, 1e-9),
        workers=measured.costs.workers,
        cores=measured.costs.cores,
        stages=_stages(measured, limit),
        advice=advice,
        config={name: getattr(loader, name) for name in _OPTIONS},
        seconds=time.perf_counter() - began,
    )


def _measure(loader: Any, step: Step | None, seconds: float) -> Measured:
    """Runs the loop and the step alone in turns, since the machine may change meanwhile; then the
    loader alone.
    """
    loop = Turn()
    free = None
    with Running(copy_of(loader)) as running:
        if step is None:
            loop = alone = running.run(min(_LONGEST["loop"], 0.5 * seconds))
        else:
            free = Turn()
            kept = [running.next() for _ in range(_KEPT)]
            for _ in range(_ROUNDS):
                loop.add(running.run(min(_LONGEST["loop"], 0.4 * seconds) / _ROUNDS, step))
                free.add(run_step(kept, step, min(_LONGEST["free"], 0.2 * seconds) / _ROUNDS))
            del kept
            alone = running.run(min(_LONGEST["alone"], 0.3 * seconds))
    if not isinstance(loader, Loader):
        _count_plain(loader, alone)
    return Measured(loader, loop, alone, free, _costs(loader, alone, free))


def _count_plain(loader: DataLoader[Any], alone: Turn) -> None:
    """Times of a torch DataLoader, whose workers count nothing: of a few batches made here."""
    samples = 0
    seconds = {"sample_seconds": 0.0, "collate_seconds": 0.0}
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset) and loader.batch_sampler is not None:
        for indices in itertools.islice(loader.batch_sampler, 8):
            start = time.perf_counter()
            values = [dataset[index] for index in indices]
            collating = time.perf_counter()
            loader.collate_fn(values)
            seconds["sample_seconds"] += collating - start
            seconds["collate_seconds"] += time.perf_counter() - collating
            samples += len(values)
    if samples:
        for name, value in seconds.items():
            alone.times[name] = value * alone.samples / samples
        alone.times["work_seconds"] = sum(seconds.values()) * alone.samples / samples
    else:
        alone.times["work_seconds"] = alone.seconds * max(1, loader.num_workers)
        alone.times["sample_seconds"] = alone.times["work_seconds"]
    if not loader.num_workers:
        alone.times["work_cpu_seconds"] = min(alone.cpu, alone.times["work_seconds"])


def _costs(loader: Any, alone: Turn, free: Turn | None) -> Costs:
    work = alone.per_sample("work_seconds")
    cpu = min(alone.per_sample("work_cpu_seconds"), work)
    main = alone.cpu / max(alone.samples, 1)
    if not loader.num_workers:
        main = max(0.0, main - cpu)
    step = 0.0
    step_cpu = 0.0
    if free is not None:
        step = 1 / max(free.rate, 1e-9)
        step_cpu = free.cpu / max(free.samples, 1)
    costs = Costs(work, cpu, main, step, step_cpu, loader.num_workers, cores_of_rank())
    return costs.scaled_to(alone.rate)


def _try(loader: Any, advice: Advice, step: Step | None, seconds: float) -> None:
    """Measures the gain of an advice: the loader as it is and a changed one take turns, so that
    both meet the same machine. Notes the median of the rounds, the least and the most of them.
    """
    until = time.perf_counter() + max(2.0, seconds)
    cached = None
    if "loading_mode" in advice.options:
        cached = in_mode(loader.dataset, LoadingMode.CACHED)
    try:
        options = {} if cached is not None else advice.options
        with Running(copy_of(loader)) as base, Running(copy_of(loader, cached, **options)) as other:
            if cached is not None:
                for _ in range(len(other.loader)):
                    other.next()
                    if time.perf_counter() > until - (1 - _FILLING) * seconds:
                        advice.not_measured = (
                            "an epoch takes longer than there is time for: profile with more "
                            "seconds"
                        )
                        return
            turn = max(0.4, 0.9 * (until - time.perf_counter()) / (2 * _ROUNDS + 1))
            base.run(turn / 2, step)
            gains = []
            for _ in range(_ROUNDS):
                before = base.run(turn, step).rate
                gains.append(other.run(turn, step).rate / max(before, 1e-9))
        advice.measured = statistics.median(gains)
        advice.spread = (min(gains), max(gains))
    except HeadraceError as error:
        advice.not_measured = f"it could not be tried: {error}"
    finally:
        if cached is not None:
            cached.close()


def _stages(measured: Measured, limit: str) -> list[Stage]:
    stages: list[Stage] = []
    alone = measured.alone
    work = max(alone.per_sample("work_seconds"), 1e-12)
    for name in STAGES:
        seconds = measured.seconds(name)
        if seconds:
            stages.append(Stage(name, 1 / seconds, seconds / work, name == limit))
    if measured.costs.workers or limit == "workers":
        stages.append(Stage("workers", alone.rate, is_limit=limit == "workers"))
    moving = alone.per_sample("transfer_time")
    if moving:
        stages.append(Stage("transfer", 1 / moving, is_limit=limit == "transfer"))
    if measured.free is not None:
        stages.append(Stage("step", measured.free.rate, is_limit=limit == "step"))
    return stages


_NAMES = {
    "read": "Reading",
    "decode": "Decoding",
    "transform": "The transform",
    "collate": "The collate function",
    "sample": "The dataset's __getitem__",
    "transfer": "Copying to the device",
}


def _verdict(measured: Measured, limit: str, advice: list[Advice]) -> str:
    costs = measured.costs
    if limit == "step":
        seconds = costs.step * measured.loop.samples / measured.loop.batches
        return (
            f"Nothing to gain from data: the step takes {1000 * seconds:.1f} ms a batch, and with "
            f"data that cost nothing the loop would be x{measured.most_gain:.2f} as fast."
        )
    if limit == "workers":
        held = f"Too few workers ({costs.workers} on {costs.cores} cores) limit the loop"
    else:
        share = measured.seconds(limit) / max(measured.alone.per_sample("work_seconds"), 1e-12)
        of_work = ""
        if share:
            of_work = f", {share:.0%} of the time that loading takes,"
        held = f"{_NAMES[limit]}{of_work} limits the loop"
    first = next((one for one in advice if one.options), None)
    if first is None:
        return f"{held}; no option helps."
    change = ", ".join(f"{name}={value!r}" for name, value in first.options.items())
    if first.measured is None:
        return f"{held}: {change} is predicted to gain x{first.predicted:.2f}."
    if first.measured < WORTH:
        return f"{held}; {change}, which was tried, does not help."
    return f"{held}: {change} gains x{first.measured:.2f}, measured."
