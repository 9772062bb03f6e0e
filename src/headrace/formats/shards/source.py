"""Shards that begin with a table of where their samples lie: random access to what others packed.

A shard begins with the number of its samples and the byte at which each begins, and where the last
one ends (uint32). A sample is the sizes of its values whose size varies (uint32), and then all
values, in the order of the columns. A compressed shard is such a file, compressed as a whole: it is
decoded as a chunk. An `index.json` beside the shards says what they hold.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import struct
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import DataNotFoundError, FormatError
from headrace.formats.arrays.chunks import Chunks
from headrace.formats.arrays.codecs import GZIP, Codec, Inflate, Pipeline, Zstd
from headrace.formats.arrays.reader import ChunkCache, visit
from headrace.formats.shards.values import Decoder, array
from headrace.formats.source import Column, Description, Locatable, RowSource
from headrace.formats.table.columns import pyarrow
from headrace.io.files import Files
from headrace.io.paths import named_part, redact
from headrace.io.ranges import ByteRanges
from headrace.sorting import distinct

INDEX = "index.json"
COPY = "copy or write it again"
ALL = -1
"""The bytes of a value that is all of its sample."""
Edges = npt.NDArray[np.uint32]
OFFSET = 4
"""Bytes of the number of samples, and of where one begins."""


class _Arrow(Codec):
    """A compression that pyarrow knows."""

    adds: int | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def decode(self, data: Any, size: int | None) -> Any:
        return pyarrow().Codec(self.name).decompress(data, size)


CODECS: dict[str, Codec] = {
    "zstd": Zstd(),
    "gz": Inflate(GZIP),
    "snappy": _Arrow("snappy"),
    "br": _Arrow("brotli"),
}


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

    @property
    def array_spec(self) -> ArraySpec | None:
        """Shape and dtype of all values; None: they differ, or are no arrays."""
        if isinstance(self.decode, partial) and self.decode.func is array:
            dtype, shape = self.decode.args
            if -1 not in shape:
                return ArraySpec(shape, np.dtype(dtype))
        return None


def _size_of(files: Files, shard: Shard) -> int:
    """The bytes of the file of a shard.

    Raises:
        FormatError: its index says something else.
    """
    size = files.version(shard.path).size
    if size != (shard.stored or size):
        raise FormatError(
            f"{redact(shard.path)} has {size:,} bytes, and {INDEX} says {shard.stored:,}: {COPY}"
        )
    return size


def _edges_in(head: Any, shard: Shard) -> Edges:
    """Where the samples of a shard begin, and the last one ends ([samples + 1]), by its first
    bytes.

    Raises:
        FormatError: its index says something else, or it is damaged.
    """
    table = np.frombuffer(head, "<u4", shard.samples + 2).copy()
    count = table[0]
    edges = table[1:]
    is_sorted = edges[0] >= table.nbytes and (edges[:-1] <= edges[1:]).all()
    if (count, edges[-1]) != (shard.samples, shard.nbytes) or not is_sorted:
        raise FormatError(
            f"{redact(shard.path)} says that {count:,} samples end at byte {edges[-1]:,}, and "
            f"{INDEX} that {shard.samples:,} do at {shard.nbytes:,}: {COPY}"
        )
    return edges


class _Opened(NamedTuple):
    """The bytes of a shard that was compressed, and where its samples begin and end."""

    data: memoryview
    edges: Edges

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
            ranges.append((shard.path, 0, _size_of(self._files, shard)))
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
        self._edges: dict[int, Edges] = {}
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
        shards = [
            (posixpath.basename(named_part(shard.path)), shard.samples) for shard in self._shards
        ]
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
        """See `Locatable`. Samples of bad shards are left out: reading them says what is wrong."""
        shards, inner, is_packed = self._places(indices)
        try:
            packed = self._chunks.byte_ranges(distinct(shards[is_packed]))
            plain = self._ranges(shards[~is_packed], inner[~is_packed])
        except (DataNotFoundError, FormatError):
            good = [number for number in distinct(shards).tolist() if self._is_good(number)]
            chosen = np.flatnonzero(np.isin(shards, good))
            return self.byte_ranges(indices[chosen])
        return ByteRanges.joined([plain, packed])

    def _is_good(self, number: int) -> bool:
        """True if the samples of a shard can be located."""
        try:
            self._chunks.byte_ranges(np.array([number]))
            if not self._is_packed[number]:
                self._ranges(np.array([number]), np.array([0]))
        except (DataNotFoundError, FormatError):
            return False
        return True

    def _ranges(self, shards: IntArray, inner: IntArray) -> ByteRanges:
        """Where samples lie in shards that are not compressed."""
        unknown = [number for number in distinct(shards).tolist() if number not in self._edges]
        heads = []
        for shard in map(self._shards.__getitem__, unknown):
            _size_of(self.files, shard)
            heads.append((shard.path, 0, OFFSET * (shard.samples + 2)))
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
