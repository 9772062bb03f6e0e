"""The chunk index of a Zarr array: the locations of its files, and of the chunks inside shards.

NOTE [ remote shards ]

* Before its chunks can be read, a shard's version must be requested and its index read: two round
  trips, for all needed shards together. For arrays with a limited number of shards this is done
  when they are first opened, and cached (see `headrace.io.index`): the index of the shards holds
  the size, version and index of each.
* When the store is opened again, some shards are compared with the cached index, and every read
  requests the cached version. A shard that was replaced is an error, and the cached index is
  removed, so that the next start builds it again.
* An index that was written elsewhere (`headrace.write_index`) has no versions. They are requested
  when a shard is first read. A shard whose size differs from that in the index is an error.
* For an array with very many shards and no index, versions and indexes are requested when they are
  needed; in mode streaming, for the next batches together.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.array_file import Arrays
from headrace.io.files import Files, Version
from headrace.io.index import IndexKind, found_index, kept_index, learn_indexed, made_index
from headrace.io.paths import redact
from headrace.io.ranges import WHOLE, ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.memory.anonymous import SharedArray
from headrace.sorting import distinct
from headrace.storage.arrays.chunks import ChunkIndex, Grid
from headrace.storage.arrays.codecs import Crc32c
from headrace.storage.zarr.layout import Layout, UnknownLayout, layout_of
from headrace.storage.zarr.store import V3_NODE, Store, key_of
from headrace.storage.zarr.stores import ZarrUrl

_INDEX_BYTES = 64 << 20  # of the shards' indices that a process holds
_NOWHERE = (1 << 64) - 1
_MADE, _TOGETHER = 4096, 512  # shards whose indices are read at the opening; and at once
_LOOKED_AT = 16  # shards that are compared with what is cached of them


class ArrayFiles(ChunkIndex):
    """Where the files of an array lie, numbered as the grid of chunks or shards.

    Args:
        store, name, layout: of the array.
        whole: say nothing of the files' sizes, which would have to be asked for, and nothing of
            whether they are there.
    """

    def __init__(self, store: Store, name: str, layout: Layout, whole: bool = False) -> None:
        self.store, self.name, self._separator, self._is_sharded = (
            store,
            name,
            layout.separator,
            layout.index_at is not None,
        )
        self._counts = Grid(layout.shape, layout.files).counts
        first = "/".join(part for part in (name, layout.prefix) if part)
        self._first = first + (layout.separator if layout.prefix else "/") if first else ""
        self._folder, _, self._start = self._first.rpartition("/")
        self.count: int = math.prod(self._counts)
        self.whole_files = whole
        self.reads_files = store.reads_files and not self._is_sharded
        if 0 < self.count < _NOWHERE >> 1:
            store.note_last(self.keys([self.count - 1])[0])

    def keys(self, numbers: IntArray | Sequence[int]) -> list[str]:
        """Of files in the store."""
        return self._names(self._first, numbers)

    def _names(self, start: str, numbers: IntArray | Sequence[int]) -> list[str]:
        if math.prod(self._counts[1:]) == 1:
            end = f"{self._separator}0" * (len(self._counts) - 1)
            return [
                f"{start}{number}{end}"
                for number in (numbers.tolist() if isinstance(numbers, np.ndarray) else numbers)
            ]
        places = np.stack(
            np.unravel_index(np.asarray(numbers, np.int64), self._counts), axis=1
        ).tolist()
        return [start + self._separator.join(map(str, place)) for place in places]

    def read_files(self, numbers: Sequence[int]) -> list[bytes | None]:
        self.store.check_version(self.name)
        return self.store.read_files(self._folder, self._names(self._start, numbers))

    def read_files_into(
        self, numbers: Sequence[int] | IntArray, buffers: Sequence[memoryview]
    ) -> list[int]:
        self.store.check_version(self.name)
        return self.store.read_files_into(self._folder, self._names(self._start, numbers), buffers)

    def urls(self, numbers: IntArray | Sequence[int]) -> list[str]:
        """Of files."""
        return list(map(self.store.path_of, self.keys(numbers)))

    def ranges(self, numbers: IntArray | Sequence[int]) -> ByteRanges:
        if self.whole_files:
            return ByteRanges.of((url, 0, WHOLE) for url in self.urls(numbers))
        self.store.check_version(self.name)
        # parts of shards have checksums of their own
        return self.store.ranges(self.keys(numbers), checked=not self._is_sharded)

    def check(self, number: int) -> None:
        if not self.store.files.is_remote:
            self.ranges([number])


class _Index(NamedTuple):
    """Where the chunks of a shard lie.

    Attributes:
        path: of the file.
        size: of the shard.
        rows: for each chunk its offset in the file and its bytes, one after the other; -1 where
            nothing was written. A memoryview gives single numbers faster than an array does.
    """

    path: str
    size: int
    rows: memoryview


class Shards(ChunkIndex):
    """Where the chunks in shards lie, by the shards' indices, of which each process holds those it
    used last; see NOTE [ remote shards ].

    Args:
        whole, layout: of the array.
        cached: what is cached of remote shards.
    """

    def __init__(
        self, whole: ArrayFiles, layout: Layout, cached: CachedShards | None = None
    ) -> None:
        self.whole, self._at, self._cached = whole, layout.index_at, cached
        self._files: Files = whole.store.files
        self._shards, self._chunks = (
            Grid(layout.shape, layout.files),
            Grid(layout.shape, layout.chunks),
        )
        self._inside = tuple(f // c for f, c in zip(layout.files, layout.chunks, strict=True))
        self.chunks_each: int = math.prod(self._inside)
        self._is_flat = self._chunks.inner == 1
        self._index_bytes = 16 * self.chunks_each + 4
        self._known: dict[int, _Index | None] = {}
        self._most = max(16, _INDEX_BYTES // (16 * self.chunks_each))

    @property
    def needs_io(self) -> bool:  # type: ignore[override]
        """True if servers are asked before it is known where chunks lie."""
        return self._files.is_remote and self._cached is None

    def ranges(self, numbers: IntArray) -> ByteRanges:
        if self._is_flat:
            shards, within = np.divmod(numbers, self._inside[0])
            within *= self.chunks_each // self._inside[0]
        else:
            places = np.stack(np.unravel_index(numbers, self._chunks.counts))
            inside = np.array(self._inside)[:, None]
            shards = np.ravel_multi_index(tuple(places // inside), self._shards.counts)
            within = np.ravel_multi_index(tuple(places % inside), self._inside)
        known: dict[int, int] = {}
        which = [known.setdefault(shard, len(known)) for shard in shards.tolist()]
        indices = self.indices(list(known))
        rows = [None if index is None else index.rows for index in indices]
        starts, sizes = list[int](), list[int]()
        for shard, chunk in zip(which, within.tolist(), strict=True):
            row = rows[shard]
            starts.append(-1 if row is None else row[2 * chunk])
            sizes.append(0 if row is None else row[2 * chunk + 1])
        paths = ["" if index is None else index.path for index in indices]
        start, nbytes = np.array([starts, sizes], np.int64)
        return ByteRanges(
            paths, np.array(which, np.int64), start, np.where(start < 0, -1, start + nbytes)
        )

    def check(self, number: int) -> None:
        if self._files.is_remote:
            return
        if self._is_flat:
            shard = number // self._inside[0]
        else:
            places = zip(self._chunks.place(number), self._inside, strict=True)
            shard = self._shards.number(tuple(place // inside for place, inside in places))
        if (index := self._known.get(shard)) is None:
            self.indices([shard])
            return
        self.whole.store.check_version(self.whole.name)
        self.whole.store.check_open([index.path])

    def indices(self, shards: Sequence[int]) -> list[_Index | None]:
        """The index of each shard; None: there is no such shard.

        Raises:
            FormatError: one is damaged, or too short. All others are known from then on.
        """
        store, known = self.whole.store, self._known
        store.check_version(self.whole.name)
        found = {shard: known[shard] for shard in shards if shard in known}
        new = [shard for shard in shards if shard not in found]
        if new and self._cached is not None:
            for shard, url in zip(new, self.whole.urls(new), strict=True):
                index = self._cached.index(shard, url)
                # one that was missing, or damaged, may have been written since
                if index is not None:
                    found[shard] = self._learn(shard, index)
            new = [shard for shard in new if shard not in found]
        if new:
            found.update(self._read(new))
        store.check_open([index.path for index in found.values() if index is not None])
        return [found[shard] for shard in shards]

    def _read(self, shards: Sequence[int]) -> dict[int, _Index | None]:
        """The indices of shards, read together."""
        whole = self.whole.ranges(shards)
        is_short = whole.is_written & (whole.nbytes < self._index_bytes)
        numbers = np.flatnonzero(whole.is_written & ~is_short)
        starts = whole.start if self._at == "start" else whole.stop - self._index_bytes
        ranges = ByteRanges(whole.paths, whole.file, starts, starts + self._index_bytes).take(
            numbers
        )
        failure: FormatError | None = None
        if is_short.any():
            path, size = whole.paths[whole.file[is_short][0]], int(whole.nbytes[is_short][0])
            room = f"{size:,} bytes have no room for the index of a shard of {self._index_bytes:,}"
            failure = FormatError(f"{redact(path)} is cut short: {room}")
        found: dict[int, _Index | None] = {}
        for number in np.flatnonzero(~whole.is_written).tolist():
            found[shards[number]] = None
            if self._files.is_remote:  # of a local one it is looked for again
                self._learn(shards[number], None)
        if not self._files.is_remote:
            for path in ranges.paths:
                self._files.version(path)  # all later reads are compared with it
        for number, data in zip(numbers.tolist(), self._files.read(ranges), strict=True):
            path, begin, size = (
                whole.paths[whole.file[number]],
                int(whole.start[number]),
                int(whole.nbytes[number]),
            )
            try:
                found[shards[number]] = self._learn(
                    shards[number], _Index(path, size, self._rows(data, path, begin, size))
                )
            except FormatError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return found

    def _rows(self, data: Any, path: str, begin: int, size: int) -> memoryview:
        try:
            raw = np.frombuffer(Crc32c().decode(data, self._index_bytes - 4), "<u8").reshape(-1, 2)
        except FormatError as error:
            raise FormatError(f"{redact(path)}, the index of the shard: {error}") from None
        missing = (raw == _NOWHERE).all(axis=1)
        beyond = ~missing & (
            (raw[:, 0] > size) | (raw[:, 1] > size) | (raw[:, 0] + raw[:, 1] > size)
        )
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


class CachedShards:
    """What was cached of the shards of an array.

    Args:
        arrays: as `INDEX` says.
        url: of the array's metadata file.
        files: its server's.
    """

    def __init__(self, arrays: Arrays, url: str, files: RemoteFiles) -> None:
        sizes, rows, about_bytes = arrays
        about = json.loads(about_bytes.tobytes())
        self.has_versions: bool = about["of"] == [redact(url), files.place] and all(
            tag for tag, size in zip(about["tags"], sizes, strict=True) if size >= 0
        )
        self._tags: list[str | None] = about["tags"]
        self._sizes, self._rows = SharedArray(sizes), SharedArray(rows)
        self._places = SharedArray(np.cumsum(sizes >= 0) - 1)
        self._length = len(rows) // max(1, int((sizes >= 0).sum()))

    def fits(self, urls: Sequence[str], chunks_each: int, files: RemoteFiles) -> bool:
        """True if it is of so many shards, of so many chunks, and some of them are as they were."""
        written = int((self._sizes.array >= 0).sum())
        if (
            not len(self._sizes) == len(self._tags) == len(urls)
            or len(self._rows) != written * 2 * chunks_each
        ):
            return False
        if not self.has_versions or not urls:
            return True  # their sizes are compared when they are first read
        some = distinct(np.linspace(0, len(urls) - 1, _LOOKED_AT).astype(np.int64)).tolist()
        versions = files.find_versions([urls[shard] for shard in some], afresh=True)
        return all(
            version == self.version(shard) for shard, version in zip(some, versions, strict=True)
        )

    def version(self, shard: int) -> Version | None:
        """Size and tag; None: there was no such shard."""
        size = int(self._sizes.array[shard])
        return None if size < 0 else Version(size, self._tags[shard])

    def index(self, shard: int, url: str) -> _Index | None:
        """The index of a shard; None: there was no such shard then."""
        size, place = int(self._sizes.array[shard]), int(self._places.array[shard])
        return (
            None
            if size < 0
            else _Index(
                url, size, self._rows.array[place * self._length : (place + 1) * self._length].data
            )
        )


def shards_of(store: Store, name: str, layout: Layout) -> Shards:
    """The shards of an array.

    Raises:
        DataNotFoundError, AccessError, RemoteError: see `RemoteFiles.learn`.
    """
    shards = Shards(ArrayFiles(store, name, layout), layout)
    if not store.reads_whole:
        return shards
    return Shards(
        shards.whole,
        layout,
        _cached(shards, store.path_of(key_of(name, V3_NODE)), cast(RemoteFiles, store.files)),
    )


def _cached(shards: Shards, url: str, files: RemoteFiles) -> CachedShards | None:
    """What is cached of the shards, or is to be found out now."""
    is_small = (
        shards.whole.count <= _MADE and 16 * shards.whole.count * shards.chunks_each <= _INDEX_BYTES
    )
    learn_indexed(files, [url], INDEX)
    arrays = found_index(files, url, INDEX)
    if arrays is None and not is_small:
        return None
    urls = shards.whole.urls(range(shards.whole.count))
    cached = CachedShards(made_index(files, url, INDEX) if arrays is None else arrays, url, files)
    if arrays is not None and not cached.fits(urls, shards.chunks_each, files):
        if not is_small:
            return None
        cached = CachedShards(made_index(files, url, INDEX), url, files)
    path = kept_index(files, url, INDEX).path
    for shard, url_of_shard in enumerate(urls):
        version = cached.version(shard)
        if version is not None and cached.has_versions:
            files.assume(url_of_shard, version, path)
        elif version is not None:
            files.expect(url_of_shard, version.size)
    return cached


def _make(files: RemoteFiles, url: str) -> Arrays:
    store = ZarrUrl("".join(url.rsplit(f"/{V3_NODE}", 1)), files)
    try:
        layout = layout_of(store.metadata("") or {})
    except UnknownLayout as why:
        raise FormatError(
            f"{redact(url)} is no array of shards whose layout is known: {why}"
        ) from None
    shards, indices = Shards(ArrayFiles(store, "", layout), layout), list[_Index | None]()
    for start in range(0, shards.whole.count, _TOGETHER):
        numbers = range(start, min(start + _TOGETHER, shards.whole.count))
        try:
            indices += shards.indices(numbers)
        except FormatError:  # of the way, perhaps
            with files.bypassing_cache():
                indices += [_if_sound(shards, shard) for shard in numbers]
    tags = [None if index is None else files.version(index.path).tag for index in indices]
    sizes = np.array([-1 if index is None else index.size for index in indices], np.int64)
    rows = [
        np.empty(0, np.int64),
        *(np.frombuffer(index.rows, np.int64) for index in indices if index is not None),
    ]
    about = json.dumps({"of": [redact(url), files.place], "tags": tags}).encode()
    return [sizes, np.concatenate(rows), np.frombuffer(about, np.uint8)]


def _if_sound(shards: Shards, shard: int) -> _Index | None:
    try:
        return shards.indices([shard])[0]
    except FormatError:  # whoever reads samples of it is told so
        return None


INDEX = IndexKind("zarr-shards", 1, ("<i8", "<i8", "u1"), _make)
"""The shards of an array, by the URL of its metadata file: sizes [shards] (-1: never written), what
their indices say [shards that were written x chunks x 2], and their tags with the URL that these
are of; of damaged ones as if they had never been written, so that they are asked for when they are
needed.
"""


def indexed(store: Store) -> Iterable[str]:
    """The URLs for which `INDEX` can be made: those of the metadata files of arrays with shards."""
    for name in store.array_names():
        with contextlib.suppress(UnknownLayout):
            if layout_of(store.metadata(name) or {}).index_at is not None:
                yield store.path_of(key_of(name, V3_NODE))
