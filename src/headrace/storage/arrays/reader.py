"""Which chunks of an array does a batch need, and how do they become its samples?

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
from headrace.io.ranges import ByteRanges
from headrace.io.stretches import Places, Span, bytes_of, read_parts, read_places
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
            return self._rows.raw_places(rows).ranges()  # type: ignore[attr-defined,no-any-return]
        bands = np.unique(rows // grid.chunks[0])
        return chunks.byte_ranges((bands[:, None] * grid.inner + np.arange(grid.inner)).reshape(-1))

    def row_ranges(self, rows: Sequence[int]) -> ByteRanges | None:
        """Where each row lies, if all were written and lie there as they are."""
        chunks = self._rows
        if not isinstance(chunks, DirectChunks) or not _is_raw(chunks):
            return None
        places = chunks.raw_places(np.asarray(rows, np.int64))
        return None if (places.offsets < 0).any() else places.ranges()

    @property
    def asks(self) -> bool:
        """Must something be asked for before it is known where chunks lie?"""
        return isinstance(self.chunks, DirectChunks) and bool(getattr(self.chunks.stretches, "asks", False))

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
            parts = [
                part
                for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)
                for part in _cuts(first, end - first, grid.chunks[0])
            ]
            return ByteRanges.of(span for span, _ in self._raw_parts(chunks, parts) if span is not None)
        there = ends > firsts
        bands = [np.arange(a, b) for a, b in zip(firsts[there] // grid.chunks[0], -(-ends[there] // grid.chunks[0]), strict=True)]
        return self.byte_ranges(np.unique(np.concatenate(bands)) * grid.chunks[0]) if bands else ByteRanges.of([])

    def _raw_parts(self, chunks: DirectChunks, parts: Sequence[tuple[int, slice, slice]]) -> list[tuple[Span | None, slice]]:
        """Where parts of chunks lie (None: never written), and which rows of a stretch they are."""
        places = chunks.raw_places(np.array([place for place, _, _ in parts], np.int64))
        row_bytes = chunks.nbytes // chunks.grid.chunks[0]
        found: list[tuple[Span | None, slice]] = []
        for (_, source, target), file, offset in zip(parts, places.files.tolist(), places.offsets.tolist(), strict=True):
            span = (places.paths[file], offset + source.start * row_bytes, offset + source.stop * row_bytes) if offset >= 0 else None
            found.append((span, target))
        return found

    def read_spans(self, firsts: Sequence[int], outs: Sequence[npt.NDArray[Any]], run: Map) -> None:
        """Copies stretches of rows: for each array as many as it has, from its first one on.

        Raises:
            FormatError: a chunk is damaged.
            OSError: the file can't be read.
        """
        chunks, grid = self.chunks, self.chunks.grid
        wanted = [(first, out) for first, out in zip(firsts, outs, strict=True) if out.size]
        if isinstance(chunks, DirectChunks) and _is_raw(chunks):
            missing: list[tuple[Span, npt.NDArray[Any]]] = []
            for first, out in wanted:
                for span, target in self._raw_parts(chunks, list(_cuts(first, len(out), grid.chunks[0]))):
                    if span is None:
                        out[target] = chunks.fill_value()
                    else:
                        missing.append((span, out[target]))
            read_parts([span for span, _ in missing], [bytes_of(out) for _, out in missing], chunks.files)
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
        places = chunks.raw_places(np.asarray(rows, np.int64))
        if isinstance(outs, np.ndarray) and outs.flags.c_contiguous:
            whole, nbytes = bytes_of(outs), chunks.nbytes
            parts = [whole[start : start + nbytes] for start in range(0, len(whole), nbytes)]
        else:
            parts = [bytes_of(out) for out in outs]
        if (places.offsets < 0).any():
            there = np.flatnonzero(places.offsets >= 0)
            for number in np.flatnonzero(places.offsets < 0).tolist():
                outs[number][...] = chunks.fill_value()
            places = Places(places.paths, places.files[there], places.offsets[there], places.nbytes[there])
            parts = [parts[number] for number in there.tolist()]
        read_places(places, parts, chunks.files)

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
