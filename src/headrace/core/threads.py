"""The number of decoding threads of a worker: as many as its share of the cores.

Decoders let go of the interpreter's lock, so threads of one worker get as far as so
many workers, and share its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch.utils.data import get_worker_info

from headrace.formats.parallel import map_parts
from headrace.memory.limits import usable_cpus
from headrace.memory.per_process import renew_after_fork
from headrace.order import detect_world

SHARE = 0.75
"""The part of a machine's cores that loads data; the rest is the training's."""
_MOST = 8
_WORTH = 1 << 20  # bytes to copy for each thread that is to take part


def threads_of(workers: int, cores: int, ranks: int) -> int:
    """Threads for each of so many workers, on a machine of so many cores and ranks."""
    return max(1, min(_MOST, int(SHARE * cores / ranks) // workers))


class WorkerThreads:
    """Threads that decode in a worker; in the training's process, whose cores the training needs,
    threads that copy what is held, and no more. Started at first use.

    Not shared by processes: a fork, a copy and a pickle begin without.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._number, self._copying = 0, 0  # nobody has looked
        self._pool: ThreadPoolExecutor | None = None
        renew_after_fork(self)

    after_fork = _reset

    def _look(self) -> None:
        if not self._number:
            info, ranks = get_worker_info(), detect_world().local_world_size
            number = 1 if info is None else threads_of(info.num_workers, usable_cpus(), ranks)
            self._copying = min(_MOST, torch.get_num_threads()) if info is None else number
            self._number = number

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max(self._number, self._copying), "headrace-samples")
        return self._pool

    def copy(self, function: Callable[[int], Any], count: int, nbytes: int) -> None:
        """Calls a function that copies, for 0 to count - 1: `nbytes` in all. Not in torch's
        threads, which wait for each other after every step of a conversion: measured, they gain 10
        % where these gain 40.
        """
        self._look()
        numbers = iter(range(count))

        def work() -> None:
            for number in numbers:
                function(number)

        helpers = min(self._copying, nbytes // _WORTH) - 1
        others = [self._threads().submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()

    def map(self, function: Callable[[int], Any], count: int) -> list[Any]:
        """What a function gives for 0 to count - 1; raises what it raises for the first of them
        that fails, when all are done.
        """
        return self._in_parts(lambda part: [function(number) for number in part], count)

    def timed_map(
        self, function: Callable[[int], Any], count: int
    ) -> tuple[list[Any], list[float]]:
        """As `map`, and the seconds that each number took."""
        seconds, clock = [0.0] * count, time.perf_counter

        def run(part: range) -> list[Any]:
            made, last = [], clock()
            for number in part:
                made.append(function(number))
                now = clock()
                seconds[number], last = now - last, now
            return made

        return self._in_parts(run, count), seconds

    def _in_parts(self, run: Callable[[range], list[Any]], count: int) -> list[Any]:
        """What a function gives for parts of 0 to count - 1, as one list."""
        self._look()
        if self._number == 1 or count < 2:
            return run(range(count))
        return map_parts(self._threads(), self._number, run, count)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerThreads, ()
