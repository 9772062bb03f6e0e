"""Takes the results of futures in order, with no more than some on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def in_order(begun: Iterable[tuple[K, Future[T]]], most: int) -> Generator[tuple[K, T], None, None]:
    """Results of futures in the order in which they begin, each with what it is of. Those that are
    left when it is closed are cancelled.

    Args:
        begun: begins a future when the next one is asked for: a generator that submits tasks.
        most: futures on their way at once.
    """
    waiting = deque[tuple[K, Future[T]]]()
    try:
        for one in begun:
            waiting.append(one)
            if len(waiting) == most:
                yield _first_of(waiting)
        while waiting:
            yield _first_of(waiting)
    finally:
        for _, future in waiting:
            future.cancel()


def _first_of(waiting: deque[tuple[K, Future[T]]]) -> tuple[K, T]:
    # in a frame of its own: nobody else holds the result while the next one is waited for
    key, future = waiting.popleft()
    return key, future.result()
