"""Parses metadata by zarr-python, which also reads arrays that are not read directly.

Imported where it is needed, since zarr-python takes its time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import zarr
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store as LibraryStore,
    SuffixByteRequest,
)
from zarr.codecs import BytesCodec, Crc32cCodec, TransposeCodec
from zarr.storage import MemoryStore, StorePath

from headrace.errors import FormatError, HeadraceError, one_line
from headrace.formats.arrays.chunks import COUNTABLE, shown_array
from headrace.formats.arrays.codecs import (
    BLOSC,
    CRC32C,
    GUNZIP,
    INFLATE,
    ZSTD,
    Codec,
    Pipeline,
    unshuffle,
)
from headrace.formats.zarr.shards import Layout
from headrace.formats.zarr.stores import OBJECT, Store
from headrace.io.files import Files
from headrace.io.library_errors import asking
from headrace.io.ranges import ByteRanges

_CODECS: dict[str, Codec] = {
    "zlib": INFLATE,
    "gzip": GUNZIP,
    "zstd": ZSTD,
    "blosc": BLOSC,
    "crc32c": CRC32C,
}


class UnknownLayout(Exception):
    """The reason why an array can't be read directly."""


def layout_of(metadata: dict[str, Any]) -> Layout:
    """The layout that metadata describe.

    Raises:
        UnknownLayout: there is something in them that is not known here, or to zarr-python.
    """
    try:
        if "chunk_grid" in metadata:
            grid = metadata["chunk_grid"]["name"]
            _check(grid == "regular", f"chunk grid {grid!r}")
        layout = _layout(zarr.Array.from_dict(StorePath(MemoryStore()), metadata))
    except UnknownLayout:
        raise
    except Exception as error:  # whatever zarr-python makes of metadata that it doesn't like
        raise UnknownLayout(
            f"its metadata are unusual ({type(error).__name__}: {one_line(error)})"
        ) from error
    extents = [*layout.shape, *layout.files, *layout.chunks]
    largest = max(math.prod(layout.files), math.prod(layout.chunks))
    is_countable = max(extents, default=0) <= COUNTABLE and largest * 16 <= COUNTABLE
    _check(is_countable and largest > 0, f"chunks of {list(layout.files)} elements")
    _check(len(layout.files) == len(layout.shape), f"chunks of {len(layout.files)} axes")
    _check(layout.dtype.kind in "biufc", f"data type {layout.dtype}")
    try:
        Pipeline(layout.codecs)
    except ValueError as error:
        raise UnknownLayout(str(error)) from error
    return layout


def _check(is_known: bool, what: str) -> None:
    """Raises an UnknownLayout if something is not known."""
    if not is_known:
        raise UnknownLayout(what)


def _layout(array: Any) -> Layout:
    metadata = array.metadata
    dtype = array.dtype
    fill = array.fill_value
    files = array.shards or array.chunks
    order = "C"
    index_at = None
    steps: list[Codec] = []
    if metadata.zarr_format == 2:
        order = array.order
        for codec in array.filters:
            _check(codec.codec_id == "shuffle", f"filter {codec.codec_id!r}")
            itemsize = codec.elementsize
            is_whole = itemsize >= 1 and not math.prod(files) * dtype.itemsize % itemsize
            _check(is_whole, f"shuffled by {itemsize} bytes")
            steps.append(unshuffle(itemsize))
        names = [codec.codec_id for codec in array.compressors]
        if fill is None:
            fill = np.zeros((), dtype)[()]
    else:
        axes = tuple(range(len(files)))
        for codec in array.filters:
            is_known = isinstance(codec, TransposeCodec) and len(array.filters) == 1
            _check(is_known, f"codec {type(codec).__name__}")
            if codec.order != axes:
                order = "F"
                _check(codec.order == axes[::-1], f"transposed to {codec.order!r}")
        serializer = array.serializer
        _check(isinstance(serializer, BytesCodec), f"codec {type(serializer).__name__}")
        endian = serializer.to_dict().get("configuration", {}).get("endian")
        if endian is not None:
            dtype = dtype.newbyteorder({"little": "<", "big": ">"}[endian])
        names = [codec.to_dict()["name"] for codec in array.compressors]
    if array.shards:
        shards = metadata.codecs[0]
        index_at = shards.to_dict()["configuration"]["index_location"]
        _check(
            shards.index_codecs == (BytesCodec(endian="little"), Crc32cCodec()),
            "a shard index with other codecs than [bytes, crc32c]",
        )
        is_whole = not any(f % c for f, c in zip(files, array.chunks, strict=True))
        _check(is_whole, "shards that are not made of whole chunks")
    for name in names:
        _check(name in _CODECS, f"codec {name!r}")
        steps.append(_CODECS[name])
    key = metadata.encode_chunk_key((0, 0))
    separator = key[-2]
    prefix = key.removesuffix(f"0{separator}0")
    _check(separator in "./" and prefix in ("", f"c{separator}"), f"chunk keys such as {key!r}")
    return Layout(
        array.shape,
        files,
        array.chunks,
        dtype,
        fill,
        order,
        tuple(steps),
        prefix,
        separator,
        index_at,
    )


