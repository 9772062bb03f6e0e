"""Eager and cached modes for overlapping windows: each step is cached once, and windows are cut
out of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.errors import HeadraceError, SampleError
from headrace.memory.store import MISSING
from headrace.modes.mode import Mode, Read
from headrace.modes.stored import Stored
from headrace.sorting import distinct
from headrace.storage.episodes.source import EpisodeSource
from headrace.storage.episodes.windows import Bands
from headrace.storage.source import Source


class CachedSteps(Mode):
    """Caches bands of steps; see `Bands`.

    Args:
        inner: caches the bands, by their numbers.
        source: of the windows.
        bands: of its episodes.
        decode: a window as it is stored -> its value.
    """

    caches_samples = True

    def __init__(
        self, inner: Stored, source: EpisodeSource, bands: Bands, decode: Callable[[Any], Any]
    ) -> None:
        self._inner, self._source, self._bands, self._decode = inner, source, bands, decode

    def prefetches_records(self, source: Source) -> bool:
        return True  # what is missing is read by bands

    def get(self, indices: Sequence[int]) -> list[Any]:
        wanted = np.asarray(indices, np.int64)
        needed = self._source.bands_of(wanted, self._bands)
        numbers = distinct(np.concatenate([np.empty(0, np.int64), *needed]))
        held = dict(zip(numbers.tolist(), self._inner.get(numbers.tolist()), strict=True))
        held = {
            number: band
            for number, band in held.items()
            if band is not MISSING and not isinstance(band, SampleError)
        }
        found: list[Any] = [MISSING] * len(indices)
        whole = [
            at for at, some in enumerate(needed) if all(number in held for number in some.tolist())
        ]
        for at, window in zip(
            whole, self._source.cut(wanted[whole], self._bands, held), strict=True
        ):
            found[at] = self._decode(window)
        return found

    def read(self, indices: Sequence[int], read: Read) -> list[Any]:
        wanted = np.asarray(indices, np.int64)
        numbers = distinct(np.concatenate(self._source.bands_of(wanted, self._bands))).tolist()
        held = dict(zip(numbers, self._inner.get(numbers), strict=True))
        missing = [number for number, band in held.items() if band is MISSING]
        if any(isinstance(band, SampleError) for band in held.values()):
            return read(indices)  # which says what is wrong, and with which sample
        for number, band in zip(
            missing, self._source.read_bands(missing, self._bands), strict=True
        ):
            self._inner.admit(number, band)
            held[number] = band
        return self._source.cut(wanted, self._bands, held)

    def expect_skew(self) -> None:
        self._inner.expect_skew()

    def shrink(self, nbytes: int) -> None:
        self._inner.shrink(nbytes)

    def close(self) -> None:
        self._inner.close()

    def stats(self) -> dict[str, int]:
        return self._inner.stats()


def load_bands(source: EpisodeSource, bands: Bands, numbers: Sequence[int]) -> list[Any]:
    """Bands; a SampleError for each that can't be read: its windows say what is wrong when they
    are read.
    """
    try:
        return source.read_bands(numbers, bands)
    except (HeadraceError, OSError, ValueError) as error:
        if len(numbers) == 1:
            return [SampleError(str(error))]
    return [band for number in numbers for band in load_bands(source, bands, [number])]
