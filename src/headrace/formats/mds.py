"""Reads the shards of MosaicML Streaming (MDS) in place, with random access.

A folder has shards, and an `index.json` that names them and their columns. A shard begins with the
number of its samples and the byte at which each begins, and where the last one ends (uint32). A
sample is the sizes of its values whose size varies (uint32), and then all values, in the order of
the columns. A compressed shard is such a file, compressed as a whole: it is decoded as a chunk.
Source: the documentation of MosaicML Streaming, "Dataset format".
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import PIL.Image

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import DataNotFoundError, FormatError
from headrace.formats.arrays.chunks import Chunks
from headrace.formats.arrays.codecs import GZIP, Codec, Inflate, Pipeline, Zstd
from headrace.formats.arrays.reader import ChunkCache, visit
from headrace.formats.columns import Columns
from headrace.formats.resolve.file_set import Format
from headrace.formats.source import Column, Description, Locatable, RowSource
from headrace.formats.table.columns import pyarrow
from headrace.io.files import Files
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles, in_folder_of
from headrace.sorting import distinct

INDEX = "index.json"
_VERSION = 2
_DTYPES = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"},
    **{33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}
"""Of the values of an array, by the byte that it may begin with."""
_IMAGES = {
    **dict.fromkeys(("jpeg", "list[jpeg]", "jpeg_array", "jpegarray"), "jpg"),
    **dict.fromkeys(("png", "list[png]"), "png"),
    **dict.fromkeys(("pil", "list[pil]"), "tiff"),
}
"""Encodings of images, and the extension that a file of the bytes would have which they become."""
_COPY = "copy or write it again"


# -- values


def _text(make: Callable[[str], Any], data: memoryview) -> Any:
    return make(str(data, "utf-8"))


def _array(dtype: str | None, shape: tuple[int, ...] | None, data: memoryview) -> Any:
    """An array; what its column does not say of dtype and shape, it begins with."""
    at = 0
    if dtype is None:
        dtype = _DTYPES[data[0]]
        at = 1
    if shape is None:
        axes = data[at] >> 2
        extent = np.dtype(f"<u{1 << (data[at] & 3)}")
        shape = tuple(np.frombuffer(data, extent, axes, at + 1).tolist())
        at += 1 + axes * extent.itemsize
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=at)
    return values.reshape(shape).copy()


def _pixels(data: memoryview) -> bytes:
    """An image that lies there as its pixels, encoded without loss."""
    width, height, length = struct.unpack_from("<3I", data)
    mode = str(data[12 : 12 + length], "ascii")
    pixels = bytes(data[12 + length :])
    if width * height > 8 * len(pixels):  # Pillow would take the memory first
        raise ValueError(f"{width:,} x {height:,} pixels in {len(pixels):,} bytes")
    encoded = io.BytesIO()
    image = PIL.Image.frombytes(mode, (width, height), pixels)
    image.save(encoded, "BMP" if mode in ("L", "RGB") else "TIFF")
    return encoded.getvalue()


def _list(start: int, make: Callable[[memoryview], Any], data: memoryview) -> list[Any]:
    """Values one behind the other, after their number and their sizes, which begin at `start`."""
    (count,) = struct.unpack_from("<I", data, start)
    sizes = struct.unpack_from(f"<{count}I", data, start + 4)
    edges = list(itertools.accumulate(sizes, initial=start + 4 + 4 * count))
    if edges[-1] != len(data):
        raise ValueError(f"a list of {edges[-1]:,} bytes in {len(data):,}")
    return [make(data[first:last]) for first, last in itertools.pairwise(edges)]


_DECODERS: dict[str, Callable[[memoryview], Any]] = {
    **dict.fromkeys(("bytes", "jpeg", "png"), bytes),
    # the first four bytes of these lists say nothing
    **dict.fromkeys(("list[jpeg]", "list[png]"), partial(_list, 4, bytes)),
    **dict.fromkeys(("jpeg_array", "jpegarray"), partial(_list, 0, bytes)),
    "list[pil]": partial(_list, 4, _pixels),
    "pil": _pixels,
    "str": partial(_text, str),
    "str_int": partial(_text, int),
    "str_float": partial(_text, float),
    "str_decimal": partial(_text, Decimal),
    "json": partial(_text, json.loads),
    "int": partial(_array, "int64", ()),
    **{dtype: partial(_array, dtype, ()) for dtype in _DTYPES.values()},
    "ndarray": partial(_array, None, None),
}
"""What makes a value of its bytes, by encoding."""


def _decoder_of(encoding: str) -> Callable[[memoryview], Any] | None:
    """The same, also of arrays whose column says dtype or shape: ``ndarray:uint8:3,32,32``."""
    name, _, fixed = encoding.partition(":")
    dtype, _, extents = fixed.partition(":")
    if name != "ndarray" or dtype not in _DTYPES.values():
        return _DECODERS.get(encoding)
    shape = tuple(map(int, extents.split(","))) if extents else None
    return partial(_array, dtype, shape)


class _Arrow(Codec):
    """A compression that pyarrow knows."""

    adds: int | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def decode(self, data: Any, size: int | None) -> Any:
        return pyarrow().Codec(self.name).decompress(data, size)


_CODECS = {"zstd": Zstd(), "gz": Inflate(GZIP), "snappy": _Arrow("snappy"), "br": _Arrow("brotli")}


# -- the index


class _Shard(NamedTuple):
    """A shard: its file, samples, bytes, bytes of the file, and compression ("" for none)."""

    path: str
    samples: int
    nbytes: int
    stored: int
    codec: str


class MdsColumns(Columns):
    """The columns of the shards in some folders, one folder after the other.

    Args:
        paths: of shards, or their URLs. All shards of their folders are read.
        files: by which they are read.

    Raises:
        DataNotFoundError: a folder has no index.
        FormatError: an index is damaged, or of another layout; folders have other columns.
    """

    def __init__(self, paths: Sequence[str], files: Files) -> None:
        self._files = files
        self._paths = set(paths)
        self._shards = list[_Shard]()
        self._columns: dict[str, tuple[str, int | None]] = {}
        indices = list(dict.fromkeys(in_folder_of(path, INDEX) for path in paths))
        found = files.read(ByteRanges.of_wholes(indices, range(len(indices))))
        for index, text in zip(indices, found, strict=True):
            if text is None:
                raise DataNotFoundError(
                    f"{redact(index)}, the index of shards, is missing: {_COPY}"
                )
            try:
                for said in json.loads(bytes(text))["shards"]:
                    self._add(index, said)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise FormatError(
                    f"{redact(index)} is damaged, or no index of MDS version {_VERSION} "
                    f"({type(error).__name__}: {error}): {_COPY}"
                ) from error
        self.names = list(self._columns)
        if files.is_remote:
            cast(RemoteFiles, files).learn([shard.path for shard in self._shards])
        kinds = {name: _IMAGES.get(encoding) for name, (encoding, _) in self._columns.items()}
        self.decoders = {name: kind for name, kind in kinds.items() if kind is not None}

    def _add(self, index: str, said: dict[str, Any]) -> None:
        """Adds a shard, as the index says."""
        if (said["format"], said["version"]) != ("mds", _VERSION):
            raise ValueError(f"format {said['format']!r}, version {said['version']!r}")
        kinds = zip(said["column_encodings"], said["column_sizes"], strict=True)
        columns = dict(zip(said["column_names"], kinds, strict=True))
        if columns != (self._columns or columns):
            raise ValueError(f"columns {columns} after {self._columns}: open its folder by itself")
        self._columns = columns
        file = raw = said["raw_data"]
        codec = ""
        # who reads compressed shards may have left others beside them
        if said["zip_data"] and in_folder_of(index, raw["basename"]) not in self._paths:
            file = said["zip_data"]
            codec, _, _ = said["compression"].partition(":")
        numbers = (said["samples"], raw["bytes"], file["bytes"])
        if codec not in ("", *_CODECS) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"compression {codec!r}, samples and bytes {numbers}")
        self._shards.append(_Shard(in_folder_of(index, file["basename"]), *numbers, codec))

    def __len__(self) -> int:
        return sum(shard.samples for shard in self._shards)

    def column(self, name: str) -> MdsSource:
        return MdsSource(self._files, self._shards, self._columns, [name], True)

    def rows(self, names: Sequence[str]) -> MdsSource:
        return MdsSource(self._files, self._shards, self._columns, names, False)


# -- samples


def _edges_in(head: Any, shard: _Shard) -> IntArray:
    """Where the samples of a shard begin, and the last one ends ([samples + 1]), by its first
    bytes.

    Raises:
        FormatError: its index says something else, or it is damaged.
    """
    count, *edges = np.frombuffer(head, "<u4", shard.samples + 2).tolist()
    steps = np.diff(edges, prepend=4 * (shard.samples + 2))
    if (count, edges[-1]) != (shard.samples, shard.nbytes) or (steps < 0).any():
        raise FormatError(
            f"{redact(shard.path)} says that {count:,} samples end at byte {edges[-1]:,}, and "
            f"{INDEX} that {shard.samples:,} do at {shard.nbytes:,}: {_COPY}"
        )
    return np.array(edges, np.int64)


class _Opened(NamedTuple):
    """The bytes of a shard that was compressed, and where its samples begin and end."""

    data: memoryview
    edges: IntArray

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.data.nbytes + self.edges.nbytes

    def __len__(self) -> int:  # a cache drops it when so many samples were taken
        return len(self.edges) - 1


class _Packed(Chunks):
    """Compressed shards as chunks."""

    def __init__(self, files: Files, shards: Sequence[_Shard]) -> None:
        self._files = files
        self._shards = shards
        self.nbytes = max((shard.nbytes for shard in shards if shard.codec), default=0)

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        shards = [self._shards[number] for number in numbers.tolist()]
        return ByteRanges.of([(shard.path, 0, shard.stored) for shard in shards])

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return self._files.read(self.byte_ranges(np.asarray(numbers, np.int64)))

    def decode(self, number: int, data: Any) -> Any:
        shard = self._shards[number]
        try:
            made = Pipeline([_CODECS[shard.codec]]).decode(data, shard.nbytes)
        except FormatError as error:
            raise FormatError(f"{redact(shard.path)}: {error}: {_COPY}") from error
        return _Opened(made.data, _edges_in(made, shard))

    def check_cached(self, number: int) -> None:
        self._files.check(self._shards[number].path)


class MdsSource(RowSource, Locatable):
    """Samples: the values of one column, or dicts of several.

    Args:
        files: by which shards are read.
        shards: all.
        columns: encoding and bytes of all columns, by name; None: their bytes vary.
        names: of those that are read.
        is_one: True if a record is the value of the one column.

    Raises:
        FormatError: values of a column can't be read.
    """

    def __init__(
        self,
        files: Files,
        shards: Sequence[_Shard],
        columns: dict[str, tuple[str, int | None]],
        names: Sequence[str],
        is_one: bool,
    ) -> None:
        self.files = files
        self._shards = list(shards)
        self._columns = columns
        self._names = list(names)
        self._is_one = is_one
        self._starts = np.cumsum([0, *(shard.samples for shard in shards)])
        self._is_packed = np.array([bool(shard.codec) for shard in shards], bool)
        self._paths = [shard.path for shard in shards]
        self._edges: dict[int, IntArray] = {}
        self._chunks = _Packed(files, self._shards)
        self._decoded = ChunkCache(0)
        self._varying = sum(not size for _, size in columns.values())
        self._decoders = {name: _decoder_of(columns[name][0]) for name in names}
        for name, decoder in self._decoders.items():
            if decoder is None:
                raise FormatError(
                    f"{redact(self._paths[0])}: column {name!r} is of the encoding "
                    f"{columns[name][0]!r}, which is not read (pickles could run any code): name "
                    "other columns by columns="
                )

    # -- what it is

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def array_spec(self) -> ArraySpec | None:
        decoder = self._decoders[self._names[0]]
        if self._is_one and isinstance(decoder, partial) and decoder.func is _array:
            dtype, shape = decoder.args
            if shape is not None:
                return ArraySpec(shape, np.dtype(dtype))
        return None

    @property
    def stored_nbytes(self) -> int:
        return sum(shard.stored for shard in self._shards)

    @property
    def cut_nbytes(self) -> int:
        return sum(shard.stored for shard in self._shards if not shard.codec)

    def blocks_of(self, nbytes: int) -> IntArray:
        """Compressed shards, and the others in parts of about so many bytes."""
        edges = [0]
        for shard in self._shards:
            parts = 1
            if not shard.codec:
                parts = max(1, shard.nbytes // nbytes)
            edges += (edges[-1] + np.arange(1, parts + 1) * shard.samples // parts).tolist()
        return np.diff(distinct(np.array(edges, np.int64)))

    @property
    def block_nbytes(self) -> int:
        return self._chunks.nbytes

    @property
    def decoded_nbytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards if shard.codec)

    def hold_chunks(self, nbytes: int) -> None:
        self._decoded.resize(nbytes)

    def fingerprint(self) -> str:
        """A hash of the columns, and of the names and samples of the shards."""
        shards = [(shard.path.rpartition("/")[2], shard.samples) for shard in self._shards]
        said = json.dumps([self._names, self._columns, shards]).encode()
        return hashlib.blake2b(said, digest_size=16).hexdigest()

    def location(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"{redact(self._paths[number])}, sample {index - int(self._starts[number])}"

    def describe(self) -> Description:
        column = Column("samples", f"{self.files.explain()}, a sample at a time")
        column.sample = ", ".join(f"{name} {self._columns[name][0]}" for name in self._names)
        column.nbytes = column.read = self.stored_nbytes // max(1, len(self))
        if self._is_packed.any():
            column.read_by = f"{self.files.explain()}, decompressed a shard at a time"
            column.chunks = 1
            column.decoded = column.read = self._chunks.nbytes
        return Description([column], files=len(self._shards), stored=self.stored_nbytes)

    def take_counts(self) -> Counter[str]:
        return super().take_counts() + self._decoded.take_counts()

    def close(self) -> None:
        self._decoded.clear()
        self.files.close()

    # -- reading

    @property
    def locating_needs_io(self) -> bool:
        return True

    def _places(self, indices: Any) -> tuple[IntArray, IntArray, IntArray]:
        """The shard of each sample, its number there, and whether it is in a compressed one."""
        rows = np.asarray(indices, np.int64)
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        return shards, rows - self._starts[shards], self._is_packed[shards]

    def byte_ranges(self, indices: IntArray) -> ByteRanges:
        shards, inner, is_packed = self._places(indices)
        packed = self._chunks.byte_ranges(distinct(shards[is_packed]))
        return ByteRanges.joined([self._ranges(shards[~is_packed], inner[~is_packed]), packed])

    def _ranges(self, shards: IntArray, inner: IntArray) -> ByteRanges:
        """Where samples lie in shards that are not compressed."""
        unknown = [number for number in distinct(shards).tolist() if number not in self._edges]
        heads = []
        for shard in map(self._shards.__getitem__, unknown):
            size = self.files.version(shard.path).size
            if size != shard.stored:
                why = f"{size:,} bytes, and {INDEX} says {shard.stored:,}"
                raise FormatError(f"{redact(shard.path)} has {why}: {_COPY}")
            heads.append((shard.path, 0, 4 * (shard.samples + 2)))
        for number, head in zip(unknown, self.files.read_each(ByteRanges.of(heads)), strict=True):
            self._edges[number] = _edges_in(head, self._shards[number])
        places = zip(shards.tolist(), inner.tolist(), strict=True)
        bounds = np.array([self._edges[shard][at : at + 2] for shard, at in places], np.int64)
        return ByteRanges(self._paths, shards, *bounds.reshape(-1, 2).T)

    def read(self, indices: Sequence[int]) -> list[Any]:
        shards, inner, is_packed = self._places(indices)
        records: list[Any] = [None] * len(indices)
        plain = np.flatnonzero(~is_packed).tolist()
        views = self.files.read(self._ranges(shards[plain], inner[plain]))
        for at, view in zip(plain, views, strict=True):
            records[at] = self._record(view)
        numbers = distinct(shards[is_packed]).tolist()
        places = [np.flatnonzero(shards == number).tolist() for number in numbers]

        def use(number: int, opened: _Opened) -> None:
            for at in places[number]:
                start, stop = opened.edges[inner[at] : inner[at] + 2].tolist()
                records[at] = self._record(opened.data[start:stop])

        used = list(map(len, places))
        visit(self._chunks, self._decoded, "", numbers, used, use, self.run)
        return records

    def _record(self, data: Any) -> Any:
        """The values of a sample, by its bytes.

        Raises:
            FormatError: they are damaged.
        """
        at = 4 * self._varying
        name = ""
        try:
            sizes = iter(struct.unpack_from(f"<{self._varying}I", data))
            found = dict[str, Any]()
            for name, (_, size) in self._columns.items():
                stop = at + (size or next(sizes))
                decoder = self._decoders.get(name)
                if decoder is not None:
                    found[name] = decoder(data[at:stop])
                at = stop
            if at != len(data):
                raise ValueError(f"values of {at:,} bytes in {len(data):,}")
        except (ValueError, LookupError, ArithmeticError, struct.error, OSError) as error:
            raise FormatError(f"its shard is damaged, at column {name!r}: {error}") from error
        if self._is_one:
            return found[self._names[0]]
        return {name: found[name] for name in self._names}


MDS = Format("MDS shards", (".mds", *(f".mds.{name}" for name in _CODECS)), open=MdsColumns)
