"""Runs parts of one piece of work in threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def map_in(
    pool: ThreadPoolExecutor, threads: int, function: Callable[[int], Any], count: int
) -> list[Any]:
    """What a function gives for 0 to count - 1; raises what it raises for the first of them that
    fails, when all are done.

    Args:
        pool: whose threads call it.
        threads: how many of them there are, 2 or more.
    """

    def run(part: range) -> list[Any]:
        return [function(number) for number in part]

    step = max(1, -(-count // (4 * threads)))  # some parts a thread: they take different times
    parts = [range(start, min(start + step, count)) for start in range(0, count, step)]
    tasks = [pool.submit(run, part) for part in parts]
    try:
        return [made for task in tasks for made in task.result()]
    finally:
        for task in tasks:
            if not task.cancel():
                task.exception()
