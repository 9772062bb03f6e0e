"""The protocol of the loading modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.memory.store import MISSING, Rows
from headrace.storage.source import Source

Read = Callable[[Sequence[int]], list[Any]]
"""Reads the records of some indices. Raises if one of them can't be read."""


class Coming(NamedTuple):
    """The batches of an epoch that a process has not yet read, the next one first."""

    key: Any
    """Identifies the epoch; equal keys mean the same epoch."""
    steps: range
    """Steps of the batches."""
    batches: Callable[[Sequence[int]], list[IntArray]]
    """A callable from steps to the sample indices of each batch."""
    segments: Callable[[], IntArray | None] | None
    """Returns the edges of runs of stored samples that are all used soon after their first one (see
    `EpochOrder.segments`). None: there is no memory for the open runs.
    """


class Mode:
    """Decides which samples are cached and when they are read. This base class caches nothing.

    A mode travels to workers with its dataset. What it caches must be shared by them, or be dropped
    when it is pickled for another purpose.
    """

    window = 0
    """Maximum bytes of records that a process prefetches."""
    caches_samples = False
    """True if it may cache samples that were read."""

    def prefetches_records(self, source: Source) -> bool:
        """True if records are prefetched, so that they must be read through `read`."""
        return False

    def get(self, indices: Sequence[int]) -> list[Any]:
        """Returns for each index a copy of the cached sample, or MISSING."""
        return [MISSING] * len(indices)

    def rows(self, indices: npt.NDArray[np.int64]) -> Rows | None:
        """The cached samples as arrays of one shape and dtype, without a copy. None: not all of
        them are cached in this form.
        """
        return None

    def admit(self, index: int, value: Any) -> None:
        """Offers a sample that was read; the mode decides whether to cache it."""

    def prefetch(
        self, coming: Coming, source: Source, whole: Callable[[IntArray], IntArray]
    ) -> None:
        """Starts to read the next batches.

        Args:
            coming: the batches, in their order.
            source: the source of the records.
            whole: a callable from indices in batches to indices of the source.
        """

    def read(self, indices: Sequence[int], read: Read) -> list[Any]:
        """Returns the records of samples that are not cached. Called if `prefetches_records` is
        True.
        """
        return read(indices)

    def expect_skew(self) -> None:
        """Announces that some samples will be drawn much more often than others."""

    def shrink(self, nbytes: int) -> None:
        """Releases up to `nbytes` of the budget, which a loader needs for its batches."""

    def close(self) -> None:
        """Frees what is cached."""

    def stats(self) -> dict[str, int]:
        """Counters for `get_stats()`."""
        return {}
