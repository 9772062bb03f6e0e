"""By which path is a Zarr array read?

Its chunks straight from their files, where its metadata say nothing but what is known here: a regular grid, the codecs of
`headrace.storage.codecs`, perhaps shards. Everything else goes through zarr-python. `Chunks.how` says which, and why.

The layouts are those of the Zarr specifications, versions 2 and 3, and of its sharding codec (ZEP 2).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.memory.lru import LRUCache
from headrace.storage.chunks import Chunks, DirectChunks, Grid, LibraryChunks
from headrace.storage.codecs import GZIP, ZLIB, Blosc, Codec, Crc32c, Inflate, Pipeline, Unshuffle, Zstd
from headrace.storage.handles import WorkerFiles
from headrace.storage.paths import redact
from headrace.storage.stretches import Stretch, fill
from headrace.storage.zarr_files import ZarrFolder, ZarrZip

_KINDS = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32", "float64"]
_KINDS += ["complex64", "complex128"]
_INDEX_BYTES = 64 << 20  # of the shards' indices that a process holds
_NOWHERE = (1 << 64) - 1


class _Unknown(Exception):
    """Why an array can't be read directly."""


class Layout(NamedTuple):
    """What the metadata say of an array."""

    shape: tuple[int, ...]
    files: tuple[int, ...]
    """Extents of what lies in one file: a chunk, or a shard."""
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any
    order: str
    codecs: tuple[Codec, ...]
    prefix: str
    """Of the names of files: "c" or ""."""
    separator: str
    index_at: str | None
    """Where a shard's index lies, "start" or "end"; None: there are no shards."""


def layout_of(said: dict[str, Any]) -> Layout:
    """The layout that metadata describe.

    Raises:
        _Unknown: there is something in them that is not known here.
    """
    try:
        return _layout_3(said) if said.get("zarr_format") == 3 else _layout_2(said)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _Unknown(f"its metadata are unusual ({type(error).__name__}: {error})") from error


def _layout_3(said: dict[str, Any]) -> Layout:
    known = {"zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs", "attributes"}
    unknown = [key for key in said if key not in known | {"dimension_names", "storage_transformers"}]
    if unknown or said.get("storage_transformers"):
        raise _Unknown(f"its metadata have {', '.join(unknown) or 'storage_transformers'}")
    kind, grid, keys = said["data_type"], said["chunk_grid"], said["chunk_key_encoding"]
    if kind not in _KINDS:
        raise _Unknown(f"data type {kind!r}")
    if grid["name"] != "regular":
        raise _Unknown(f"chunk grid {grid['name']!r}")
    if keys["name"] not in ("default", "v2"):
        raise _Unknown(f"chunk keys {keys['name']!r}")
    separator = keys.get("configuration", {}).get("separator", "/" if keys["name"] == "default" else ".")
    shape, files = _extents(said["shape"], least=0), _extents(grid["configuration"]["chunk_shape"])
    codecs, chunks, index_at = said["codecs"], files, None
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        options = codecs[0]["configuration"]
        codecs, chunks, index_at = options["codecs"], _extents(options["chunk_shape"]), options.get("index_location", "end")
        if [codec["name"] for codec in options["index_codecs"]] != ["bytes", "crc32c"] or _endian(options["index_codecs"][0]) != "<":
            raise _Unknown("a shard index with other codecs than [bytes, crc32c]")
        if index_at not in ("start", "end") or len(chunks) != len(files) or any(f % c for f, c in zip(files, chunks, strict=True)):
            raise _Unknown("shards that are not made of whole chunks")
    dtype = np.dtype(kind)
    order, endian, steps = _codecs_3(codecs, len(shape))
    value = _fill(said["fill_value"], dtype)
    prefix = "c" if keys["name"] == "default" else ""
    return Layout(shape, files, chunks, dtype.newbyteorder(endian), value, order, tuple(steps), prefix, separator, index_at)


def _layout_2(said: dict[str, Any]) -> Layout:
    if said.get("zarr_format") != 2:
        raise _Unknown(f"zarr_format {said.get('zarr_format')!r}")
    if not isinstance(said["dtype"], str) or np.dtype(said["dtype"]).kind not in "biufc":
        raise _Unknown(f"data type {said['dtype']!r}")
    dtype, steps = np.dtype(said["dtype"]), list[Codec]()
    for codec in said.get("filters") or []:
        if codec["id"] != "shuffle":
            raise _Unknown(f"filter {codec['id']!r}")
        steps.append(Unshuffle(int(codec.get("elementsize", 4))))
    compressor = said.get("compressor")
    if compressor is not None:
        known = {"zlib": Inflate(ZLIB), "gzip": Inflate(GZIP), "zstd": Zstd(), "blosc": Blosc()}
        if compressor["id"] not in known:
            raise _Unknown(f"compressor {compressor['id']!r}")
        steps.append(known[compressor["id"]])
    if said["order"] not in ("C", "F"):
        raise _Unknown(f"order {said['order']!r}")
    chunks, separator = _extents(said["chunks"]), said.get("dimension_separator", ".")
    value = np.zeros((), dtype)[()] if said["fill_value"] is None else _fill(said["fill_value"], dtype)
    return Layout(_extents(said["shape"], least=0), chunks, chunks, dtype, value, said["order"], tuple(steps), "", separator, None)


