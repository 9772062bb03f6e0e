"""Reads rows, spans of rows and boxes of an array through the chunks that a batch needs.

NOTE [ from a batch's indices to its rows ]

1. Rows that are stored without a codec are read to their destination by `preadv`; consecutive rows
  by one call. The rest of their chunks is not read.
2. Otherwise the chunks of the batch are determined, each once (`visit`). Cached chunks are taken
  from the cache. The stored bytes of the others are read, neighbours by one call, and decoded, in
  threads if there are any. The rows are copied directly into the batch.
3. Decoded chunks of several rows go to the cache, an LRU bounded in bytes. A chunk that has yielded
  all its rows is dropped: under a block shuffle it is not needed again.

Chunks that only another library can read (`LibraryChunks`) follow the same steps.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from headrace.dtypes import AnyArray, IntArray, distinct
from headrace.formats.arrays.chunks import Chunks, DirectChunks, Grid
from headrace.formats.source import Column, Locatable, Map, Rows, row_at
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.local_files import bytes_of
from headrace.io.ranges import ByteRanges
from headrace.memory.lru import LRUCache, held_bytes

T = TypeVar("T")
Use = Callable[[int, Any], None]
"""Called with the position of a chunk among those asked for, and the chunk; None: it was never
written.
"""

_LOCAL = 8 << 20  # bytes of local chunks at once: freed memory is reused, its pages still mapped
_TOGETHER = 16  # at least so many chunks, for threads to decode
GROUP = 64 << 20
"""Decoded bytes of the chunks whose stored bytes are held at once."""
_MANY = 4  # so many rows of one chunk, or more, are copied by one call


@dataclass(slots=True, eq=False)
class Block:
    """A chunk that is no array, such as a row group of a table."""

    content: Any
    rows: int
    nbytes: int
    """Bytes of the content."""

    def __len__(self) -> int:
        return self.rows


@dataclass(slots=True, eq=False)
class Decoded:
    """A chunk that is cached."""

    chunk: Any
    """An array, or a `Block`."""
    left: int
    """Rows that have not been read yet."""
    nbytes: int
    """Bytes of the chunk."""


class ChunkCache(LRUCache[tuple[str, int], Decoded]):
    """The decoded chunks that this process used last, by array and number. Readers subtract the
    rows that they copy from `left`, and drop a chunk that has none left.
    """

    def __init__(self, *limits: int | None, **options: Any) -> None:
        super().__init__(*limits, **options)
        self.counts: Counter[str] = Counter()

    def take_counts(self) -> Counter[str]:
        """Chunks that were found here, and that were decoded, since the last call."""
        counts = self.counts
        self.counts = Counter()
        return counts

    def used(self, key: tuple[str, int], chunk: Any, rows: int) -> None:
        """Notes that rows of a chunk were copied; it is cached while others are left."""
        decoded = self.get(key)
        if decoded is not None:
            decoded.left -= rows
            if decoded.left <= 0:
                self.pop(key)
        elif len(chunk) > rows and chunk.nbytes <= self.maxsize:
            # as a view it would keep all that was read with it
            if isinstance(chunk, np.ndarray) and held_bytes(chunk) > chunk.nbytes:
                chunk = chunk.copy()
            self.put(key, Decoded(chunk, len(chunk) - rows, chunk.nbytes))


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
        """Closes all files and drops the chunks; files are opened again when needed."""
        self.library.close()
        self.files.close()
        self.chunks.clear()


class OpenSource(Locatable):
    """Records out of what is open, and of chunks that are decoded."""

    def __init__(self, opened: OpenArrays[Any]) -> None:
        self.files = opened.files
        self._opened = opened

    def read_afresh(self, index: int) -> Any:
        self._opened.chunks.clear()
        return super().read_afresh(index)

    def take_counts(self) -> Counter[str]:
        return super().take_counts() + self._opened.chunks.take_counts()

    def hold_chunks(self, nbytes: int) -> None:
        self._opened.chunks.resize(nbytes)

    def close(self) -> None:
        """Closes what this process has open of this source and those that share it; decoded
        chunks are forgotten.
        """
        self._opened.close()


def visit(
    chunks: Chunks,
    cache: ChunkCache,
    key: str,
    numbers: Sequence[int] | IntArray,
    used: Sequence[int] | None,
    use: Use,
    run: Map,
) -> None:
    """Gives chunks to a function: those that are cached, then the others as they are decoded, as
    many at once as take `GROUP` bytes.

    Args:
        chunks: of the array.
        cache, key: where they are cached, and by what they are told from those of other arrays.
        numbers: of the chunks, each once.
        used: rows that are taken of each, and not needed again; None: chunks are not cached.
        use: called with them.
        run: calls a function in threads.
    """
    missing: Sequence[int] = range(len(numbers))
    if used is not None:
        missing = []
        last = -1
        for at, decoded in enumerate(cache.get_many(zip(itertools.repeat(key), numbers))):
            if decoded is None:
                missing.append(at)
                continue
            last = at
            use(at, decoded.chunk)
            decoded.left = left = decoded.left - used[at]
            if left <= 0:
                cache.pop((key, numbers[at]))
        if last >= 0:  # one of them a batch
            chunks.check_cached(numbers[last])
    nbytes = max(1, chunks.nbytes)
    step = max(1, GROUP // nbytes)
    if not chunks.is_remote:
        step = min(step, max(_TOGETHER, _LOCAL // nbytes))
    for start in range(0, len(missing), step):
        some = missing[start : start + step]
        stored = chunks.read([numbers[at] for at in some])

        def work(place: int, some: Sequence[int] = some, stored: list[Any] = stored) -> None:
            at = some[place]
            data = stored[place]
            stored[place] = None
            chunk = chunks.decode(numbers[at], data)
            use(at, chunk)
            if used is not None and chunk is not None:
                cache.used((key, numbers[at]), chunk, used[at])

        run(work, len(some))
    if chunks.decodes:
        cache.counts["chunk_hits"] += (len(numbers) - len(missing)) * chunks.width
        cache.counts["chunks_decoded"] += len(missing) * chunks.width


Slices = tuple[slice, ...]
"""A part of an array: a slice along each axis."""


class ArrayReader:
    """Rows, spans of rows and boxes of one array, whatever its chunks.

    What reads raises a FormatError where a chunk is damaged, and an OSError where a file can't be
    read.

    Args:
        chunks: of the array.
        cache: for decoded chunks; shared by the arrays of a source.
        key: tells this array's chunks from those of others in the cache.
    """

    def __init__(self, chunks: Chunks, cache: ChunkCache, key: str = "") -> None:
        self.chunks: Chunks = chunks
        self.cache: ChunkCache = cache
        self.key: str = key
        self.raw: DirectChunks | None = None
        """The chunks, if whole rows are stored uncompressed in them; else None."""
        self._rows: Chunks = chunks  # as rows are read
        if isinstance(chunks, DirectChunks) and chunks.is_raw:
            if chunks.grid.chunks[1:] == chunks.grid.shape[1:]:
                self.raw = chunks
            elif chunks.grid.chunks[0] > 1:  # else a chunk, perhaps a whole file, is a row's part
                self._rows = chunks.by_row()
        self.shape: tuple[int, ...] = chunks.grid.shape
        self.inner: int = chunks.grid.inner
        self.dtype: np.dtype[Any] = chunks.dtype
        self.how: str = chunks.how
        self.extents: tuple[int, ...] | None = chunks.extents
        self.height: int = chunks.grid.chunks[0] if chunks.grid.chunks else 1
        """Rows of a chunk."""
        self.caches_chunks: bool = chunks.decodes and self.height > 1
        """True if chunks of several rows are decoded as a whole, and worth caching."""

    def describe(self, name: str, extents: Sequence[float] | None = None) -> Column:
        """What a random box of an array costs: along each axis it crosses (extent - 1) / chunk + 1
        chunks on average, and no more than there are. None: a row.
        """
        chunks = self.chunks
        grid = chunks.grid
        box = [1, *grid.shape[1:]] if extents is None else extents
        shape = list(self.shape[1:]) if extents is None else [round(extent) for extent in box]
        nbytes = int(math.prod(box) * self.dtype.itemsize)
        column = Column(name, self.how, f"{self.dtype} {shape}", nbytes=nbytes, read=nbytes)
        column.total = math.prod(grid.shape) * chunks.dtype.itemsize
        column.stored = chunks.stored_nbytes
        if column.stored == column.total and chunks.decodes:
            column.stored = 0  # files of their own, whose sizes are not known
        is_exact = chunks.is_raw and (extents is None or len(box) == 1)
        if is_exact or not math.prod(grid.shape):
            return column
        column.chunk = grid.chunks
        column.chunks = 1.0
        for extent, chunk, count in zip(box, grid.chunks, grid.counts, strict=True):
            column.chunks *= min(float(count), max(0.0, extent - 1) / chunk + 1)
        column.decoded = int(column.chunks * chunks.nbytes)
        column.read = int(column.chunks * column.stored / math.prod(grid.counts))
        return column

    # -- where bytes lie

    @property
    def begin(self) -> int | None:
        """The first byte of the first row, if all rows lie uncompressed in one file, one after the
        other; else None.
        """
        if self.raw is None:
            return None
        ranges = self.raw.raw_ranges(np.arange(-(-self.shape[0] // max(1, self.height))))
        if len(ranges.paths) > 1 or not ranges.is_written.all():
            return None
        if not np.array_equal(ranges.start[1:], ranges.stop[:-1]):
            return None
        return int(ranges.start[0]) if ranges.size else 0

    def row_ranges(self, rows: IntArray) -> ByteRanges | None:
        """Where each row lies, if all were written, uncompressed, into files of known sizes; else
        None.
        """
        if self.raw is None:
            return None
        ranges = Cuts.of_rows(rows, self.height).ranges(self.raw)
        return ranges if (ranges.stop > ranges.start).all() else None

    def span_ranges(self, firsts: IntArray, ends: IntArray, missing: bool = False) -> ByteRanges:
        """Where the stored bytes of spans of rows lie, ``firsts[i]`` to ``ends[i] - 1``, with all
        chunks that are decoded as a whole; none where only another library can read them.

        Args:
            firsts, ends: [spans].
            missing: leaves out the chunks that are cached.
        """
        cuts = Cuts.of_spans(firsts, ends, self.height)
        if not len(cuts.chunks):
            return ByteRanges.of([])
        if self.raw is not None:
            ranges = cuts.ranges(self.raw)
            return ranges.take(ranges.is_written)
        bands = distinct(cuts.chunks)
        numbers = bands[:, None] * self.inner + np.arange(self.inner)
        return self._chunk_ranges(numbers.reshape(-1), missing)

    def box_ranges(
        self, boxes: Sequence[tuple[Sequence[int], Sequence[int]]], missing: bool = False
    ) -> ByteRanges:
        """Where the stored bytes of boxes lie, each from its lowest corner on and of its own
        extents; `missing`: as for `span_ranges`.
        """
        pieces = pieces_of(self.chunks.grid, *zip(*boxes, strict=True)) if boxes else {}
        return self._chunk_ranges(np.array(list(pieces), np.int64), missing)

    def _chunk_ranges(self, numbers: IntArray, missing: bool) -> ByteRanges:
        if missing and len(self.cache):
            is_cached = [(self.key, number) in self.cache for number in numbers.tolist()]
            numbers = numbers[~np.array(is_cached, bool)]
        return self.chunks.byte_ranges(numbers)

    # -- reading

    def read_rows(self, rows: Sequence[int] | IntArray, outs: Rows, run: Map) -> None:
        """Copies rows (indices along the first axis) into arrays of a row's shape and this
        array's dtype, C-contiguous.
        """
        if not len(outs) or not outs[0].size:
            return
        numbers = np.asarray(rows, np.int64)
        if self.raw is not None:
            ranges = Cuts.of_rows(numbers, self.height).ranges(self.raw)
            if isinstance(outs, np.ndarray) and outs.flags.c_contiguous:
                edges = np.arange(len(numbers) + 1)
                if not self.raw.is_remote:  # remote ones are read as they were prefetched
                    ranges, edges = ranges.merged()
                whole = bytes_of(outs)
                bounds = (edges * outs[:1].nbytes).tolist()
                buffers = [whole[start:stop] for start, stop in itertools.pairwise(bounds)]
            else:
                buffers = [bytes_of(out) for out in outs]
            self.raw.read_raw(ranges, buffers)
            return
        chunks = self._rows
        grid = chunks.grid
        if grid.inner > 1:
            corners = [(row, *[0] * (len(grid.shape) - 1)) for row in rows]
            boxes = [row_at(outs, number)[np.newaxis] for number in range(len(rows))]
            self.read_boxes(corners, boxes, run, are_rows=True)
            return
        clip: tuple[Any, ...] = tuple(slice(0, extent) for extent in grid.shape[1:])
        fill = self.chunks.fill
        numbers, within = np.divmod(numbers, grid.chunks[0])
        inner_rows = within.tolist()

        def take(parts: IntArray, chunk: AnyArray | None) -> None:
            if chunk is not None and len(parts) >= _MANY and isinstance(outs, np.ndarray):
                outs[parts] = chunk[(within[parts], *clip)]
                return
            for part in parts.tolist():
                row = fill if chunk is None else chunk[(inner_rows[part], *clip)]
                row_at(outs, part)[...] = row

        self._visit_parts(chunks, numbers, np.ones(len(numbers), np.int64), take, run)

    def _visit_parts(
        self,
        chunks: Chunks,
        numbers: IntArray,
        rows: IntArray,
        take: Callable[[IntArray, AnyArray | None], None],
        run: Map,
    ) -> None:
        """Gives each chunk to a function, with all parts that are taken of it.

        Args:
            chunks: of the array.
            numbers: [parts] the number of the chunk of each.
            rows: [parts] rows of each.
            take: called with the numbers of parts, and their chunk.
            run: calls a function in threads.
        """
        if not len(numbers):
            return
        order = numbers.argsort(kind="stable")
        of = numbers[order]
        is_new = np.ones(len(of), bool)
        np.not_equal(of[1:], of[:-1], out=is_new[1:])
        edges = is_new.nonzero()[0]
        bounds = [*edges.tolist(), len(order)]
        used = None
        if self.caches_chunks:
            used = np.add.reduceat(rows[order], edges).tolist()

        def use(at: int, chunk: AnyArray | None) -> None:
            take(order[bounds[at] : bounds[at + 1]], chunk)

        visit(chunks, self.cache, self.key, of[edges].tolist(), used, use, run)

    def read_spans(
        self, firsts: IntArray, outs: Sequence[AnyArray], run: Map, overlap: bool = False
    ) -> None:
        """Copies spans of rows: for each array as many as it has, from its first one on.

        Args:
            firsts: [spans] the first row of each.
            outs: the array that each goes to.
            run: calls a function in threads.
            overlap: other spans have these rows too, so their chunks stay cached.
        """
        if self.inner > 1:
            some = [number for number, out in enumerate(outs) if out.size]
            corners = [(int(firsts[number]), *[0] * (len(self.shape) - 1)) for number in some]
            self.read_boxes(corners, [outs[number] for number in some], run)
            return
        ends = firsts + np.array([len(out) if out.size else 0 for out in outs], np.int64)
        cuts = Cuts.of_spans(firsts, ends, self.height)
        starts = cuts.starts.tolist()
        stops = cuts.stops.tolist()
        parts: list[AnyArray] = []
        moves = (cuts.chunks * self.height - firsts[cuts.spans]).tolist()
        for span, move, start, stop in zip(cuts.spans.tolist(), moves, starts, stops, strict=True):
            parts.append(outs[span][start + move : stop + move])
        if self.raw is not None:
            self.raw.read_raw(cuts.ranges(self.raw), list(map(bytes_of, parts)))
            return
        fill = self.chunks.fill
        clip = tuple(slice(0, extent) for extent in self.shape[1:])

        def take(numbers: IntArray, chunk: AnyArray | None) -> None:
            for number in numbers.tolist():
                rows = fill
                if chunk is not None:
                    rows = chunk[(slice(starts[number], stops[number]), *clip)]
                parts[number][...] = rows

        used = np.zeros(len(parts), np.int64) if overlap else cuts.stops - cuts.starts
        self._visit_parts(self.chunks, cuts.chunks, used, take, run)

    def whole(self, run: Map) -> AnyArray:
        """All rows, as one array."""
        rows = np.empty(self.shape, self.dtype)
        self.read_spans(np.zeros(1, np.int64), [rows], run)
        return rows

    def read_boxes(
        self,
        corners: Sequence[Sequence[int]],
        outs: Sequence[AnyArray],
        run: Map,
        are_rows: bool = False,
    ) -> None:
        """Copies boxes, which lie inside of the array, from their lowest corner on; each as
        large as its array in `outs`. `are_rows`: they are whole rows, each wanted once.
        """
        chunks = self._rows if are_rows else self.chunks
        pieces = pieces_of(chunks.grid, corners, [out.shape for out in outs])
        each = list(pieces.values())

        def use(at: int, chunk: AnyArray | None) -> None:
            for out, source, target in each[at]:
                outs[out][target] = chunks.fill if chunk is None else chunk[source]

        used: list[int] | None = None
        if chunks.decodes and are_rows:
            used = list(map(len, each))
        elif chunks.decodes:
            height = self.height
            whole = tuple(slice(0, extent) for extent in chunks.grid.chunks)
            used = [0] * len(each)
            for at, (number, some) in enumerate(pieces.items()):
                is_whole = any(source == whole for _, source, _ in some)
                # what is cached stays: other boxes may overlap this one
                if is_whole and (self.key, number) not in self.cache:
                    used[at] = height
        visit(chunks, self.cache, self.key, list(pieces), used, use, run)

    def raw_joined(self, cuts: Cuts) -> AnyArray:
        """The elements of parts of a 1-D array that lie as they are, one part behind the other,
        perhaps read-only.
        """
        assert self.raw is not None
        ranges = cuts.ranges(self.raw)
        if len(ranges.paths) == 1 and ranges.is_written.all():
            return np.frombuffer(self.raw.files.read_joined(ranges), self.dtype)
        edges = [0, *np.cumsum(cuts.stops - cuts.starts).tolist()]
        out = np.empty(edges[-1], self.dtype)
        self.raw.read_raw(ranges, [bytes_of(out[a:b]) for a, b in itertools.pairwise(edges)])
        return out


class Cuts(NamedTuple):
    """Spans of rows, cut at the borders of chunks. Parts are in the order of their spans; an empty
    span has none.

    Attributes:
        spans: the number of the span of each part.
        chunks: the number of its chunk, along the rows.
        starts, stops: its first row in the chunk, and its end.
    """

    spans: IntArray
    chunks: IntArray
    starts: IntArray
    stops: IntArray

    @classmethod
    def of_rows(cls, rows: IntArray, height: int) -> Cuts:
        """Of spans of one row each, in chunks of so many rows."""
        chunks, starts = np.divmod(rows, height)
        return cls(np.arange(len(rows)), chunks, starts, starts + 1)

    @classmethod
    def of_spans(cls, firsts: IntArray, ends: IntArray, height: int) -> Cuts:
        """Of spans ``firsts[i]`` to ``ends[i] - 1``."""
        first_chunks = firsts // height
        counts = np.where(ends > firsts, -(-ends // height) - first_chunks, 0)
        spans = np.repeat(np.arange(len(firsts)), counts)
        chunks = (first_chunks - np.cumsum(counts) + counts)[spans] + np.arange(len(spans))
        begins = chunks * height
        starts = np.maximum(firsts[spans] - begins, 0)
        stops = np.minimum(ends[spans] - begins, height)
        return cls(spans, chunks, starts, stops)

    def ranges(self, raw: DirectChunks) -> ByteRanges:
        """Where the parts lie, in chunks whose rows lie as they are."""
        row_bytes = raw.nbytes // raw.grid.chunks[0]
        whole = raw.raw_ranges(self.chunks)
        if whole.is_whole.any():  # files of one row each
            return whole
        begins = whole.start + self.starts * row_bytes
        ends = whole.start + self.stops * row_bytes
        missing = ~whole.is_written
        begins[missing] = -1
        ends[missing] = -1
        return ByteRanges(whole.paths, whole.file, begins, ends)


def pieces_of(
    grid: Grid, corners: Sequence[Sequence[int]], boxes: Sequence[Sequence[int]]
) -> dict[int, list[tuple[int, Slices, Slices]]]:
    """By chunk, the pieces that boxes are made of: the number of the box, the part of the chunk,
    and the part of the box.
    """
    strides = [math.prod(grid.counts[axis + 1 :]) for axis in range(len(grid.shape))]
    pieces: dict[int, list[tuple[int, Slices, Slices]]] = {}
    for out, (corner, box) in enumerate(zip(corners, boxes, strict=True)):
        axes = [
            [(place * stride, source, target) for place, source, target in _cuts(*along)]
            for *along, stride in zip(corner, box, grid.chunks, strides, strict=True)
        ]
        for parts in itertools.product(*axes):
            numbers, sources, targets = zip(*parts, strict=True)
            pieces.setdefault(sum(numbers), []).append((out, sources, targets))
    return pieces


def _cuts(start: int, extent: int, chunk: int) -> Iterator[tuple[int, slice, slice]]:
    """Along one axis: the chunks that a range crosses, and which parts of them go where."""
    for place in range(start // chunk, -(-(start + extent) // chunk)):
        begin = place * chunk
        first = max(start, begin)
        last = min(start + extent, begin + chunk)
        yield place, slice(first - begin, last - begin), slice(first - start, last - start)
