"""Time limits of attempts to fetch byte ranges.

An attempt may take its time limit, and longer while bytes arrive: on a slow line many pieces share
the bandwidth, and what has arrived should not be discarded. A server that stays slower than
`SLOWEST` is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

SLOWEST = 16 << 10
"""Bytes a second of one piece, below which its time runs out."""
PART = 256 << 10
"""Bytes of a body that are read before they are counted, and the time is looked at again."""


class Attempt:
    """The time of one attempt, by the monotonic clock. One thread counts its bytes, any may look.

    Args:
        seconds: that it is given.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()
        self._nbytes = 0

    def came(self, nbytes: int) -> None:
        """So many bytes more."""
        self._nbytes += nbytes

    def left(self) -> float:
        """Seconds.

        Raises:
            TimeoutError: none are.
        """
        left = self._began + self._seconds + self._nbytes / SLOWEST - time.monotonic()
        if left <= 0:
            raise TimeoutError(self.shortfall)
        return left

    @property
    def shortfall(self) -> str:
        """What has come, when its time is over, in words."""
        if self._nbytes:
            return f"only {self._nbytes:,} bytes came in time"
        return "nothing came in time"

    @property
    def overtime(self) -> float:
        """Seconds that it has taken beyond those that it was given, since bytes came."""
        return max(0.0, time.monotonic() - self._began - self._seconds)


async def in_time(answer: Awaitable[Any], attempt: Attempt) -> Any:
    """What an awaitable gives, if it does so in the attempt's time; else it is cancelled.

    Raises:
        TimeoutError: it does not.
    """
    task = asyncio.ensure_future(answer)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=attempt.left())
        return task.result()
    except BaseException:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