def _extents(given: Sequence[int], least: int = 1) -> tuple[int, ...]:
    if any(type(extent) is not int or extent < least for extent in given):
        raise ValueError(f"extents {given!r}")
    return tuple(given)


def _endian(codec: dict[str, Any]) -> str:
    return {"little": "<", "big": ">", None: "="}[codec.get("configuration", {}).get("endian")]


def _codecs_3(codecs: Sequence[dict[str, Any]], axes: int) -> tuple[str, str, list[Codec]]:
    """Order and byte order of the elements, and the codecs of the bytes."""
    rest, order = list(codecs), "C"
    if rest and rest[0]["name"] == "transpose":
        axis_order = rest.pop(0)["configuration"]["order"]
        if axis_order not in (list(range(axes)), list(range(axes))[::-1]):
            raise _Unknown(f"transposed to {axis_order!r}")
        order = "C" if axis_order == list(range(axes)) else "F"
    if not rest or rest[0]["name"] != "bytes":
        raise _Unknown(f"codec {rest[0]['name']!r}" if rest else "no codec that makes bytes")
    known = {"gzip": Inflate(GZIP), "zstd": Zstd(), "blosc": Blosc(), "crc32c": Crc32c()}
    names = [codec["name"] for codec in rest[1:]]
    for name in names:
        if name not in known:
            raise _Unknown(f"codec {name!r}")
    steps = [known[name] for name in names]
    try:
        Pipeline(steps)
    except ValueError as error:
        raise _Unknown(str(error)) from error
    return order, _endian(rest[0]), steps


def _fill(said: Any, dtype: np.dtype[Any]) -> Any:
    """The fill value as a scalar of that dtype.

    Raises:
        ValueError: it is none.
    """
    if dtype.kind == "c":
        if not isinstance(said, (list, tuple)):
            return dtype.type(said)
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return dtype.type(complex(_fill(said[0], part), _fill(said[1], part)))
    if isinstance(said, str):
        if said.startswith("0x"):
            return np.array(int(said, 16), f"u{dtype.itemsize}").view(dtype.newbyteorder("="))[()]
        if dtype.kind != "f" or said not in ("NaN", "Infinity", "-Infinity"):
            raise ValueError(f"fill value {said!r}")
        return dtype.type(float(said.replace("Infinity", "inf")))
    if not isinstance(said, (bool, int, float)):
        raise ValueError(f"fill value {said!r}")
    return np.array(said).astype(dtype.newbyteorder("="))[()] if dtype.kind in "fb" else np.array(said, dtype.newbyteorder("="))[()]


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
        self._store, self._separator = store, layout.separator
        self._counts = Grid(layout.shape, layout.files).counts
        first = "/".join(part for part in (name, layout.prefix) if part)
        self._first = first + (layout.separator if layout.prefix else "/") if first else ""

    def __call__(self, numbers: Sequence[int]) -> list[Stretch | None]:
        places = np.stack(np.unravel_index(np.asarray(numbers, np.int64), self._counts), axis=1).tolist()
        return self._store.stretches([self._first + self._separator.join(map(str, place)) for place in places])


class _Shards:
    """Where the chunks in shards lie, by the shards' indices, of which each process holds those it used last."""

    def __init__(self, whole: _Files, layout: Layout, files: WorkerFiles[int]) -> None:
        self._whole, self._files, self._at = whole, files, layout.index_at
        self._shards, self._chunks = Grid(layout.shape, layout.files), Grid(layout.shape, layout.chunks)
        self._inside = tuple(f // c for f, c in zip(layout.files, layout.chunks, strict=True))
        self._count = math.prod(self._inside)
        self._known: LRUCache[tuple[str, int, int, int], npt.NDArray[np.int64]] = LRUCache(_INDEX_BYTES)

    def __call__(self, numbers: Sequence[int]) -> list[Stretch | None]:
        places = np.stack(np.unravel_index(np.asarray(numbers, np.int64), self._chunks.counts))
        inside = np.array(self._inside)[:, None]
        shards = np.ravel_multi_index(tuple(places // inside), self._shards.counts)
        within = np.ravel_multi_index(tuple(places % inside), self._inside)
        distinct, which = np.unique(shards, return_inverse=True)
        wholes = self._whole(distinct.tolist())
        indices = [None if whole is None else self._index(whole) for whole in wholes]
        found: list[Stretch | None] = []
        for shard, chunk in zip(which.tolist(), within.tolist(), strict=True):
            whole, index = wholes[shard], indices[shard]
            if whole is None or index is None:
                found.append(None)
                continue
            offset, nbytes = index[chunk].tolist()
            found.append(None if offset < 0 else Stretch(whole.path, whole.offset + offset, nbytes))
        return found

    def _index(self, whole: Stretch) -> npt.NDArray[np.int64]:
        """[chunks, 2] offset in the shard and bytes; -1 where nothing was written."""
        nbytes = 16 * self._count + 4
        with self._files.reading(whole.path) as fd:
            status = os.fstat(fd)
            key = (whole.path, whole.offset, status.st_size, status.st_mtime_ns)
            known = self._known.get(key)
            if known is not None:
                return known
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
        index = np.where(missing[:, None], -1, raw.astype(np.int64))
        self._known.put(key, index)
        return index


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
        with self._opened.reading(self._path) as root:
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
    except _Unknown as reason:
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
    shape = tuple(array.shape)
    return LibraryChunks(Grid(shape, tuple(array.chunks)), array.dtype, _Library(opened, path, name), f"zarr-python: {why}")
