"""Measures what limits the speed of a training loop, and what would make it faster.

The rate of a loop is predicted from what a sample costs. Workers make batches side by side, and the
loop takes them one after the other. So the rate is the least of three: what the workers make, what
the loop takes, and what the cores compute for both. Without workers all of it is sequential.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from headrace.arguments import check_callable, check_seconds, checks_keywords, described
from headrace.core.dataset import BaseDataset
from headrace.core.options import LoadingMode
from headrace.datasets.image.image import ImageDataset
from headrace.errors import ConfigError, HeadraceError
from headrace.loader.config import inner_datasets, length_of
from headrace.loader.loader import Loader
from headrace.memory.budget import format_size
from headrace.monitor.stats import STAGES
from headrace.order.seeding import preserved_rng
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

_SAMPLES = 64  # that are cached to measure what cached samples cost
_FAR = 1_000_003  # an epoch that no training reaches
_MORE_WORKERS = 1.15  # a gain that makes their number the limit
# a loop that hardly waits is limited by its step, unless it is clearly slower than the step alone
_HARDLY = 0.08
_UNSURE = 1.2


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a sample costs.

    Attributes:
        work: of a worker (without workers: of this process while it makes a batch).
        cpu: the part of `work` in which a core computes.
        main: of this process, for receiving and moving.
        step: of the user's step. 0: there is none.
        step_cpu: the part of `step` in which a core computes.
        workers: processes that make batches.
        cores: of the machine, for this rank.
    """

    work: float
    cpu: float
    main: float
    step: float
    step_cpu: float
    workers: int
    cores: int

    def loop(self) -> float:
        """Samples per second of the loop."""
        taking = self.main + self.step
        if not self.workers:
            return 1 / max(self.work + taking, 1e-12)
        computing = (self.cpu + self.main + self.step_cpu) / self.cores
        return 1 / max(self.work / self.workers, taking, computing, 1e-12)


@dataclasses.dataclass(slots=True)
class Measured:
    """What was measured before any advice.

    Attributes:
        loader: a `Loader` or a torch `DataLoader`.
        loop: with the step, if there is one.
        alone: the loader without the step.
        free: the step with batches in memory. None: no step.
        costs: of a sample, which agree with the rate of the loader alone.
    """

    loader: Any
    loop: Turn
    alone: Turn
    free: Turn | None
    costs: Costs

    @property
    def most_gain(self) -> float | None:
        """The factor by which the loop would be faster if loading cost nothing."""
        if self.free is None:
            return None
        return self.free.rate / max(self.loop.rate, 1e-9)

    def seconds(self, stage: str) -> float:
        """Seconds of a worker's stage for a sample."""
        return self.alone.per_sample(f"{stage}_seconds")

    def gain(self, saved: float = 0.0, workers: int | None = None) -> float:
        """The predicted factor by which the loop would be faster if a worker's stage cost `saved`
        seconds less per sample, or with another number of workers.
        """
        costs = self.costs
        work = max(costs.work - saved, 0.02 * costs.work)
        cpu = costs.cpu * work / max(costs.work, 1e-12)
        if workers is None:
            workers = costs.workers
        then = dataclasses.replace(costs, work=work, cpu=cpu, workers=workers)
        return then.loop() / costs.loop()

    @property
    def waiting(self) -> float:
        """The share of a worker's time in which it does not compute."""
        times = self.alone.times
        return max(0.0, 1 - times["work_cpu_seconds"] / max(times["work_seconds"], 1e-9))

    @property
    def waits(self) -> bool:
        """True if workers wait for a disk or a server, rather than compute."""
        return self.waiting > 0.5


def find_limit(measured: Measured, *, may_be_workers: bool = True) -> str:
    """What limits the loop: "step", "workers", "transfer", or the stage that takes most of the
    workers' time.

    Args:
        measured: what was measured.
        may_be_workers: False: more workers were tried, and did not help.
    """
    most = measured.most_gain
    waited = measured.loop.wait / max(measured.loop.seconds, 1e-9)
    if most is not None and (most < WORTH or (waited < _HARDLY and most < _UNSURE)):
        return "step"
    costs = measured.costs
    working = costs.work / max(costs.workers, 1)
    if measured.alone.per_sample("transfer_time") > max(working, costs.step):
        return "transfer"
    gain = measured.gain(workers=more_workers(measured))
    if may_be_workers and not measured.waits and gain >= _MORE_WORKERS:
        return "workers"
    return max(STAGES, key=measured.seconds)


