"""What does headrace need to know of the place where samples lie?

Four things: how many samples there are, their records, which of them share a block, and a fingerprint of them all. `location` is
there for error messages only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Source(ABC):
    """A numbered set of records.

    A record is what the storage holds of one sample before it is decoded: the bytes of a file, a row of an array.

    Sources are built once, in the parent, and travel to workers by fork or pickle: keep the index in flat arrays, and open files
    through a `WorkerHandle`. `read` is called by several threads at once, unless `thread_safe` is False.
    """

    thread_safe = True
    """May several threads call `read` at once, and beside the dataset's transforms? If not, eager fills with one thread, and streaming
    reads nothing ahead."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def read(self, indices: Sequence[int]) -> list[Any]:
        """The records of `indices`, in their order; an index may come twice.

        Raises:
            Exception: any; headrace then reads one by one to find the record that is at fault, and names it.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash of what the samples are (names, shapes), never of where they lie or when they were written."""

    def blocks(self) -> npt.NDArray[np.int64] | None:
        """How many consecutive samples share each chunk, shard or file ([blocks] int64, their sum is `len`).

        None: every sample lies by itself.
        """
        return None

    def location(self, index: int) -> str:
        """Where a sample lies, for people: a path, or a file and a row; never with credentials."""
        return f"{type(self).__name__}[{index}]"
