"""The chunk index of a Zarr array: the locations of its files, and of the chunks inside shards.

Before its chunks can be read, a shard's index must be read, and of a remote one first its version
be requested: two round trips for all needed shards together; in mode streaming, for those of the
next batches together. Of arrays of few shards the versions are requested when they are opened, so
that a shard that is replaced later is an error. Each process holds the indices that it used last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.formats.arrays.chunks import ChunkIndex, Grid
from headrace.formats.arrays.codecs import Codec, Crc32c
from headrace.formats.zarr.stores import Store
from headrace.io.paths import redact
from headrace.io.ranges import WHOLE, ByteRanges

_INDEX_BYTES = 64 << 20  # of the shards' indices that a process holds
_NOWHERE = (1 << 64) - 1
_VERSIONS = 256  # shards whose versions a server is asked for when the array is opened


class Layout(NamedTuple):
    """How the elements of an array lie in files.

    Attributes:
        files: extents of what lies in one file: a chunk, or a shard.
        codecs: of chunks, from bytes to bytes.
        prefix: of the names of files: "c" or "".
        index_at: where a shard's index lies, "start" or "end"; None: there are no shards.
    """

    shape: tuple[int, ...]
    files: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any
    order: str
    codecs: tuple[Codec, ...]
    prefix: str
    separator: str
    index_at: str | None


class ArrayFiles(ChunkIndex):
    """Where the files of an array lie, numbered as the grid of chunks or shards.

    Args:
        store, name, layout: of the array.
        whole: say nothing of the files' sizes, which would have to be asked for, and nothing of
            whether they are there.
    """

    def __init__(self, store: Store, name: str, layout: Layout, whole: bool = False) -> None:
        self.store = store
        self.name = name
        self._separator = layout.separator
        self._counts = Grid(layout.shape, layout.files).counts
        first = "/".join(part for part in (name, layout.prefix) if part)
        if first:
            first += layout.separator if layout.prefix else "/"
        self._first = first
        self.count: int = math.prod(self._counts)
        self.whole_files = whole
        if 0 < self.count < _NOWHERE >> 1:
            store.note_last(self._names([self.count - 1])[0])

    def _names(self, numbers: IntArray | Sequence[int]) -> list[str]:
        first = self._first
        if math.prod(self._counts[1:]) == 1:
            end = f"{self._separator}0" * (len(self._counts) - 1)
            return [f"{first}{number}{end}" for number in np.asarray(numbers).tolist()]
        places = np.unravel_index(np.asarray(numbers, np.int64), self._counts)
        each = np.stack(places, axis=1).tolist()
        return [first + self._separator.join(map(str, place)) for place in each]

    def ranges(self, numbers: IntArray | Sequence[int]) -> ByteRanges:
        self.store.check_version(self.name)
        keys = self._names(numbers)
        if self.whole_files:
            return ByteRanges.of((self.store.path_of(key), 0, WHOLE) for key in keys)
        return self.store.ranges(keys)

    def check(self, number: int) -> None:
        if not self.store.files.is_remote:
            self.store.check_version(self.name)
            self.store.ranges(self._names([number]))


class _Index(NamedTuple):
    """Where the chunks of a shard lie.

    Attributes:
        path: of the file.
        rows: for each chunk its offset in the file and its bytes, one after the other; -1 where
            nothing was written. A memoryview gives single numbers faster than an array does.
    """

    path: str
    rows: memoryview


class Shards(ChunkIndex):
    """Where the chunks in shards lie, by the shards' indices.

    Args:
        store, name, layout: of the array.
    """

    def __init__(self, store: Store, name: str, layout: Layout) -> None:
        self._whole = ArrayFiles(store, name, layout)
        self._at = layout.index_at
        self._files = store.files
        self._shards = Grid(layout.shape, layout.files)
        self._chunks = Grid(layout.shape, layout.chunks)
        self._inside = tuple(f // c for f, c in zip(layout.files, layout.chunks, strict=True))
        self._index_bytes = 16 * math.prod(self._inside) + 4
        self._known: dict[int, _Index | None] = {}
        self._most = max(16, _INDEX_BYTES // self._index_bytes)
        self.needs_io: bool = store.files.is_remote
        if self.needs_io and store.reads_whole and self._whole.count <= _VERSIONS:
            self._whole.ranges(range(self._whole.count))  # reads of all processes are of these

    def _places(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """The shard of each chunk, and the chunk's number in it."""
        if self._chunks.inner == 1:
            shards, within = np.divmod(numbers, self._inside[0])
            return shards, within * (math.prod(self._inside[1:]))
        places = np.stack(np.unravel_index(numbers, self._chunks.counts))
        inside = np.array(self._inside)[:, None]
        shards = np.ravel_multi_index(tuple(places // inside), self._shards.counts)
        return shards, np.ravel_multi_index(tuple(places % inside), self._inside)

    def ranges(self, numbers: IntArray) -> ByteRanges:
        shards, within = self._places(numbers)
        known: dict[int, int] = {}
        which = [known.setdefault(shard, len(known)) for shard in shards.tolist()]
        indices = self._indices(list(known))
        rows = [None if index is None else index.rows for index in indices]
        starts: list[int] = []
        sizes: list[int] = []
        for shard, chunk in zip(which, within.tolist(), strict=True):
            row = rows[shard]
            starts.append(-1 if row is None else row[2 * chunk])
            sizes.append(0 if row is None else row[2 * chunk + 1])
        paths = ["" if index is None else index.path for index in indices]
        start, nbytes = np.array([starts, sizes], np.int64)
        stop = np.where(start < 0, -1, start + nbytes)
        return ByteRanges(paths, np.array(which, np.int64), start, stop)

    def check(self, number: int) -> None:
        if not self._files.is_remote:
            for index in self._indices(self._places(np.array([number]))[0].tolist()):
                if index is not None:
                    self._files.check(index.path)

    def _indices(self, shards: Sequence[int]) -> list[_Index | None]:
        """The index of each shard; None: there is no such shard.

        Raises:
            FormatError: one is damaged, or too short. All others are known from then on.
        """
        store = self._whole.store
        store.check_version(self._whole.name)
        found = {shard: self._known[shard] for shard in shards if shard in self._known}
        new = [shard for shard in shards if shard not in found]
        if new:
            found.update(self._read(new))
        return [found[shard] for shard in shards]

    def _read(self, shards: Sequence[int]) -> dict[int, _Index | None]:
        """The indices of shards, read together."""
        whole = self._whole.ranges(shards)
        is_there = whole.is_written
        is_long = is_there & (whole.nbytes >= self._index_bytes)
        starts = whole.start if self._at == "start" else whole.stop - self._index_bytes
        ranges = ByteRanges(whole.paths, whole.file, starts, starts + self._index_bytes)
        numbers = np.flatnonzero(is_long)
        ranges = ranges.take(numbers)
        found: dict[int, _Index | None] = {}
        for number in np.flatnonzero(~is_there).tolist():
            found[shards[number]] = None
            if self._files.is_remote:  # a local one is looked for again
                self._learn(shards[number], None)
        failure: FormatError | None = None
        for number in np.flatnonzero(is_there & ~is_long).tolist():
            failure = FormatError(
                f"{redact(whole.paths[whole.file[number]])} is cut short: "
                f"{int(whole.nbytes[number]):,} bytes have no room for the index of a shard of "
                f"{self._index_bytes:,}"
            )
        for number, data in zip(numbers.tolist(), self._files.read(ranges), strict=True):
            path = whole.paths[whole.file[number]]
            try:
                rows = self._rows(data, path, int(whole.start[number]), int(whole.nbytes[number]))
            except FormatError as error:
                failure = failure or error
                continue
            found[shards[number]] = self._learn(shards[number], _Index(path, rows))
        if failure is not None:
            raise failure
        return found

    def _rows(self, data: Any, path: str, begin: int, size: int) -> memoryview:
        try:
            raw = np.frombuffer(Crc32c().decode(data, self._index_bytes - 4), "<u8").reshape(-1, 2)
        except FormatError as error:
            raise FormatError(f"{redact(path)}, the index of the shard: {error}") from None
        missing = (raw == _NOWHERE).all(axis=1)
        beyond = (raw > size).any(axis=1) | (raw.sum(axis=1) > size)
        beyond &= ~missing
        if beyond.any():
            raise FormatError(
                f"{redact(path)}: chunk {int(np.flatnonzero(beyond)[0])} of the shard lies beyond "
                f"its {size:,} bytes"
            )
        rows = np.where(missing[:, None], -1, raw.astype(np.int64) + np.array([begin, 0]))
        return np.ascontiguousarray(rows, np.int64).reshape(-1).data

    def _learn(self, shard: int, index: _Index | None) -> _Index | None:
        if len(self._known) >= self._most:
            # they are read again soon enough; keeping count of their use would cost more
            self._known = {}
        self._known[shard] = index
        return index

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}
