"""Queues to and from workers, whose short messages are written by the thread that sends them.

A queue of `multiprocessing` leaves each message to a thread of its own: two switches between threads for each batch, on either side.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import select
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

_PIPE_BUF: int = getattr(select, "PIPE_BUF", 512)  # bytes that are written whole, or not at all
_HEADER = 4  # bytes before a message

if TYPE_CHECKING:
    _Queue = Queue[Any]
else:
    _Queue = Queue


class DirectQueue(_Queue):
    """A queue that writes a message itself where the pipe has room for all of it, and so never waits: who sends is not held up by who is
    to receive. From the first message on that is too long, or finds the pipe full, it is a plain queue, so that none overtakes another."""

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)  # type: ignore[misc]
        self._room: Any = None

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        if not self._sent_here(obj, block, timeout):
            super().put(obj, block, timeout)

    def _sent_here(self, obj: Any, block: bool, timeout: float | None) -> bool:
        own: Any = self
        if own._closed or own._thread is not None or not hasattr(select, "poll"):
            return False
        data = ForkingPickler.dumps(obj)
        if len(data) + _HEADER > _PIPE_BUF:
            return False
        if self._room is None:
            self._room = select.poll()
            self._room.register(own._writer.fileno(), select.POLLOUT)
        with own._wlock or contextlib.nullcontext():
            if self._room.poll(0) != [(own._writer.fileno(), select.POLLOUT)]:
                return False
            if not own._sem.acquire(block, timeout):
                raise queue.Full
            own._writer.send_bytes(data)
        return True


def direct_queues(context: Any) -> Any:
    """What a multiprocessing context has as its `Queue`."""
    return functools.partial(DirectQueue, ctx=context)
