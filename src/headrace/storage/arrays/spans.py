"""Reads many spans of a 1-D array into one, one behind the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
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
        chunks, height, out = self.chunks, self.chunks.grid.chunks[0], np.empty(int((ends - firsts).sum()), self.dtype)
        _, of, starts, stops = cut_spans(firsts, ends, height)
        sizes = stops - starts
        order = np.argsort(of, kind="stable")
        of = of[order]
        at = np.flatnonzero(np.concatenate([[True], of[1:] != of[:-1]]))
        numbers, edges, totals = of[at].tolist(), [*at.tolist(), len(of)], np.add.reduceat(sizes[order], at).tolist()
        columns = (starts % height, np.cumsum(sizes) - sizes, sizes)
        sources, places, counts = (column[order].tolist() for column in columns)

        def copy(which: int, chunk: npt.NDArray[Any] | None) -> None:
            for part in range(edges[which], edges[which + 1]):
                source, place, count = sources[part], places[part], counts[part]
                out[place : place + count] = chunks.fill if chunk is None else chunk[source : source + count]

        missing = list(range(len(numbers)))
        if chunks.decodes:
            missing = self._copy_cached(numbers, totals, copy)

        def hand_out(number: int, chunk: npt.NDArray[Any] | None) -> None:
            which = missing[number]
            copy(which, chunk)
            if chunk is not None and chunks.decodes:
                self._cache.used((self._key, numbers[which]), chunk, totals[which])

        self._decode(chunks, [numbers[which] for which in missing], hand_out, run)
        return out

    def _copy_cached(self, numbers: list[int], totals: list[int], copy: Callable[[int, npt.NDArray[Any]], None]) -> list[int]:
        """Copies out of chunks that are cached; which of them are not. (`totals`: elements that are taken of each.)"""
        missing, is_checked = [], False
        for which, decoded in enumerate(self._cache.get_many(self._key, numbers)):
            if decoded is None:
                missing.append(which)
                continue
            if not is_checked:  # one of them a batch
                self.chunks.check_cached(numbers[which])
                is_checked = True
            copy(which, decoded.chunk)
            decoded.left -= totals[which]
            if decoded.left <= 0:
                self._cache.drop((self._key, numbers[which]))
        self.counts["chunk_hits"] += len(numbers) - len(missing)
        return missing


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
