"""Reads rows and boxes of an array through the chunks that a batch needs.

NOTE [ from a batch's indices to its rows ]

1. Rows that are stored without a codec are read to their destination by `preadv`; consecutive rows
  by one call. The rest of their chunks is
not read.
2. Otherwise the chunks of the batch are determined, each once. Cached chunks are taken from the
  cache. The stored bytes of the others are
read, neighbours by one call, and decoded, in threads if there are any. The rows are copied directly
into the batch.
3. Decoded chunks of several rows go to the cache, an LRU bounded in bytes. A chunk that has yielded
  all its rows is dropped: under a block
shuffle it is not needed again.

Chunks that only another library can read (`LibraryChunks`) follow the same steps from there on.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.local.files import bytes_of
from headrace.io.ranges import ByteRanges
from headrace.memory.lru import LRUCache, held_bytes
from headrace.sorting import distinct
from headrace.storage.arrays.chunks import Chunks, DirectChunks, Grid
from headrace.storage.describe import Column
from headrace.storage.source import Rows, row_at

T = TypeVar("T")
Map = Callable[[Callable[[int], Any], int], list[Any]]
"""Calls a function for 0 to n - 1, perhaps in threads, and gives what it returns."""

GROUP = 64 << 20
"""Decoded bytes of the chunks whose stored bytes are held at once."""
CutSpans = tuple[IntArray, IntArray, IntArray, IntArray]
"""What `cut_spans` gives."""


class Chunk(Protocol):
    """A decoded chunk: an array, or the columns of a block of a table. Its length are its rows."""

    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""


@dataclass(slots=True, eq=False)
class Decoded:
    """A chunk that is cached."""

    chunk: Any
    left: int
    """Rows that nobody has asked for yet."""


def _nbytes(item: Decoded) -> int:
    nbytes: int = item.chunk.nbytes
    return nbytes


class ChunkCache:
    """The decoded chunks that this process used last, of at most so many bytes together."""

    def __init__(self, max_bytes: int) -> None:
        self._cached: LRUCache[tuple[str, int], Decoded] = LRUCache(max_bytes, sizeof=_nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that are cached."""
        return self._cached.nbytes

    def resize(self, max_bytes: int) -> None:
        """Caches at most so many bytes from now on."""
        self._cached.resize(max_bytes)

    def get(self, key: tuple[str, int]) -> Any:
        """A chunk, if it is cached; else None."""
        decoded = self._cached.get(key)
        return None if decoded is None else decoded.chunk

    def get_many(self, key: str, numbers: Iterable[int]) -> list[Decoded | None]:
        """Chunks of one array by their numbers, as far as they are cached. Who copies rows of one
        takes them off `left`, and drops it where none are left.
        """
        return self._cached.get_many(zip(itertools.repeat(key), numbers))

    def drop(self, key: tuple[str, int]) -> None:
        """Forgets a chunk."""
        self._cached.pop(key)

    def used(self, key: tuple[str, int], chunk: Chunk, rows: int) -> None:
        """So many rows of a chunk have been copied: it stays, if others are left."""
        decoded = self._cached.get(key)
        if decoded is None:
            if len(chunk) > rows and chunk.nbytes <= (self._cached.max_bytes or 0):
                # it lies among what was read with it
                if isinstance(chunk, np.ndarray) and held_bytes(chunk) > chunk.nbytes:
                    chunk = chunk.copy()
                self._cached.put(key, Decoded(chunk, len(chunk) - rows))
            return
        decoded.left -= rows
        if decoded.left <= 0:
            self._cached.pop(key)

    def close(self) -> None:
        """Forgets everything."""
        self._cached.clear()


class OpenArrays(Generic[T]):
    """What each process has open of files of arrays, and the chunks that it has decoded.

    Args:
        files: by which they are read directly.
        opener, closer: of what another library opens, see `WorkerFiles`; None: no other is needed.
    """

    def __init__(
        self,
        files: Files,
        opener: Callable[[str], T] | None = None,
        closer: Callable[[T], object] | None = None,
    ) -> None:
        self.files: Files = files
        self.library: WorkerFiles[T] = WorkerFiles(opener, closer, 16, survives_fork=False)
        self.chunks: ChunkCache = ChunkCache(0)

    def close(self) -> None:
        """Closes and forgets it all; it is opened again when it is needed."""
        for part in (self.library, self.files, self.chunks):
            part.close()


class Piece(NamedTuple):
    """A part of a chunk, and where it goes.

    Attributes:
        out: the number of the array that it goes to.
        source: slices of the chunk.
        target: slices of that array.
    """

    out: int
    source: tuple[Any, ...]
    target: tuple[Any, ...]