def more_workers(measured: Measured) -> int | None:
    """The smallest number of workers within 3 % of the best predicted rate. None: there are as many
    already.
    """
    costs = measured.costs
    most = max(costs.cores, costs.workers)
    if measured.waits:  # who waits needs no core
        most = 4 * max(1, costs.workers)
    plan = getattr(measured.loader, "_plan", None)
    turns = None if plan is None else plan.parameters().get("turns")
    gains = {costs.workers: 1.0}
    for number in range(costs.workers + 1, most + 1):
        if not turns or turns % number == 0:
            gains[number] = measured.gain(workers=number)
    best = min(number for number, gain in gains.items() if gain >= 0.97 * max(gains.values()))
    return best if best > costs.workers else None


def advise(measured: Measured, limit: str) -> list[Advice]:
    """The changes that are predicted to help, largest gain first."""
    advice: list[Advice] = []
    if limit == "step":
        return advice
    for rule in RULES:
        for one in rule(measured):
            one.predicted = min(one.predicted, measured.most_gain or one.predicted)
            if one.predicted >= WORTH:
                advice.append(one)
    return sorted(advice, key=lambda one: -one.predicted)


def _option(measured: Measured, why: str, predicted: float, **options: Any) -> Advice:
    """Advice to change options of the loader."""
    [(name, value)] = options.items()
    maker = "create_dataloader" if isinstance(measured.loader, Loader) else "DataLoader"
    code = f"{maker}(dataset, {name}={value!r})  # and your other options"
    return Advice(name, why, code, predicted, options=options)


def _workers(measured: Measured) -> Iterator[Advice]:
    number = more_workers(measured)
    if number is None:
        return
    costs = measured.costs
    why = f"{costs.workers} of {costs.cores} cores make batches"
    if measured.waits:
        why = (
            f"a worker waits for {measured.waiting:.0%} of its time: more of them wait at the same "
            "time, as far as disk or server allow"
        )
    yield _option(measured, why, measured.gain(workers=number), num_workers=number)


def _prefetch(measured: Measured) -> Iterator[Advice]:
    free = measured.free
    if not measured.costs.workers or free is None or measured.alone.rate < 1.1 * free.rate:
        return
    factor = (getattr(measured.loader, "prefetch_factor", None) or 2) * 4
    why = (
        "the loader alone is faster than the step, and yet the loop waits: some batches take "
        "much longer than others"
    )
    yield _option(measured, why, measured.most_gain or 1.0, prefetch_factor=factor)


def _persistent(measured: Measured) -> Iterator[Advice]:
    loader = measured.loader
    loop = measured.loop
    steps = length_of(loader)
    if getattr(loader, "persistent_workers", True) or not measured.costs.workers:
        return
    if not steps or not loop.starts or loop.batches <= len(loop.starts):
        return
    usual = (loop.wait - sum(loop.starts)) / (loop.batches - len(loop.starts))
    starting = max(0.0, sum(loop.starts) / len(loop.starts) - usual)
    epoch = loop.seconds / loop.batches * steps
    why = (
        f"workers are started anew for each epoch of {steps} batches, which takes {starting:.2f} s"
    )
    gain = epoch / max(epoch - starting, 1e-9)
    yield _option(measured, why, gain, persistent_workers=True)


def _block(measured: Measured) -> Iterator[Advice]:
    loader = measured.loader
    if not isinstance(loader, Loader) or not isinstance(loader.dataset, BaseDataset):
        return
    dataset = loader.dataset
    if loader.config.shuffle is not True or loader.config.orders:
        return
    sizes = dataset.blocks()
    if not dataset.sample_source.block_nbytes or sizes is None or not len(sizes):
        return  # samples are read one by one
    together = len(dataset) / len(sizes)
    if together < 2:
        return
    why = (
        f"{together:,.0f} samples share each block of the storage, which a full shuffle reads and "
        "decodes for each of them"
    )
    gain = measured.gain(measured.seconds("read") * (1 - 1 / together))
    yield _option(measured, why, gain, shuffle="block")


