"""How many pieces are asked of a server at once?

It follows from how it goes: one more after each success until the server is overloaded for the first time, then one more after as many
successes; half as many when it is overloaded (slow start, additive increase, multiplicative decrease: V. Jacobson, "Congestion avoidance
and control", 1988). Never more bytes than `window`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

FEWEST, FIRST, MOST = 2, 16, 64
"""Pieces on their way: at least, in the beginning, at most."""
_QUESTIONS = 4  # times as many may be on their way where no bytes come but an answer's headers


class Flow:
    """How many pieces may be on their way, and how many are. Used in the loop's thread only."""

    def __init__(self, window: int) -> None:
        self._limit, self._window, self._is_new = float(FIRST), window, True
        self._running, self._bytes = 0, 0
        self._waiting: list[asyncio.Future[None]] = []

    @contextlib.asynccontextmanager
    async def place(self, nbytes: int) -> Any:
        """While one is on its way. The first may be of any size."""
        share = 1 if nbytes else _QUESTIONS
        while self._running and (self._running >= share * int(self._limit) or self._bytes + nbytes > self._window):
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(woken)
            await woken
        self._running, self._bytes = self._running + 1, self._bytes + nbytes
        try:
            yield
        finally:
            self._running, self._bytes = self._running - 1, self._bytes - nbytes
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def went_well(self) -> None:
        """A piece has come."""
        self._limit = min(MOST, self._limit + (1 if self._is_new else 1 / self._limit))

    def went_badly(self) -> None:
        """The server is overloaded."""
        self._limit, self._is_new = max(FEWEST, self._limit / 2), False


async def together(tasks: Sequence[Callable[[], Awaitable[Any]]], flow: Flow, sizes: Sequence[int]) -> list[Any]:
    """What each task gives; the first error cancels the others."""

    async def placed(task: Callable[[], Awaitable[Any]], nbytes: int) -> Any:
        async with flow.place(nbytes):
            return await task()

    running = [asyncio.ensure_future(placed(task, nbytes)) for task, nbytes in zip(tasks, sizes, strict=True)]
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
