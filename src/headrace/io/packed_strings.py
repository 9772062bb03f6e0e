"""Holds millions of names in two flat arrays.

Their bytes lie one behind the other, beside the offsets where each begins: 8 bytes a name beside
its own, in two arrays that all processes share. A list of as many objects would take ten times the
room, and each worker would copy it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.memory.anonymous import SharedArray

_CHUNK = 1 << 16  # names that are Python objects at the same time


class PackedNames(Sequence[bytes]):
    """Many byte strings in two flat, read-only arrays, which workers share."""

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        listed = list(names)
        offsets = itertools.accumulate(map(len, listed), initial=0)
        self._bytes = SharedArray(np.frombuffer(b"".join(listed), np.uint8))
        self._offsets = SharedArray(np.fromiter(offsets, np.int64, len(listed) + 1))

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
    def joined(cls, each: Iterable[PackedNames | None]) -> PackedNames | None:
        """The names of all, one after the other; None where some are None."""
        data = [np.empty(0, np.uint8)]
        offsets = [np.zeros(1, np.int64)]
        nbytes = 0
        for names in each:
            if names is None:
                return None
            data.append(names._bytes.array)
            offsets.append(names._offsets.array[1:] + nbytes)
            nbytes += len(names._bytes)
        return cls.from_arrays(np.concatenate(data), np.concatenate(offsets))

    @property
    def arrays(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """The bytes and the offsets."""
        return self._bytes.array, self._offsets.array

    def __len__(self) -> int:
        return len(self._offsets.array) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        data = self._bytes.array
        offsets = self._offsets.array
        count = len(offsets) - 1
        if not -count <= index < count:
            raise IndexError(index)
        index %= count
        return data[offsets[index] : offsets[index + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        data, offsets = self.arrays
        for start in range(0, len(self), _CHUNK):
            ends = offsets[start : start + _CHUNK + 1].tolist()
            first = ends[0]
            joined = data[first : ends[-1]].tobytes()
            for begin, end in itertools.pairwise(ends):
                yield joined[begin - first : end - first]

    def end_in(self, *endings: str) -> npt.NDArray[np.bool_]:
        """Which names end in one of these, in ASCII letters and dots, in any case ([n] bool)."""
        data = self._bytes.array
        offsets = self._offsets.array
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
        return PackedNames(map(self.__getitem__, order.tolist()))
