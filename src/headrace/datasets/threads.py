"""How many samples does a worker decode at once?

As many as its share of the cores has room for. Decoders let go of the interpreter's lock, so threads of one worker get as far as so
many workers, and share its memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils.data import get_worker_info

from headrace.modes.eager import usable_cpus
from headrace.order import detect_world

SHARE = 0.75
"""The part of a machine's cores that loads data; the rest is the training's."""
_MOST = 8


def threads_of(workers: int, cores: int, ranks: int) -> int:
    """Threads for each of so many workers, on a machine of so many cores and ranks."""
    return max(1, min(_MOST, int(SHARE * cores / ranks) // workers))


class WorkerThreads:
    """Threads of a worker process, started at first use; none in the training's process, whose cores the training needs.

    Not shared by processes: a fork, a copy and a pickle begin without.
    """

    def __init__(self) -> None:
        self._pid, self._number = 0, 1
        self._pool: ThreadPoolExecutor | None = None

    @property
    def number(self) -> int:
        """Threads that work in this process."""
        if self._pid != os.getpid():
            info, ranks = get_worker_info(), detect_world().local_world_size
            self._number = 1 if info is None else threads_of(info.num_workers, len(usable_cpus()), ranks)
            self._pid, self._pool = os.getpid(), None
        return self._number

    def map(self, function: Callable[[int], Any], count: int) -> list[Any]:
        """What a function gives for 0 to count - 1; raises what it raises for the first of them that fails, when all are done."""
        threads = self.number
        if threads == 1 or count < 2:
            return [function(number) for number in range(count)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, "headrace-decode")
        step = -(-count // (4 * threads))  # some parts a thread: samples take different times
        parts = [range(start, min(start + step, count)) for start in range(0, count, step)]
        tasks = [self._pool.submit(lambda part: [function(number) for number in part], part) for part in parts]
        try:
            return [made for task in tasks for made in task.result()]
        finally:
            for task in tasks:
                if not task.cancel():
                    task.exception()

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerThreads, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> WorkerThreads:
        return WorkerThreads()
