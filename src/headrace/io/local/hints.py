"""Prefetches a batch's byte ranges into the system's cache, while reads wait for the disk.

A disk works on many requests at once, but receives one at a time from a process that reads ranges
one after the other. Ranges that are in the system's cache need no hint, and a hint costs a third of
a microsecond. So hints are given only while recent reads were slow because they waited; a read that
was slow because another process had the core does not count. To know that costs a system call, so
it is asked only for a while after a slow read; one that comes later is believed for a few batches.
Hints make reads fast, so only a batch without them shows whether they are still needed: one is
after 32 batches, then after 64, up to 1,024.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from typing import TypeAlias

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# no slower than this, seconds a stretch and bytes a second, is what comes out of memory
_CALM, _RATE = 10e-6, 1e9
TO_THE_END = sys.maxsize
"""Bytes that no file has."""
_SHORT = 4  # batches that are told of after a slow one of which nobody knows whether it waited
_LONG, _LONGEST = 32, 1024  # and after a slow one that waited


Began: TypeAlias = tuple[float, int | None]
"""When reads began, in seconds, and how often this thread had waited by then; None: nobody
asked.
"""


class Hints:
    """Watches the reads of this process. Thread-safe: at worst it tells too much or too little."""

    def __init__(self) -> None:
        self._left = 0  # batches that are told of
        # and those whose waits are counted: at first, and longer than they are told of
        self._watched = _LONG
        self._span = _LONG // 2  # of `_left`

    @property
    def are_wanted(self) -> bool:
        """Have reads lately been slow?"""
        return self._left > 0

    def give(self, fd: int, stretches: Iterable[tuple[int, int]]) -> None:
        """Tells the system which bytes of an open file are read next: where they begin, and how
        many.
        """
        with contextlib.suppress(OSError):  # a file that can't be read ahead is read all the same
            for start, nbytes in stretches:
                if nbytes:  # 0 would mean: to the end
                    os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_WILLNEED)

    def begin(self) -> Began:
        """What `note` needs to know of the time before some reads."""
        return time.perf_counter(), _waits() if self._watched else None

    def note(self, began: Began, stretches: int, nbytes: int) -> None:
        """So many stretches of so many bytes in all have been read since `began`, by the same
        thread.
        """
        if not _CAN_TELL or not stretches:
            return
        seconds, waits = began
        is_slow = time.perf_counter() - seconds > stretches * _CALM + nbytes / _RATE
        if is_slow and waits is None:
            self._left = max(self._left, _SHORT)
        elif is_slow and _waits() != waits:
            if not self._left:
                is_again = self._watched > _LONG - _SHORT
                self._span = min(2 * self._span, _LONGEST) if is_again else _LONG
            self._left = self._span
        elif self._left:
            self._left -= 1
        if is_slow:
            self._watched = self._left + _LONG
        elif self._watched:
            self._watched -= 1


def _waits() -> int:
    """How often this thread has given up its core to wait; always another number where the
    system doesn't count.
    """
    global _uncounted
    if resource is None or _THREAD is None:
        _uncounted += 1
        return _uncounted
    return resource.getrusage(_THREAD).ru_nvcsw


_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)
_uncounted = 0
HINTS = Hints()
_CAN_TELL = hasattr(os, "posix_fadvise")
