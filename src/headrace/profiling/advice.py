"""Finds what holds a loop back, and the changes that are predicted to help."""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import Collating
from headrace.datasets.core.finishing import is_transformed
from headrace.datasets.core.ways import choose_way
from headrace.errors import HeadraceWarning
from headrace.loader import Loader
from headrace.loader.data import length_of
from headrace.memory.budget import format_size, size_of
from headrace.modes import LoadingMode
from headrace.monitor.hooks import STAGES
from headrace.order import BatchRequest
from headrace.order.seeding import preserved_rng
from headrace.profiling.alone import Alone
from headrace.profiling.frozen import Frozen
from headrace.profiling.model import Costs, fewest_workers, gain
from headrace.profiling.result import WORTH, Advice
from headrace.profiling.running import Turn
from headrace.profiling.workers import plain_loader

_SAMPLES = 64  # that are cached to try what cached samples cost
_COMPUTES = 0.5  # of a worker's time: below it waits rather than computes
_MORE_WORKERS = 1.15  # a gain that makes their number the limit
_HARDLY, _UNSURE = 0.08, 1.2  # a loop that hardly waits is held back by its step, unless it is clearly slower than the step alone


@dataclass(slots=True)
class Found:
    """What was measured before any advice.

    Attributes:
        loader: the user's, which is left alone; a `Loader`, or a torch `DataLoader`.
        loop: with the step, if there is one; `alone`: the loader without; `free`: the step with batches in memory.
        stages: of the dataset by itself.
        most_gain: by which the loop would be faster if data cost nothing.
        costs: of a sample, which agree with the rate of the loader alone.
        requests: epoch -> its batches; None: not known.
    """

    loader: Any
    loop: Turn
    alone: Turn
    free: Turn | None
    most_gain: float | None
    stages: Alone
    costs: Costs
    requests: Callable[[int], Iterator[BatchRequest]] | None
    reading_gain: float | None = None

    def of_work(self) -> dict[str, float]:
        """Seconds of each stage for a sample: those of the workers, or, where nobody counted them, those of this process."""
        if self.alone.times["work_seconds"]:
            return {stage: self.alone.a_sample(f"{stage}_seconds") for stage in STAGES}
        rates = {stage: self.stages.rate(stage) for stage in STAGES}
        return {stage: 1 / rate if rate else 0.0 for stage, rate in rates.items()}

    @property
    def computes(self) -> bool:
        """True if workers compute, rather than wait for a disk or a server."""
        return self.waiting <= 1 - _COMPUTES

    @property
    def waiting(self) -> float:
        """The share of a worker's time in which it neither computes nor is ready to."""
        turn, workers = self.alone, self.costs.workers
        busy, whole = turn.times["work_cpu_seconds"] + turn.queued, turn.times["work_seconds"]
        if not whole:  # nobody counted in the workers: alone, a loader's workers are at it all the time
            busy, whole = busy if workers else turn.own_cpu, turn.seconds * max(1, workers)
        return max(0.0, 1 - busy / max(whole, 1e-9))


Variant = Callable[[], tuple[Any, Any]]
"""Makes a loader with a change, and the dataset that it has of its own, to be closed, or None."""


@dataclass(slots=True)
class Candidate:
    """An advice that may be tried.

    Attributes:
        advice: what the user is told.
        variant: makes the loader that follows it; None: it can't be tried.
        unlimited: the gain that is predicted for a step that takes nothing; None: it does not depend on the step.
    """

    advice: Advice
    variant: Variant | None
    unlimited: float | None = None


def find_limit(found: Found, *, more_workers: bool = True) -> str:
    """What holds the loop back: "step", "workers", "device", or the stage that takes most of the workers' time.

    Args:
        found: what was measured.
        more_workers: False: more workers were tried, and did not help.
    """
    most, waited = found.most_gain, found.loop.wait / max(found.loop.seconds, 1e-9)
    if most is not None and (most < WORTH or (waited < _HARDLY and most < _UNSURE)):
        return "step"
    seconds = found.of_work()
    slowest = max(seconds, key=lambda stage: seconds[stage])
    moving = found.stages.rate("device")
    if moving is not None and 1 / moving > max(found.costs.work / max(found.costs.workers, 1), found.costs.step):
        return "device"
    number = _more_workers(found)
    if number is not None and more_workers:
        then = found.costs.with_workers(number)
        gained = gain(found.costs, then)
        if found.computes and gained >= _MORE_WORKERS:
            return "workers"
    return slowest


