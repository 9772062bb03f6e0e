"""The chunk index of a Zarr array: the locations of its files, and of the chunks inside shards.

Before its chunks can be read, a shard's index must be read, and of a remote one first its version
be requested: two round trips for all needed shards together; in mode streaming, for those of the
next batches together. Of arrays of few shards the versions are requested when they are opened, so
that a shard that is replaced later is an error. Each process holds the indices that it used last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from posixpath import join
from typing import Any, NamedTuple

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.formats.arrays.chunks import ChunkIndex, Grid
from headrace.formats.arrays.codecs import CRC32C, Codec
from headrace.formats.zarr.stores import Store
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges

_INDEX_BYTES = 64 << 20  # of the shards' indices that a process holds
_NOWHERE = (1 << 64) - 1
_VERSIONS = 256  # shards whose versions a server is asked for when the array is opened


class Layout(NamedTuple):
    """How the elements of an array lie in files.

    Attributes:
        files: extents of the part in one file: a chunk, or a shard.
        codecs: of chunks, from bytes to bytes.
        prefix: of the names of files: "c" with the separator, or "".
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
        self.store: Store = store
        self.name: str = name
        self._separator = layout.separator
        self._counts = Grid(layout.shape, layout.files).counts
        self._first = join(name, layout.prefix)
        self.count: int = math.prod(self._counts)
        self._whole = whole
        if 0 < self.count < _NOWHERE >> 1:
            store.note_last(self._names([self.count - 1])[0])

    def _names(self, numbers: IntArray | Sequence[int]) -> list[str]:
        places = np.unravel_index(np.asarray(numbers, np.int64), self._counts)
        each = np.stack(places, axis=1).tolist()
        return [self._first + self._separator.join(map(str, place)) for place in each]

    def ranges(self, numbers: IntArray | Sequence[int]) -> ByteRanges:
        self.store.check_version(self.name)
        keys = self._names(numbers)
        if self._whole:
            return ByteRanges.of_wholes(list(map(self.store.path_of, keys)), range(len(keys)))
        return self.store.ranges(keys)


_Index = tuple[str, memoryview]
"""Where the chunks of a shard lie: the path of its file, and for each chunk its offset and its
bytes, one after the other; -1 where nothing was written. A memoryview gives single numbers faster
than an array does.
"""


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
        indices = [index or ("", None) for index in self._indices(list(known))]
        starts: list[int] = []
        stops: list[int] = []
        for shard, chunk in zip(which, within.tolist(), strict=True):
            row = indices[shard][1]
            start = -1 if row is None else row[2 * chunk]
            starts.append(start)
            stops.append(-1 if row is None or start < 0 else start + row[2 * chunk + 1])
        paths = [path for path, _ in indices]
        return ByteRanges(paths, *np.array([which, starts, stops], np.int64))

    def _indices(self, shards: Sequence[int]) -> list[_Index | None]:
        """The index of each shard; None: there is no such shard.

        Raises:
            FormatError: one is damaged, or too short.
        """
        self._whole.store.check_version(self._whole.name)
        known = self._known  # another thread may begin a new one
        found = {shard: known[shard] for shard in shards if shard in known}
        new = [shard for shard in shards if shard not in found]
        if new:
            read = self._read(new)
            found |= read
            if len(self._known) + len(new) > self._most:
                # they are read again soon enough; keeping count of their use would cost more
                self._known = {}
            # a local one that is missing is looked for again
            is_local = not self._files.is_remote
            self._known |= {n: index for n, index in read.items() if index or not is_local}
        return [found[shard] for shard in shards]

    def _read(self, shards: Sequence[int]) -> dict[int, _Index | None]:
        """The indices of shards, read together."""
        whole = self._whole.ranges(shards)
        is_there = whole.is_written
        is_short = is_there & (whole.nbytes < self._index_bytes)
        if is_short.any():
            number = int(np.argmax(is_short))
            raise FormatError(
                f"{redact(whole.paths[whole.file[number]])} is cut short: "
                f"{int(whole.nbytes[number]):,} bytes have no room for the index of a shard of "
                f"{self._index_bytes:,}"
            )
        starts = whole.start if self._at == "start" else whole.stop - self._index_bytes
        stops = np.where(is_there, starts + self._index_bytes, -1)
        starts = np.where(is_there, starts, -1)
        found: dict[int, _Index | None] = dict.fromkeys(shards)
        ranges = ByteRanges(whole.paths, whole.file, starts, stops)
        for number, data in enumerate(self._files.read(ranges)):
            if data is not None:
                path = whole.paths[whole.file[number]]
                rows = self._rows(data, path, int(whole.start[number]), int(whole.nbytes[number]))
                found[shards[number]] = (path, rows)
        return found

    def _rows(self, data: Any, path: str, begin: int, size: int) -> memoryview:
        try:
            raw = np.frombuffer(CRC32C.decode(data, self._index_bytes - 4), "<u8").reshape(-1, 2)
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}
