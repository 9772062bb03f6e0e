"""Prefetches a batch's byte ranges into the system's cache, while reads wait for the disk.

A disk works on many requests at once, but receives one at a time from a process that reads ranges
one after the other. Ranges that are in the system's cache need no hint. So hints are given only for
some batches after two whose reads were slow: of one, another process may have had the core. Hints
make reads fast, so batches without them then show whether they are still needed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable

# reads from memory are no slower than so many seconds a range, and bytes a second
_CALM = 10e-6
_RATE = 1e9
_BATCHES = 256  # that have hints after slow ones
TO_THE_END = sys.maxsize
"""Bytes that no file has."""


class Hints:
    """Watches the reads of this process. Thread-safe: at worst it gives too many hints, or too
    few.
    """

    def __init__(self) -> None:
        self._left = 0  # batches that have hints
        self._was_slow = False  # the last batch

    @property
    def are_wanted(self) -> bool:
        """True if reads have lately been slow."""
        return self._left > 0

    def give(self, fd: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Tells the system which bytes of an open file are read next: where they begin, and how
        many.
        """
        with contextlib.suppress(OSError):  # a file that can't be read ahead is read all the same
            for start, nbytes in ranges:
                if nbytes:  # 0 would mean: to the end
                    os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_WILLNEED)

    def note(self, began: float, count: int, nbytes: int) -> None:
        """So many ranges of so many bytes in all have been read since `began`, by
        `time.perf_counter`.
        """
        if not _CAN_TELL or not count:
            return
        is_slow = time.perf_counter() - began > count * _CALM + nbytes / _RATE
        if is_slow and (self._was_slow or self._left):
            self._left = _BATCHES
        elif self._left:
            self._left -= 1
        self._was_slow = is_slow


HINTS = Hints()
_CAN_TELL = hasattr(os, "posix_fadvise")