def _cached(measured: Measured) -> Iterator[Advice]:
    """Samples in memory; if they don't fit, decoded images in a packed file."""
    loader = measured.loader
    if not isinstance(loader, Loader) or not isinstance(loader.dataset, BaseDataset):
        return
    dataset = loader.dataset
    if dataset.loading_mode not in (LoadingMode.LAZY, LoadingMode.STREAMING):
        return
    tried = _try_cached(loader)
    if tried is None:
        return
    ratio, nbytes = tried
    whole = format_size(nbytes * len(dataset))
    gain = measured.gain((1 - ratio) * measured.costs.work)
    if nbytes * len(dataset) <= 0.9 * dataset.budget.available:
        why = (
            f"all {len(dataset):,} samples take {whole} of memory; from the second epoch on "
            "nothing is read or decoded"
        )
        code = f'{type(dataset).__name__}(..., loading_mode="cached")'
        options = {"loading_mode": "cached"}
        yield Advice("loading_mode", why, code, gain, options=options)
    elif isinstance(dataset, ImageDataset) and dataset.image_size is not None:
        why = f"decoded samples, {whole}, don't fit memory; a packed file has nothing to decode"
        code = f'headrace.pack(dataset, "packed.h5", store="decoded", size={dataset.image_size})'
        yield Advice("packing", why, code, gain)


def _try_cached(loader: Loader) -> tuple[float, float] | None:
    """Makes some batches in mode "cached" in this process: the time of later batches as a part of
    the first time's, and bytes of a sample in memory. None: nothing was held.
    """
    cached = in_mode(loader.dataset, LoadingMode.CACHED)
    batches = -(-_SAMPLES // (loader.batch_size or 1))
    options = {"num_workers": 0, "pin_memory": False, "device": None, "memory_format": None}
    seconds = []
    try:
        with copy_of(loader, cached, **options) as copy:
            for _ in range(4):
                copy.set_epoch(_FAR)
                start = time.perf_counter()
                for _batch in itertools.islice(copy, batches):
                    pass
                seconds.append(time.perf_counter() - start)
        stats = cached.held.stats() if cached.held else {}
    finally:
        cached.close()
    if not stats.get("held"):
        return None
    ratio = min(1.0, min(seconds[1:]) / max(seconds[0], 1e-9))
    return ratio, stats["held_bytes"] / stats["held"]


def _own_code(measured: Measured) -> Iterator[Advice]:
    """The user's transforms and collate function: no option makes them faster."""
    loader = measured.loader
    if not isinstance(loader, Loader):
        return
    codes = []
    if isinstance(loader.dataset, BaseDataset) and loader.dataset.is_transformed:
        codes.append(("transform", measured.seconds("transform")))
    if loader._collating.is_users:
        codes.append(("collate_fn", measured.seconds("collate")))
    for name, seconds in codes:
        share = seconds / max(measured.alone.per_sample("work_seconds"), 1e-12)
        why = f"it takes {share:.0%} of a worker's time: this much is gained if it costs nothing"
        yield Advice(name, why, "", measured.gain(share * measured.costs.work))


RULES = (_workers, _prefetch, _persistent, _block, _cached, _own_code)


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
    # such that the loader alone is as fast as measured, since workers slow each other down; by a
    # factor of 3 at most, if measurements contradict each other
    scaled = loader.num_workers / max(alone.rate, 1e-12)
    if not loader.num_workers:
        scaled = 1 / max(alone.rate, 1e-12) - main
    scaled = min(max(scaled, 0.5 * work, 1e-12), 3 * work)
    return Costs(
        scaled, min(cpu, scaled), main, step, step_cpu, loader.num_workers, cores_of_rank()
    )


def _try(loader: Any, advice: Advice, step: Step | None, seconds: float) -> None:
    """Measures the gain of an advice: the loader as it is and a changed one take turns, so that
    both meet the same machine. Notes the median of the rounds, the least and the most of them.
    """
    seconds = max(2.0, seconds)
    until = time.perf_counter() + seconds
    cached = None
    if "loading_mode" in advice.options:
        cached = in_mode(loader.dataset, LoadingMode.CACHED)
    try:
        options = {} if cached is not None else advice.options
        with Running(copy_of(loader)) as base, Running(copy_of(loader, cached, **options)) as other:
            if cached is not None:
                filled = other.run(_FILLING * seconds, most=len(other.loader))
                if filled.batches < len(other.loader):
                    advice.not_measured = (
                        "an epoch takes longer than there is time for: profile with more seconds"
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
    if not first.is_confirmed:
        return f"{held}; {change}: {first.result} is within the noise: profile longer."
    return f"{held}: {change} gains x{first.measured:.2f}, measured."
