"""Rows and boxes of an array, read by the chunks that a batch needs.

NOTE [ from a batch's indices to its rows ]

1. Where the bytes of a row lie as they are (no codec), they are read to their place by `preadv`; rows that lie one after the other, by
   one call. Nothing of the rest of their chunks is read.
2. Else the chunks that the batch needs are found, each once. What the cache holds of them is taken from there. Of the others the
   stored bytes are read, neighbours by one call, and are decoded, in threads where there are some; the rows are copied straight into
   the batch.
3. Decoded chunks of several rows go to the cache, which holds those used last within a number of bytes. One that has given all its
   rows is dropped: under a block shuffle nobody comes back to it.

Chunks that only another library can read (`LibraryChunks`) go the same way from there on.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.local.files import bytes_of
from headrace.io.ranges import ByteRanges
from headrace.memory.lru import LRUCache, held_bytes
from headrace.storage.arrays.chunks import Chunks, DirectChunks, Grid
from headrace.storage.source import Rows

Map = Callable[[Callable[[int], Any], int], list[Any]]
"""Calls a function for 0 to n - 1, perhaps in threads, and gives what it returns."""

_GROUP = 64 << 20  # decoded bytes of the chunks whose stored bytes are held at once


@dataclass(slots=True)
class _Decoded:
    chunk: npt.NDArray[Any]
    left: int
    """Rows that nobody has asked for yet."""


def _nbytes(item: _Decoded) -> int:
    return item.chunk.nbytes


class ChunkCache:
    """The decoded chunks that this process used last.

    Args:
        max_bytes: of all of them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._held: LRUCache[tuple[str, int], _Decoded] = LRUCache(max_bytes, sizeof=_nbytes)

    @property
    def max_bytes(self) -> int:
        """Of all chunks that are held."""
        return self._held.max_bytes or 0

    def resize(self, max_bytes: int) -> None:
        """Holds so many bytes from now on."""
        self._held.resize(max_bytes)

    def get(self, key: tuple[str, int]) -> npt.NDArray[Any] | None:
        """A chunk, if it is held."""
        found = self._held.get(key)
        return None if found is None else found.chunk

    def used(self, key: tuple[str, int], chunk: npt.NDArray[Any], rows: int) -> None:
        """So many rows of a chunk have been copied: it stays, if others are left."""
        found = self._held.get(key)
        if found is None:
            if len(chunk) > rows and chunk.nbytes <= self.max_bytes:
                if held_bytes(chunk) > chunk.nbytes:  # it lies among what was read with it
                    chunk = chunk.copy()
                self._held.put(key, _Decoded(chunk, len(chunk) - rows))
            return
        found.left -= rows
        if found.left <= 0:
            self._held.pop(key)

    def close(self) -> None:
        """Forgets everything."""
        self._held.clear()


class Piece(NamedTuple):
    """A part of a chunk, and where it goes."""

    out: int
    """The number of the array that it goes to."""
    source: tuple[Any, ...]
    """Slices of the chunk."""
    target: tuple[Any, ...]
    """Slices of that array."""


