"""Finds what holds a loop back, and the changes that are predicted to help."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from typing import Any

import numpy as np

from headrace.core.batch import Collating
from headrace.core.batcher import Batcher
from headrace.core.dataset import BaseDataset
from headrace.core.modes import LoadingMode
from headrace.datasets.image.image import ImageDataset
from headrace.errors import HeadraceWarning
from headrace.loader.data import length_of
from headrace.loader.loader import Loader
from headrace.memory.budget import format_size, size_of
from headrace.order.seeding import preserved_rng
from headrace.profiling.alone import first_requests
from headrace.profiling.frozen import Frozen
from headrace.profiling.images import as_uint8, packing_command, smaller_files, work_ratio
from headrace.profiling.limit import Candidate, Found, Variant, more_workers
from headrace.profiling.model import Costs, gain
from headrace.profiling.report.result import WORTH, Advice
from headrace.profiling.workers import in_mode, plain_loader

_SAMPLES = 64  # that are cached to try what cached samples cost


class Adviser:
    """Makes advice, and for each a loader that follows it.

    Args:
        found: what was measured.
        limit: what holds the loop back.
    """

    def __init__(self, found: Found, limit: str) -> None:
        self._found = found
        self.candidates: list[Candidate] = []
        if limit == "step":
            return
        self._workers()
        self._prefetch()
        self._persistent()
        self._block()
        self._cached()
        self._images()
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
        keeps_batch: bool = False,
    ) -> None:
        most = self._found.most_gain
        predicted = min(predicted, most) if most is not None else predicted
        if predicted >= WORTH:
            self.candidates.append(
                Candidate(
                    Advice(name, why, code, predicted, options=options),
                    variant,
                    unlimited,
                    keeps_batch,
                )
            )

    def _unlimited(self, then: Costs) -> float | None:
        """The gain where the step takes nothing; without workers the step takes its time in any
        case.
        """
        return then.loading() / self._found.costs.loop() if then.workers else None

    def _option(
        self, why: str, predicted: float, unlimited: float | None = None, **options: Any
    ) -> None:
        text = ", ".join(f"{name}={value!r}" for name, value in options.items())
        loader = self._found.loader
        code = f"create_dataloader(dataset, {text})  # and your other options"
        if not isinstance(loader, Loader):
            code = f"DataLoader(dataset, {text})  # and your other options"
        self._add(
            next(iter(options)),
            why,
            code,
            predicted,
            options,
            lambda: (copy_of(loader, **options), None),
            unlimited,
        )

    def _workers(self) -> None:
        found = self._found
        number = more_workers(found)
        if number is None:
            return
        then = found.costs.with_workers(number)
        predicted, unlimited = gain(found.costs, then), self._unlimited(then)
        if not found.computes:
            reads = found.slowest == "read"
            if reads and found.reading_gain is None:
                return
            if reads:
                most = max(1.0, found.reading_gain or 1.0)
                predicted, unlimited = min(predicted, most), min(unlimited or most, most)
            why = (
                f"a worker waits for {found.waiting:.0%} of its time: more of them wait at the "
                "same time"
            )
        else:
            why = f"{found.costs.workers} of {found.costs.cores} cores make batches"
        self._option(why, predicted, unlimited, num_workers=number)

    def _prefetch(self) -> None:
        found = self._found
        if (
            not found.costs.workers
            or found.free is None
            or found.alone.rate < 1.1 * found.free.rate
        ):
            return
        factor = (getattr(found.loader, "prefetch_factor", None) or 2) * 4
        why = (
            "the loader alone is faster than the step, and yet the loop waits: some batches take "
            "much longer than others"
        )
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
        why = (
            f"workers are started anew for each epoch of {steps} batches, which takes "
            f"{starting:.2f} s"
        )
        self._option(why, epoch / max(epoch - starting, 1e-9), persistent_workers=True)

    def _block(self) -> None:
        found, loader = self._found, self._found.loader
        if (
            not isinstance(loader, Loader)
            or not isinstance(loader.dataset, BaseDataset)
            or loader.config.shuffle is not True
        ):
            return
        if not loader.dataset.sample_source.block_nbytes:  # samples are read one by one
            return
        sizes, stats = loader.dataset.blocks(), found.alone
        if sizes is None or not len(sizes) or loader.config.orders:
            return
        together = len(loader.dataset) / len(sizes)
        if together < 2:
            return
        reading = stats.a_sample("read_seconds")
        why = (
            f"{together:,.0f} samples share each block of the storage, which a full shuffle reads "
            "and decodes for each of them"
        )
        then = found.costs.without(reading * (1 - 1 / together), computes=found.computes)
        self._option(why, gain(found.costs, then), self._unlimited(then), shuffle="block")

    # -- the dataset

    def _cached(self) -> None:
        found, loader = self._found, self._found.loader
        dataset = getattr(loader, "dataset", None)
        if (
            not isinstance(loader, Loader)
            or not isinstance(dataset, BaseDataset)
            or found.requests is None
        ):
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
            f"all {len(dataset):,} decoded samples take {format_size(whole)} of memory; from the "
            "second epoch on nothing is read or decoded"
        )
        code = f'{type(dataset).__name__}(..., loading_mode="cached")'

        def variant() -> tuple[Any, Any]:
            cached = in_mode(dataset, LoadingMode.CACHED)
            return copy_of(loader, cached), cached

        self._add(
            "loading_mode",
            why,
            code,
            gain(found.costs, then),
            {"loading_mode": "cached"},
            variant,
            self._unlimited(then),
        )

    def _pack(self, dataset: BaseDataset, held: float, fixed: float, whole: int) -> None:
        """The samples don't fit memory: decoded pixels in one file."""
        found = self._found
        size = getattr(dataset, "image_size", None)
        if (
            not isinstance(dataset, ImageDataset)
            or size is None
            or not isinstance(dataset.data_path, (str, os.PathLike))
        ):
            return
        then = self._with_work(held, fixed)
        why = (
            f"decoded samples, {format_size(whole)}, don't fit memory; in a packed file nothing "
            "is left to decode"
        )
        shape = "x".join(map(str, size)) if isinstance(size, (tuple, list)) else str(size)
        color = dataset._arguments.get("color", "RGB")
        options = f"packed.h5 --store decoded --size {shape}"
        code = packing_command(dataset, options if color == "RGB" else f"{options} --color {color}")
        if code is None:
            return
        self._add("packing", why, code, gain(found.costs, then), {}, None)

    def _with_work(self, held: float, fixed: float) -> Costs:
        """The costs where samples come from memory: as measured in this process, times what
        workers take from each other.
        """
        found = self._found
        inside = max(found.costs.work - found.of_work()["read"], 1e-9)
        factor = min(max(inside / max(fixed, 1e-9), 0.7), 2.0)
        work = min(held * factor, found.costs.work)
        if found.loader.dataset.is_transformed:  # nothing else becomes faster
            seconds, counted = found.of_work(), found.alone.a_sample("work_seconds")
            work = max(
                work,
                found.costs.work
                * (1 - (seconds["read"] + seconds["decode"]) / max(counted, 1e-12)),
            )
        return dataclasses.replace(found.costs, work=work, cpu=min(work, found.costs.cpu))

    def _try_cached(self, dataset: BaseDataset) -> tuple[float, float, int] | None:
        """Some samples in mode "cached", in this process: seconds of one that is held; of one that
        is not, without reading it; and bytes of a decoded one. None: there is not even room for
        these.
        """
        found = self._found
        assert found.requests is not None
        collating = collating_of(found.loader)
        cached = in_mode(dataset, LoadingMode.CACHED)
        requests = first_requests(found.requests(1_000_003), _SAMPLES)
        count = sum(map(len, requests))
        if not count:
            return None
        try:
            batcher = Batcher(cached, collating)
            with preserved_rng():
                before = time.perf_counter()
                for request in requests:
                    batcher.make(request)
                filling = time.perf_counter() - before
                reading = cached.sample_reader.take_report().get("read_seconds", 0.0)
                best = float("inf")
                for _ in range(3):
                    before = time.perf_counter()
                    for request in requests:
                        batcher.make(request)
                    best = min(best, time.perf_counter() - before)
            report = cached.sample_reader.take_report()
            if report.get("cache_misses", 0):
                return None
            first = cached.checked_indices(requests[0][:1]).tolist()
            value = cached.value_source.read(first, cached.access())[0]
            return best / count, (filling - reading) / count, size_of(value)
        finally:
            cached.close()

    def _images(self) -> None:
        found, loader = self._found, self._found.loader
        dataset = getattr(loader, "dataset", None)
        if (
            not isinstance(loader, Loader)
            or found.requests is None
            or not isinstance(dataset, BaseDataset)
        ):
            return
        view = as_uint8(dataset)
        if view is not None and loader._images.pixels is None:
            ratio = work_ratio(dataset, view, collating_of(loader), found.requests(1_000_004))  # type: ignore[arg-type]  # of images
            then = found.costs.without(
                (1 - min(ratio, 1.0)) * found.costs.work, computes=found.computes
            )
            why = (
                "batches of uint8 are a quarter of the bytes, and normalised on the device (where "
                "that takes its time)"
            )
            code = (
                "ImageDataset(..., normalize=False)  # and in the step: (images / 255 - mean) / std"
            )
            variant: Variant = lambda: (copy_of(loader, view), None)  # noqa: E731
            self._add(
                "uint8",
                why,
                code,
                gain(found.costs, then),
                {},
                variant,
                self._unlimited(then),
                keeps_batch=True,
            )
        if dataset.loading_mode in (LoadingMode.EAGER, LoadingMode.CACHED):
            return
        smaller = smaller_files(dataset, found.requests)
        if smaller is not None:
            saved = found.of_work()["decode"] * (1 - min(smaller.ratio, 1.0))
            then = found.costs.without(saved, computes=found.computes)
            why = (
                f"images of at most {smaller.side} pixels decode in {smaller.ratio:.0%} of the "
                "time, and are resized to samples as before"
            )
            self._add(
                "smaller files",
                why,
                smaller.command,
                gain(found.costs, then),
                {},
                None,
                self._unlimited(then),
            )

    # -- the user's own code

    def _own_code(self) -> None:
        found, loader = self._found, self._found.loader
        seconds = found.of_work()
        if not isinstance(loader, Loader):
            return
        dataset = loader.dataset
        if isinstance(dataset, BaseDataset) and dataset.is_transformed:
            share = seconds["transform"] / max(found.costs.work, 1e-12)
            is_held = found.stages.own_code == "transform" and bool(found.stages.gil)
            held = (
                f", and hold the interpreter's lock for {found.stages.gil:.0%} of it"
                if is_held
                else ""
            )
            why = (
                f"the transforms take {share:.0%} of a worker's time{held}: this much is gained "
                "if they cost nothing"
            )

            def frozen() -> tuple[Any, Any]:
                view = dataset.subset(np.arange(len(dataset)))
                for name in ("transform", "transforms"):
                    if getattr(view, name) is not None:
                        setattr(view, name, Frozen(getattr(view, name)))
                return copy_of(loader, view), None

            self._ablation("transform", why, seconds["transform"], frozen)
        collating = collating_of(loader)
        if collating.is_users:
            share = seconds["collate"] / max(found.costs.work, 1e-12)
            why = (
                f"collate_fn takes {share:.0%} of a worker's time: this much is gained if it "
                "costs nothing"
            )
            self._ablation(
                "collate_fn",
                why,
                seconds["collate"],
                lambda: (copy_of(loader, collate_fn=Frozen(collating.function)), None),
            )

    def _ablation(self, name: str, why: str, seconds: float, variant: Variant) -> None:
        then = self._found.costs.without(seconds, computes=self._found.computes)
        self._add(name, why, "", gain(self._found.costs, then), {}, variant, self._unlimited(then))


def collating_of(loader: Any) -> Collating:
    """How a loader makes batches of samples."""
    if isinstance(loader, Loader):
        return Collating(loader._collating.function, loader.config.yields_batches)
    return Collating(loader.collate_fn, loader.batch_size is None and loader.batch_sampler is None)


def copy_of(loader: Any, dataset: Any = None, **options: Any) -> Any:
    """A loader like another, with other options, or over another dataset."""
    with warnings.catch_warnings():
        # of options that mean nothing now: the user's loader has said them
        warnings.simplefilter("ignore", HeadraceWarning)
        if isinstance(loader, Loader):
            return type(loader)(
                loader.dataset if dataset is None else dataset, loader.given.with_(**options)
            )
        return plain_loader(loader, options.pop("num_workers", loader.num_workers), **options)
