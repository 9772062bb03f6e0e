"""Holds millions of names in two flat arrays.

Their bytes lie one behind the other, beside the offsets where each begins: 8 bytes a name beside
its own, in two arrays that all processes share. A list of as many objects would take ten times the
room, and each worker would copy it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.memory.anonymous import SharedArray

_CHUNK = 1 << 16  # names that are Python objects at the same time


class PackedNames(Sequence[bytes]):
    """Many byte strings in two flat, read-only arrays, which workers share.

    Args:
        names: taken one after the other; they need not be in memory at once.
    """

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        builder = NamesBuilder()
        builder.extend(names)
        data, offsets = builder.arrays()
        self._bytes = SharedArray(data)
        self._offsets = SharedArray(offsets)

    @classmethod
    def from_arrays(
        cls, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]
    ) -> PackedNames:
        """From [bytes] uint8 and [n + 1] int64 offsets into them."""
        packed = cls.__new__(cls)
        packed._bytes = SharedArray(data)
        packed._offsets = SharedArray(offsets)
        return packed

    @classmethod
    def joined(cls, each: Sequence[PackedNames | None]) -> PackedNames | None:
        """The names of all, one after the other; None where some are None."""
        builder = NamesBuilder()
        for names in each:
            if names is None:
                return None
            data, offsets = names.arrays
            builder.add_joined(data, np.diff(offsets))
        return builder.build()

    @property
    def arrays(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """The bytes and the offsets."""
        return self._bytes.array, self._offsets.array

    def __len__(self) -> int:
        return len(self._offsets.array) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        data, offsets = self.arrays
        count = len(offsets) - 1
        if not -count <= index < count:
            raise IndexError(index)
        index %= count
        return data[offsets[index] : offsets[index + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks():
            yield from chunk

    def chunks(self) -> Iterator[list[bytes]]:
        """All names in order, some thousands at a time."""
        data, offsets = self.arrays
        for start in range(0, len(self), _CHUNK):
            ends = offsets[start : start + _CHUNK + 1].tolist()
            first = ends[0]
            joined = data[first : ends[-1]].tobytes()
            yield [joined[a - first : b - first] for a, b in itertools.pairwise(ends)]

    def end_in(self, *endings: str) -> npt.NDArray[np.bool_]:
        """Which names end in one of these, in ASCII letters and dots, in any case ([n] bool)."""
        data, offsets = self.arrays
        found = np.zeros(len(self), bool)
        for ending in endings:
            fits = np.diff(offsets) >= len(ending)
            for place, byte in enumerate(reversed(ending.encode()), 1):
                left = np.flatnonzero(fits)
                # which makes letters small, and leaves a dot
                fits[left] = (data[offsets[left + 1] - place] | 0x20) == (byte | 0x20)
            found |= fits
        return found

    def take(self, order: npt.NDArray[np.int64]) -> PackedNames:
        """The names at some positions ([m] int64), in that order."""
        data, offsets = self.arrays
        view = data.data
        packed = NamesBuilder()
        for start in range(0, len(order), _CHUNK):
            chosen = order[start : start + _CHUNK]
            begins = offsets[chosen]
            ends = offsets[chosen + 1]
            joined = b"".join(
                [view[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
            )
            packed.add_joined(joined, ends - begins)
        return packed.build()


class NamesBuilder:
    """Takes names in, and holds little more than what a `PackedNames` of them holds."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def extend(self, names: Iterable[bytes]) -> None:
        """Adds names one after the other."""
        coming = iter(names)
        while chunk := list(itertools.islice(coming, _CHUNK)):
            self.add_joined(b"".join(chunk), np.fromiter(map(len, chunk), np.int64, len(chunk)))

    def add_joined(
        self, data: bytes | npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64]
    ) -> None:
        """Adds names that lie one behind the other already, of these lengths ([m] int64)."""
        ends = np.cumsum(lengths) + len(self._bytes)
        self._offsets.frombytes(ends.tobytes())
        self._bytes += np.frombuffer(data, np.uint8).data

    def arrays(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Bytes and offsets of what was added; nothing more can be added then."""
        return np.frombuffer(self._bytes, np.uint8), np.frombuffer(self._offsets, np.int64)

    def build(self) -> PackedNames:
        """The names that were added; nothing more can be added then."""
        return PackedNames.from_arrays(*self.arrays())
