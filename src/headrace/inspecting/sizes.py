"""Picks some of many files, and estimates the bytes of all by theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.sorting import distinct
from headrace.storage.files import FilesSource

ASKED = 16
"""Files that are looked at, where each is opened, or asked for."""
_COUNTED, _SAMPLED = 20_000, 1000  # files whose sizes are all looked at; of more


def evenly(count: int, most: int) -> IntArray:
    """The numbers of all of `count` things ([n] int64), or of `most` of them at equal distances,
    the first and the last included.
    """
    return (
        np.arange(count, dtype=np.int64)
        if count <= most
        else distinct(np.linspace(0, count - 1, most).astype(np.int64))
    )


def sizes_of(source: FilesSource) -> npt.NDArray[np.int64]:
    """Bytes of files ([n] int64), of all or some."""
    count, files = len(source), source.listing
    if files.server is None:
        return source.sizes(evenly(count, _COUNTED if count <= _COUNTED else _SAMPLED))
    urls = [files.url(number) for number in evenly(count, ASKED).tolist()]
    return np.array([size or 0 for size in files.server.sizes(urls)], np.int64)


def stored_in(count: int, sizes: Sequence[int] | npt.NDArray[np.int64]) -> tuple[int, bool]:
    """The bytes of so many files, by those of some ([n], at least one), and whether that is an
    estimate.
    """
    return int(np.sum(sizes, dtype=np.int64)) * count // len(sizes), len(sizes) < count


def spread_of(sizes: npt.NDArray[np.int64]) -> dict[str, int]:
    """The least, the median and the largest size."""
    return {"least": int(sizes.min()), "median": int(np.median(sizes)), "most": int(sizes.max())}
