"""The index of a Zarr array: where its files lie, and the chunks inside of shards.

NOTE [ shards that are far away ]

* A shard's version must be asked for, and its index read, before its chunks can be: two round trips, for all shards that are needed
  together. An array of not too many shards has that done when it is first opened, and it is kept (see `headrace.io.index`): an index
  of shards holds, for each, its size, its version and its index.
* When the store is opened again, some shards are compared with what was kept, and whatever is read of any is of the version that was
  kept: a shard that was replaced is an error, and what was kept is removed, so that the next start makes it anew.
* An index that was written elsewhere (`headrace.write_index`) says no versions: those are asked for when a shard is first read. One of
  another size than the index says is an error.
* Of an array of very many shards without an index, those are asked that are needed: in mode streaming, of the next batches together.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.array_file import Arrays
from headrace.io.files import Files, Version
from headrace.io.index import IndexKind, found_index, is_unknown, kept_index, made_index
from headrace.io.local.files import LocalFiles, fill
from headrace.io.paths import redact
from headrace.io.ranges import WHOLE, ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.chunks import ChunkIndex, Grid
from headrace.storage.arrays.codecs import Crc32c
from headrace.storage.zarr.keys import V3_NODE
from headrace.storage.zarr.layout import Layout, UnknownLayout, layout_of
from headrace.storage.zarr.local import ZarrFolder
from headrace.storage.zarr.metadata import array_names, metadata_of
from headrace.storage.zarr.stores import Store, ZarrUrl, ZarrZipUrl

_INDEX_BYTES = 64 << 20  # of the shards' indices that a process holds
_NOWHERE = (1 << 64) - 1
_MADE, _TOGETHER = 4096, 512  # shards whose indices are read at the opening; and at once
_LOOKED_AT = 16  # shards that are compared with what is kept of them


class ArrayFiles(ChunkIndex):
    """Where the files of an array lie, numbered as the grid of chunks or shards.

    Args:
        store, name, layout: of the array.
        whole: of files below a URL: say nothing of their sizes, which would have to be asked for, and nothing of whether they are there.
    """

    def __init__(self, store: Store, name: str, layout: Layout, whole: bool = False) -> None:
        self.store, self.name, self._separator, self._is_sharded = store, name, layout.separator, layout.index_at is not None
        self._counts = Grid(layout.shape, layout.files).counts
        first = "/".join(part for part in (name, layout.prefix) if part)
        self._first = first + (layout.separator if layout.prefix else "/") if first else ""
        self.whole_files = whole
        if isinstance(store, ZarrFolder) and 0 < math.prod(self._counts) < _NOWHERE >> 1:
            store.note_last(self.keys([math.prod(self._counts) - 1])[0])

    def keys(self, numbers: IntArray | Sequence[int]) -> list[str]:
        """Of files in the store."""
        places = np.stack(np.unravel_index(np.asarray(numbers, np.int64), self._counts), axis=1).tolist()
        return [self._first + self._separator.join(map(str, place)) for place in places]

    def urls(self, numbers: IntArray | Sequence[int]) -> list[str]:
        """Of files below a URL."""
        assert isinstance(self.store, ZarrUrl)
        return [self.store.place(key) for key in self.keys(numbers)]

    def ranges(self, numbers: IntArray | Sequence[int]) -> ByteRanges:
        if self.whole_files:
            return ByteRanges.of((url, 0, WHOLE) for url in self.urls(numbers))
        self.store.check_version(self.name)
        return self.store.ranges(self.keys(numbers), checked=not self._is_sharded)  # parts of shards have checksums of their own

    def check(self, number: int) -> None:
        if not isinstance(self.store, ZarrUrl | ZarrZipUrl):
            self.ranges([number])


_File = tuple[str, int, int]
"""A file, or a part of a zip file: path, first byte and end."""


class _Index(NamedTuple):
    """Where the chunks of a shard lie.

    Attributes:
        path: of the file.
        size: of the shard.
        rows: for each chunk its offset in the file and its bytes, one after the other; -1 where nothing was written. A memoryview gives
            single numbers faster than an array does.
    """

    path: str
    size: int
    rows: memoryview


class Shards(ChunkIndex):
    """Where the chunks in shards lie, by the shards' indices, of which each process holds those it used last."""

    def __init__(self, whole: ArrayFiles, layout: Layout) -> None:
        self._whole, self._at = whole, layout.index_at
        self._shards, self._chunks = Grid(layout.shape, layout.files), Grid(layout.shape, layout.chunks)
        self._inside = tuple(f // c for f, c in zip(layout.files, layout.chunks, strict=True))
        self._count = math.prod(self._inside)
        self._index_bytes = 16 * self._count + 4
        self._known: dict[int, _Index | None] = {}
        self._most = max(16, _INDEX_BYTES // (16 * self._count))

    def ranges(self, numbers: IntArray) -> ByteRanges:
        if self._chunks.inner == 1:
            shards, within = np.divmod(numbers, self._inside[0])
            within *= self._count // self._inside[0]
        else:
            places = np.stack(np.unravel_index(numbers, self._chunks.counts))
            inside = np.array(self._inside)[:, None]
            shards = np.ravel_multi_index(tuple(places // inside), self._shards.counts)
            within = np.ravel_multi_index(tuple(places % inside), self._inside)
        known: dict[int, int] = {}
        which = [known.setdefault(shard, len(known)) for shard in shards.tolist()]
        indices = self._indices(list(known))
        rows = [None if index is None else index.rows for index in indices]
        starts, sizes = list[int](), list[int]()
        for shard, chunk in zip(which, within.tolist(), strict=True):
            row = rows[shard]
            starts.append(-1 if row is None else row[2 * chunk])
            sizes.append(0 if row is None else row[2 * chunk + 1])
        paths = ["" if index is None else index.path for index in indices]
        start, nbytes = np.array([starts, sizes], np.int64)
        return ByteRanges(paths, np.array(which, np.int64), start, np.where(start < 0, -1, start + nbytes))

    @abstractmethod
    def _indices(self, shards: Sequence[int]) -> list[_Index | None]:
        """The index of each shard; None: there is no such shard."""

    def _files_of(self, shards: Sequence[int]) -> list[_File | None]:
        """Where shards lie; None: there is no such shard."""
        return [None if start < 0 else (path, start, stop) for path, start, stop in self._whole.ranges(shards).each()]

    def _learn(self, shard: int, index: _Index | None) -> _Index | None:
        if len(self._known) >= self._most:
            self._known = {}  # they are read again soon enough; keeping count of their use would cost more
        self._known[shard] = index
        return index

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}

    def _begin(self, whole: _File) -> int:
        """Where the index of a shard lies in its file.

        Raises:
            FormatError: the shard is too short for one.
        """
        path, begin, size = whole[0], whole[1], whole[2] - whole[1]
        if size < self._index_bytes:
            raise FormatError(f"{redact(path)} is cut short: {size:,} bytes have no room for the index of a shard of {self._index_bytes:,}")
        return begin + (0 if self._at == "start" else size - self._index_bytes)

    def _rows(self, data: Any, whole: _File) -> memoryview:
        """What the index of a shard says.

        Raises:
            FormatError: it is damaged.
        """
        try:
            raw = np.frombuffer(Crc32c().decode(data, self._index_bytes - 4), "<u8").reshape(-1, 2)
        except FormatError as error:
            raise FormatError(f"{redact(whole[0])}, the index of the shard: {error}") from None
        size = whole[2] - whole[1]
        missing = (raw == _NOWHERE).all(axis=1)
        beyond = ~missing & ((raw[:, 0] > size) | (raw[:, 1] > size) | (raw[:, 0] + raw[:, 1] > size))
        if beyond.any():
            raise FormatError(f"{redact(whole[0])}: chunk {int(np.flatnonzero(beyond)[0])} of the shard lies beyond its {size:,} bytes")
        rows = np.where(missing[:, None], -1, raw.astype(np.int64) + np.array([whole[1], 0]))
        return np.ascontiguousarray(rows, np.int64).reshape(-1).data


class NearShards(Shards):
    """Shards on this machine's disk."""

    def __init__(self, whole: ArrayFiles, layout: Layout, files: LocalFiles) -> None:
        super().__init__(whole, layout)
        self._files = files

    def _indices(self, shards: Sequence[int]) -> list[_Index | None]:
        store = self._whole.store
        store.check_version(self._whole.name)
        found = [self._known.get(shard) for shard in shards]
        new = [at for at, index in enumerate(found) if index is None]
        wholes = dict(zip(new, self._files_of([shards[at] for at in new]), strict=True)) if new else {}
        there = [at for at, index in enumerate(found) if index is not None or wholes[at] is not None] if new else range(len(shards))
        paths = [(found[at] or wholes[at])[0] for at in there]  # type: ignore[index]
        with contextlib.closing(self._files.descriptors.reading_each(paths)) as files:
            for start, fds in files:
                for at, fd in zip(there[start:], fds, strict=False):
                    whole = wholes.get(at)
                    if isinstance(store, ZarrFolder):  # a zip file was looked at already
                        store.check_file(os.fstat(fd), (found[at] or whole)[0])  # type: ignore[index]
                    if whole is not None:
                        found[at] = self._learn(shards[at], self._index(fd, whole))
        return found

    def _index(self, fd: int, whole: _File) -> _Index:
        begin, data = self._begin(whole), np.empty(self._index_bytes, np.uint8)
        fill(fd, [memoryview(data)], begin, whole[0])  # type: ignore[arg-type]
        return _Index(whole[0], whole[2] - whole[1], self._rows(data, whole))

    def check(self, number: int) -> None:
        self.ranges(np.array([number]))


class FarShards(Shards):
    """Shards that are far away; see NOTE [ shards that are far away ].

    Args:
        whole, layout: of the array.
        files: their server's.
        kept: what is known of them already.
    """

    def __init__(self, whole: ArrayFiles, layout: Layout, files: RemoteFiles, kept: KeptShards | None = None) -> None:
        super().__init__(whole, layout)
        self._files, self._kept = files, kept

    def _indices(self, shards: Sequence[int]) -> list[_Index | None]:
        known, kept = self._known, self._kept
        found = {shard: known[shard] for shard in shards if shard in known}
        new = [shard for shard in shards if shard not in found]
        if new and kept is not None:
            for shard, url in zip(new, self._whole.urls(new), strict=True):
                index = kept.index(shard, url)
                if index is not None:  # one that was missing, or damaged, may have been written since
                    found[shard] = self._learn(shard, index)
            new = [shard for shard in new if shard not in found]
        wholes = dict(zip(new, self._files_of(new), strict=True)) if new else {}
        found.update((shard, self._learn(shard, None)) for shard, whole in wholes.items() if whole is None)
        found.update(self._asked([(shard, whole) for shard, whole in wholes.items() if whole is not None]))
        return [found[shard] for shard in shards]

    def _asked(self, wholes: Sequence[tuple[int, _File]]) -> dict[int, _Index]:
        """The indices of shards, read together; all that are sound are known from then on, also where others are not."""
        found, ranges, failure = dict[int, _Index](), list[_File](), None
        there = list[tuple[int, _File]]()
        for shard, whole in wholes:
            try:
                begin = self._begin(whole)
            except FormatError as error:
                failure = failure or error
                continue
            there.append((shard, whole))
            ranges.append((whole[0], begin, begin + self._index_bytes))
        for (shard, whole), data in zip(there, self._files.read(ByteRanges.of(ranges)), strict=True):
            try:
                found[shard] = _Index(whole[0], whole[2] - whole[1], self._rows(data, whole))
                self._learn(shard, found[shard])
            except FormatError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return found

    @property
    def needs_io(self) -> bool:  # type: ignore[override]
        """True if shards are asked before it is known where their chunks lie."""
        return self._kept is None

    def all_of_them(self) -> Arrays:
        """Size (-1: there is none, or it is damaged), and index, of every shard."""
        count, sizes, rows = math.prod(self._shards.counts), list[int](), list[npt.NDArray[np.int64]]()
        for start in range(0, count, _TOGETHER):
            numbers = range(start, min(start + _TOGETHER, count))
            try:
                found = self._indices(numbers)
            except FormatError:  # of the way, perhaps
                with self._files.bypassing_cache():
                    found = [self._if_sound(shard) for shard in numbers]
            sizes += [-1 if index is None else index.size for index in found]
            rows += [np.frombuffer(index.rows, np.int64) for index in found if index is not None]
        return [np.array(sizes, np.int64), np.concatenate(rows) if rows else np.empty(0, np.int64)]

    def _if_sound(self, shard: int) -> _Index | None:
        try:
            return self._indices([shard])[0]
        except FormatError:  # whoever reads samples of it is told so
            return None

    def urls(self) -> list[str]:
        """Those of all shards."""
        return self._whole.urls(range(math.prod(self._shards.counts)))


class KeptShards:
    """What was kept of the shards of an array.

    Args:
        arrays: as `INDEX` says.
        url: of the array's metadata file.
        files: its server's.
    """

    def __init__(self, arrays: Arrays, url: str, files: RemoteFiles) -> None:
        sizes, rows, said = arrays
        about = json.loads(said.tobytes())
        self.has_versions: bool = about["of"] == _of(url, files) and all(
            tag for tag, size in zip(about["tags"], sizes, strict=True) if size >= 0
        )
        self._tags: list[str | None] = about["tags"]
        self._sizes, self._rows = SharedArray(sizes), SharedArray(rows)
        self._places = SharedArray(np.cumsum(sizes >= 0) - 1)
        self._length = len(rows) // max(1, int((sizes >= 0).sum()))

    def fits(self, urls: Sequence[str], count: int) -> bool:
        """Is it of so many shards, of so many chunks?"""
        there = int((self._sizes.array >= 0).sum())
        return len(self._sizes) == len(self._tags) == len(urls) and len(self._rows) == there * 2 * count

    def version(self, shard: int) -> Version | None:
        """Size and tag; None: there was no such shard."""
        size = int(self._sizes.array[shard])
        return None if size < 0 else Version(size, self._tags[shard])

    def index(self, shard: int, url: str) -> _Index | None:
        """The index of a shard; None: there was no such shard then."""
        size, place = int(self._sizes.array[shard]), int(self._places.array[shard])
        if size < 0:
            return None
        return _Index(url, size, self._rows.array[place * self._length : (place + 1) * self._length].data)


def shards_of(store: Store, name: str, layout: Layout, files: Files) -> Shards:
    """The shards of an array.

    Raises:
        DataNotFoundError, AccessError, RemoteError: see `RemoteFiles.learn`.
    """
    whole = ArrayFiles(store, name, layout)
    if isinstance(files, LocalFiles):
        return NearShards(whole, layout, files)
    assert isinstance(files, RemoteFiles)
    kept = _kept_shards(store, name, layout, files) if isinstance(store, ZarrUrl) else None
    return FarShards(whole, layout, files, kept)


def _kept_shards(store: ZarrUrl, name: str, layout: Layout, files: RemoteFiles) -> KeptShards | None:
    """What is kept of the shards, or is to be found out now."""
    shards, count = math.prod(Grid(layout.shape, layout.files).counts), math.prod(layout.files) // math.prod(layout.chunks)
    is_small = shards <= _MADE and 16 * shards * count <= _INDEX_BYTES
    url = store.place(f"{name}/{V3_NODE}" if name else V3_NODE)
    files.learn([url], beside=lambda url: is_unknown(files, url, INDEX))
    arrays = found_index(files, url, INDEX)
    if arrays is None and not is_small:
        return None
    found = KeptShards(made_index(files, url, INDEX) if arrays is None else arrays, url, files)
    where = FarShards(ArrayFiles(store, name, layout), layout, files).urls()
    if arrays is not None and not (found.fits(where, count) and _still_holds(found, where, files)):
        if not is_small:
            return None
        found = KeptShards(made_index(files, url, INDEX), url, files)
    kept = kept_index(files, url, INDEX).path
    for shard, place in enumerate(where):
        version = found.version(shard)
        if version is not None and found.has_versions:
            files.assume(place, version, kept)
        elif version is not None:
            files.expect(place, version.size)
    return found


def _still_holds(found: KeptShards, urls: Sequence[str], files: RemoteFiles) -> bool:
    """Are some shards what was kept of them?"""
    if not found.has_versions:
        return True  # their sizes are compared when they are first read
    some = np.unique(np.linspace(0, len(urls) - 1, _LOOKED_AT).astype(np.int64)).tolist() if urls else []
    versions = files.find_versions([urls[shard] for shard in some], afresh=True)
    return all(version == found.version(shard) for shard, version in zip(some, versions, strict=True))


def _of(url: str, files: RemoteFiles) -> list[str]:
    return [redact(url), files.place]


def _make(files: RemoteFiles, url: str) -> Arrays:
    store = ZarrUrl("".join(url.rsplit(f"/{V3_NODE}", 1)), files)
    said = metadata_of(store, "") or {}
    try:
        layout = layout_of(said)
    except UnknownLayout as why:
        raise FormatError(f"{redact(url)} is no array of shards whose layout is known: {why}") from None
    shards = FarShards(ArrayFiles(store, "", layout), layout, files)
    sizes, rows = shards.all_of_them()
    urls = shards.urls()
    tags = [files.version(place).tag if size >= 0 else None for place, size in zip(urls, sizes.tolist(), strict=True)]
    about = json.dumps({"of": _of(url, files), "tags": tags}).encode()
    return [sizes, rows, np.frombuffer(about, np.uint8)]


INDEX = IndexKind("zarr-shards", 1, ("<i8", "<i8", "u1"), _make)
"""The shards of an array, by the URL of its metadata file: sizes [shards] (-1: never written), what their indices say [shards that were
written x chunks x 2], and their tags with the URL that these are of; of damaged ones as if they had never been written, so that they
are asked for when they are needed."""


def indexed(store: ZarrUrl) -> Iterable[str]:
    """The URLs for which `INDEX` can be made: those of the metadata files of arrays with shards."""
    for name in array_names(store):
        with contextlib.suppress(UnknownLayout):
            if layout_of(metadata_of(store, name) or {}).index_at is not None:
                yield store.place(f"{name}/{V3_NODE}" if name else V3_NODE)
