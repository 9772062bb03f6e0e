"""The protocol of loading modes."""

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
    some: Callable[[Sequence[int]], list[IntArray]]
    """Steps -> the indices of each one's samples."""
    stretches: Callable[[], IntArray | None] | None
    """Gives where stretches of stored samples begin, and the end, of which all come before long (see `Order.stretches`); None: there is no
    room for those that it is in the midst of."""


class Mode:
    """Says what is held of a dataset, and when it is read. This base holds nothing.

    Travels to workers with its dataset. What it holds must be shared by them, or be dropped when it is pickled elsewhere.
    """

    window = 0
    """Bytes of records that a process reads ahead at most."""
    holds_samples = False
    """True if it may hold samples that have been read."""

    def reads_records_ahead(self, source: Source) -> bool:
        """True if records are read ahead as such, so that `read` must be asked for them."""
        return False

    def get(self, indices: Sequence[int]) -> list[Any]:
        """For each index what is held of it, a copy, or MISSING."""
        return [MISSING] * len(indices)

    def rows(self, indices: npt.NDArray[np.int64]) -> Rows | None:
        """The samples where they are held, if all of them are, as arrays of one shape and dtype."""
        return None

    def keep(self, index: int, value: Any) -> None:
        """A sample that was missing has been read: hold it, or don't."""

    def expect(self, coming: Coming, source: Source, whole: Callable[[IntArray], IntArray]) -> None:
        """These batches come next, in this order.

        Args:
            coming: the batches.
            source: where their records are.
            whole: indices of the batches -> those of the source.
        """

    def read(self, indices: Sequence[int], read: Read) -> list[Any]:
        """The records of samples that are not held."""
        return read(indices)

    def expect_skew(self) -> None:
        """Some samples will be drawn much more often than others."""

    def give_way(self, nbytes: int) -> None:
        """A loader needs so many more bytes of the budget for its batches: it gets what can be spared."""

    def close(self) -> None:
        """Gives back what is held."""

    def stats(self) -> dict[str, int]:
        """Numbers for `get_stats()`."""
        return {}
