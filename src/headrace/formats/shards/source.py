"""Shards that begin with a table of where their samples lie: random access to what others packed.

A shard begins with the number of its samples and the byte at which each begins, and where the last
one ends (uint32). A sample is the sizes of its values whose size varies (uint32), and then all
values, in the order of the columns. A compressed shard is such a file, compressed as a whole: it is
decoded as a chunk. An `index.json` beside the shards says what they hold.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import struct
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
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
from headrace.formats.source import Column, Description, Locatable, RowSource
from headrace.formats.table.columns import pyarrow
from headrace.io.files import Files
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles, in_folder_of
from headrace.sorting import distinct

INDEX = "index.json"
COPY = "copy or write it again"
ALL = -1
"""The bytes of a value that is all of its sample."""
Decoder = Callable[[memoryview], Any]
"""Makes a value of its bytes. It travels to workers by pickle."""


# -- values


def text(make: Callable[[str], Any], data: memoryview) -> Any:
    return make(str(data, "utf-8"))


def array(dtype: str, shape: tuple[int, ...], data: memoryview, start: int = 0) -> Any:
    """An array of little-endian numbers; -1 in its shape stands for what there is."""
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=start)
    return values.reshape(shape).copy()


def pixels(data: memoryview) -> bytes:
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


def many(start: int, make: Callable[[memoryview], Any], data: memoryview) -> list[Any]:
    """Values one behind the other, after their number and their sizes, which begin at `start`."""
    (count,) = struct.unpack_from("<I", data, start)
    sizes = struct.unpack_from(f"<{count}I", data, start + 4)
    edges = list(itertools.accumulate(sizes, initial=start + 4 + 4 * count))
    if edges[-1] != len(data):
        raise ValueError(f"a list of {edges[-1]:,} bytes in {len(data):,}")
    return [make(data[first:last]) for first, last in itertools.pairwise(edges)]


class _Arrow(Codec):
    """A compression that pyarrow knows."""

    adds: int | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def decode(self, data: Any, size: int | None) -> Any:
        return pyarrow().Codec(self.name).decompress(data, size)


CODECS = {"zstd": Zstd(), "gz": Inflate(GZIP), "snappy": _Arrow("snappy"), "br": _Arrow("brotli")}


# -- the index


class Shard(NamedTuple):
    """A shard: its file, samples, bytes, bytes of the file (0: the index does not say), and
    compression ("" for none).
    """

    path: str
    samples: int
    nbytes: int
    stored: int
    codec: str


class ShardColumn(NamedTuple):
    """A column: its encoding, bytes of a value (None: they vary) and decoder (None: there is
    none); the extension that a file of a value's bytes would have, where it is an encoded one.
    """

    encoding: str
    nbytes: int | None
    decode: Decoder | None
    extension: str = ""


class ShardColumns(Columns):
    """The columns of the shards in some folders, one folder after the other.

    Args:
        paths: of shards, or their URLs. All shards of their folders are read.
        files: by which they are read.

    Raises:
        DataNotFoundError: a folder has no index.
        FormatError: an index is damaged, or of another layout; folders have other columns.
    """

    written_by = ""

    def __init__(self, paths: Sequence[str], files: Files) -> None:
        self.paths = set(paths)
        self._files = files
        self._shards = list[Shard]()
        self._columns: dict[str, ShardColumn] = {}
        indices = list(dict.fromkeys(in_folder_of(path, INDEX) for path in paths))
        found = files.read(ByteRanges.of_wholes(indices, range(len(indices))))
        for index, content in zip(indices, found, strict=True):
            if content is None:
                raise DataNotFoundError(f"{redact(index)}, of the shards, is missing: {COPY}")
            try:
                self.add(index, json.loads(bytes(content)))
            except FormatError:
                raise
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise FormatError(
                    f"{redact(index)} is damaged, or no index of {self.written_by} "
                    f"({type(error).__name__}: {error}): {COPY}"
                ) from error
        if files.is_remote:
            cast(RemoteFiles, files).learn([shard.path for shard in self._shards])
        self.names = list(self._columns)
        columns = self._columns.items()
        self.decoders = {name: column.extension for name, column in columns if column.extension}

    @abstractmethod
    def add(self, index: str, said: Any) -> None:
        """Adds shards, as an index says.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: it is none.
        """

    def add_shard(self, shard: Shard, columns: dict[str, ShardColumn]) -> None:
        """Adds a shard that has these columns."""
        kinds = {name: column[:2] for name, column in columns.items()}
        others = {name: column[:2] for name, column in self._columns.items()}
        if others and kinds != others:
            raise ValueError(f"columns {kinds} after {others}: open its folder by itself")
        numbers = (shard.samples, shard.nbytes, shard.stored)
        if shard.codec not in ("", *CODECS) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"compression {shard.codec!r}, samples and bytes {numbers}")
        self._columns = columns
        self._shards.append(shard)

    def __len__(self) -> int:
        return sum(shard.samples for shard in self._shards)

    def column(self, name: str) -> ShardSource:
        return ShardSource(self._files, self._shards, self._columns, [name], True)

    def rows(self, names: Sequence[str]) -> ShardSource:
        return ShardSource(self._files, self._shards, self._columns, names, False)


# -- samples


def _edges_in(head: Any, shard: Shard) -> IntArray:
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
            f"{INDEX} that {shard.samples:,} do at {shard.nbytes:,}: {COPY}"
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

    def __init__(self, files: Files, shards: Sequence[Shard]) -> None:
        self._files = files
        self._shards = shards
        self.nbytes = max((shard.nbytes for shard in shards if shard.codec), default=0)

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        ranges = []
        for shard in map(self._shards.__getitem__, numbers.tolist()):
            size = shard.stored or self._files.version(shard.path).size
            ranges.append((shard.path, 0, size))
        return ByteRanges.of(ranges)

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return self._files.read(self.byte_ranges(np.asarray(numbers, np.int64)))

    def decode(self, number: int, data: Any) -> Any:
        shard = self._shards[number]
        try:
            made = Pipeline([CODECS[shard.codec]]).decode(data, shard.nbytes)
        except FormatError as error:
            raise FormatError(f"{redact(shard.path)}: {error}: {COPY}") from error
        return _Opened(made.data, _edges_in(made, shard))

    def check_cached(self, number: int) -> None:
        self._files.check(self._shards[number].path)


class ShardSource(RowSource, Locatable):
    """Samples: the values of one column, or dicts of several.

    Args:
        files: by which shards are read.
        shards: all.
        columns: all, by name.
        names: of those that are read.
        is_one: True if a record is the value of the one column.

    Raises:
        FormatError: values of a column can't be read.
    """

    def __init__(
        self,
        files: Files,
        shards: Sequence[Shard],
        columns: dict[str, ShardColumn],
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
        self._varying = sum(column.nbytes is None for column in columns.values())
        for name in names:
            if columns[name].decode is None:
                raise FormatError(
                    f"{redact(self._paths[0])}: column {name!r} is of the encoding "
                    f"{columns[name].encoding!r}, which is not read (pickles could run any code): "
                    "name other columns by columns="
                )

    # -- what it is

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def array_spec(self) -> ArraySpec | None:
        decode = self._columns[self._names[0]].decode
        if self._is_one and isinstance(decode, partial) and decode.func is array:
            dtype, shape = decode.args
            if -1 not in shape:
                return ArraySpec(shape, np.dtype(dtype))
        return None

    @property
    def stored_nbytes(self) -> int:
        return sum(shard.stored or shard.nbytes for shard in self._shards)

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
        columns = {name: column[:2] for name, column in self._columns.items()}
        said = json.dumps([self._names, columns, shards]).encode()
        return hashlib.blake2b(said, digest_size=16).hexdigest()

    def location(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"{redact(self._paths[number])}, sample {index - int(self._starts[number])}"

    def describe(self) -> Description:
        column = Column("samples", f"{self.files.explain()}, a sample at a time")
        column.sample = ", ".join(f"{name} {self._columns[name].encoding}" for name in self._names)
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
                raise FormatError(f"{redact(shard.path)} has {why}: {COPY}")
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
            for name, column in self._columns.items():
                size = column.nbytes
                if size is None:
                    size = next(sizes)
                elif size == ALL:
                    size = len(data)
                stop = at + size
                if name in self._names and column.decode is not None:
                    found[name] = column.decode(data[at:stop])
                at = stop
            if at != len(data):
                raise ValueError(f"values of {at:,} bytes in {len(data):,}")
        except (ValueError, LookupError, ArithmeticError, struct.error, OSError) as error:
            raise FormatError(f"its shard is damaged, at column {name!r}: {error}") from error
        if self._is_one:
            return found[self._names[0]]
        return {name: found[name] for name in self._names}