def open_array(store: Store, name: str) -> Any:
    """An array as zarr-python opens it, alone: what else is in a store may be anything.

    Raises:
        FormatError: it can't be opened.
        HeadraceError: what reading the store raises.
    """
    where: Any = store.object if isinstance(store, ObjectStore) else _Requests(store)
    try:
        return zarr.open_array(where, path=name, mode="r")
    except HeadraceError:
        raise
    except Exception as error:  # whatever zarr-python makes of metadata that it doesn't like
        raise FormatError(
            f"{shown_array(store.path, name)} can't be opened by zarr-python: {one_line(error)}: "
            "install and import the package that registers its codec or data type with zarr, such "
            "as numcodecs[pcodec]"
        ) from error


class _Requests(LibraryStore):
    """A store as zarr-python sees it, so that its bytes come by the same requests, with the same
    retries and checks, as all others. For reading alone.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(read_only=True)
        self._store = store

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        start = 0
        stop = None
        if isinstance(byte_range, RangeByteRequest):
            start = byte_range.start
            stop = byte_range.end
        elif isinstance(byte_range, OffsetByteRequest):
            start = byte_range.offset
        elif isinstance(byte_range, SuffixByteRequest):
            start = -byte_range.suffix
        data = await asyncio.to_thread(self._store.content, key, start, stop)
        if data is None:
            return None
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [*await asyncio.gather(*(self.get(key, prototype, one) for key, one in key_ranges))]

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self._store.content, key) is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Requests) and other._store is self._store

    supports_writes = supports_deletes = supports_listing = False

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError

    set = delete = list = list_prefix = list_dir = _refuse  # type: ignore[assignment]


class ObjectStore(Store):
    """A store object of zarr-python, which alone reads it.

    Args:
        path, files: see `Store`; no files are read.
        store: the object. It is never closed here.
    """

    only_library = OBJECT

    def __init__(self, path: str, files: Files, store: LibraryStore) -> None:
        super().__init__(path, files)
        self.object = store
        self._metadata: dict[str, dict[str, Any] | None] = {}

    def read(self, key: str) -> bytes | None:
        raise NotImplementedError

    def ranges(self, keys: Sequence[str]) -> ByteRanges:
        return ByteRanges.of([None] * len(keys))  # versions of its files are not known

    def metadata(self, name: str) -> dict[str, Any] | None:
        if name not in self._metadata:
            node = self._open(name)
            found = None
            if node is not None:
                kind = "array" if isinstance(node, zarr.Array) else "group"
                found = {**node.metadata.to_dict(), "node_type": kind}
            self._metadata[name] = found
        return self._metadata[name]

    def nodes(self) -> Iterator[str]:
        root = self._open("")
        if root is None:
            return
        yield ""
        if isinstance(root, zarr.Group):
            with asking("zarr-python", self.path):
                names = [name for name, _ in root.members(max_depth=None)]
            yield from sorted(names)

    def _open(self, name: str) -> Any:
        """An array or a group; None: there is none."""
        with asking("zarr-python", shown_array(self.path, name)):
            try:
                return zarr.open(self.object, path=name, mode="r")
            except FileNotFoundError as error:
                if error.errno is not None:  # of a file that it lies in
                    raise
                return None
