"""Finds what limits a loop, and the changes that are predicted to help.

The rate of a loop is predicted from what a sample costs. Workers make batches side by side, and the
loop takes them one after the other. So the rate is the least of three: what the workers make, what
the loop takes, and what the cores compute for both. Without workers all of it is sequential.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from headrace.core.batcher import Batcher
from headrace.core.dataset import BaseDataset
from headrace.core.options import LoadingMode
from headrace.datasets.image.image import ImageDataset
from headrace.loader.config import length_of
from headrace.loader.loader import Loader
from headrace.memory.budget import format_size
from headrace.monitor.stats import STAGES
from headrace.order import RankBatches
from headrace.order.seeding import preserved_rng
from headrace.profiling.result import WORTH, Advice
from headrace.profiling.running import Turn, in_mode

_SAMPLES = 64  # that are cached to measure what cached samples cost
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

    def scaled_to(self, loading: float) -> Costs:
        """The same, with a worker's time such that the loader alone is as fast as measured:
        workers slow each other down. Contradicting measurements change it by a factor of 3 at most.
        """
        work = max(self.workers / max(loading, 1e-12), 1e-12)
        if not self.workers:
            work = max(1 / max(loading, 1e-12) - self.main, 1e-12)
        work = min(max(work, 0.5 * self.work), 3 * self.work)
        return dataclasses.replace(self, work=work, cpu=min(self.cpu, work))

    def without(self, seconds: float) -> Costs:
        """The same, where a worker's stage costs so many seconds less."""
        work = max(self.work - seconds, 0.02 * self.work)
        return dataclasses.replace(self, work=work, cpu=self.cpu * work / max(self.work, 1e-12))

    def with_workers(self, workers: int) -> Costs:
        """The same with another number of workers."""
        return dataclasses.replace(self, workers=workers)


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

    @property
    def slowest(self) -> str:
        """The stage that takes most of the work."""
        return max(STAGES, key=self.seconds)

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
    number = more_workers(measured)
    if number is not None and may_be_workers and not measured.waits:
        then = costs.with_workers(number)
        if _gain(measured, then) >= _MORE_WORKERS:
            return "workers"
    return measured.slowest


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
    rates = {costs.workers: costs.loop()}
    for number in range(costs.workers + 1, most + 1):
        if not turns or turns % number == 0:
            rates[number] = costs.with_workers(number).loop()
    best = min(number for number, rate in rates.items() if rate >= 0.97 * max(rates.values()))
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


def _gain(measured: Measured, then: Costs) -> float:
    return then.loop() / measured.costs.loop()


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
    then = costs.with_workers(number)
    yield _option(measured, why, _gain(measured, then), num_workers=number)


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
    then = measured.costs.without(measured.seconds("read") * (1 - 1 / together))
    yield _option(measured, why, _gain(measured, then), shuffle="block")


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
    then = measured.costs.without((1 - ratio) * measured.costs.work)
    if nbytes * len(dataset) <= 0.9 * dataset.budget.available:
        why = (
            f"all {len(dataset):,} samples take {whole} of memory; from the second epoch on "
            "nothing is read or decoded"
        )
        code = f'{type(dataset).__name__}(..., loading_mode="cached")'
        options = {"loading_mode": "cached"}
        yield Advice("loading_mode", why, code, _gain(measured, then), options=options)
    elif isinstance(dataset, ImageDataset) and dataset.image_size is not None:
        why = f"decoded samples, {whole}, don't fit memory; a packed file has nothing to decode"
        code = f'headrace.pack(dataset, "packed.h5", store="decoded", size={dataset.image_size})'
        yield Advice("packing", why, code, _gain(measured, then))


def _try_cached(loader: Loader) -> tuple[float, float] | None:
    """Makes some batches in mode "cached" in this process: the time of later batches as a part of
    the first time's, and bytes of a sample in memory. None: nothing was held.
    """
    plan = loader._plan
    if not isinstance(plan, RankBatches):
        return None
    cached = in_mode(loader.dataset, LoadingMode.CACHED)
    batcher = Batcher(cached, loader._collating)
    requests = []
    for request in plan.requests(1_000_003, 0):
        requests.append(request)
        if sum(map(len, requests)) >= _SAMPLES:
            break
    seconds = []
    try:
        with preserved_rng():
            for _ in range(4):
                start = time.perf_counter()
                for request in requests:
                    batcher.make(request)
                seconds.append(time.perf_counter() - start)
        stats = cached.value_source.stats()
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
        then = measured.costs.without(share * measured.costs.work)
        yield Advice(name, why, "", _gain(measured, then))


RULES: tuple[Callable[[Measured], Iterator[Advice]], ...] = (
    *(_workers, _prefetch, _persistent, _block, _cached, _own_code),
)
