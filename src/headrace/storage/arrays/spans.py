"""Reads many spans of a 1-D array into one, one behind the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.local.files import bytes_of
from headrace.storage.arrays.chunks import DirectChunks
from headrace.storage.arrays.reader import ArrayReader, Map, cut_spans


class Cuts(NamedTuple):
    """Spans of rows, cut at the borders of chunks. Lists by part are in the order of the spans.

    Attributes:
        numbers: of the chunks.
        edges: [chunks + 1] where the parts of each chunk begin in `parts`, and the end.
        parts: numbers of parts, chunk by chunk.
        starts, stops: of each part, the first row in its chunk, and the end.
        totals: [chunks] rows that are taken of each.
    """

    numbers: list[int]
    edges: list[int]
    parts: list[int]
    starts: list[int]
    stops: list[int]
    totals: list[int]

    @classmethod
    def of(cls, firsts: IntArray, ends: IntArray, height: int) -> Cuts:
        """Of spans, of which one at least has rows."""
        _, of, starts, stops = cut_spans(firsts, ends, height)
        order = np.argsort(of, kind="stable")
        by_chunk = of[order]
        is_first = np.ones(len(of), bool)
        np.not_equal(by_chunk[1:], by_chunk[:-1], out=is_first[1:])
        at, begins = np.flatnonzero(is_first), of * height
        totals = np.add.reduceat((stops - starts)[order], at).tolist()
        edges = [*at.tolist(), len(of)]
        return cls(by_chunk[at].tolist(), edges, order.tolist(), (starts - begins).tolist(), (stops - begins).tolist(), totals)


class SpanReader(ArrayReader):
    """Spans of a 1-D array, whatever its chunks."""

    def _as_they_are(self, raw: DirectChunks, firsts: IntArray, ends: IntArray) -> npt.NDArray[Any]:
        ranges, _, starts, stops = self._cut(raw, firsts, ends)
        if len(ranges.paths) == 1 and ranges.is_written.all():
            return np.frombuffer(raw.files.read_joined(ranges), self.dtype)
        out = np.empty(int((ends - firsts).sum()), self.dtype)
        edges = [0, *np.cumsum(stops - starts).tolist()]
        parts = [out[start:stop] for start, stop in itertools.pairwise(edges)]
        self._read_raw(raw, ranges, parts, list(map(bytes_of, parts)))
        return out

    def _decoded(self, cuts: Cuts, run: Map) -> npt.NDArray[Any]:
        """Of chunks that are decoded as a whole."""
        chunks, (numbers, edges, parts, starts, stops, totals) = self.chunks, cuts
        pieces: list[Any] = [None] * len(parts)
        missing = self._from_cache(cuts, pieces) if chunks.decodes else list(range(len(numbers)))

        def hand_out(number: int, chunk: npt.NDArray[Any] | None) -> None:
            which = missing[number]
            for part in parts[edges[which] : edges[which + 1]]:  # copies: the chunk need not be held for them
                start, stop = starts[part], stops[part]
                pieces[part] = np.full(stop - start, chunks.fill, self.dtype) if chunk is None else chunk[start:stop].copy()
            if chunk is not None and chunks.decodes:
                self._cache.used((self._key, numbers[which]), chunk, totals[which])

        self._decode(chunks, [numbers[which] for which in missing], hand_out, run)
        return np.concatenate(pieces, out=np.empty(sum(totals), self.dtype))

    def _from_cache(self, cuts: Cuts, pieces: list[Any]) -> list[int]:
        """Writes parts of chunks that are cached to `pieces`; which chunks are not."""
        numbers, edges, parts, starts, stops, totals = cuts
        missing, is_checked = [], False
        for which, decoded in enumerate(self._cache.get_many(self._key, numbers)):
            if decoded is None:
                missing.append(which)
                continue
            if not is_checked:  # one of them a batch
                self.chunks.check_cached(numbers[which])
                is_checked = True
            chunk = decoded.chunk
            for part in parts[edges[which] : edges[which + 1]]:
                pieces[part] = chunk[starts[part] : stops[part]]
            decoded.left -= totals[which]
            if decoded.left <= 0:
                self._cache.drop((self._key, numbers[which]))
        self.counts["chunk_hits"] += len(numbers) - len(missing)
        return missing


def read_joined(readers: Sequence[SpanReader], firsts: IntArray, ends: IntArray, run: Map) -> list[npt.NDArray[Any]]:
    """The same spans of several arrays: of each the elements ``firsts[i]`` to ``ends[i] - 1`` of all spans, one span behind the other,
    perhaps read-only.

    Spans that follow one another are read as one, and each chunk is decoded once.

    Raises:
        FormatError, OSError: a chunk is damaged; a file can't be read.
    """
    firsts, ends = _joined(firsts, ends)
    if not len(firsts):
        return [np.empty(0, reader.dtype) for reader in readers]
    cuts, found = dict[int, Cuts](), list[npt.NDArray[Any]]()
    for reader in readers:
        raw, height = reader._raw, reader.height
        if raw is None and height not in cuts:
            cuts[height] = Cuts.of(firsts, ends, height)
        found.append(reader._decoded(cuts[height], run) if raw is None else reader._as_they_are(raw, firsts, ends))
    return found


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
