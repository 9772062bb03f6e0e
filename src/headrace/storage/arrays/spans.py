"""Reads many spans of a 1-D array into one, one behind the other."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.local.files import bytes_of
from headrace.storage.arrays.reader import ArrayReader, Map, cut_spans


class SpanReader(ArrayReader):
    """Spans of a 1-D array, whatever its chunks."""

    def read_joined(self, firsts: IntArray, ends: IntArray, run: Map) -> npt.NDArray[Any]:
        """The elements ``firsts[i]`` to ``ends[i] - 1`` of all spans, one span behind the other, perhaps read-only.

        Spans that follow one another are read as one, and each chunk is decoded once.

        Raises:
            FormatError, OSError: a chunk is damaged; a file can't be read.
        """
        firsts, ends = _joined(firsts, ends)
        if not len(firsts):
            return np.empty(0, self.dtype)
        if self._raw is not None:
            ranges, _, starts, stops = self._cut(self._raw, firsts, ends)
            if len(ranges.paths) == 1 and ranges.is_written.all():
                return np.frombuffer(self._raw.files.read_joined(ranges), self.dtype)
            out = np.empty(int((ends - firsts).sum()), self.dtype)
            edges = [0, *np.cumsum(stops - starts).tolist()]
            parts = [out[start:stop] for start, stop in itertools.pairwise(edges)]
            self._read_raw(self._raw, ranges, parts, list(map(bytes_of, parts)))
            return out
        return self._decoded(firsts, ends, run)

    def _decoded(self, firsts: IntArray, ends: IntArray, run: Map) -> npt.NDArray[Any]:
        """Of chunks that are decoded as a whole."""
        height, out = self.chunks.grid.chunks[0], np.empty(int((ends - firsts).sum()), self.dtype)
        _, chunks, starts, stops = cut_spans(firsts, ends, height)
        sizes = stops - starts
        order = np.argsort(chunks, kind="stable")
        numbers, edges = np.unique(chunks[order], return_index=True)
        bounds = dict(zip(numbers.tolist(), itertools.pairwise([*edges.tolist(), len(order)]), strict=True))
        columns = (starts - chunks * height, np.cumsum(sizes) - sizes, sizes)
        sources, places, counts = ([*column[order].tolist()] for column in columns)

        def hand_out(number: int, chunk: npt.NDArray[Any] | None) -> None:
            taken, (first, last) = 0, bounds[number]
            for source, place, count in zip(sources[first:last], places[first:last], counts[first:last], strict=True):
                out[place : place + count] = self.chunks.fill if chunk is None else chunk[source : source + count]
                taken += count
            if chunk is not None and self.chunks.decodes:
                self._cache.used((self._key, number), chunk, taken)

        self._each(self.chunks, list(bounds), hand_out, run)
        return out


def _joined(firsts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """The spans without those that are empty; one where the next begins at the end of the last."""
    is_there = ends > firsts
    if not is_there.all():
        firsts, ends = firsts[is_there], ends[is_there]
    is_new = np.ones(len(firsts), bool)
    np.not_equal(firsts[1:], ends[:-1], out=is_new[1:])
    if is_new.all():
        return firsts, ends
    return firsts[is_new], ends[np.append(np.flatnonzero(is_new)[1:], len(ends)) - 1]