class ArrayReader:
    """Rows and boxes of one array, whatever its chunks.

    Args:
        chunks: of the array.
        cache: for decoded chunks; shared by the arrays of a source.
        key: tells this array's chunks from those of others in the cache.
    """

    def __init__(self, chunks: Chunks, cache: ChunkCache, key: str = "") -> None:
        self.chunks: Chunks = chunks
        self._cache, self._key = cache, key
        is_raw = isinstance(chunks, DirectChunks) and chunks.is_raw
        self._rows: Chunks = chunks.by_row() if is_raw and chunks.grid.chunks[0] > 1 else chunks  # type: ignore[attr-defined]
        self.shape: tuple[int, ...] = chunks.grid.shape
        self.dtype: np.dtype[Any] = chunks.dtype
        self.counts: Counter[str] = Counter()

    @property
    def how(self) -> str:
        """By which path it is read, in words."""
        return self.chunks.how

    @property
    def is_chunked(self) -> bool:
        """Is it cut along the rows?"""
        return 0 < self.chunks.grid.chunks[0] < self.shape[0]

    @property
    def holds_chunks(self) -> bool:
        """Are chunks of several rows decoded as a whole, and worth being held?"""
        return self.chunks.decodes and self.chunks.grid.chunks[0] > 1

    def read_rows(self, rows: Sequence[int], outs: Rows, run: Map) -> None:
        """Copies rows (indices along the first axis) into arrays of a row's shape and this array's dtype, C-contiguous.

        Raises:
            FormatError: a chunk is damaged.
            OSError: the file can't be read.
        """
        chunks, grid = self._rows, self._rows.grid
        if not len(outs) or not outs[0].size:
            return
        if isinstance(chunks, DirectChunks) and chunks.is_raw and grid.chunks[1:] == grid.shape[1:]:
            self._read_raw_rows(chunks, rows, outs)
            return
        if isinstance(chunks, DirectChunks) and grid.chunks == (1, *grid.shape[1:]):
            self._decode_rows(chunks, rows, outs, run)
            return
        if grid.inner == 1:
            clip = tuple(slice(0, extent) for extent in grid.shape[1:])
            pieces: dict[int, list[Piece]] = {}
            for number, row in enumerate(rows):
                band, within = divmod(row, grid.chunks[0])
                pieces.setdefault(band, []).append(Piece(number, (within, *clip), ()))
        else:
            corners = [(row, *[0] * (len(grid.shape) - 1)) for row in rows]
            pieces = {
                number: [Piece(out, (source[0].start, *source[1:]), target[1:]) for out, source, target in some]
                for number, some in _pieces(grid, corners, (1, *grid.shape[1:])).items()
            }
        self._copy(chunks, pieces, outs, run)

    def byte_ranges(self, rows: IntArray) -> ByteRanges:
        """Where the stored bytes of rows lie, with all of their chunks; of what only another library can read nobody knows it: nothing."""
        chunks, grid = self.chunks, self.chunks.grid
        if not isinstance(chunks, DirectChunks) or not len(rows) or not math.prod(grid.shape):
            return ByteRanges.of([])
        if _is_raw(chunks):
            return self._rows.raw_ranges(rows)  # type: ignore[attr-defined,no-any-return]
        bands = np.unique(rows // grid.chunks[0])
        return chunks.byte_ranges((bands[:, None] * grid.inner + np.arange(grid.inner)).reshape(-1))

    def row_ranges(self, rows: Sequence[int]) -> ByteRanges | None:
        """Where each row lies, if all were written and lie there as they are."""
        chunks = self._rows
        if not isinstance(chunks, DirectChunks) or not _is_raw(chunks):
            return None
        ranges = chunks.raw_ranges(np.asarray(rows, np.int64))
        return ranges if ranges.is_written.all() else None

    @property
    def needs_io(self) -> bool:
        """True if locating chunks performs requests."""
        return isinstance(self.chunks, DirectChunks) and self.chunks.index.needs_io

    def box_ranges(self, corners: Sequence[Sequence[int]], extents: Sequence[Sequence[int]]) -> ByteRanges:
        """The same of boxes from their lowest corners on, each of its own extents."""
        chunks, grid = self.chunks, self.chunks.grid
        if not isinstance(chunks, DirectChunks) or not math.prod(grid.shape):
            return ByteRanges.of([])
        numbers: dict[int, None] = {}
        for corner, box in zip(corners, extents, strict=True):
            sides = [
                range(start // chunk, -(-(start + extent) // chunk)) for start, extent, chunk in zip(corner, box, grid.chunks, strict=True)
            ]
            found = np.ravel_multi_index(np.meshgrid(*sides, indexing="ij"), grid.counts)
            numbers.update(dict.fromkeys(np.asarray(found).reshape(-1).tolist()))
        return chunks.byte_ranges(np.array(list(numbers), np.int64))

    def stretch_ranges(self, firsts: IntArray, ends: IntArray) -> ByteRanges:
        """Where the stored bytes of stretches of rows lie (rows ``firsts[i]`` to ``ends[i] - 1``), with all chunks that are decoded as a
        whole."""
        chunks, grid = self.chunks, self.chunks.grid
        if not isinstance(chunks, DirectChunks) or not len(firsts) or not math.prod(grid.shape):
            return ByteRanges.of([])
        if _is_raw(chunks):
            cuts = [
                cut for first, end in zip(firsts.tolist(), ends.tolist(), strict=True) for cut in _cuts(first, end - first, grid.chunks[0])
            ]
            ranges = self._parts_of(chunks, cuts)
            return ranges.take(ranges.is_written)
        there = ends > firsts
        bands = [np.arange(a, b) for a, b in zip(firsts[there] // grid.chunks[0], -(-ends[there] // grid.chunks[0]), strict=True)]
        return self.byte_ranges(np.unique(np.concatenate(bands)) * grid.chunks[0]) if bands else ByteRanges.of([])

    def _parts_of(self, chunks: DirectChunks, cuts: Sequence[tuple[int, slice, slice]]) -> ByteRanges:
        """Where parts of chunks lie."""
        places, firsts, ends = np.array([(place, part.start, part.stop) for place, part, _ in cuts], np.int64).reshape(-1, 3).T
        found, row_bytes = chunks.raw_ranges(places), chunks.nbytes // chunks.grid.chunks[0]
        start, stop = found.start + firsts * row_bytes, found.start + ends * row_bytes
        return ByteRanges(found.paths, found.file, np.where(found.is_written, start, -1), np.where(found.is_written, stop, -1))

    def read_spans(self, firsts: Sequence[int], outs: Sequence[npt.NDArray[Any]], run: Map) -> None:
        """Copies stretches of rows: for each array as many as it has, from its first one on.

        Raises:
            FormatError: a chunk is damaged.
            OSError: the file can't be read.
        """
        chunks, grid = self.chunks, self.chunks.grid
        wanted = [(first, out) for first, out in zip(firsts, outs, strict=True) if out.size]
        if isinstance(chunks, DirectChunks) and _is_raw(chunks):
            cuts = [(cut, out[cut[2]]) for first, out in wanted for cut in _cuts(first, len(out), grid.chunks[0])]
            ranges = self._parts_of(chunks, [cut for cut, _ in cuts])
            for number in np.flatnonzero(~ranges.is_written).tolist():
                cuts[number][1][...] = chunks.fill_value()
            written = np.flatnonzero(ranges.is_written)
            chunks.files.read_into(ranges.take(written), [bytes_of(cuts[number][1]) for number in written.tolist()])
            return
        pieces: dict[int, list[Piece]] = {}
        for number, (first, out) in enumerate(wanted):
            for chunk, some in _pieces(grid, [(first, *[0] * (len(grid.shape) - 1))], out.shape).items():
                pieces.setdefault(chunk, []).extend(piece._replace(out=number) for piece in some)
        self._copy(chunks, pieces, [out for _, out in wanted], run)

    def read_span(self, first: int, out: npt.NDArray[Any], run: Map) -> None:
        """Copies as many rows as `out` has, from one on; see `read_spans`."""
        self.read_spans([first], [out], run)

    def read_boxes(self, corners: Sequence[Sequence[int]], outs: Sequence[npt.NDArray[Any]], run: Map) -> None:
        """Copies boxes, which lie inside of the array, from their lowest corner on; each as large as its array in `outs`.

        Raises:
            FormatError: a chunk is damaged.
            OSError: the file can't be read.
        """
        if outs:
            self._copy(self.chunks, _pieces(self.chunks.grid, corners, outs[0].shape), outs, run)

    # -- rows that lie as they are

    def _read_raw_rows(self, chunks: DirectChunks, rows: Sequence[int], outs: Rows) -> None:
        ranges = chunks.raw_ranges(np.asarray(rows, np.int64))
        if isinstance(outs, np.ndarray) and outs.flags.c_contiguous:
            whole, nbytes = bytes_of(outs), chunks.nbytes
            parts = [whole[start : start + nbytes] for start in range(0, len(whole), nbytes)]
        else:
            parts = [bytes_of(out) for out in outs]
        is_written = ranges.is_written
        if not is_written.all():
            for number in np.flatnonzero(~is_written).tolist():
                outs[number][...] = chunks.fill_value()
            there = np.flatnonzero(is_written)
            ranges, parts = ranges.take(there), [parts[number] for number in there.tolist()]
        chunks.files.read_into(ranges, parts)

    # -- rows that are a chunk each

    def _decode_rows(self, chunks: DirectChunks, rows: Sequence[int], outs: Rows, run: Map) -> None:
        step = max(1, _GROUP // max(1, chunks.nbytes))
        for start in range(0, len(rows), step):
            numbers, some = rows[start : start + step], outs[start : start + step]
            data = chunks.read(numbers)

            def work(at: int, numbers: Sequence[int] = numbers, some: Rows = some, data: list[Any] = data) -> None:
                stored, data[at] = data[at], None
                chunk = chunks.decode(numbers[at], stored)
                some[at][...] = chunks.fill_value() if chunk is None else chunk[0]

            run(work, len(numbers))
        self.counts["chunks_decoded"] += len(rows) if chunks.decodes else 0

    # -- pieces of chunks

    def _copy(self, chunks: Chunks, pieces: dict[int, list[Piece]], outs: Rows, run: Map) -> None:
        missing, is_checked = [], False
        for number, some in pieces.items():
            chunk = self._cache.get((self._key, number)) if chunks.decodes else None
            if chunk is None:
                missing.append(number)
                continue
            if not is_checked:  # one of them a batch
                chunks.check_held(number)
                is_checked = True
            self._hand_out(chunks, number, chunk, some, outs)
        step = max(1, _GROUP // max(1, chunks.nbytes))
        for start in range(0, len(missing), step):
            self._decode(chunks, missing[start : start + step], pieces, outs, run)
        if chunks.decodes:
            self.counts["chunk_hits"] += len(pieces) - len(missing)
            self.counts["chunks_decoded"] += len(missing)

    def _decode(self, chunks: Chunks, numbers: list[int], pieces: dict[int, list[Piece]], outs: Rows, run: Map) -> None:
        data = chunks.read(numbers)

        def work(at: int) -> None:
            stored, data[at] = data[at], None
            self._hand_out(chunks, numbers[at], chunks.decode(numbers[at], stored), pieces[numbers[at]], outs)

        run(work, len(numbers))

    def _hand_out(self, chunks: Chunks, number: int, chunk: npt.NDArray[Any] | None, pieces: list[Piece], outs: Rows) -> None:
        if chunk is None:
            for piece in pieces:
                outs[piece.out][piece.target or ...] = chunks.fill_value()
            return
        for piece in pieces:
            np.copyto(outs[piece.out][piece.target or ...], chunk[piece.source])
        if not chunks.decodes:
            return
        rows = {piece.source[0] for piece in pieces if isinstance(piece.source[0], int)}
        spans = [piece.source for piece in pieces if not isinstance(piece.source[0], int)]
        if rows and len(chunk) > 1:
            self._cache.used((self._key, number), chunk, len(rows))
        elif spans and all(chunk[span].size < chunk.size for span in spans):
            self._cache.used((self._key, number), chunk, 0)


def _is_raw(chunks: DirectChunks) -> bool:
    """Do whole rows lie one behind the other, as they are?"""
    return chunks.is_raw and chunks.grid.chunks[1:] == chunks.grid.shape[1:]


def _pieces(grid: Grid, corners: Sequence[Sequence[int]], box: Sequence[int]) -> dict[int, list[Piece]]:
    """By chunk, the parts that boxes of one shape are made of."""
    strides = [math.prod(grid.counts[axis + 1 :]) for axis in range(len(grid.shape))]
    pieces: dict[int, list[Piece]] = {}
    for out, corner in enumerate(corners):
        axes = [
            [(place * stride, source, target) for place, source, target in _cuts(start, extent, chunk)]
            for start, extent, chunk, stride in zip(corner, box, grid.chunks, strides, strict=True)
        ]
        for parts in itertools.product(*axes):
            number = sum(part[0] for part in parts)
            pieces.setdefault(number, []).append(Piece(out, tuple(part[1] for part in parts), tuple(part[2] for part in parts)))
    return pieces


def _cuts(start: int, extent: int, chunk: int) -> Iterator[tuple[int, slice, slice]]:
    """Along one axis: the chunks that a range crosses, and which parts of them go where."""
    for place in range(start // chunk, -(-(start + extent) // chunk)):
        first, last = max(start, place * chunk), min(start + extent, (place + 1) * chunk)
        yield place, slice(first - place * chunk, last - place * chunk), slice(first - start, last - start)
