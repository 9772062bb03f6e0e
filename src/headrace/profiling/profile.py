"""Measures what limits the speed of a training loop, and what would make it faster."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from headrace.arguments import check_callable, check_seconds, checks_keywords, described
from headrace.core.dataset import BaseDataset
from headrace.errors import ConfigError
from headrace.loader.data import inner_datasets, length_of
from headrace.loader.loader import Loader
from headrace.order import BatchRequest, EpochOrder, RankBatches
from headrace.order.seeding import preserved_rng
from headrace.profiling.advice import Adviser, collating_of, copy_of
from headrace.profiling.alone import Alone, measure_alone, reading_gain, repeated
from headrace.profiling.limit import Candidate, Found, find_limit, more_workers
from headrace.profiling.model import Costs
from headrace.profiling.report.result import WORTH, Advice, Profile, Stage
from headrace.profiling.running import Running, Step, Turn, joined, run_step
from headrace.profiling.trying import try_advice
from headrace.profiling.workers import cores_of_rank, drawn_from

_ROUNDS = 3
_KEPT = 4  # batches that stand for data that cost nothing
_MOST = {"loop": 8.0, "alone": 4.0, "free": 3.0, "stages": 6.0}  # seconds: longer runs say no more
_TRIED = 2  # pieces of advice that are measured


@checks_keywords
def profile_dataloader(
    loader: DataLoader[Any], step: Step | None = None, seconds: float = 60.0, *, apply: bool = False
) -> Profile:
    """Measures what limits a training loop, the step or a stage of loading, and what would help, by
    how much.

    The loop runs as in training, with the step. For comparison, the step also runs with batches
    that are already in memory, which is the best that faster loading can achieve. Then the loader
    runs alone, and each stage separately in this process. A copy of the loader is measured; the
    loader itself is not touched, and the global random generators are restored. A dataset in mode
    "cached" or "eager" fills its cache, as in training.

    ```python
    profile = headrace.profile_dataloader(loader, step, apply=True)
    print(profile)
    profile.save_html("profile.html")
    ```

    Samples in the system's page cache are read from there, except for "read (cold)", for which the
    system is told to drop them first.

    Args:
        loader: a `Loader` or a torch `DataLoader`.
        step: the training step, a callable that is called with each batch. It is called some
            hundred times, and changes the model. None: measure loading alone.
        seconds: approximate total time. Batches that take longer are waited for.
        apply: also measure each advice, next to the unchanged loader. This takes half of the time.

    Raises:
        ConfigError: an argument is invalid, or there is no batch.
        Exception: any error of loading or of the step.
    """
    _check(loader, step, seconds)
    began = time.perf_counter()
    share = 0.45 if apply else 0.9
    with preserved_rng(drawn_from(loader)), _counting_apart(loader):
        found = _measure(loader, step, seconds * share)
        limit = find_limit(found)
        candidates = Adviser(found, limit).candidates
        if apply:
            _try_best(loader, candidates, found, step, began + 0.97 * seconds)
            limit = _after_trying(limit, candidates, found)
    profile = _result(loader, found, limit)
    profile.advice = [one.advice for one in candidates]
    profile.verdict = _verdict(profile, found)
    profile.seconds = time.perf_counter() - began
    return profile


@contextlib.contextmanager
def _counting_apart(loader: Any) -> Iterator[None]:
    """What is counted inside of it by the loader's datasets in this process is not told as the
    loader's.
    """
    try:
        yield
    finally:
        for dataset in inner_datasets(loader.dataset):
            dataset.sample_reader.take_report()


def _try_best(
    loader: Any, candidates: list[Candidate], found: Found, step: Step | None, until: float
) -> None:
    """Tries some candidates, options before what has none."""
    possible = sorted(
        (one for one in candidates if one.variant is not None),
        key=lambda one: not one.advice.options,
    )
    for number, candidate in enumerate(chosen := possible[:_TRIED]):
        left = max(2.0, until - time.perf_counter()) / (len(chosen) - number)
        try_advice(loader, candidate, None if found.free is None else found.free.rate, step, left)
    for one in candidates:
        if one.variant is None:
            one.advice.not_measured = "not measured: it writes a file"
        elif one.advice.measured is None and not one.advice.not_measured:
            one.advice.not_measured = "not measured: others are predicted to gain more"


def _after_trying(limit: str, candidates: list[Candidate], found: Found) -> str:
    """What holds the loop back, where more workers have not helped."""
    workers = next((one.advice for one in candidates if one.advice.name == "num_workers"), None)
    is_refuted = workers is not None and workers.measured is not None and workers.measured < WORTH
    return find_limit(found, may_be_workers=False) if limit == "workers" and is_refuted else limit


def _check(loader: Any, step: Any, seconds: Any) -> None:
    door = "profile_dataloader"
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"{door}: loader must be a Loader or a torch DataLoader, not {described(loader)}: "
            "pass create_dataloader(dataset), or one "
            "of the loaders of a MultiDataLoader or a DataModule"
        )
    check_callable(f"{door}: step", step)
    check_seconds(f"{door}: seconds", seconds, 1)


def _measure(loader: Any, step: Step | None, seconds: float) -> Found:
    """The loop, the loader alone, the step alone, and each stage by itself."""
    running, rounds = Running(copy_of(loader)), 1 if step is None else _ROUNDS
    try:
        kept = running.first(1 if step is None else _KEPT)
        loops, frees = [], []
        for _ in range(rounds):  # in turns: the machine may change meanwhile
            loops.append(running.run(min(_MOST["loop"], 0.3 * seconds) / rounds, step, looks=True))
            if step is not None:
                frees.append(run_step(kept, step, min(_MOST["free"], 0.15 * seconds) / rounds))
        del kept
        loop, free = joined(loops), joined(frees) if frees else None
        most = (
            statistics.median(
                f.rate / max(one.rate, 1e-9) for one, f in zip(loops, frees, strict=True)
            )
            if frees
            else None
        )
        alone = loop if step is None else running.run(min(_MOST["alone"], 0.2 * seconds))
        copied = running.loader
    finally:
        running.close()
    requests = _requests_of(copied if isinstance(copied, Loader) else loader)
    left = min(_MOST["stages"], 0.25 * seconds)
    stages = Alone()
    if requests is not None:
        device, dataset = None, copied.dataset
        if isinstance(copied, Loader):
            device, dataset = copied.config.device, copied._images.dataset_of(dataset)
        stages = measure_alone(
            dataset, collating_of(copied), repeated(requests, 1_000_001), device, left
        )
    found = Found(
        loader, loop, alone, free, most, stages, _costs(copied, alone, free, stages), requests
    )
    number = more_workers(found)
    if (
        isinstance(copied.dataset, BaseDataset)
        and requests is not None
        and not found.computes
        and number is not None
    ):
        readers = max(1, found.costs.workers), number
        found.reading_gain = reading_gain(
            copied.dataset, repeated(requests, 1_000_002), readers, min(3.0, 0.15 * seconds)
        )
    return found


def _requests_of(loader: Any) -> Callable[[int], Iterator[BatchRequest]] | None:
    """Epoch -> its batches; None where samples have no number."""
    if isinstance(loader, Loader):
        plan = loader._plan
        return (lambda epoch: plan.requests(epoch, 0)) if isinstance(plan, RankBatches) else None
    count = length_of(loader.dataset)
    if count is None or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    shuffle = isinstance(loader.sampler, RandomSampler)
    order = EpochOrder(count, shuffle=shuffle, global_batch=loader.batch_size)
    batches = RankBatches(order, 0, 1, loader.batch_size, False, True)
    return lambda epoch: batches.requests(epoch, 0)


def _costs(loader: Any, alone: Turn, free: Turn | None, stages: Alone) -> Costs:
    workers, samples = int(getattr(loader, "num_workers", 0)), max(alone.samples, 1)
    work, cpu = alone.a_sample("work_seconds"), alone.a_sample("work_cpu_seconds")
    if not work:  # nobody counted in the workers: as it was in this process
        work = sum(1 / rate for stage in ("sample", "collate") if (rate := stages.rate(stage)))
        work = work or max(1, workers) / max(alone.rate, 1e-9)
        cpu = alone.a_sample("work_cpu_seconds") if workers else min(work, alone.own_cpu / samples)
    own = alone.own_cpu / samples
    main = own if workers else max(0.0, own - cpu)
    step = step_cpu = 0.0
    if free is not None:
        step, step_cpu = 1 / max(free.rate, 1e-9), free.own_cpu / max(free.samples, 1)
    costs = Costs(
        work, min(cpu, work), main, step, step_cpu, workers, cores_of_rank(), alone.others
    )
    return costs.scaled_to(alone.rate)


# -- what came of it


def _result(loader: Any, found: Found, limit: str) -> Profile:
    config: dict[str, Any] = {}
    if isinstance(loader, Loader):
        for field in dataclasses.fields(loader.config):
            value = getattr(loader.config, field.name)
            if hasattr(value, "get_start_method"):
                value = value.get_start_method()
            config[field.name] = (
                value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
            )
    else:
        config = {
            name: getattr(loader, name)
            for name in (
                "batch_size",
                "num_workers",
                "prefetch_factor",
                "pin_memory",
                "persistent_workers",
            )
        }
    return Profile(
        loader=repr(loader)
        if isinstance(loader, Loader)
        else f"DataLoader({type(loader.dataset).__name__})",
        verdict="",
        limit=limit,
        has_step=found.free is not None,
        samples_per_second=found.loop.rate,
        loading_per_second=found.alone.rate,
        free_per_second=None if found.free is None else found.free.rate,
        most_gain=found.most_gain,
        wait_fraction=found.loop.wait / max(found.loop.seconds, 1e-9),
        gil_fraction=found.stages.gil,
        own_code=found.stages.own_code,
        workers=found.costs.workers,
        cores=found.costs.cores,
        stages=_stages(found, limit),
        config=config,
        batches=[one._asdict() for one in found.loop.told],
        series=found.loop.series,
    )


_NOISE = 1.25
"""A stage that is faster than its ceiling by a larger factor was not measured by the same work."""
_CEILINGS = {
    "read (warm)": "the same bytes by plain reads, out of memory",
    "decode": "the decoder alone",
    "transform": "the transforms alone",
    "collate": "one copy of the batch's bytes",
    "device": "one copy of the batch's bytes, in one piece",
}


def _stages(found: Found, limit: str) -> list[Stage]:
    stages: list[Stage] = []
    seconds, work = found.of_work(), max(found.costs.work, 1e-12)
    if found.alone.times["work_seconds"]:
        work = found.alone.a_sample("work_seconds")
    for name in (
        "read (cold)",
        "read (warm)",
        "decode",
        "transform",
        "sample",
        "collate",
        "device",
    ):
        rate = found.stages.rate(name)
        if rate is None:
            continue
        ceiling = _ceiling(rate, found.stages.ceiling(name))
        stage = name.split(" ")[0]
        share = seconds[stage] / work if stage in seconds and name != "read (cold)" else None
        is_limit = stage == limit and name != "read (cold)"
        stages.append(
            Stage(name, rate, ceiling, _CEILINGS.get(name, "") if ceiling else "", share, is_limit)
        )
    costs = found.costs
    if costs.workers:
        ceiling = _ceiling(found.alone.rate, costs.workers / work)
        what = (
            "1 worker that never waits"
            if costs.workers == 1
            else f"{costs.workers} workers that never wait"
        )
        stages.append(
            Stage(
                "workers",
                found.alone.rate,
                ceiling,
                what if ceiling else "",
                is_limit=limit == "workers",
            )
        )
    elif limit == "workers":
        stages.append(
            Stage(
                "workers", found.alone.rate, None, "no workers: this process loads", is_limit=True
            )
        )
    if found.free is not None:
        stages.append(Stage("step", found.free.rate, None, "", is_limit=limit == "step"))
    return stages


def _ceiling(rate: float, measured: float | None) -> float | None:
    """The ceiling of a stage. None: the stage is faster by more than noise, so that other work
    was measured, such as another disk's.
    """
    if measured is None or rate > _NOISE * measured:
        return None
    return max(rate, measured)


def _verdict(profile: Profile, found: Found) -> str:
    most = profile.most_gain
    if profile.limit == "step":
        seconds = found.costs.step * found.loop.samples / found.loop.batches
        return (
            f"Nothing to gain from data: the step takes {1000 * seconds:.1f} ms a batch, and with "
            "data that cost nothing the loop would be "
            f"x{most or 1.0:.2f} as fast."
        )
    share = next(
        (stage.share for stage in profile.stages if stage.is_limit and stage.share is not None),
        None,
    )
    names = {
        "workers": f"Too few workers ({profile.workers} on {profile.cores} cores)",
        "read": "Reading",
        "decode": "Decoding",
        "transform": "The transform",
        "collate": "The collate function",
        "sample": "The dataset's __getitem__",
        "device": "Copying to the device",
    }
    whose = "a worker's time" if profile.workers else "the time that loading takes"
    of_time = f", {share:.0%} of {whose}," if share is not None else ""
    holds = "hold" if profile.limit == "workers" else "holds"
    most_is = f" of at most x{most:.2f}" if most is not None else ""
    held = f"{names[profile.limit]}{of_time} {holds} the loop back"
    measured = [one for one in profile.advice if one.measured is not None and one.options]
    best = profile.best
    if best is not None:
        return f"{held}: {_named(best)} gains x{best.measured:.2f}, measured{most_is}."
    untried = next((one for one in profile.advice if one.measured is None and one.options), None)
    if untried is not None and not measured:
        return f"{held}: {_named(untried)} is predicted to gain x{untried.predicted:.2f}{most_is}."
    own = next((one for one in profile.advice if not one.options and one.name != "packing"), None)
    faster = (
        f", and a faster one gains at most x{own.measured or own.predicted:.2f}"
        if own is not None
        else ""
    )
    tried = "nothing that was tried helps" if measured else "no option helps"
    return f"{held}; {tried}{faster}."


def _named(advice: Advice) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in advice.options.items())
