"""What headrace needs to know of the place where samples are stored: `Source`.

Four things: how many samples there are, their records, which of them share a block, and a fingerprint of them all. `location` is
there for error messages only. A source whose records are arrays of one shape may also write them straight to where they are to be
(`rows_like`, `read_into`); one whose stored bytes can be located can be prefetched (`Locatable`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.io.files import Files
from headrace.io.ranges import ByteRanges

Rows = Sequence[npt.NDArray[Any]] | npt.NDArray[Any]
"""Arrays of one shape and dtype; or one array that has them as its rows."""


def _one_after_the_other(function: Callable[[int], Any], count: int) -> list[Any]:
    return [function(number) for number in range(count)]


class Locatable(Protocol):
    """What can be prefetched: records whose stored bytes can be located."""

    far: Files | None
    """The remote files that they lie in; None: they are local, or can't be located."""

    @property
    def locating_needs_io(self) -> bool:
        """True if locating records performs requests, so that they had better be named in large numbers."""

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all records as they are stored, about."""

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        """Where the stored bytes of records lie, with all of their chunks; what is not said is fetched when it is read.

        Args:
            indices: [n] int64, of the samples.
        """


class Source(ABC):
    """A numbered set of records.

    A record is what the storage holds of one sample before it is decoded: the bytes of a file, a row of an array.

    Sources are built once, in the parent, and travel to workers by fork or pickle: keep the index in flat arrays, and open files
    through a `WorkerHandle`. `read` is called by several threads at once, unless `thread_safe` is False.
    """

    thread_safe = True
    """True if several threads may call `read` at once, and beside the dataset's transforms. If not, eager fills with one thread, and
    streaming reads nothing ahead."""

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

    def rows_like(self) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and dtype of all records, if they are arrays of one kind and `read_into` can be used."""
        return None

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        """Writes the record of each index into its array, which is C-contiguous and as `rows_like` says.

        Args:
            indices: of the samples.
            rows: an array for each, or one array [samples, ...] that they are the rows of.

        Default: copies of what `read` gives.

        Raises:
            Exception: as `read`; the arrays may then hold anything.
        """
        for index, row, record in zip(indices, rows, self.read(indices), strict=True):
            array = np.asarray(record)
            if (array.shape, array.dtype) != (row.shape, row.dtype):  # else NumPy would make it fit
                raise FormatError(f"record {index} is {array.dtype} {list(array.shape)}, and not {row.dtype} {list(row.shape)}")
            row[...] = array

    far: Files | None = None
    """The remote files that it reads from, if `byte_ranges` locates samples in them; see `Locatable`."""

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        """See `Locatable`; default: nothing is said."""
        return ByteRanges.of([])

    def row_ranges(self, indices: Sequence[int]) -> ByteRanges | None:
        """Where each record lies in remote files, if its bytes are there what `read_into` writes; None: they are not, or not all."""
        return None

    def announce(self, indices: Sequence[int]) -> None:
        """Tells the system that these samples are read next, where they lie on a slow disk of this machine."""
        return

    def check(self, indices: Sequence[int], records: Rows | Sequence[Any]) -> None:
        """Compares records with their checksums, where there are some.

        Raises:
            FormatError: one has another checksum.
        """
        return

    locating_needs_io = False
    """See `Locatable`."""

    @property
    def stored_nbytes(self) -> int:
        """See `Locatable`."""
        return 0

    def read_afresh(self, indices: Sequence[int]) -> list[Any]:
        """The records of samples, of which something was wrong: past everything that is cached of remote files."""
        if self.far is None:
            return self.read(indices)
        with self.far.bypassing_cache():
            return self.read(indices)

    run: Callable[[Callable[[int], Any], int], list[Any]] = staticmethod(_one_after_the_other)
    """Calls a function for 0 to count - 1: what may be done in threads."""

    def use_threads(self, run: Callable[[Callable[[int], Any], int], list[Any]]) -> None:
        """A dataset says how: in a worker that has cores left, in threads."""
        self.run = run

    @property
    def block_nbytes(self) -> int:
        """Bytes that a reader should hold of each block it is in the midst of, so that nothing is decoded twice."""
        return 0

    def hold_chunks(self, nbytes: int) -> None:  # noqa: B027
        """From now on each process may hold so many bytes of decoded chunks."""

    def take_counts(self) -> Counter[str]:
        """What was counted in this process since the last call, for `get_stats()`."""
        return Counter()

    def how(self) -> dict[str, str]:
        """By which path each array is read, and why, in words."""
        return {}

    def close(self) -> None:
        """Closes what this process has open; the next `read` opens again. Default: every attribute that can be closed."""
        for attribute in vars(self).values():
            if hasattr(attribute, "close"):
                attribute.close()

    def location(self, index: int) -> str:
        """Where a sample lies, for people: a path, or a file and a row; never with credentials."""
        return f"{type(self).__name__}[{index}]"
