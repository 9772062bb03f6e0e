"""By which path is a Zarr array read?

Its chunks straight from their files, where its metadata say nothing but what is known here: a regular grid, the codecs of
`headrace.storage.codecs`, perhaps shards. Everything else goes through zarr-python. `Chunks.how` says which, and why.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.storage.chunks import Chunks, DirectChunks, Grid, LibraryChunks
from headrace.storage.codecs import Crc32c, Pipeline
from headrace.storage.foreign import asking
from headrace.storage.handles import WorkerFiles
from headrace.storage.paths import redact
from headrace.storage.stretches import Places, Stretch, fill
from headrace.storage.zarr_files import ZarrFolder, ZarrZip
from headrace.storage.zarr_layout import Layout, UnknownLayout, layout_of

_INDEX_BYTES = 64 << 20  # of the shards' indices that a process holds
_COUNTABLE = (1 << 63) - 1
_NOWHERE = (1 << 64) - 1


class _Where:
    """Names a chunk for messages."""

    def __init__(self, path: str, name: str, grid: Grid) -> None:
        self._path, self._name, self._grid = path, name, grid

    def __call__(self, number: int) -> str:
        of = f" of {self._name!r}" if self._name else ""
        return f"{redact(self._path)}, chunk {self._grid.place(number)}{of}"


class _Files:
    """Where the files of an array lie, numbered as the grid of chunks or shards."""

    def __init__(self, store: ZarrFolder | ZarrZip, name: str, layout: Layout) -> None:
        self._store, self._separator, self._is_sharded = store, layout.separator, layout.index_at is not None
        self._counts = Grid(layout.shape, layout.files).counts
        first = "/".join(part for part in (name, layout.prefix) if part)
        self._first = first + (layout.separator if layout.prefix else "/") if first else ""

    def __call__(self, numbers: Sequence[int]) -> list[Stretch | None]:
        places = np.stack(np.unravel_index(np.asarray(numbers, np.int64), self._counts), axis=1).tolist()
        keys = [self._first + self._separator.join(map(str, place)) for place in places]
        return self._store.stretches(keys, checked=not self._is_sharded)  # of shards parts are read, which have checksums of their own


class _Index(NamedTuple):
    """Where the chunks of a shard lie.

    Attributes:
        path: of the file.
        size, mtime: of the file: another one has another index.
        rows: for each chunk its offset in the file and its bytes, one after the other; -1 where nothing was written. A memoryview gives
            single numbers faster than an array does.
    """

    path: str
    size: int
    mtime: int
    rows: memoryview


class _Shards:
    """Where the chunks in shards lie, by the shards' indices, of which each process holds those it used last."""

    def __init__(self, whole: _Files, layout: Layout, files: WorkerFiles[int]) -> None:
        self._whole, self._files, self._at = whole, files, layout.index_at
        self._shards, self._chunks = Grid(layout.shape, layout.files), Grid(layout.shape, layout.chunks)
        self._inside = tuple(f // c for f, c in zip(layout.files, layout.chunks, strict=True))
        self._count = math.prod(self._inside)
        self._known: dict[int, _Index] = {}
        self._most = max(16, _INDEX_BYTES // (16 * self._count))

    def __call__(self, numbers: Sequence[int]) -> list[Stretch | None]:
        return self.places(np.asarray(numbers, np.int64)).stretches()

    def places(self, numbers: npt.NDArray[np.int64]) -> Places:
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
        offsets, nbytes = list[int](), list[int]()
        for shard, chunk in zip(which, within.tolist(), strict=True):
            row = rows[shard]
            offsets.append(-1 if row is None else row[2 * chunk])
            nbytes.append(0 if row is None else row[2 * chunk + 1])
        paths = ["" if index is None else index.path for index in indices]
        return Places(paths, np.array(which, np.int64), np.array(offsets, np.int64), np.array(nbytes, np.int64))

    def _indices(self, shards: Sequence[int]) -> list[_Index | None]:
        """The index of each shard, also of one that has been written anew; None: there is no such shard."""
        found = [self._known.get(shard) for shard in shards]
        new = [at for at, index in enumerate(found) if index is None]
        wholes = dict(zip(new, self._whole([shards[at] for at in new]), strict=True)) if new else {}
        there = [at for at, index in enumerate(found) if index is not None or wholes[at] is not None] if new else range(len(shards))
        paths = [(found[at] or wholes[at]).path for at in there]  # type: ignore[union-attr]
        with contextlib.closing(self._files.reading_each(paths)) as files:
            for start, fds in files:
                for at, fd in zip(there[start:], fds, strict=False):
                    index, status = found[at], os.fstat(fd)
                    if index is None or index.mtime != status.st_mtime_ns or index.size != status.st_size:
                        whole = self._whole([shards[at]])[0] if index is not None else wholes[at]
                        found[at] = None if whole is None else self._learn(shards[at], self._index(fd, whole, status))
        return found

    def _learn(self, shard: int, index: _Index) -> _Index:
        if len(self._known) >= self._most:
            self._known = {}  # they are read again soon enough; keeping count of their use would cost more
        self._known[shard] = index
        return index

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}

    def _index(self, fd: int, whole: Stretch, status: os.stat_result) -> _Index:
        nbytes = 16 * self._count + 4
        size = min(whole.nbytes, status.st_size - whole.offset)
        if size < nbytes:
            raise FormatError(f"{redact(whole.path)} is cut short: {size:,} bytes have no room for the index of a shard of {nbytes:,}")
        data = np.empty(nbytes, np.uint8)
        fill(fd, [memoryview(data)], whole.offset + (0 if self._at == "start" else size - nbytes), whole.path)  # type: ignore[arg-type]
        try:
            raw = np.frombuffer(Crc32c().decode(data, nbytes - 4), "<u8").reshape(-1, 2)
        except FormatError as error:
            raise FormatError(f"{redact(whole.path)}, the index of the shard: {error}") from None
        missing = (raw == _NOWHERE).all(axis=1)
        beyond = ~missing & ((raw[:, 0] > size) | (raw[:, 1] > size) | (raw[:, 0] + raw[:, 1] > size))
        if beyond.any():
            raise FormatError(f"{redact(whole.path)}: chunk {int(np.flatnonzero(beyond)[0])} of the shard lies beyond its {size:,} bytes")
        rows = np.where(missing[:, None], -1, raw.astype(np.int64) + np.array([whole.offset, 0]))
        return _Index(whole.path, status.st_size, status.st_mtime_ns, np.ascontiguousarray(rows, np.int64).reshape(-1).data)


class _Required:
    """The same, and a chunk that was never written is an error."""

    def __init__(self, stretches: Callable[[Sequence[int]], list[Stretch | None]], where: _Where) -> None:
        self._stretches, self._where = stretches, where

    def __call__(self, numbers: Sequence[int]) -> list[Stretch | None]:
        found = self._stretches(numbers)
        for number, stretch in zip(numbers, found, strict=True):
            if stretch is None:
                raise FormatError(f"{self._where(number)} is missing, and missing='error'")
        return found


class _Library:
    """Reads parts of an array through zarr-python."""

    def __init__(self, opened: WorkerFiles[Any], path: str, name: str) -> None:
        self._opened, self._path, self._name = opened, path, name

    def __call__(self, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        with self._opened.reading(self._path) as root, asking("zarr-python", f"{redact(self._path)}: {self._name!r}"):
            array = root[self._name] if self._name else root
            return np.asarray(array[part])


def chunks_of(
    store: ZarrFolder | ZarrZip,
    name: str,
    said: dict[str, Any],
    files: WorkerFiles[int],
    library: Callable[[str], Chunks],
    *,
    direct: bool = True,
    missing: str = "fill",
) -> Chunks:
    """The chunks of an array.

    Args:
        store, name: of the array.
        said: its metadata.
        files: what each process opens to read from.
        library: a reason -> its chunks as zarr-python reads them.
        direct: False: through zarr-python in any case.
        missing: "fill" or "error": what becomes of a chunk that was never written.
    """
    if not direct:
        return library("direct=False")
    if not hasattr(os, "preadv"):
        return library("this system has no preadv")
    try:
        layout = layout_of(said)
    except UnknownLayout as reason:
        return library(str(reason))
    if isinstance(store, ZarrZip) and not store.is_stored:
        return library("a zip file that is compressed itself")
    if not layout.shape or 0 in layout.shape:
        return library("it has no elements")
    grid = Grid(layout.shape, layout.chunks)
    where = _Where(store.path, name, grid)
    whole = _Files(store, name, layout)
    found: Callable[[Sequence[int]], list[Stretch | None]] = whole if layout.index_at is None else _Shards(whole, layout, files)
    if missing == "error":
        found = _Required(found, where)
    pipeline, sharded = Pipeline(layout.codecs), " out of shards" if layout.index_at else ""
    how = (f"pread + {pipeline}" if pipeline else "pread") + sharded
    return DirectChunks(grid, layout.dtype, found, pipeline, files, fill=layout.fill, order=layout.order, where=where, how=how)


def library_chunks(array: Any, opened: WorkerFiles[Any], path: str, name: str, why: str) -> LibraryChunks:
    """The chunks of an array that zarr-python has opened."""
    shape, chunks = tuple(array.shape), tuple(array.chunks)
    if 0 not in shape and (min(chunks, default=1) < 1 or math.prod(chunks) * array.dtype.itemsize > _COUNTABLE):
        raise FormatError(f"{redact(path)}: {name!r} has chunks of {list(chunks)} elements: its metadata are damaged")
    return LibraryChunks(Grid(shape, chunks), array.dtype, _Library(opened, path, name), f"zarr-python: {why}")
