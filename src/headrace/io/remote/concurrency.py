"""Adaptive concurrency of requests to a server.

The number of concurrent pieces grows by one after each success until the server is overloaded for
the first time; from then on it grows by one after as many successes as there are concurrent pieces.
It is halved at each overload (slow start, additive increase, multiplicative decrease: V. Jacobson,
"Congestion avoidance and control", 1988). Pieces in flight never exceed `window` bytes, except for
a single larger
    piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

FEWEST, FIRST, MOST = 2, 32, 64
"""Pieces on their way: at least, in the beginning, at most."""
_AHEAD = 16
"""Pieces that nobody waits for yet, at most: with more, the next ones share the line with those
that are read long after them.
"""
_QUESTIONS = 2  # times as many may be on their way where few bytes come beside an answer's headers


class Flow:
    """How many pieces may be on their way, and how many are. Used in the loop's thread only.

    Pieces that somebody waits for are urgent: they go first, and while any is on its way no other
    begins, so that they have the line.
    """

    def __init__(self, window: int) -> None:
        self._limit, self._window, self._is_new = float(FIRST), window, True
        self._running = self._urgent = self._bytes = 0
        self._waiting: list[_Waiting] = []  # a heap
        self._turns = itertools.count()

    @contextlib.asynccontextmanager
    async def place(self, nbytes: int, urgent: bool = True) -> Any:
        """While one is on its way. The first may be of any size."""
        if self._waiting or not self._has_room(nbytes, urgent):
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(
                self._waiting, (not urgent, nbytes > 0, next(self._turns), nbytes, woken)
            )
            self._wake()
            try:
                await woken
            except asyncio.CancelledError:
                if woken.done() and not woken.cancelled():
                    self._leave(nbytes, urgent)
                raise
        else:
            self._enter(nbytes, urgent)
        try:
            yield
        finally:
            self._leave(nbytes, urgent)

    def _has_room(self, nbytes: int, urgent: bool) -> bool:
        if self._urgent and not urgent:
            return False
        most = int(self._limit if urgent else min(self._limit, _AHEAD)) * (
            1 if nbytes else _QUESTIONS
        )
        return not self._running or (self._running < most and self._bytes + nbytes <= self._window)

    def _enter(self, nbytes: int, urgent: bool) -> None:
        self._running, self._bytes, self._urgent = (
            self._running + 1,
            self._bytes + nbytes,
            self._urgent + urgent,
        )

    def _leave(self, nbytes: int, urgent: bool) -> None:
        self._running, self._bytes, self._urgent = (
            self._running - 1,
            self._bytes - nbytes,
            self._urgent - urgent,
        )
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            is_later, _, _, nbytes, woken = self._waiting[0]
            if not woken.done():
                if not self._has_room(nbytes, not is_later):
                    return
                self._enter(nbytes, not is_later)
                woken.set_result(None)
            heapq.heappop(self._waiting)

    def went_well(self) -> None:
        """A piece has come."""
        self._limit = min(MOST, self._limit + (1 if self._is_new else 1 / self._limit))

    def went_badly(self) -> None:
        """The server is overloaded."""
        self._limit, self._is_new = max(FEWEST, self._limit / 2), False


_Waiting = tuple[bool, bool, int, int, "asyncio.Future[None]"]
"""Later than urgent ones, later than questions, turn, bytes, and what is set when it may begin."""


async def together(
    tasks: Sequence[Callable[[], Awaitable[Any]]],
    flow: Flow,
    sizes: Sequence[int],
    urgent: bool = True,
) -> list[Any]:
    """What each task gives; the first error cancels the others."""

    async def placed(task: Callable[[], Awaitable[Any]], nbytes: int) -> Any:
        async with flow.place(nbytes, urgent):
            return await task()

    running = [
        asyncio.ensure_future(placed(task, nbytes))
        for task, nbytes in zip(tasks, sizes, strict=True)
    ]
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