def _more_workers(found: Found) -> int | None:
    """The number of workers that is predicted to be best; None: there are as many already."""
    costs = found.costs
    if found.computes:
        numbers = list(range(costs.workers, max(costs.cores, costs.workers) + 1))
    else:
        most = max(1, int(costs.workers or 1) * 4)
        numbers = [number for number in (costs.workers, 1, 2, 4, 8, 16) if costs.workers <= number <= most]
    plan = getattr(found.loader, "_plan", None)
    turns = None if plan is None else plan.parameters().get("turns")
    numbers = [number for number in numbers if number == costs.workers or not turns or turns % number == 0]
    best = fewest_workers(costs, numbers)
    return best if best > costs.workers else None


class Adviser:
    """Makes advice, and for each a loader that follows it.

    Args:
        found: what was measured.
        limit: what holds the loop back.
    """

    def __init__(self, found: Found, limit: str) -> None:
        self._found, self._limit = found, limit
        self.candidates: list[Candidate] = []
        if limit == "step":
            return
        self._workers()
        self._prefetch()
        self._persistent()
        self._block()
        self._cached()
        self._own_code()
        self.candidates.sort(key=lambda one: -one.advice.predicted)

    # -- options of the loader

    def _add(
        self,
        name: str,
        why: str,
        code: str,
        predicted: float,
        options: dict[str, Any],
        variant: Variant | None,
        unlimited: float | None = None,
    ) -> None:
        most = self._found.most_gain
        predicted = min(predicted, most) if most is not None else predicted
        if predicted >= WORTH:
            self.candidates.append(Candidate(Advice(name, why, code, predicted, options=options), variant, unlimited))

    def _unlimited(self, then: Costs) -> float | None:
        """The gain where the step takes nothing; without workers the step takes its time in any case."""
        return then.loading() / self._found.costs.loop() if then.workers else None

    def _option(self, why: str, predicted: float, unlimited: float | None = None, **options: Any) -> None:
        text = ", ".join(f"{name}={value!r}" for name, value in options.items())
        loader = self._found.loader
        code = f"create_dataloader(dataset, {text})  # and your other options"
        if not isinstance(loader, Loader):
            code = f"DataLoader(dataset, {text})  # and your other options"
        self._add(next(iter(options)), why, code, predicted, options, lambda: (copy_of(loader, **options), None), unlimited)

    def _workers(self) -> None:
        found = self._found
        number = _more_workers(found)
        if number is None:
            return
        then = found.costs.with_workers(number)
        predicted, unlimited = gain(found.costs, then), self._unlimited(then)
        if not found.computes:
            reads = max(found.of_work(), key=lambda stage: found.of_work()[stage]) == "read"
            if reads and found.reading_gain is None:
                return
            if reads:
                most = max(1.0, found.reading_gain or 1.0)
                predicted, unlimited = min(predicted, most), min(unlimited or most, most)
            why = f"a worker waits for {found.waiting:.0%} of its time: more of them wait at the same time"
        else:
            why = f"{found.costs.workers} of {found.costs.cores} cores make batches"
        self._option(why, predicted, unlimited, num_workers=number)

    def _prefetch(self) -> None:
        found = self._found
        if not found.costs.workers or found.free is None or found.alone.rate < 1.1 * found.free.rate:
            return
        factor = (getattr(found.loader, "prefetch_factor", None) or 2) * 4
        why = "the loader alone is faster than the step, and yet the loop waits: some batches take much longer than others"
        self._option(why, found.most_gain or 1.0, prefetch_factor=factor)

    def _persistent(self) -> None:
        found, loader = self._found, self._found.loader
        steps = length_of(loader)
        if not found.costs.workers or getattr(loader, "persistent_workers", True) or not steps:
            return
        waits = [one.wait_seconds for one in found.loop.told]
        firsts = [one.wait_seconds for one in found.loop.told if one.step == 0]
        if not firsts:
            return
        usual = sorted(waits)[len(waits) // 2]
        starting = max(0.0, sum(firsts) / len(firsts) - usual)
        epoch = found.loop.seconds / max(found.loop.batches, 1) * steps
        why = f"workers are started anew for each epoch of {steps} batches, which takes {starting:.2f} s"
        self._option(why, epoch / max(epoch - starting, 1e-9), persistent_workers=True)

    def _block(self) -> None:
        found, loader = self._found, self._found.loader
        if not isinstance(loader, Loader) or not isinstance(loader.dataset, BaseDataset) or loader.config.shuffle is not True:
            return
        sizes, stats = loader.dataset.blocks(), found.alone
        if sizes is None or not len(sizes) or loader.config.order_of_its_own:
            return
        together = len(loader.dataset) / len(sizes)
        if together < 2:
            return
        reading = stats.a_sample("read_seconds")
        why = f"{together:,.0f} samples share each block of the storage, which a full shuffle reads and decodes for each of them"
        then = found.costs.without(reading * (1 - 1 / together), computes=found.computes)
        self._option(why, gain(found.costs, then), self._unlimited(then), shuffle="block")

    # -- the dataset

    def _cached(self) -> None:
        found, loader = self._found, self._found.loader
        dataset = getattr(loader, "dataset", None)
        if not isinstance(loader, Loader) or not isinstance(dataset, BaseDataset) or found.requests is None:
            return
        if dataset.loading_mode not in (LoadingMode.LAZY, LoadingMode.STREAMING):
            return
        tried = self._try_cached(dataset)
        if tried is None:
            return
        held, ratio_fixed, nbytes = tried
        whole = nbytes * len(dataset)
        if whole > 0.9 * dataset.budget.available:
            self._pack(dataset, held, ratio_fixed, whole)
            return
        then = self._with_work(held, ratio_fixed)
        why = (
            f"all {len(dataset):,} decoded samples take {format_size(whole)} of memory; from the second epoch on nothing is read or decoded"
        )
        code = f'{type(dataset).__name__}(..., loading_mode="cached")'

        def variant() -> tuple[Any, Any]:
            cached = in_mode(dataset, LoadingMode.CACHED)
            return copy_of(loader, cached), cached

        self._add("loading_mode", why, code, gain(found.costs, then), {"loading_mode": "cached"}, variant, self._unlimited(then))

    def _pack(self, dataset: BaseDataset, held: float, fixed: float, whole: int) -> None:
        """The samples don't fit memory: decoded pixels in one file."""
        found = self._found
        size = getattr(dataset, "image_size", None)
        if size is None or dataset.data_path is None:
            return
        then = self._with_work(held, fixed)
        why = f"decoded samples, {format_size(whole)}, don't fit memory; in a packed file nothing is left to decode"
        shape = "x".join(map(str, size)) if isinstance(size, (tuple, list)) else str(size)
        code = f"headrace pack {dataset.data_path} packed.h5 --store decoded --size {shape}"
        self._add("packing", why, code, gain(found.costs, then), {}, None)

    def _with_work(self, held: float, fixed: float) -> Costs:
        """The costs where samples come from memory: as measured in this process, times what workers take from each other."""
        found = self._found
        inside = max(found.costs.work - found.of_work()["read"], 1e-9)
        factor = min(max(inside / max(fixed, 1e-9), 0.7), 2.0)
        work = min(held * factor, found.costs.work)
        if is_transformed(found.loader.dataset):  # nothing else becomes faster
            seconds, counted = found.of_work(), found.alone.a_sample("work_seconds")
            work = max(work, found.costs.work * (1 - (seconds["read"] + seconds["decode"]) / max(counted, 1e-12)))
        return dataclasses.replace(found.costs, work=work, cpu=min(work, found.costs.cpu))

    def _try_cached(self, dataset: BaseDataset) -> tuple[float, float, int] | None:
        """Some samples in mode "cached", in this process: seconds of one that is held; of one that is not, without reading it; and bytes of
        a decoded one. None: there is not even room for these."""
        found = self._found
        assert found.requests is not None
        collating = collating_of(found.loader)
        cached = in_mode(dataset, LoadingMode.CACHED)
        requests: list[BatchRequest] = []
        for request in found.requests(1_000_003):
            requests.append(request)
            if sum(map(len, requests)) >= _SAMPLES:
                break
        count = sum(map(len, requests))
        if not count:
            return None
        try:
            way = choose_way(cached, collating)
            with preserved_rng():
                before = time.perf_counter()
                for request in requests:
                    way.make(request)
                filling = time.perf_counter() - before
                reading = cached.sample_reader.take_report().get("read_seconds", 0.0)
                best = float("inf")
                for _ in range(3):
                    before = time.perf_counter()
                    for request in requests:
                        way.make(request)
                    best = min(best, time.perf_counter() - before)
            report = cached.sample_reader.take_report()
            if report.get("cache_misses", 0):
                return None
            value = cached.sample_reader.values(cached.whole_indices(requests[0][:1]).tolist(), cached.sample_access)[0]
            return best / count, (filling - reading) / count, size_of(value)
        finally:
            cached.close()

    # -- the user's own code

    def _own_code(self) -> None:
        found, loader = self._found, self._found.loader
        seconds = found.of_work()
        if not isinstance(loader, Loader):
            return
        dataset = loader.dataset
        if isinstance(dataset, BaseDataset) and is_transformed(dataset):
            share = seconds["transform"] / max(found.costs.work, 1e-12)
            is_held = found.stages.own_code == "transform" and bool(found.stages.gil)
            held = f", and hold the interpreter's lock for {found.stages.gil:.0%} of it" if is_held else ""
            why = f"the transforms take {share:.0%} of a worker's time{held}: this much is gained if they cost nothing"

            def frozen() -> tuple[Any, Any]:
                view = dataset.subset(np.arange(len(dataset)))
                for name in ("transform", "transforms"):
                    if getattr(view, name) is not None:
                        setattr(view, name, Frozen(getattr(view, name)))
                return copy_of(loader, view), None

            self._ablation("transform", why, seconds["transform"], frozen)
        function = collating_of(loader).function
        if function is not None and not getattr(function, "__module__", "").startswith("headrace."):
            share = seconds["collate"] / max(found.costs.work, 1e-12)
            why = f"collate_fn takes {share:.0%} of a worker's time: this much is gained if it costs nothing"
            self._ablation("collate_fn", why, seconds["collate"], lambda: (copy_of(loader, collate_fn=Frozen(function)), None))

    def _ablation(self, name: str, why: str, seconds: float, variant: Variant) -> None:
        then = self._found.costs.without(seconds, computes=self._found.computes)
        self._add(name, why, "", gain(self._found.costs, then), {}, variant, self._unlimited(then))


def in_mode(dataset: BaseDataset, mode: LoadingMode) -> BaseDataset:
    """The dataset in another mode: handles, store and budget stay behind."""
    if dataset.loading_mode is LoadingMode.STREAMING:
        other: BaseDataset = copy.copy(dataset)
        other.__class__ = getattr(type(other), "_plain_class", type(other))
    else:
        other = copy.copy(dataset)
    other.loading_mode = mode
    return other


def collating_of(loader: Any) -> Collating:
    """How a loader makes batches of samples."""
    if isinstance(loader, Loader):
        return Collating(loader._collate, loader.config.yields_batches)
    return Collating(loader.collate_fn, loader.batch_size is None and loader.batch_sampler is None)


def copy_of(loader: Any, dataset: Any = None, **options: Any) -> Any:
    """A loader like another, with other options, or over another dataset."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadraceWarning)  # of options that mean nothing now: the user's loader has said them
        if isinstance(loader, Loader):
            return type(loader)(loader.dataset if dataset is None else dataset, loader.given.with_(**options))
        return plain_loader(loader, options.pop("num_workers", loader.num_workers), **options)
