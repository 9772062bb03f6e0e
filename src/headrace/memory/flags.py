"""Flags that the workers of a loader and their parent share."""

from __future__ import annotations

from headrace.memory.anonymous import AnonymousMemory


class Flags:
    """A byte for each worker, which it sets when its loop begins, and one for all, which the parent sets when the work is done.

    The latter takes the place of torch's event: a worker that is killed while it looks at an event takes the event's lock with it, and
    the parent, which sets it, would wait for ever. Picklable while `multiprocessing` starts a worker; fork-safe.
    """

    def __init__(self, workers: int) -> None:
        self._memory = AnonymousMemory(workers + 1, "flags")
        self._memory.map[0] = 0  # mapped before a fork

    def set(self) -> None:
        """The work is done."""
        self._memory.map[0] = 1

    def is_set(self) -> bool:
        """True if the work is done."""
        return self._memory.map[0] == 1

    def mark(self, worker: int, has_begun: bool = True) -> None:
        """A worker's loop begins; or another process is about to take its place."""
        self._memory.map[worker + 1] = has_begun

    def has_begun(self, worker: int) -> bool:
        """True if the worker has reached its loop."""
        return self._memory.map[worker + 1] == 1
