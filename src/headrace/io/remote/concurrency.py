"""Limits the concurrent requests to a server.

Pieces that somebody waits for are urgent: they go first, and while any is on its way no other
begins, so that they have the line. Pieces in flight never exceed `window` bytes, except for a
single larger piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

MOST = 64
"""Urgent pieces on their way, at most. Twice as many may be questions, whose answers are short."""
_AHEAD = 16
"""Pieces that nobody waits for yet, at most: with more, the next ones share the line with those
that are read long after them.
"""


class Flow:
    """The pieces that are on their way. Used in the loop's thread only."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._running = 0
        self._urgent = 0
        self._bytes = 0
        # a heap: later than urgent ones, later than questions, turn, bytes, set when it may begin
        self._waiting: list[tuple[bool, bool, int, int, asyncio.Future[None]]] = []
        self._turns = itertools.count()

    @contextlib.asynccontextmanager
    async def place(self, nbytes: int, urgent: bool = True) -> AsyncIterator[None]:
        """While one is on its way. The first may be of any size."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (not urgent, nbytes > 0, next(self._turns), nbytes, woken))
        self._wake()
        try:
            await woken
            yield
        finally:
            if woken.done() and not woken.cancelled():
                self._running -= 1
                self._bytes -= nbytes
                self._urgent -= urgent
                self._wake()

    def _wake(self) -> None:
        """Begins the pieces that there is room for."""
        while self._waiting:
            is_later, _, _, nbytes, woken = self._waiting[0]
            if not woken.done():
                most = _AHEAD if is_later else MOST
                if not nbytes:
                    most *= 2
                has_room = self._running < most and self._bytes + nbytes <= self._window
                if self._running and (not has_room or (is_later and self._urgent)):
                    return
                self._running += 1
                self._bytes += nbytes
                self._urgent += not is_later
                woken.set_result(None)
            heapq.heappop(self._waiting)


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