class ArrayReader:
    """Rows and boxes of one array, whatever its chunks.

    What reads raises a FormatError where a chunk is damaged, and an OSError where a file can't be
    read.

    Args:
        chunks: of the array.
        cache: for decoded chunks; shared by the arrays of a source.
        key: tells this array's chunks from those of others in the cache.
    """

    def __init__(self, chunks: Chunks, cache: ChunkCache, key: str = "") -> None:
        self.chunks: Chunks = chunks
        self._cache, self._key = cache, key
        direct = chunks if isinstance(chunks, DirectChunks) else None
        self._rows: Chunks = chunks if direct is None else direct.by_row()
        is_wide = chunks.grid.chunks[1:] == chunks.grid.shape[1:]
        self._raw: DirectChunks | None = (
            direct if direct is not None and direct.is_raw and is_wide else None
        )
        """Of whole rows that lie one behind the other, as they are."""
        self._raw_rows = None if self._raw is None else self._raw.by_row()
        self._has_row_chunks = direct is not None and is_wide and chunks.grid.chunks[0] == 1
        self.shape: tuple[int, ...] = chunks.grid.shape
        self.dtype: np.dtype[Any] = chunks.dtype
        self.how: str = chunks.how
        self.counts: Counter[str] = Counter()

    def describe(self, name: str, extents: Sequence[float] | None = None) -> Column:
        """What a random box of an array costs: along each axis it crosses (extent - 1) / chunk + 1
        chunks on average, and no more than there are. None: a row.
        """
        chunks, grid = self.chunks, self.chunks.grid
        box = [1, *grid.shape[1:]] if extents is None else extents
        shape = list(self.shape[1:]) if extents is None else [round(extent) for extent in box]
        nbytes = int(math.prod(box) * self.dtype.itemsize)
        column = Column(name, self.how, f"{self.dtype} {shape}", nbytes=nbytes, read=nbytes)
        column.total = math.prod(grid.shape) * chunks.dtype.itemsize
        column.stored = chunks.stored_nbytes
        if column.stored == column.total and chunks.decodes:
            column.stored = 0  # files of their own, whose sizes nobody has asked for
        is_exact = chunks.is_raw and (extents is None or len(box) == 1)
        if is_exact or not math.prod(grid.shape):
            return column
        column.chunk, column.chunks = grid.chunks, 1.0
        for extent, chunk, count in zip(box, grid.chunks, grid.counts, strict=True):
            column.chunks *= min(float(count), max(0.0, extent - 1) / chunk + 1)
        column.decoded = int(column.chunks * chunks.nbytes)
        column.read = int(column.chunks * column.stored / math.prod(grid.counts))
        return column

    @property
    def is_chunked(self) -> bool:
        """True if it is chunked along the rows."""
        return 0 < self.height < self.shape[0]

    @property
    def caches_chunks(self) -> bool:
        """True if chunks of several rows are decoded as a whole, and worth caching."""
        return self.chunks.decodes and self.height > 1

    @property
    def reads_rows_as_they_are(self) -> bool:
        """True if rows lie in the file one behind the other as they are, and are read without
        anything else of their chunks.
        """
        return self._raw_rows is not None

    @property
    def height(self) -> int:
        """Rows of a chunk."""
        return self.chunks.grid.chunks[0]

    @property
    def across(self) -> int:
        """Chunks that share the rows of one."""
        return self.chunks.grid.inner

    # -- where bytes lie

    @property
    def begin(self) -> int | None:
        """The byte of the file that the first row begins at, where all rows lie one behind the
        other as they are; else None.
        """
        if self._raw is None:
            return None
        ranges = self._raw.raw_ranges(
            np.arange(-(-self.shape[0] // max(1, self.chunks.grid.chunks[0])))
        )
        is_one = (
            len(ranges.paths) <= 1
            and ranges.is_written.all()
            and np.array_equal(ranges.start[1:], ranges.stop[:-1])
        )
        return (int(ranges.start[0]) if ranges.size else 0) if is_one else None

    def byte_ranges(self, rows: IntArray) -> ByteRanges:
        """Where the stored bytes of rows lie, with all of their chunks; none where only another
        library can read them.
        """
        if not len(rows) or not self.chunks.is_direct:
            return ByteRanges.of([])
        if self._raw_rows is not None:
            return self._raw_rows.raw_ranges(rows)
        grid = self.chunks.grid
        bands = distinct(rows // grid.chunks[0])
        return self.chunks.byte_ranges(
            (bands[:, None] * grid.inner + np.arange(grid.inner)).reshape(-1)
        )

    def row_ranges(self, rows: Sequence[int]) -> ByteRanges | None:
        """Where each row lies, if all were written and lie there as they are."""
        if self._raw_rows is None:
            return None
        ranges = self._raw_rows.raw_ranges(np.asarray(rows, np.int64))
        return ranges if ranges.is_written.all() else None

    def span_ranges(self, firsts: IntArray, ends: IntArray) -> ByteRanges:
        """Where the stored bytes of spans of rows lie, ``firsts[i]`` to ``ends[i] - 1``, with
        all chunks that are decoded as a whole.
        """
        if self._raw is not None:
            ranges = self._cut(self._raw, firsts, ends)[0]
            return ranges.take(ranges.is_written)
        there, height = ends > firsts, self.chunks.grid.chunks[0]
        bands = [
            np.arange(a, b)
            for a, b in zip(firsts[there] // height, -(-ends[there] // height), strict=True)
        ]
        return (
            self.byte_ranges(distinct(np.concatenate(bands)) * height)
            if bands
            else ByteRanges.of([])
        )

    def _cut(
        self, raw: DirectChunks, firsts: IntArray, ends: IntArray
    ) -> tuple[ByteRanges, IntArray, IntArray, IntArray]:
        """Where spans of rows lie, cut at the borders of chunks; and of each part its span, and
        where in it the part begins and ends.
        """
        return self._ranges_of(raw, firsts, cut_spans(firsts, ends, raw.grid.chunks[0]))

    def _ranges_of(
        self, raw: DirectChunks, firsts: IntArray, cut: CutSpans
    ) -> tuple[ByteRanges, IntArray, IntArray, IntArray]:
        """As `_cut`, of spans that are cut already."""
        height = raw.grid.chunks[0]
        row_bytes = raw.nbytes // height
        spans, chunks, starts, stops = cut
        whole = raw.raw_ranges(chunks)
        begins = np.where(
            whole.is_written, whole.start + (starts - chunks * height) * row_bytes, -1
        )
        ranges = ByteRanges(
            whole.paths,
            whole.file,
            begins,
            np.where(whole.is_written, begins + (stops - starts) * row_bytes, -1),
        )
        return ranges, spans, starts - firsts[spans], stops - firsts[spans]

    def box_ranges(self, boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> ByteRanges:
        """Where the stored bytes of boxes lie, each from its lowest corner on and of its own
        extents.
        """
        if not self.chunks.is_direct:
            return ByteRanges.of([])
        grid, numbers = self.chunks.grid, dict[int, None]()
        for corner, box in boxes:
            sides = [
                range(start // chunk, -(-(start + extent) // chunk))
                for start, extent, chunk in zip(corner, box, grid.chunks, strict=True)
            ]
            crossed = np.ravel_multi_index(np.meshgrid(*sides, indexing="ij"), grid.counts)
            numbers.update(dict.fromkeys(np.asarray(crossed).reshape(-1).tolist()))
        return self.chunks.byte_ranges(np.array(list(numbers), np.int64))

    # -- reading

    def read_rows(self, rows: Sequence[int], outs: Rows, run: Map) -> None:
        """Copies rows (indices along the first axis) into arrays of a row's shape and this
        array's dtype, C-contiguous.
        """
        chunks, grid = self._rows, self._rows.grid
        if not len(outs) or not outs[0].size:
            return
        if self._raw_rows is not None:
            self._read_raw_rows(self._raw_rows, rows, outs)
            return
        if self._has_row_chunks:
            self._decode_rows(chunks, rows, outs, run)
            return
        pieces: dict[int, list[Piece]] = {}
        if grid.inner == 1:
            clip = tuple(slice(0, extent) for extent in grid.shape[1:])
            for number, row in enumerate(rows):
                band, within = divmod(row, grid.chunks[0])
                pieces.setdefault(band, []).append(Piece(number, (within, *clip), ()))
        else:
            corners = [(row, *[0] * (len(grid.shape) - 1)) for row in rows]
            for number, parts in pieces_of(grid, corners, (1, *grid.shape[1:])).items():
                pieces[number] = [
                    Piece(out, (source[0].start, *source[1:]), target[1:])
                    for out, source, target in parts
                ]
        self._copy(chunks, pieces, outs, run)

    def gather(self, rows: IntArray, out: npt.NDArray[Any], run: Map) -> None:
        """As `read_rows`, into the rows of one array, where many rows lie in each chunk that is
        decoded: chunk by chunk, not row by row.
        """
        chunks, grid = self.chunks, self.chunks.grid
        if not (out.size and self.caches_chunks and grid.inner == 1):
            self.read_rows(rows.tolist(), out, run)
            return
        bands, within = np.divmod(rows, grid.chunks[0])
        order = bands.argsort(kind="stable")
        numbers, edges = np.unique(bands[order], return_index=True)
        ends = [*edges[1:].tolist(), len(rows)]
        clip: tuple[Any, ...] = tuple(slice(0, extent) for extent in grid.shape[1:])
        cached = {
            at: chunk
            for at, number in enumerate(numbers.tolist())
            if (chunk := self._cache.get((self._key, number))) is not None
        }
        missing = [at for at in range(len(numbers)) if at not in cached]

        def hand_out(at: int, chunk: npt.NDArray[Any] | None) -> None:
            places = order[edges[at] : ends[at]]
            out[places] = chunks.fill if chunk is None else chunk[(within[places], *clip)]

        for at, chunk in cached.items():
            chunks.check_cached(int(numbers[at]))
            hand_out(at, chunk)
        self._decode(
            chunks,
            numbers[missing].tolist(),
            lambda number, chunk: hand_out(missing[number], chunk),
            run,
        )
        self.counts["chunk_hits"] += len(cached)

    def read_spans(self, firsts: IntArray, outs: Sequence[npt.NDArray[Any]], run: Map) -> None:
        """Copies spans of rows: for each array as many as it has, from its first one on."""
        if self._raw is not None:
            ends = firsts + np.array([len(out) if out.size else 0 for out in outs], np.int64)
            ranges, *columns = self._cut(self._raw, firsts, ends)
            parts = [
                outs[span][start:stop]
                for span, start, stop in zip(*(column.tolist() for column in columns), strict=True)
            ]
            self._read_raw(self._raw, ranges, parts, list(map(bytes_of, parts)))
            return
        grid, pieces = self.chunks.grid, dict[int, list[Piece]]()
        for number, (first, out) in enumerate(zip(firsts.tolist(), outs, strict=True)):
            if out.size:
                for chunk, (piece,) in pieces_of(
                    grid, [(first, *[0] * (len(grid.shape) - 1))], out.shape
                ).items():
                    pieces.setdefault(chunk, []).append(piece._replace(out=number))
        self._copy(self.chunks, pieces, outs, run)

    def whole(self, run: Map) -> npt.NDArray[Any]:
        """All rows, as one array."""
        rows = np.empty(self.shape, self.dtype)
        self.read_spans(np.zeros(1, np.int64), [rows], run)
        return rows

    def read_boxes(
        self, corners: Sequence[Sequence[int]], outs: Sequence[npt.NDArray[Any]], run: Map
    ) -> None:
        """Copies boxes, which lie inside of the array, from their lowest corner on; each as
        large as its array in `outs`.
        """
        if outs:
            self._copy(self.chunks, pieces_of(self.chunks.grid, corners, outs[0].shape), outs, run)

    # -- rows that lie as they are

    def _read_raw_rows(self, raw: DirectChunks, rows: Sequence[int], outs: Rows) -> None:
        if isinstance(outs, np.ndarray) and outs.flags.c_contiguous:
            whole, nbytes = bytes_of(outs), raw.nbytes
            buffers = [whole[start : start + nbytes] for start in range(0, len(whole), nbytes)]
        else:
            buffers = [bytes_of(out) for out in outs]
        if raw.reads_files:
            for number in raw.read_raw_files(rows, buffers):
                row_at(outs, number)[...] = raw.fill
            return
        self._read_raw(raw, raw.raw_ranges(np.asarray(rows, np.int64)), outs, buffers)

    def _read_raw(
        self, raw: DirectChunks, ranges: ByteRanges, parts: Rows, buffers: list[memoryview]
    ) -> None:
        is_written = ranges.is_written
        if not is_written.all():
            for number in np.flatnonzero(~is_written).tolist():
                row_at(parts, number)[...] = raw.fill
            written = np.flatnonzero(is_written)
            ranges, buffers = ranges.take(written), [buffers[number] for number in written.tolist()]
        raw.files.read_into(ranges, buffers)

    # -- chunks that are decoded

    def _decode_rows(self, chunks: Chunks, rows: Sequence[int], outs: Rows, run: Map) -> None:
        """Of rows that are a chunk each."""

        def hand_out(at: int, chunk: npt.NDArray[Any] | None) -> None:
            row_at(outs, at)[...] = chunks.fill if chunk is None else chunk[0]

        self._decode(chunks, rows, hand_out, run)

    def _copy(self, chunks: Chunks, pieces: dict[int, list[Piece]], outs: Rows, run: Map) -> None:
        missing, is_checked = [], False
        for number, parts in pieces.items():
            chunk = self._cache.get((self._key, number)) if chunks.decodes else None
            if chunk is None:
                missing.append(number)
                continue
            if not is_checked:  # one of them a batch
                chunks.check_cached(number)
                is_checked = True
            self._hand_out(chunks, number, chunk, parts, outs)
        self._decode(
            chunks,
            missing,
            lambda at, chunk: self._hand_out(chunks, missing[at], chunk, pieces[missing[at]], outs),
            run,
        )
        if chunks.decodes:
            self.counts["chunk_hits"] += len(pieces) - len(missing)

    def _decode(
        self,
        chunks: Chunks,
        numbers: Sequence[int],
        hand_out: Callable[[int, npt.NDArray[Any] | None], None],
        run: Map,
    ) -> None:
        """Reads and decodes chunks, as many at once as take `GROUP` bytes."""
        step = max(1, GROUP // max(1, chunks.nbytes))
        for start in range(0, len(numbers), step):
            data = chunks.read(numbers[start : start + step])

            def work(at: int, start: int = start, data: list[Any] = data) -> None:
                stored, data[at] = data[at], None
                hand_out(start + at, chunks.decode(numbers[start + at], stored))

            run(work, len(data))
        if chunks.decodes:
            self.counts["chunks_decoded"] += len(numbers)

    def _hand_out(
        self,
        chunks: Chunks,
        number: int,
        chunk: npt.NDArray[Any] | None,
        pieces: list[Piece],
        outs: Rows,
    ) -> None:
        if chunk is None:
            for piece in pieces:
                row_at(outs, piece.out)[piece.target or ...] = chunks.fill
            return
        for piece in pieces:
            np.copyto(row_at(outs, piece.out)[piece.target or ...], chunk[piece.source])
        if not chunks.decodes:
            return
        if isinstance(pieces[0].source[0], int):  # all are rows, or none is
            if len(chunk) > 1:
                self._cache.used(
                    (self._key, number), chunk, len({piece.source[0] for piece in pieces})
                )
        elif all(chunk[piece.source].size < chunk.size for piece in pieces):
            self._cache.used((self._key, number), chunk, 0)


def cut_spans(firsts: IntArray, ends: IntArray, height: int) -> CutSpans:
    """Cuts spans of rows at the borders of chunks of so many rows: of each part the number of its
    span and of its chunk, its first row and its end. Parts stand in the order of their spans; an
    empty span has none.
    """
    first_chunks = firsts // height
    counts = np.where(ends > firsts, -(-ends // height) - first_chunks, 0)
    spans = np.repeat(np.arange(len(firsts)), counts)
    chunks = first_chunks[spans] + np.arange(len(spans)) - (np.cumsum(counts) - counts)[spans]
    return (
        spans,
        chunks,
        np.maximum(firsts[spans], chunks * height),
        np.minimum(ends[spans], (chunks + 1) * height),
    )


def pieces_of(
    grid: Grid, corners: Sequence[Sequence[int]], box: Sequence[int]
) -> dict[int, list[Piece]]:
    """By chunk, the parts that boxes of one shape are made of."""
    strides = [math.prod(grid.counts[axis + 1 :]) for axis in range(len(grid.shape))]
    pieces: dict[int, list[Piece]] = {}
    for out, corner in enumerate(corners):
        axes = [
            [
                (place * stride, source, target)
                for place, source, target in _cuts(start, extent, chunk)
            ]
            for start, extent, chunk, stride in zip(corner, box, grid.chunks, strides, strict=True)
        ]
        for parts in itertools.product(*axes):
            number = sum(part[0] for part in parts)
            pieces.setdefault(number, []).append(
                Piece(out, tuple(part[1] for part in parts), tuple(part[2] for part in parts))
            )
    return pieces


def _cuts(start: int, extent: int, chunk: int) -> Iterator[tuple[int, slice, slice]]:
    """Along one axis: the chunks that a range crosses, and which parts of them go where."""
    for place in range(start // chunk, -(-(start + extent) // chunk)):
        first, last = max(start, place * chunk), min(start + extent, (place + 1) * chunk)
        yield (
            place,
            slice(first - place * chunk, last - place * chunk),
            slice(first - start, last - start),
        )
