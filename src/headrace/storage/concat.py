"""Several sources as one."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec
from headrace.io.local.files import bytes_of
from headrace.io.local.hints import HINTS
from headrace.io.ranges import ByteRanges
from headrace.storage.blocks import block_length
from headrace.storage.describe import Description, joined
from headrace.storage.source import ArraySource, Rows, fingerprint_of_files

S = TypeVar("S", bound=ArraySource)


@dataclass(frozen=True, slots=True)
class _Part(Generic[S]):
    """Samples of one source."""

    number: int
    source: S
    indices: list[int]
    """In the source."""
    places: list[int]
    """Of these samples, among all that are wanted."""


class ConcatSource(ArraySource, Generic[S]):
    """The samples of some sources, one source after the other.

    Args:
        sources: one at least, with records of one kind.
    """

    def __init__(self, sources: Sequence[S]) -> None:
        self.sources: list[S] = list(sources)
        self._starts = np.cumsum([0, *map(len, self.sources)])
        self.files = self.sources[0].files
        # sources that were read from since they were asked what they have counted
        self._to_count: set[int] = set()
        self.thread_safe: bool = all(source.thread_safe for source in self.sources)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def place(self, index: int) -> tuple[int, int]:
        """The number of the source that a sample is in, and its index there."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def _parts(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> list[_Part[S]]:
        wanted = np.asarray(indices, np.int64)
        if not wanted.size:
            return []
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        order = numbers.argsort(kind="stable")
        numbers = numbers[order]
        inner, places = (wanted[order] - self._starts[numbers]).tolist(), order.tolist()
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(places)]
        of = numbers[edges[:-1]].tolist()
        return [
            _Part(n, self.sources[n], inner[a:b], places[a:b])
            for n, (a, b) in zip(of, itertools.pairwise(edges), strict=True)
        ]

    def read(self, indices: Sequence[int]) -> list[Any]:
        parts = self._parts(indices)
        self._prefetch(parts)
        return self._gathered(len(indices), parts, lambda source, some: source.read(some))

    def read_afresh(self, indices: Sequence[int]) -> list[Any]:
        return self._gathered(
            len(indices), self._parts(indices), lambda source, some: source.read_afresh(some)
        )

    def _gathered(
        self, count: int, parts: list[_Part[S]], read: Callable[[S, list[int]], list[Any]]
    ) -> list[Any]:
        records: list[Any] = [None] * count
        with self._counting(parts):
            for part in parts:
                for place, record in zip(part.places, read(part.source, part.indices), strict=True):
                    records[place] = record
        return records

    def _prefetch(self, parts: list[_Part[S]]) -> None:
        """Of several sources at once: by a server together, and not file by file; of local files
        a slow disk is told.
        """
        if len(parts) > 1 and (self.is_remote or HINTS.are_wanted):
            with contextlib.suppress(OSError):  # raised again where they are read
                self.files.prefetch(
                    [part.source.byte_ranges(np.asarray(part.indices, np.int64)) for part in parts],
                    True,
                )

    @contextlib.contextmanager
    def _counting(self, parts: list[_Part[S]]) -> Iterator[None]:
        try:
            yield
        finally:  # at the end: what is counted meanwhile is not left behind
            self._to_count.update(part.number for part in parts)

    @functools.cached_property
    def is_remote(self) -> bool:
        """True if all sources are, on one server."""
        return all(source.is_remote and source.files is self.files for source in self.sources)

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        return ByteRanges.joined(
            [
                part.source.byte_ranges(np.asarray(part.indices, np.int64))
                for part in self._parts(indices)
            ]
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

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        parts = self._parts(indices)
        with self._counting(parts):
            if self._are_read_together(parts, rows):
                return
            self._prefetch(parts)
            for part in parts:
                part.source.read_into(part.indices, [rows[place] for place in part.places])

    def _are_read_together(self, parts: list[_Part[S]], rows: Rows) -> bool:
        """Reads rows by one call for all files, if they are remote and lie there as they are."""
        if not self.is_remote:
            return False
        ranges: list[ByteRanges] = []
        for part in parts:
            found = part.source.row_ranges(part.indices)
            if found is None:
                return False
            ranges.append(found)
        self.files.read_into(
            ByteRanges.joined(ranges),
            [bytes_of(rows[place]) for part in parts for place in part.places],
        )
        for part in parts:
            part.source.check(part.indices, [rows[place] for place in part.places])
        return True

    def use_threads(self, run: Callable[[Callable[[int], Any], int], list[Any]]) -> None:
        for source in self.sources:
            source.use_threads(run)

    @property
    def block_nbytes(self) -> int:
        return max(source.block_nbytes for source in self.sources)

    def hold_chunks(self, nbytes: int) -> None:
        for source in self.sources:
            source.hold_chunks(nbytes)

    def take_counts(self) -> Counter[str]:
        counts: Counter[str] = self.files.take_counts()
        for number in list(self._to_count):
            self._to_count.discard(number)
            counts.update(self.sources[number].take_counts())
        return counts

    def describe(self) -> Description:
        return joined([source.describe() for source in self.sources])

    @property
    def cut_nbytes(self) -> int:
        return sum(source.cut_nbytes for source in self.sources)

    def blocks(self) -> npt.NDArray[np.int64] | None:
        return self.blocks_of(block_length(self.cut_nbytes))

    def blocks_of(self, nbytes: int) -> npt.NDArray[np.int64] | None:
        found = [source.blocks_of(nbytes) for source in self.sources]
        if any(sizes is None for sizes in found):
            return None
        return np.concatenate([sizes for sizes in found if sizes is not None]).astype(np.int64)

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
