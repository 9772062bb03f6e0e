"""Reads shards of other libraries that begin with the offsets of their samples, with random access.

A shard begins with its number of samples, the first byte of each, and the end of the last (uint32).
A sample is the sizes of its values of varying size (uint32), and then all values, in the order of
the columns. A shard may be compressed as a whole, in frames of several samples, each of which is
decoded as a chunk, or sample by sample. An `index.json` next to the shards gives the columns.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import posixpath
import struct
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import PIL.Image
import zstandard

from headrace.dtypes import ArraySpec, IntArray, distinct
from headrace.errors import DataNotFoundError, FormatError
from headrace.formats.arrays.chunks import Chunks
from headrace.formats.arrays.codecs import GUNZIP, ZSTD, Codec, Pipeline
from headrace.formats.arrays.reader import Block, OpenArrays, OpenSource, visit
from headrace.formats.arrays.rows import layout_fingerprint
from headrace.formats.shards.heads import (
    COPY,
    INDEX,
    OFFSET,
    Heads,
    Shard,
    head_in,
    size_of,
)
from headrace.formats.source import Column, Columns, Description, RowSource
from headrace.formats.table.columns import pyarrow
from headrace.io.files import Files
from headrace.io.paths import above, in_folder_of, named_part, redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles

Decoder = Callable[[memoryview], Any]
"""Makes a value from its bytes. Must be picklable."""
ALL = -1
"""Size of a value that is the whole sample."""
_LONGEST = 512 << 20
"""Decoded bytes of a compressed sample, at most: the file itself says how many it takes."""


# -- values


def text(make: Callable[[str], Any], data: memoryview) -> Any:
    return make(str(data, "utf-8"))


def array(dtype: str, shape: tuple[int, ...], data: memoryview, start: int = 0) -> Any:
    """An array of little-endian numbers. -1 in its shape follows from its bytes."""
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=start)
    return values.reshape(shape).copy()


def pixels(data: memoryview) -> bytes:
    """An image that is stored as pixels, encoded without loss."""
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
    """A list of values: their number and sizes, from `start` on, and then the values."""
    (count,) = struct.unpack_from("<I", data, start)
    sizes = struct.unpack_from(f"<{count}I", data, start + 4)
    edges = list(itertools.accumulate(sizes, initial=start + 4 + 4 * count))
    if edges[-1] != len(data):
        raise ValueError(f"a list of {edges[-1]:,} bytes in {len(data):,}")
    return [make(data[first:last]) for first, last in itertools.pairwise(edges)]


# -- compression


def _arrow(name: str) -> Codec:
    """A codec of pyarrow."""
    return Codec(name, lambda data, size: pyarrow().Codec(name).decompress(data, size))


CODECS: dict[str, Codec] = {
    "zstd": ZSTD,
    "gz": GUNZIP,
    "snappy": _arrow("snappy"),
    "br": _arrow("brotli"),
}


class ShardColumn(NamedTuple):
    """A column: its encoding, bytes of a value (None: they vary) and decoder (None: there is
    none); the extension that a file of a value's bytes would have, where it is an encoded one.
    """

    encoding: str
    nbytes: int | None
    decode: Decoder | None
    extension: str = ""

    @property
    def array_spec(self) -> ArraySpec | None:
        """Shape and dtype of all values; None: they differ, or are no arrays."""
        if isinstance(self.decode, partial) and self.decode.func is array:
            dtype, shape = self.decode.args
            if -1 not in shape:
                return ArraySpec(shape, np.dtype(dtype))
        return None


class _Packed(Chunks):
    """Compressed shards, or their frames, as chunks, numbered through: the bytes of samples that
    were compressed together, and where these begin and end.
    """

    def __init__(self, files: Files, shards: Sequence[Shard], heads: Heads) -> None:
        self._files = files
        self._shards = shards
        self._heads = heads
        self.firsts = np.cumsum([0, *(shard.chunks for shard in shards)])
        sizes = [shard.nbytes for shard in shards if shard.codec and not shard.rows]
        sizes += heads.frame_sizes()
        self.nbytes = max(sizes, default=0)
        self.all_nbytes = sum(sizes)

    def _place(self, number: int) -> tuple[int, int]:
        """The shard of a chunk, and its number there."""
        shard = int(np.searchsorted(self.firsts, number, side="right")) - 1
        return shard, number - int(self.firsts[shard])

    def byte_ranges(self, numbers: IntArray) -> ByteRanges:
        places = list(map(self._place, numbers.tolist()))
        framed = [number for number, _ in places if self._shards[number].rows]
        heads = dict(zip(framed, self._heads.of(framed), strict=True))
        ranges = []
        for number, inner in places:
            shard = self._shards[number]
            if number in heads:
                start, stop = heads[number].starts[inner], heads[number].stops[inner]
                ranges.append((shard.path, int(start), int(stop)))
            else:
                ranges.append((shard.path, 0, size_of(self._files, shard)))
        return ByteRanges.of(ranges)

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return self._files.read(self.byte_ranges(np.asarray(numbers, np.int64)))

    def decode(self, number: int, data: Any) -> Any:
        at, inner = self._place(number)
        shard = self._shards[at]
        nbytes = shard.nbytes
        edges = None
        if shard.rows:
            first = inner * shard.rows
            [head] = self._heads.of([at])
            edges = head.edges[first : first + shard.rows + 1] - head.edges[first]
            nbytes = int(edges[-1])
        try:
            made = Pipeline([CODECS[shard.codec]]).decode(data, nbytes)
        except FormatError as error:
            raise FormatError(f"{redact(shard.path)}: {error}: {COPY}") from error
        if edges is None:
            edges = head_in(made.data, shard).edges
        return Block((made.data, edges), len(edges) - 1, made.data.nbytes + edges.nbytes)

    def check_cached(self, number: int) -> None:
        self._files.check(self._shards[self._place(number)[0]].path)


def _decompressed(data: Any, codec: str) -> Any:
    """A sample that was compressed by itself.

    Raises:
        FormatError: it is damaged, or too long.
    """
    try:
        nbytes = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise FormatError(f"a compressed sample is damaged: {error}") from error
    if not 0 <= nbytes <= _LONGEST:
        raise FormatError(
            f"a compressed sample would take {nbytes:,} bytes, and {_LONGEST:,} are allowed: write "
            "it with compression_level='batch'"
        )
    return Pipeline([CODECS[codec]]).decode(data, nbytes).data


class ShardSource(OpenSource, RowSource):
    """Samples: the values of one column, or dicts of several.

    Args:
        files: by which shards are read.
        shards: all.
        heads: of the shards.
        columns: all, by name.
        names: of those that are read; a str: records are the values of that one.

    Raises:
        FormatError: values of a column can't be read.
    """

    locating_needs_io = True

    def __init__(
        self,
        files: Files,
        shards: Sequence[Shard],
        heads: Heads,
        columns: dict[str, ShardColumn],
        names: str | Sequence[str],
    ) -> None:
        super().__init__(OpenArrays(files))
        self._shards = list(shards)
        self._columns = columns
        self._is_one = isinstance(names, str)
        self._names = [names] if isinstance(names, str) else list(names)
        self._starts = np.cumsum([0, *(shard.samples for shard in shards)])
        self._is_packed = np.array([bool(shard.codec) for shard in shards], bool)
        self._heights = np.array([shard.height for shard in shards], np.int64)
        self._paths = [shard.path for shard in shards]
        self._heads = heads
        self._chunks = _Packed(files, self._shards, heads)
        self._varying = sum(column.nbytes is None for column in columns.values())
        for name in self._names:
            if columns[name].decode is None:
                raise FormatError(
                    f"{redact(self._paths[0])}: column {name!r} is of the encoding "
                    f"{columns[name].encoding!r}, which is not read (pickles could run any code): "
                    "choose other columns with columns="
                )

    # -- what it is

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def array_spec(self) -> ArraySpec | None:
        if self._is_one:
            return self._columns[self._names[0]].array_spec
        return None

    @property
    def stored_nbytes(self) -> int:
        return sum(shard.stored or shard.nbytes for shard in self._shards)

    @property
    def cut_nbytes(self) -> int:
        return sum(shard.stored for shard in self._shards if not shard.codec)

    def blocks_of(self, nbytes: int) -> IntArray:
        """What is decompressed together, and the other shards in parts of about so many bytes."""
        edges = [0]
        for shard in self._shards:
            parts = max(1, shard.nbytes // nbytes)
            ends = np.arange(1, parts + 1) * shard.samples // parts
            if shard.codec:
                ends = np.minimum(np.arange(1, shard.chunks + 1) * shard.height, shard.samples)
            edges += (edges[-1] + ends).tolist()
        return np.diff(distinct(np.array(edges, np.int64)))

    @property
    def block_nbytes(self) -> int:
        return self._chunks.nbytes

    @property
    def decoded_nbytes(self) -> int:
        return self._chunks.all_nbytes

    def fingerprint(self) -> str:
        """A hash of the columns, and of the names and samples of the shards."""
        shards = [
            (posixpath.basename(named_part(shard.path)), shard.samples) for shard in self._shards
        ]
        columns = {name: column[:2] for name, column in self._columns.items()}
        return layout_fingerprint([self._names, columns, shards])

    def location(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"{redact(self._paths[number])}, sample {index - int(self._starts[number])}"

    def describe(self) -> Description:
        column = Column("samples", f"{self.files.explain()}, a sample at a time")
        column.sample = ", ".join(f"{name} {self._columns[name].encoding}" for name in self._names)
        column.nbytes = column.read = self.stored_nbytes // max(1, len(self))
        if self._is_packed.any():
            unit = "shard"
            if any(shard.rows for shard in self._shards):
                unit = "frame"
            column.read_by = f"{self.files.explain()}, decompressed a {unit} at a time"
            column.chunks = 1
            column.decoded = column.read = self._chunks.nbytes
        return Description([column], files=len(self._shards), stored=self.stored_nbytes)

    # -- reading

    def _places(self, indices: Any) -> tuple[IntArray, IntArray, IntArray]:
        """The shard of each sample, its number there, and whether it is in a compressed one."""
        rows = np.asarray(indices, np.int64)
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        return shards, rows - self._starts[shards], self._is_packed[shards]

    def _chunks_of(self, shards: IntArray, inner: IntArray) -> IntArray:
        """The chunk of each sample of compressed shards."""
        numbers: IntArray = self._chunks.firsts[shards] + inner // self._heights[shards]
        return numbers

    def byte_ranges(self, indices: IntArray) -> ByteRanges:
        """See `Locatable`. Samples of bad shards are left out: reading them says what is wrong."""
        shards, inner, is_packed = self._places(indices)
        try:
            chunks = distinct(self._chunks_of(shards[is_packed], inner[is_packed]))
            packed = self._chunks.byte_ranges(chunks)
            plain = self._ranges(shards[~is_packed], inner[~is_packed])
        except (DataNotFoundError, FormatError):
            numbers = distinct(shards).tolist()
            if len(numbers) == 1:
                return ByteRanges.of([])
            found = [self.byte_ranges(indices[shards == number]) for number in numbers]
            return ByteRanges.joined(found)
        return ByteRanges.joined([plain, packed])

    def _ranges(self, shards: IntArray, inner: IntArray) -> ByteRanges:
        """Where samples lie in shards that are not compressed."""
        bounds = self._heads.bounds(shards.tolist(), inner.tolist())
        return ByteRanges(self._paths, shards, *bounds.T)

    def read(self, indices: Sequence[int]) -> list[Any]:
        shards, inner, is_packed = self._places(indices)
        records: list[Any] = [None] * len(indices)
        plain = np.flatnonzero(~is_packed).tolist()
        views = self.files.read(self._ranges(shards[plain], inner[plain]))
        for at, number, view in zip(plain, shards[plain].tolist(), views, strict=True):
            each = self._shards[number].each
            records[at] = self._record(_decompressed(view, each) if each else view)
        chunks = np.where(is_packed, self._chunks_of(shards, inner), -1)
        within = (inner % self._heights[shards]).tolist()
        numbers = distinct(chunks[is_packed]).tolist()
        places = [np.flatnonzero(chunks == number).tolist() for number in numbers]

        def use(number: int, opened: Block) -> None:
            data, edges = opened.content
            for at in places[number]:
                start, stop = edges[within[at] : within[at] + 2].tolist()
                records[at] = self._record(data[start:stop])

        used = list(map(len, places))
        visit(self._chunks, self._opened.chunks, "", numbers, used, use, self.run)
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


# -- indices


def shard_path(index: str, name: str) -> str:
    """The path or URL of a shard, by its name in an index.

    Raises:
        ValueError: it leads out of the folder of the index.
    """
    if "::" in name or {"", ".."} & set(name.split("/")):
        raise ValueError(f"a shard has the name {name!r}, which leads out of the folder")
    return in_folder_of(index, name)


class ShardColumns(Columns):
    """The columns of the shards in some folders, one folder after the other. The index of a folder
    that has none may be merged with others, and lie one folder above.

    Args:
        paths: of all shards of their folders, or their URLs.
        files: by which they are read.

    Raises:
        DataNotFoundError: a folder has no index.
        FormatError: an index is damaged, or of another layout; folders have other columns.
    """

    written_by: str = ""

    def __init__(self, paths: Sequence[str], files: Files) -> None:
        self.paths: set[str] = set(paths)
        self._files = files
        self.shards = list[Shard]()
        self._heads = Heads(files, self.shards)
        self._columns: dict[str, ShardColumn] = {}
        own = self._contents(in_folder_of(path, INDEX) for path in paths)
        merged = self._contents(above(index) for index, content in own.items() if content is None)
        for index, content in own.items():
            if merged.get(above(index), content) is None:
                raise DataNotFoundError(
                    f"{redact(index)}, the index of the shards, is missing: {COPY}"
                )
            if above(index) not in merged:
                self._add(index, content)
        for index, content in merged.items():
            self._add(index, content)
        self._check_named()
        self.names: list[str] = list(self._columns)
        columns = self._columns.items()
        self.decoders: dict[str, str] = {
            name: column.extension for name, column in columns if column.extension
        }

    def _contents(self, indices: Iterable[str]) -> dict[str, memoryview | None]:
        """The contents of index files, each once; None of one that is missing."""
        distinct = list(dict.fromkeys(indices))
        found = self._files.read(ByteRanges.of_wholes(distinct, range(len(distinct))))
        return dict(zip(distinct, found, strict=True))

    def _add(self, index: str, content: Any) -> None:
        try:
            self.add(index, json.loads(bytes(content)))
        except FormatError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(
                f"{redact(index)} is damaged, or not an index of {self.written_by} "
                f"({type(error).__name__}: {error}): {COPY}"
            ) from error

    def _check_named(self) -> None:
        """Raises a FormatError where a shard lies in a folder, and is not among those named: all
        that an index knows are read. One that is missing is an error of its samples.
        """
        shards = [shard.path for shard in self.shards]
        if self._files.is_remote:
            versions = cast(RemoteFiles, self._files).find_versions(shards)
            existing = {path for path, version in zip(shards, versions, strict=True) if version}
        else:
            existing = {path for path in set(shards) - self.paths if os.path.exists(path)}
        if existing - self.paths:
            raise FormatError(
                f"{redact(min(existing - self.paths))} belongs to the same {INDEX} as those "
                "named, and its shards are one dataset: pass all, or their folder; "
                "dataset.subset() chooses samples"
            )

    @abstractmethod
    def add(self, index: str, said: Any) -> None:
        """Adds shards, as an index says.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: it is none.
        """

    def add_shard(self, shard: Shard, columns: Sequence[tuple[str, ShardColumn]]) -> None:
        """Adds a shard that has these columns.

        Raises:
            ValueError: no shard is like that.
            FormatError: those before have others.
        """
        numbers = (shard.samples, shard.nbytes, shard.stored)
        if (
            shard.codec not in ("", *CODECS)
            or not all(type(number) is int and number >= 0 for number in numbers)
            or not OFFSET * (shard.samples + 2) <= shard.nbytes < 1 << 8 * OFFSET
        ):
            raise ValueError(f"compression {shard.codec!r}, samples and bytes {numbers}")
        named = dict(columns)
        if len(named) < len(columns):
            raise ValueError(f"several columns have one name: {[name for name, _ in columns]}")
        for name, column in columns:
            size = column.nbytes
            is_size = size is None or (type(size) is int and size >= ALL)
            if not isinstance(name, str) or not is_size:
                raise ValueError(f"column {name!r} has values of {size!r} bytes")
            spec = column.array_spec
            if spec is None or not shard.samples:
                continue
            if size not in (None, ALL, spec.nbytes) or not 0 <= spec.nbytes <= shard.nbytes:
                raise ValueError(f"column {name!r}: {column.encoding!r} has {size!r} bytes")
        kinds = {name: column[:2] for name, column in columns}
        others = {name: column[:2] for name, column in self._columns.items()}
        if others and kinds != others:
            raise FormatError(
                f"{redact(shard.path)} has the columns {kinds}, and the shards before it {others}: "
                "open its folder by itself"
            )
        self._columns = named
        self.shards.append(shard)

    def __len__(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def column(self, name: str) -> ShardSource:
        return self.rows(name)

    def rows(self, names: str | Sequence[str]) -> ShardSource:
        return ShardSource(self._files, self.shards, self._heads, self._columns, names)
