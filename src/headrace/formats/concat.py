"""Several sources as one."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from headrace.dtypes import ArraySpec, IntArray
from headrace.formats.source import (
    ArraySource,
    Description,
    Map,
    Rows,
    fingerprint_of_files,
    joined,
    row_at,
)
from headrace.io.handles import HINTS
from headrace.io.ranges import ByteRanges

S = TypeVar("S", bound=ArraySource)


class Part(NamedTuple, Generic[S]):
    """Samples of one source: their indices in it, and their places among all that are wanted."""

    source: S
    indices: list[int]
    places: list[int]


class ConcatSource(ArraySource, Generic[S]):
    """The samples of some sources, one source after the other.

    Args:
        sources: one at least, with records of one kind; they share what is open and decoded.
    """

    def __init__(self, sources: Sequence[S]) -> None:
        self.sources: list[S] = list(sources)
        self._starts = np.cumsum([0, *map(len, self.sources)])
        self.files = self.sources[0].files

    def __len__(self) -> int:
        return int(self._starts[-1])

    def place(self, index: int) -> tuple[int, int]:
        """The number of the source that a sample is in, and its index there."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def parts_of(self, indices: Sequence[int] | IntArray) -> list[Part[S]]:
        """The samples of each source."""
        wanted = np.asarray(indices, np.int64)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        inner = (wanted - self._starts[numbers]).tolist()
        parts: dict[int, Part[S]] = {}
        for place, number in enumerate(numbers.tolist()):
            if number not in parts:
                parts[number] = Part(self.sources[number], [], [])
            parts[number].indices.append(inner[place])
            parts[number].places.append(place)
        return [parts[number] for number in sorted(parts)]

    def prefetch(self, parts: list[Part[S]]) -> None:
        """Asks at once for the parts of several sources, which are read next: a server is asked for
        all together, and not file by file; of local files a slow disk is told.
        """
        if len(parts) < 2 or not (self.is_remote or HINTS.are_wanted):
            return
        with contextlib.suppress(OSError):  # raised again where they are read
            each = [
                part.source.missing_ranges(np.asarray(part.indices, np.int64)) for part in parts
            ]
            self.files.prefetch(list(itertools.chain.from_iterable(each)), True)

    def read(self, indices: Sequence[int]) -> list[Any]:
        parts = self.parts_of(indices)
        self.prefetch(parts)
        records: list[Any] = [None] * len(indices)
        for part in parts:
            for place, record in zip(part.places, part.source.read(part.indices), strict=True):
                records[place] = record
        return records

    def read_afresh(self, indices: Sequence[int]) -> list[Any]:
        records: list[Any] = []
        for index in indices:
            number, inner = self.place(index)
            records += self.sources[number].read_afresh([inner])
        return records

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        parts = self.parts_of(indices)
        self.prefetch(parts)
        for part in parts:
            part.source.read_into(part.indices, [row_at(rows, place) for place in part.places])

    @functools.cached_property
    def is_remote(self) -> bool:
        """True if all sources are, on one server."""
        return all(source.is_remote and source.files is self.files for source in self.sources)

    def byte_ranges(self, indices: IntArray) -> ByteRanges:
        parts = self.parts_of(indices)
        return ByteRanges.joined(
            [part.source.byte_ranges(np.asarray(part.indices, np.int64)) for part in parts]
        )

    @property
    def locating_needs_io(self) -> bool:
        return any(source.locating_needs_io for source in self.sources)

    @property
    def stored_nbytes(self) -> int:
        return sum(source.stored_nbytes for source in self.sources)

    @functools.cached_property
    def array_spec(self) -> ArraySpec | None:
        spec = self.sources[0].array_spec
        return spec if all(source.array_spec == spec for source in self.sources) else None

    def use_threads(self, run: Map) -> None:
        for source in self.sources:
            source.use_threads(run)

    @property
    def block_nbytes(self) -> int:
        return max(source.block_nbytes for source in self.sources)

    def hold_chunks(self, nbytes: int) -> None:
        for source in self.sources:
            source.hold_chunks(nbytes)

    def take_counts(self) -> Counter[str]:
        return self.sources[0].take_counts()

    def describe(self) -> Description:
        return joined([source.describe() for source in self.sources])

    @property
    def cut_nbytes(self) -> int:
        return sum(source.cut_nbytes for source in self.sources)

    def blocks_of(self, nbytes: int) -> IntArray | None:
        found = [source.blocks_of(nbytes) for source in self.sources]
        known = [sizes for sizes in found if sizes is not None]
        if len(known) == len(found):
            return np.concatenate(known).astype(np.int64)
        return None

    def fingerprint(self) -> str:
        each = [source.fingerprint() for source in self.sources]
        return fingerprint_of_files([source.part for source in self.sources], len(self), each)

    def location(self, index: int) -> str:
        number, inner = self.place(index)
        return self.sources[number].location(inner)

    def close(self) -> None:
        """Closes what this process has open."""
        for source in self.sources:
            source.close()
