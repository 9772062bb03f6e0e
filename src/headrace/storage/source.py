"""Sources: numbered sets of stored records.

`Source` is the least that headrace needs: how many records there are, the records, which of them share a block, and a fingerprint of
them all. A `RowSource` also writes records that are arrays of one shape straight into their batch; of a `Locatable` source the stored
bytes of records are known, so that remote ones can be prefetched.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec
from headrace.errors import FormatError
from headrace.io.files import Files
from headrace.io.ranges import ByteRanges

Rows = Sequence[npt.NDArray[Any]] | npt.NDArray[Any]
"""Arrays of one shape and dtype; or one array that has them as its rows."""


def one_after_the_other(function: Callable[[int], Any], count: int) -> list[Any]:
    """Calls a function for 0 to count - 1, in this thread."""
    return [function(number) for number in range(count)]


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

    @property
    def cut_nbytes(self) -> int:
        """Stored bytes of all records, where these may be cut into blocks anywhere; 0: blocks are what the storage has."""
        return 0

    def blocks_of(self, nbytes: int) -> npt.NDArray[np.int64] | None:
        """As `blocks`: where they may be cut anywhere, of about so many stored bytes each."""
        return self.blocks()

    run: Callable[[Callable[[int], Any], int], list[Any]] = staticmethod(one_after_the_other)
    """Calls a function for 0 to count - 1: what may be done in threads."""

    def use_threads(self, run: Callable[[Callable[[int], Any], int], list[Any]]) -> None:
        """A dataset says how: in a worker that has cores left, in threads."""
        self.run = run

    @property
    def block_nbytes(self) -> int:
        """Bytes that a reader should hold of each block it is in the midst of, so that nothing is decoded twice."""
        return 0

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of all blocks when they are decoded, where each has so many rows that a random order had better cache them all; else 0."""
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


class RowSource(Source):
    """Records that can be written into rows of a batch: arrays of one shape and dtype."""

    @property
    @abstractmethod
    def array_spec(self) -> ArraySpec | None:
        """Shape and dtype of all records; None: they differ, and `read_into` can't be used."""

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        """Writes the record of each index into its array, which is C-contiguous and as `array_spec` says.

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


class Locatable(Source):
    """Records whose byte ranges are known.

    Attributes:
        files: what the ranges are of.
    """

    files: Files

    @abstractmethod
    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        """Where the stored bytes of records lie, with all of their chunks; what is left out is fetched when it is read.

        Args:
            indices: [n] int64, of the samples.
        """

    @property
    @abstractmethod
    def stored_nbytes(self) -> int:
        """Bytes of all records as they are stored, about."""

    @property
    def locating_needs_io(self) -> bool:
        """True if locating records performs requests, so that they had better be located in large numbers."""
        return False

    @property
    def is_remote(self) -> bool:
        """True if records are prefetched by their byte ranges, from a server."""
        return self.files.is_remote

    def read_afresh(self, indices: Sequence[int]) -> list[Any]:
        """The records of samples, of which something was wrong: past everything that is cached of remote files."""
        with self.files.bypassing_cache():
            return self.read(indices)

    def take_counts(self) -> Counter[str]:
        return self.files.take_counts()


def is_prefetched(source: Source) -> TypeGuard[Locatable]:
    """True if the records of a source are prefetched by their byte ranges; others are read ahead by threads."""
    return isinstance(source, Locatable) and source.is_remote


class PackPart(NamedTuple):
    """Which part of a pack of several files a source is."""

    number: int
    of: int
    fingerprint: str
    """Of all parts together."""
    samples: int
    """Of all parts together."""


def fingerprint_of_files(parts: Sequence[PackPart | None], count: int, fingerprints: Sequence[str]) -> str:
    """The fingerprint of several files as one dataset: that of the pack, if these are all of its parts, and none has left out a sample.

    Args:
        parts: what each says which part of a pack it is.
        count: of samples of all.
        fingerprints: of each.
    """
    first = parts[0]
    if first is not None and count == first.samples and list(parts) == [first._replace(number=number) for number in range(first.of)]:
        return first.fingerprint
    return hashlib.blake2b("\0".join(fingerprints).encode(), digest_size=16).hexdigest()


class ArraySource(RowSource, Locatable):
    """Arrays that lie in files: rows that can be located."""

    part: PackPart | None = None
    """None: it is none of several."""

    def row_ranges(self, indices: Sequence[int]) -> ByteRanges | None:
        """Where each record lies, if its bytes are there what `read_into` writes; None: they are not, or not all."""
        return None

    def check(self, indices: Sequence[int], records: Rows | Sequence[Any]) -> None:
        """Compares records with their checksums, where there are some.

        Raises:
            FormatError: one has another checksum.
        """
        return
