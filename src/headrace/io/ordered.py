"""Takes the results of futures in order, with a limited number of unfinished ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def in_order(begun: Iterable[tuple[K, Future[T]]], most: int) -> Generator[tuple[K, T], None, None]:
    """The results of futures in order, each with its key. Closing the generator cancels the futures
    that are left.

    Args:
        begun: a generator that submits a task when the next future is asked for, with its key.
        most: maximum number of unfinished futures.
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
