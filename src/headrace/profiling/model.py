"""Predicts the rate of a loop from what a sample costs in its parts.

Workers make batches side by side, and the loop takes them one after the other. So the rate is the
least of three: what the workers make, what the loop takes, and what the cores compute for both.
Without workers all of it is one after the other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a sample costs.

    Attributes:
        work: of a worker (or, without workers, of this process while it makes a batch).
        cpu: of these, how many a core computes.
        main: of this process, for receiving and moving.
        step: of the user's step; 0: there is none.
        step_cpu: of these, how many cores compute.
        workers: processes that make batches.
        cores: of the machine, for this rank.
        others: cores that other processes keep busy.
    """

    work: float
    cpu: float
    main: float
    step: float
    step_cpu: float
    workers: int
    cores: int
    others: float = 0.0

    def loading(self) -> float:
        """Samples a second of the loader alone."""
        return dataclasses.replace(self, step=0.0, step_cpu=0.0).loop()

    def loop(self) -> float:
        """Samples a second of the loop."""
        taking = self.main + self.step
        if not self.workers:
            return 1 / max(self.work + taking, 1e-12)
        computing = (self.cpu + self.main + self.step_cpu) / self._free_cores()
        return 1 / max(self.work / self.workers, taking, computing, 1e-12)

    def _free_cores(self) -> float:
        """Cores that are idle, or that a fair scheduler shares out to the workers."""
        others = min(self.others, self.cores)
        return max(self.cores - others, self.cores * self.workers / (self.workers + others), 0.1)

    def scaled_to(self, loading: float) -> Costs:
        """The same, with a worker's time such that the loader alone is as fast as was measured:
        what workers take from each other.
        """
        measured = 1 / max(loading, 1e-12)
        if not self.workers:
            factor = max(measured - self.main, 1e-12) / max(self.work, 1e-12)
        else:
            factor = measured * self.workers / max(self.work, 1e-12)
        factor = min(max(factor, 0.5), 3.0)
        return dataclasses.replace(
            self, work=self.work * factor, cpu=min(self.cpu, self.work * factor)
        )

    def without(self, seconds: float, *, computes: bool) -> Costs:
        """The same, where a stage of a worker costs so many seconds less."""
        work = max(self.work - seconds, 0.02 * self.work)
        cpu = max(self.cpu - seconds, 0.02 * self.cpu) if computes else min(self.cpu, work)
        return dataclasses.replace(self, work=work, cpu=cpu)

    def with_workers(self, workers: int) -> Costs:
        """The same with another number of workers."""
        return dataclasses.replace(self, workers=workers)


def gain(now: Costs, then: Costs) -> float:
    """By which the rate of the loop is multiplied."""
    return then.loop() / now.loop()


def fewest_workers(costs: Costs, numbers: list[int]) -> int:
    """The least of some numbers of workers that comes within 3 % of the best predicted rate."""
    rates = {number: costs.with_workers(number).loop() for number in numbers}
    best = max(rates.values())
    return min(number for number, rate in rates.items() if rate >= 0.97 * best)
