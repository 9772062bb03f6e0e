"""Eager and cached modes for overlapping windows: each step is held once, and windows are cut
out of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.core.held import Held
from headrace.core.values import Access, Use, ValueSource, used
from headrace.dtypes import IntArray
from headrace.errors import HeadraceError, SampleError
from headrace.memory.store import MISSING
from headrace.sorting import distinct
from headrace.storage.episodes.source import EpisodeSource
from headrace.storage.episodes.windows import Bands


class HeldSteps(ValueSource):
    """Windows cut out of bands of steps that are held; see `Bands`.

    Args:
        parent: holds the bands, by their numbers; over the records of the windows.
        source: of the windows.
        bands: of its episodes.
    """

    def __init__(self, parent: Held, source: EpisodeSource, bands: Bands) -> None:
        super().__init__(parent)
        self._bands_held = parent
        self._source = source
        self._bands = bands

    def each(self, indices: Sequence[int], use: Use, access: Access) -> list[Any]:
        reader = access.reader
        wanted = np.asarray(indices, np.int64)
        needed = self._source.bands_of(wanted, self._bands)
        held = self._held(needed)
        are_held = [all(number in held for number in some.tolist()) for some in needed]
        whole = np.flatnonzero(are_held)
        values: list[Any] = [MISSING] * len(indices)
        windows = self._source.cut(wanted[whole], self._bands, held)
        for position, window in zip(whole.tolist(), windows, strict=True):
            values[position] = access.decoder.decode(window)
        reader.counts["cache_hits"] += len(whole)
        missing = [position for position, is_held in enumerate(are_held) if not is_held]
        if missing:
            rest = wanted[missing].tolist()
            reader.counts["cache_misses"] += len(rest)
            records = reader.records(rest, self._read, access.earlier)
            for position, index, record in zip(missing, rest, records, strict=True):
                values[position] = reader.decoded(index, record, access.decoder)
        return used(values, use)

    def _held(self, needed: list[IntArray]) -> dict[int, Any]:
        """Those bands that are held, by their numbers."""
        numbers = distinct(np.concatenate([np.empty(0, np.int64), *needed])).tolist()
        bands = zip(numbers, self._bands_held.get(numbers), strict=True)
        return {
            number: band
            for number, band in bands
            if band is not MISSING and not isinstance(band, SampleError)
        }

    def _read(self, indices: Sequence[int]) -> list[Any]:
        """Windows, whose bands are read and offered to the store."""
        wanted = np.asarray(indices, np.int64)
        numbers = distinct(np.concatenate(self._source.bands_of(wanted, self._bands))).tolist()
        held = dict(zip(numbers, self._bands_held.get(numbers), strict=True))
        if any(isinstance(band, SampleError) for band in held.values()):
            return self._source.read(indices)  # which says what is wrong, and with which sample
        missing = [number for number, band in held.items() if band is MISSING]
        bands = self._source.read_bands(missing, self._bands)
        for number, band in zip(missing, bands, strict=True):
            self._bands_held.admit(number, band)
            held[number] = band
        return self._source.cut(wanted, self._bands, held)


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
