"""What was measured of a loop, and what holds it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.monitor.stats import STAGES
from headrace.order import BatchRequest
from headrace.profiling.alone import Alone
from headrace.profiling.model import Costs, fewest_workers, gain
from headrace.profiling.report.result import WORTH, Advice
from headrace.profiling.running import Turn

_COMPUTES = 0.5  # of a worker's time: below it waits rather than computes
_MORE_WORKERS = 1.15  # a gain that makes their number the limit
# a loop that hardly waits is held back by its step, unless it is clearly slower than the step alone
_HARDLY, _UNSURE = 0.08, 1.2


@dataclass(slots=True)
class Found:
    """What was measured before any advice.

    Attributes:
        loader: the user's, which is left alone; a `Loader`, or a torch `DataLoader`.
        loop: with the step, if there is one; `alone`: the loader without; `free`: the step with
            batches in memory.
        stages: of the dataset by itself.
        most_gain: by which the loop would be faster if data cost nothing.
        costs: of a sample, which agree with the rate of the loader alone.
        requests: epoch -> its batches; None: not known.
        reading_gain: by which as many threads as `more_workers` says read faster than as many as
            there are workers; None: not measured.
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
        """Seconds of each stage for a sample: those of the workers, or, where nobody counted
        them, those of this process.
        """
        if self.alone.times["work_seconds"]:
            return {stage: self.alone.a_sample(f"{stage}_seconds") for stage in STAGES}
        rates = {stage: self.stages.rate(stage) for stage in STAGES}
        return {stage: 1 / rate if rate else 0.0 for stage, rate in rates.items()}

    @property
    def slowest(self) -> str:
        """The stage that takes most of the work."""
        seconds = self.of_work()
        return max(seconds, key=lambda stage: seconds[stage])

    @property
    def computes(self) -> bool:
        """True if workers compute, rather than wait for a disk or a server."""
        return self.waiting <= 1 - _COMPUTES

    @property
    def waiting(self) -> float:
        """The share of a worker's time in which it neither computes nor is ready to."""
        turn, workers = self.alone, self.costs.workers
        busy, whole = turn.times["work_cpu_seconds"] + turn.queued, turn.times["work_seconds"]
        # nobody counted in the workers: alone, a loader's workers are at it all the time
        if not whole:
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
        unlimited: the gain that is predicted for a step that takes nothing; None: it does not
            depend on the step.
        keeps_batch: True if its batches are others than the step knows: while it is tried the step
            gets one that it knows.
    """

    advice: Advice
    variant: Variant | None
    unlimited: float | None = None
    keeps_batch: bool = False


def find_limit(found: Found, *, may_be_workers: bool = True) -> str:
    """What holds the loop back: "step", "workers", "device", or the stage that takes most of the
    workers' time.

    Args:
        found: what was measured.
        may_be_workers: False: more workers were tried, and did not help.
    """
    most, waited = found.most_gain, found.loop.wait / max(found.loop.seconds, 1e-9)
    if most is not None and (most < WORTH or (waited < _HARDLY and most < _UNSURE)):
        return "step"
    moving = found.stages.rate("device")
    if moving is not None and 1 / moving > max(
        found.costs.work / max(found.costs.workers, 1), found.costs.step
    ):
        return "device"
    number = more_workers(found)
    if (
        number is not None
        and may_be_workers
        and found.computes
        and gain(found.costs, found.costs.with_workers(number)) >= _MORE_WORKERS
    ):
        return "workers"
    return found.slowest


def more_workers(found: Found) -> int | None:
    """The number of workers that is predicted to be best; None: there are as many already."""
    costs = found.costs
    if found.computes:
        numbers = list(range(costs.workers, max(costs.cores, costs.workers) + 1))
    else:
        most = max(1, int(costs.workers or 1) * 4)
        numbers = [
            number for number in (costs.workers, 1, 2, 4, 8, 16) if costs.workers <= number <= most
        ]
    plan = getattr(found.loader, "_plan", None)
    turns = None if plan is None else plan.parameters().get("turns")
    numbers = [
        number for number in numbers if number == costs.workers or not turns or turns % number == 0
    ]
    best = fewest_workers(costs, numbers)
    return best if best > costs.workers else None
