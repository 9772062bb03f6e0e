"""Reads many spans of 1-D arrays, those of an array one behind the other.

Arrays whose chunks have the same rows, as `indices` and `data` of a sparse matrix, are read
together: their chunks are looked up, cached and dropped as one.

NOTE [ rows by memoryviews ]

A batch of sparse rows is made of a hundred parts of some kB, out of as many decoded chunks. Parts
are memoryviews, and are joined by `bytes.join`: for 64 parts of 4 kB that takes 22 us, where
`np.concatenate` takes 40, and 11 instead of 30 for 2 kB. A copy to the batch's buffer, out of the
processor's cache, adds 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.local.files import bytes_of
from headrace.memory.lru import held_bytes
from headrace.storage.arrays.chunks import DirectChunks, read_aligned
from headrace.storage.arrays.reader import GROUP, ArrayReader, CutSpans, Map, cut_spans

Room = Callable[[int, np.dtype[Any]], npt.NDArray[Any]]
"""Makes an array [n] of a dtype, of any content."""


class Cuts(NamedTuple):
    """Spans of rows, cut at the borders of chunks. Lists by part are in the order of the spans.

    Attributes:
        numbers: of the chunks.
        totals: [chunks] rows that are taken of each.
        of: of each part, the place of its chunk in `numbers`.
        starts, stops: of each part, the first row in its chunk, and the end.
    """

    numbers: list[int]
    totals: list[int]
    of: list[int]
    starts: list[int]
    stops: list[int]

    @classmethod
    def of_spans(cls, cut: CutSpans, height: int) -> Cuts:
        """Of spans, of which one at least has rows."""
        _, chunks, starts, stops = cut
        order = np.argsort(chunks, kind="stable")
        by_chunk = chunks[order]
        is_first = np.ones(len(chunks), bool)
        np.not_equal(by_chunk[1:], by_chunk[:-1], out=is_first[1:])
        of, at, begins = np.empty(len(chunks), np.int64), np.flatnonzero(is_first), chunks * height
        of[order] = np.cumsum(is_first) - 1
        totals = np.add.reduceat((stops - starts)[order], at)
        return cls(
            by_chunk[at].tolist(),
            totals.tolist(),
            of.tolist(),
            (starts - begins).tolist(),
            (stops - begins).tolist(),
        )


class AlignedChunks:
    """Decoded chunks of several arrays that have the same rows; a `Chunk`.

    Attributes:
        views: of a chunk of each, contiguous; see NOTE [ rows by memoryviews ].
        nbytes: of all.
    """

    __slots__ = ("nbytes", "views")

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        # one that lies among what was read with it would keep all of that
        alone = [array.copy() if held_bytes(array) > array.nbytes else array for array in arrays]
        self.views: list[memoryview] = list(map(memoryview, alone))  # type: ignore[arg-type]
        self.nbytes: int = sum(array.nbytes for array in alone)

    def __len__(self) -> int:
        return len(self.views[0])


_NOTHING = memoryview(b"")


class SpanReader(ArrayReader):
    """Spans of a 1-D array, whatever its chunks."""

    def _as_they_are(
        self, raw: DirectChunks, firsts: IntArray, ends: IntArray, cut: CutSpans
    ) -> npt.NDArray[Any]:
        ranges, _, starts, stops = self._ranges_of(raw, firsts, cut)
        if len(ranges.paths) == 1 and ranges.is_written.all():
            return np.frombuffer(raw.files.read_joined(ranges), self.dtype)
        out = np.empty(int((ends - firsts).sum()), self.dtype)
        edges = [0, *np.cumsum(stops - starts).tolist()]
        parts = [out[start:stop] for start, stop in itertools.pairwise(edges)]
        self._read_raw(raw, ranges, parts, list(map(bytes_of, parts)))
        return out


class _Aligned:
    """Arrays whose chunks are decoded as a whole, and have the same rows."""

    def __init__(self, readers: Sequence[SpanReader]) -> None:
        self._readers, self._arrays = readers, [reader.chunks for reader in readers]
        self._cache, self._key = readers[0]._cache, "\0".join(reader._key for reader in readers)
        self._caches = self._arrays[0].decodes

    def read(self, cuts: Cuts, run: Map, rooms: Sequence[Room | None]) -> list[npt.NDArray[Any]]:
        """The rows of spans, of each array."""
        numbers, totals, of, starts, stops = cuts
        cached = self._cached(numbers, totals) if self._caches else [None] * len(numbers)
        missing = [which for which, chunk in enumerate(cached) if chunk is None]
        pieces: list[list[memoryview | bytes]] = []
        for place in range(len(self._readers)):
            chunks = [_NOTHING if chunk is None else chunk.views[place] for chunk in cached]
            pieces.append(
                [
                    chunks[which][start:stop]
                    for which, start, stop in zip(of, starts, stops, strict=True)
                ]
            )
        if missing:
            self._decode(cuts, missing, pieces, run)
        found: list[npt.NDArray[Any]] = []
        for each, reader, room in zip(pieces, self._readers, rooms, strict=True):
            rows = np.frombuffer(b"".join(each), reader.dtype)
            found.append(rows if room is None else room(len(rows), rows.dtype))
            if room is not None:
                np.copyto(found[-1], rows)
        return found

    def _cached(self, numbers: list[int], totals: list[int]) -> list[AlignedChunks | None]:
        """The chunks that are cached, and None for the others. Their rows are taken off, and
        those that have given all are dropped.
        """
        cached = self._cache.get_many(self._key, numbers)
        found: list[AlignedChunks | None] = [
            None if decoded is None else decoded.chunk for decoded in cached
        ]
        hits = last = 0
        for number, total, decoded in zip(numbers, totals, cached, strict=True):
            if decoded is not None:
                hits, last = hits + 1, number
                decoded.left = left = decoded.left - total
                if left <= 0:
                    self._cache.drop((self._key, number))
        for reader in self._readers:
            if hits:  # one of them a batch
                reader.chunks.check_cached(last)
            reader.counts["chunk_hits"] += hits
        return found

    def _decode(
        self, cuts: Cuts, missing: list[int], pieces: list[list[memoryview | bytes]], run: Map
    ) -> None:
        """Reads and decodes chunks, as many at once as take `GROUP` bytes, and writes their
        parts to `pieces`.
        """
        numbers, totals, of, starts, stops = cuts
        parts: dict[int, list[int]] = {which: [] for which in missing}
        for part, which in enumerate(of):
            if which in parts:
                parts[which].append(part)
        step = max(1, GROUP // max(1, sum(chunks.nbytes for chunks in self._arrays)))
        for begin in range(0, len(missing), step):
            some = missing[begin : begin + step]
            decoded = self._decoded([numbers[which] for which in some], run)
            for which, *arrays in zip(some, *decoded, strict=True):
                for each, array in zip(pieces, arrays, strict=True):
                    view = memoryview(array)
                    for part in parts[which]:
                        piece = view[starts[part] : stops[part]]
                        # of many, the chunks are not held for them
                        each[part] = piece if len(missing) <= step else bytes(piece)
                if self._caches and len(arrays[0]) > totals[which]:
                    self._cache.used(
                        (self._key, numbers[which]), AlignedChunks(arrays), totals[which]
                    )
        if self._caches:
            for reader in self._readers:
                reader.counts["chunks_decoded"] += len(missing)

    def _decoded(self, numbers: list[int], run: Map) -> list[list[npt.NDArray[Any]]]:
        """Chunks of each array."""
        count, stored = len(numbers), read_aligned(self._arrays, numbers)
        found: list[list[Any]] = [[None] * count for _ in self._arrays]

        def work(at: int) -> None:
            place, which = divmod(at, count)
            chunks, data = self._arrays[place], stored[place][which]
            stored[place][which] = None
            chunk = chunks.decode(numbers[which], data)
            found[place][which] = (
                np.full(chunks.grid.chunks, chunks.fill, chunks.dtype)
                if chunk is None
                else np.ascontiguousarray(chunk)
            )

        run(work, count * len(self._arrays))
        return found


def read_joined(
    readers: Sequence[SpanReader],
    firsts: IntArray,
    ends: IntArray,
    run: Map,
    rooms: Sequence[Room | None] = (),
) -> list[npt.NDArray[Any]]:
    """The same spans of several arrays: of each the elements ``firsts[i]`` to ``ends[i] - 1`` of
    all spans, one span behind the other, perhaps read-only.

    Spans that follow one another are read as one, and each chunk is decoded once.

    Args:
        readers: of the arrays, which share a cache.
        firsts, ends: [spans].
        run: calls a function in threads.
        rooms: of each array what makes the one that its rows are copied to, if they are; None, or
            no rooms: NumPy.

    Raises:
        FormatError, OSError: a chunk is damaged; a file can't be read.
    """
    firsts, ends = _joined(firsts, ends)
    if not len(firsts):
        return [np.empty(0, reader.dtype) for reader in readers]
    cuts = {
        height: cut_spans(firsts, ends, height) for height in {reader.height for reader in readers}
    }
    found: list[Any] = [None] * len(readers)
    aligned: dict[tuple[int, bool], list[int]] = {}
    for place, reader in enumerate(readers):
        if reader._raw is None:
            aligned.setdefault((reader.height, reader.chunks.decodes), []).append(place)
        else:
            found[place] = reader._as_they_are(reader._raw, firsts, ends, cuts[reader.height])
    for (height, _), places in aligned.items():
        together, of_places = (
            _Aligned([readers[place] for place in places]),
            [rooms[place] if rooms else None for place in places],
        )
        for place, rows in zip(
            places, together.read(Cuts.of_spans(cuts[height], height), run, of_places), strict=True
        ):
            found[place] = rows
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
