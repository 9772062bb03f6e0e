"""Positions of very many lines, stored in little more than a byte per line.

Distances between lines are stored in groups. Each group uses as many bytes per distance as its
largest one needs, and stores the position of every 64th line. So a line's position is the last
stored one before it plus a sum of at most 63 distances.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.array_file import FileArrays, parts_of, rows_of
from headrace.memory.anonymous import SharedArray
from headrace.memory.budget import Reservation
from headrace.sorting import distinct

BLOCK = 64
"""Places from one that is noted itself to the next: a power of two."""
GROUP = 4096
"""Places in a group: a power of two."""
_NOTED = 8 * (GROUP // BLOCK)  # bytes of the noted places of a group, before its distances
_DTYPES = {1: "u1", 2: "<u2", 4: "<u4", 8: "<i8"}
"""Of distances, by the bytes that each takes."""
_WIDTHS = tuple(_DTYPES.items())
_TOGETHER = 16  # groups that are encoded at once


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
        self._long, self._short, self._reserved = (
            SharedArray(long),
            list(map(SharedArray, short)),
            reserved,
        )

    @property
    def long(self) -> npt.NDArray[Any]:
        """The long array, read-only."""
        return self._long.array

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        """The short arrays, read-only."""
        return [short.array for short in self._short]

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the long array."""
        return self.long.dtype

    @property
    def count(self) -> int:
        """Elements of the long array."""
        return len(self.long)

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


class PlacesEncoder:
    """Makes the bytes of places that come a piece at a time.

    Attributes:
        edges: where each group begins in the bytes, so far, and where the last one ends.
    """

    def __init__(self) -> None:
        # places that don't fill a group yet; the last of them is known to have no distance yet
        self._left: list[IntArray] = []
        self._waiting = 0
        self.edges: list[int] = [0]

    def feed(self, places: IntArray) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of the groups that are full now.

        Args:
            places: the next ones; none is before the one that precedes it.
        """
        self._left.append(places)
        self._waiting += places.size
        if self._waiting > _TOGETHER * GROUP:
            joined = np.concatenate(self._left)
            # the last distance of a group is that to the next group's first place
            full = (joined.size - 1) // GROUP * GROUP
            yield from self._groups(joined[: full + 1])
            self._left, self._waiting = [joined[full:].copy()], joined.size - full

    def finish(self) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of the rest, filled up to whole groups."""
        joined = np.concatenate([*self._left, np.empty(0, np.int64)])
        if joined.size:
            filled = -(-joined.size // GROUP) * GROUP
            yield from self._groups(
                np.concatenate([joined, np.full(filled + 1 - joined.size, joined[-1])])
            )
        self._left, self._waiting = [], 0

    def encoded(self, pieces: Iterable[IntArray]) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of all places of these pieces, to the end."""
        for places in pieces:
            yield from self.feed(places)
        yield from self.finish()

    def _groups(self, places: IntArray) -> Iterator[npt.NDArray[np.uint8]]:
        """Of n groups and the place behind them."""
        distances = np.diff(places).reshape(-1, GROUP)
        noted = places[:-1:BLOCK].reshape(-1, GROUP // BLOCK)
        wanted = np.searchsorted([1 << 8, 1 << 16, 1 << 32], distances.max(axis=1), side="right")
        for begin, end in _alike(wanted):
            width, dtype = _WIDTHS[wanted[begin]]
            made = np.empty((end - begin, _NOTED + GROUP * width), np.uint8)
            made[:, :_NOTED] = np.ascontiguousarray(noted[begin:end], "<i8").view(np.uint8)
            made[:, _NOTED:] = distances[begin:end].astype(dtype).view(np.uint8)
            self.edges.extend(
                range(self.edges[-1] + made.shape[1], self.edges[-1] + made.size + 1, made.shape[1])
            )
            yield made.reshape(-1)


class Places:
    """The places that were encoded, at random.

    Args:
        arrays: the bytes (uint8), as their long array.
        edges: where each group begins there, and the last one ends: [groups + 1] int64.
    """

    def __init__(self, arrays: Arrays, edges: IntArray) -> None:
        self._arrays = arrays
        self._edges = edges
        self._widths = (np.diff(edges) - _NOTED) // GROUP
        found = distinct(self._widths).tolist()
        self._only: int | None = found[0] if len(found) == 1 else None  # the usual case

    def reach(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Some places, and for each the one that follows it.

        Args:
            numbers: [n] which, from 0; each of them there, and not the last of all.

        Returns:
            [n] int64 each.
        """
        groups = numbers >> _GROUP_BITS
        blocks = (numbers >> _BLOCK_BITS) & (GROUP // BLOCK - 1)
        begins, steps = self._edges.take(groups), numbers & (BLOCK - 1)
        starts = self._arrays.rows("<i8", 1, (begins >> 3) + blocks)[:, 0].astype(np.int64)
        if self._only is not None:
            return self._summed(self._only, begins, blocks, steps, starts)
        ends, widths = np.empty_like(starts), self._widths.take(groups)
        for width in distinct(widths).tolist():
            chosen = widths == width
            starts[chosen], ends[chosen] = self._summed(
                width, begins[chosen], blocks[chosen], steps[chosen], starts[chosen]
            )
        return starts, ends

    def _summed(
        self, width: int, begins: IntArray, blocks: IntArray, steps: IntArray, starts: IntArray
    ) -> tuple[IntArray, IntArray]:
        """The places so many steps behind `starts`, and those that follow."""
        # groups begin at multiples of 512 bytes
        rows = (begins + _NOTED) // (width * BLOCK) + blocks
        distances = self._arrays.rows(_DTYPES[width], BLOCK, rows)
        own = distances.reshape(-1).take(steps + np.arange(0, distances.size, BLOCK))
        places = starts + (distances * _BEFORE.take(steps, axis=0)).sum(axis=1, dtype=np.int64)
        return places, places + own

    def distances(self, count: int) -> IntArray:
        """From each of the first so many places to the next ([count] int64)."""
        made = np.empty((len(self._widths), GROUP // BLOCK, BLOCK), np.int64)
        for number, width in enumerate(self._widths.tolist()):
            begin, end = (
                self._edges[number : number + 1] + _NOTED,
                self._edges[number + 1 : number + 2],
            )
            (group,) = self._arrays.parts(begin, end)
            made[number] = group.view(_DTYPES[width]).reshape(-1, BLOCK)
        return made.reshape(-1)[:count]


class PlacesTable:
    """Places in arrays in a file or in memory, by which they travel to workers too.

    Args:
        arrays: the bytes, and, as the last of the short ones, where groups begin.

    Attributes:
        path: of the file; None: they are in memory.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self.path: str | None = arrays.path
        self._places: Places | None = None

    @property
    def places(self) -> Places:
        """The places.

        Raises:
            AccessError: the file is gone, or another one.
        """
        if self._places is None:
            self._places = Places(self._arrays, self._arrays.short[-1])
        return self._places

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        """The other arrays."""
        return self._arrays.short[:-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None}


_BLOCK_BITS, _GROUP_BITS = BLOCK.bit_length() - 1, GROUP.bit_length() - 1
_BEFORE = np.tri(BLOCK, BLOCK, -1, np.uint8)
"""[steps, place in a block]: 1 where the distance counts."""


def _alike(values: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Stretches of equal values: where each begins and ends."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    yield from itertools.pairwise(edges)
