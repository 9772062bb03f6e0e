"""The protocol of the loading modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.memory.rows import Rows
from headrace.memory.store import MISSING
from headrace.storage.source import Source

Read = Callable[[Sequence[int]], list[Any]]
"""Reads the records of some indices; raises if one of them can't be read."""


class Coming(NamedTuple):
    """The batches that a process has yet to read of an epoch, the next one first."""

    key: Any
    """Of the epoch: equal while it is the same one."""
    steps: range
    """Their steps."""
    batches: Callable[[Sequence[int]], list[IntArray]]
    """Steps -> the indices of each one's samples."""
    segments: Callable[[], IntArray | None] | None
    """Gives the edges of runs of stored samples each of which is used up before long (see `EpochOrder.segments`); None: there is no room
    for those that are in use."""


class Mode:
    """Determines what is cached of a dataset, and when it is read. This base caches nothing.

    Travels to workers with its dataset. What it caches must be shared by them, or be dropped when it is pickled elsewhere.
    """

    window = 0
    """Bytes of records that a process prefetches at most."""
    caches_samples = False
    """True if it may cache samples that have been read."""

    def prefetches_records(self, source: Source) -> bool:
        """True if records are prefetched as such, so that `read` must be asked for them."""
        return False

    def get(self, indices: Sequence[int]) -> list[Any]:
        """For each index what is cached of it, a copy, or MISSING."""
        return [MISSING] * len(indices)

    def rows(self, indices: npt.NDArray[np.int64]) -> Rows | None:
        """The samples where they are cached, if all of them are, as arrays of one shape and dtype."""
        return None

    def admit(self, index: int, value: Any) -> None:
        """Caches a sample that was missing and has been read, or doesn't."""

    def prefetch(self, coming: Coming, source: Source, whole: Callable[[IntArray], IntArray]) -> None:
        """Begins to read what comes next.

        Args:
            coming: the batches, in their order.
            source: where their records are.
            whole: indices of the batches -> those of the source.
        """

    def read(self, indices: Sequence[int], read: Read) -> list[Any]:
        """The records of samples that are not cached; called where `prefetches_records` is True."""
        return read(indices)

    def expect_skew(self) -> None:
        """Some samples will be drawn much more often than others."""

    def shrink(self, nbytes: int) -> None:
        """Gives back so many bytes of the budget, or what can be spared, which a loader needs for its batches."""

    def close(self) -> None:
        """Gives back what is cached."""

    def stats(self) -> dict[str, int]:
        """Numbers for `get_stats()`."""
        return {}
