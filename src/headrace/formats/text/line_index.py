"""Positions of very many lines, stored in little more than a byte per line.

Distances between lines are stored in groups. Each group uses as many bytes per distance as its
largest one needs, and stores the position of every 64th line. So a line's position is the last
stored one before it plus a sum of at most 63 distances.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.array_file import ArrayFile, FileArrays, Unkept, parts_of, rows_of
from headrace.io.single_flight import found_or_built
from headrace.memory.anonymous import SharedArray
from headrace.memory.budget import Reservation
from headrace.sorting import distinct

BLOCK = 64
"""Places from one that is noted itself to the next."""
GROUP = 4096
"""Places in a group."""
_NOTED = 8 * (GROUP // BLOCK)  # bytes of the noted places of a group, before its distances
_DTYPES = {1: "u1", 2: "<u2", 4: "<u4", 8: "<i8"}  # of distances, by the bytes that each takes
_TOGETHER = 16  # groups that are encoded at once
_BEFORE = np.tri(BLOCK, BLOCK, -1, np.uint8)
"""[steps, place in a block]: 1 where the distance counts."""


class HeldArrays:
    """What `FileArrays` are, in memory that workers share.

    Args:
        long: the long array.
        short: the short ones.
        reserved: what the budget holds for them.
    """

    path = None

    def __init__(
        self,
        long: npt.NDArray[Any],
        short: Sequence[npt.NDArray[Any]],
        reserved: Reservation | None = None,
    ) -> None:
        self._long = SharedArray(long)
        self._short = list(map(SharedArray, short))
        self._reserved = reserved
        self.dtype: np.dtype[Any] = long.dtype
        self.count: int = len(long)

    @property
    def long(self) -> npt.NDArray[Any]:
        """The long array, read-only."""
        return self._long.array

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        """The short arrays, read-only."""
        return [short.array for short in self._short]

    def parts(self, begins: IntArray, ends: IntArray) -> list[npt.NDArray[Any]]:
        """Views of ranges of the long array."""
        return parts_of(self.long, begins, ends)

    def rows(self, dtype: npt.DTypeLike, length: int, numbers: IntArray) -> npt.NDArray[Any]:
        """See `FileArrays.rows`."""
        return rows_of(self.long, dtype, length, numbers)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reserved": None}  # of the process that made it


Arrays: TypeAlias = FileArrays | HeldArrays
"""A long array and some short ones. Picklable."""
Make: TypeAlias = Callable[[Callable[[npt.NDArray[Any]], None]], list[npt.NDArray[Any]]]
"""Hands out a long array a piece at a time, and returns the short ones."""


def held(make: Make) -> HeldArrays:
    """Arrays in memory."""
    pieces: list[npt.NDArray[Any]] = []
    short = make(pieces.append)
    return HeldArrays(np.concatenate(pieces), short)


def kept_or_held(
    cached: ArrayFile | None, patience: float, what: str, dtype: str, make: Make
) -> Arrays:
    """The arrays of a cache file, found or made; in memory without one, or if it can't be written.

    Args:
        cached: the file.
        patience: seconds that it may stay as it is while another process writes it.
        what: for a warning: "the table of lines is".
        dtype: of the long array.
        make: makes them.
    """
    if cached is None:
        return held(make)
    unkept = Unkept(
        os.path.dirname(cached.path), what, "they are held in memory, and made at every start"
    )

    def build() -> Arrays:
        with unkept:
            with cached.writing(dtype) as writer:
                writer.short(make(writer.write))
            return cached.open()
        return held(make)

    return found_or_built(cached, patience, build)


class PlacesEncoder:
    """Makes the bytes of places that come a piece at a time.

    Attributes:
        edges: where each group begins in the bytes, so far, and where the last one ends.
    """

    def __init__(self) -> None:
        self.edges: list[int] = [0]

    def encoded(self, pieces: Iterable[IntArray]) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of all places of some pieces; none of them is before the one that precedes
        it.
        """
        # places that don't fill a group yet; the last of them has no distance yet
        waiting: list[IntArray] = []
        count = 0
        for places in pieces:
            waiting.append(places)
            count += places.size
            if count > _TOGETHER * GROUP:
                joined = np.concatenate(waiting)
                # the last distance of a group is that to the next group's first place
                full = (joined.size - 1) // GROUP * GROUP
                yield from self._groups(joined[: full + 1])
                waiting = [joined[full:].copy()]
                count = joined.size - full
        yield np.empty(0, np.uint8)
        if count:
            joined = np.concatenate(waiting)
            missing = -(-count // GROUP) * GROUP + 1 - count
            yield from self._groups(np.concatenate([joined, np.full(missing, joined[-1])]))

    def _groups(self, places: IntArray) -> Iterator[npt.NDArray[np.uint8]]:
        """Of n groups and the place behind them."""
        distances = np.diff(places).reshape(-1, GROUP)
        noted = places[:-1:BLOCK].reshape(-1, GROUP // BLOCK)
        widths = np.searchsorted([1 << 8, 1 << 16, 1 << 32], distances.max(axis=1), side="right")
        cuts = [0, *(np.flatnonzero(np.diff(widths)) + 1).tolist(), len(widths)]
        for begin, end in itertools.pairwise(cuts):  # groups of one width
            width = 1 << int(widths[begin])
            made = np.empty((end - begin, _NOTED + GROUP * width), np.uint8)
            made[:, :_NOTED] = np.ascontiguousarray(noted[begin:end], "<i8").view(np.uint8)
            made[:, _NOTED:] = distances[begin:end].astype(_DTYPES[width]).view(np.uint8)
            first = self.edges[-1]
            self.edges.extend(first + made.shape[1] * np.arange(1, end - begin + 1))
            yield made.reshape(-1)


class Places:
    """The places that were encoded, at random. Picklable.

    Args:
        arrays: the bytes (uint8), and, as the last of the short ones, where groups begin.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays: Arrays = arrays

    @functools.cached_property
    def _edges(self) -> IntArray:
        return self.arrays.short[-1]

    @functools.cached_property
    def _widths(self) -> IntArray:
        """Bytes of a distance, of each group."""
        return (np.diff(self._edges) - _NOTED) // GROUP

    def reach(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Some places, and for each the one that follows it.

        Args:
            numbers: [n] which, from 0; each of them there, and not the last of all.

        Returns:
            [n] int64 each.

        Raises:
            AccessError: the file is gone, or another one.
        """
        groups = numbers // GROUP
        widths = self._widths.take(groups)
        if not widths.size or (widths == widths[0]).all():  # the usual case
            return self._reach(numbers, groups, int(widths[0]) if widths.size else 1)
        starts = np.empty(len(numbers), np.int64)
        ends = np.empty(len(numbers), np.int64)
        for width in distinct(widths).tolist():
            chosen = widths == width
            starts[chosen], ends[chosen] = self._reach(numbers[chosen], groups[chosen], width)
        return starts, ends

    def _reach(self, numbers: IntArray, groups: IntArray, width: int) -> tuple[IntArray, IntArray]:
        """Those of groups of one width."""
        begins = self._edges.take(groups)
        blocks = (numbers // BLOCK) & (GROUP // BLOCK - 1)
        steps = numbers & (BLOCK - 1)
        starts = self.arrays.rows("<i8", 1, begins // 8 + blocks)[:, 0]
        # groups begin at multiples of 512 bytes
        rows = (begins + _NOTED) // (width * BLOCK) + blocks
        distances = self.arrays.rows(_DTYPES[width], BLOCK, rows)
        own = distances.reshape(-1).take(steps + np.arange(0, distances.size, BLOCK))
        places = starts + (distances * _BEFORE.take(steps, axis=0)).sum(axis=1, dtype=np.int64)
        return places, places + own

    def distances(self, count: int) -> IntArray:
        """From each of the first so many places to the next ([count] int64)."""
        made = np.empty((len(self._widths), GROUP), np.int64)
        for number, width in enumerate(self._widths.tolist()):
            begin = self._edges[number : number + 1] + _NOTED
            end = self._edges[number + 1 : number + 2]
            made[number] = self.arrays.parts(begin, end)[0].view(_DTYPES[width])
        return made.reshape(-1)[:count]

    def __getstate__(self) -> dict[str, Any]:
        return {"arrays": self.arrays}
