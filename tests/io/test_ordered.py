"""Results of futures in order, with a bounded number on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from headrace.io.ordered import in_order


def begun(futures: list[Future[int]]) -> Iterator[tuple[str, Future[int]]]:
    """Futures that end when they have begun, and are noted in the list."""
    for number in range(10):
        futures.append(Future())
        futures[-1].set_result(number)
        yield f"task {number}", futures[-1]


def test_order_and_how_many_begin() -> None:
    for most in [1, 3, 20]:
        futures: list[Future[int]] = []
        for number, found in enumerate(in_order(begun(futures), most)):
            assert found == (f"task {number}", number)
            assert len(futures) == min(10, number + most)


def test_an_error_or_closing_cancels_the_rest() -> None:
    futures = [Future[int]() for _ in range(4)]
    futures[0].set_result(0)
    futures[1].set_exception(OSError("broken"))
    results = in_order(enumerate(futures), 4)
    assert next(results) == (0, 0)
    with pytest.raises(OSError, match="broken"):
        next(results)
    assert [future.cancelled() for future in futures] == [False, False, True, True]
    futures = [Future[int]() for _ in range(4)]
    futures[0].set_result(0)
    with contextlib.closing(in_order(enumerate(futures), 3)) as results:
        next(results)
    assert [future.cancelled() for future in futures] == [False, True, True, False]
