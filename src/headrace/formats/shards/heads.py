"""Reads the heads of shards, which give the byte ranges of their samples, and compares them with
the index.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import DataNotFoundError, FormatError
from headrace.io.files import Files
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.memory.lru import LRUCache

INDEX = "index.json"
COPY = "copy or write it again"
Edges = npt.NDArray[np.uint32]
OFFSET = 4
"""Bytes of an integer in a head."""
_LARGE = 1 << 16
"""Bytes of a head from which on it is not read as a whole to find a sample."""
_KEPT = 64 << 20
"""Bytes of heads that a process caches."""
_FRAMED = struct.Struct("<8sHHIII")
"""The beginning of a shard of frames: magic, version, flags, samples, samples per frame, frames.
The edges of its samples follow, and then its frames.
"""
_MAGIC = b"LDFZ01\0\0"
_FRAME = np.dtype(
    [("first", "<u4"), ("count", "<u4"), ("start", "<u8"), ("stored", "<u4"), ("nbytes", "<u4")]
)
"""A frame: its first sample, samples, first byte in the file, stored and decoded bytes."""


class Shard(NamedTuple):
    """A shard: its path, samples, decoded bytes, bytes of the file (0: not in the index), and codec
    ("": not compressed).

    Attributes:
        rows: samples per frame, if frames are compressed. 0: the file is, as a whole.
        each: codec of each sample, if samples are compressed one by one.
    """

    path: str
    samples: int
    nbytes: int
    stored: int
    codec: str
    rows: int = 0
    each: str = ""

    @property
    def height(self) -> int:
        """Number of samples that are decompressed together."""
        return self.rows or max(1, self.samples)

    @property
    def chunks(self) -> int:
        """Number of parts that are decompressed as a whole."""
        if not self.codec:
            return 0
        return -(-self.samples // self.height)

    @property
    def head_nbytes(self) -> int:
        """Bytes of its head."""
        if self.rows:
            return _FRAMED.size + OFFSET * (self.samples + 1) + _FRAME.itemsize * self.chunks
        return OFFSET * (self.samples + 2)


class Head(NamedTuple):
    """The byte ranges of samples.

    Attributes:
        edges: [samples + 1] the first byte of each sample, and the end of the last: in the shard,
            or in its decompressed frames, one after the other.
        starts, stops: [frames] byte ranges of the frames in the file; empty without frames.
    """

    edges: Edges
    starts: IntArray
    stops: IntArray


_NONE = np.zeros(0, np.int64)


def size_of(files: Files, shard: Shard) -> int:
    """The size of the file of a shard.

    Raises:
        FormatError: the index has another size.
    """
    size = files.version(shard.path).size
    if size != (shard.stored or size):
        raise FormatError(
            f"{redact(shard.path)} has {size:,} bytes, and {INDEX} says {shard.stored:,}: {COPY}"
        )
    return size


def head_in(data: bytes | memoryview, shard: Shard) -> Head:
    """Parses the head of a shard.

    Raises:
        FormatError: it differs from the index, or is damaged.
    """
    if shard.rows:
        return _frames_in(data, shard)
    table = np.frombuffer(data, "<u4", shard.samples + 2).copy()
    count = table[0]
    edges = table[1:]
    is_sorted = edges[0] >= table.nbytes and (edges[:-1] <= edges[1:]).all()
    if (count, edges[-1]) != (shard.samples, shard.nbytes) or not is_sorted:
        raise FormatError(
            f"{redact(shard.path)} says that {count:,} samples end at byte {edges[-1]:,}, and "
            f"{INDEX} that {shard.samples:,} do at {shard.nbytes:,}: {COPY}"
        )
    return Head(edges, _NONE, _NONE)


def _frames_in(data: bytes | memoryview, shard: Shard) -> Head:
    expected = (_MAGIC, 1, 0, shard.samples, shard.rows, shard.chunks)
    found = _FRAMED.unpack_from(data)
    edges = np.frombuffer(data, "<u4", shard.samples + 1, _FRAMED.size).copy()
    frames = np.frombuffer(data, _FRAME, shard.chunks, _FRAMED.size + edges.nbytes)
    starts = frames["start"].astype(np.int64)
    stops = starts + frames["stored"]
    firsts = np.arange(shard.chunks) * shard.rows
    lasts = np.minimum(firsts + shard.rows, shard.samples)
    is_sound = (
        found == expected
        and edges[0] == 0
        and (edges[:-1] <= edges[1:]).all()
        and (frames["first"] == firsts).all()
        and (frames["count"] == lasts - firsts).all()
        and (frames["nbytes"] == edges[lasts] - edges[firsts]).all()
        and (starts >= shard.head_nbytes).all()
        and (starts <= stops).all()
        and (stops <= shard.stored).all()
    )
    if not is_sound:
        raise FormatError(
            f"{redact(shard.path)}: its table of frames is damaged, or disagrees with {INDEX} "
            f"({shard.samples:,} samples, {shard.rows:,} in a frame): {COPY}"
        )
    return Head(edges, starts, stops)


class Heads:
    """The heads of shards, with an LRU cache.

    Args:
        files: reads them.
        shards: all shards.
    """

    def __init__(self, files: Files, shards: Sequence[Shard]) -> None:
        self._files = files
        self._shards = shards
        self._kept = LRUCache[int, Head](_KEPT)

    def of(self, numbers: Sequence[int]) -> list[Head]:
        """The heads of some shards, by number.

        Raises:
            FormatError: one is damaged, or differs from the index.
            Exception: as `Files.read`.
        """
        distinct = list(dict.fromkeys(numbers))
        known = dict(zip(distinct, self._kept.get_many(distinct), strict=True))
        unknown = [number for number, head in known.items() if head is None]
        places = []
        for shard in map(self._shards.__getitem__, unknown):
            size_of(self._files, shard)
            places.append((shard.path, 0, shard.head_nbytes))
        if unknown:
            found = self._files.read_each(ByteRanges.of(places))
            for number, data in zip(unknown, found, strict=True):
                head = head_in(data, self._shards[number])
                self._kept.put(number, head)
                known[number] = head
        return [cast(Head, known[number]) for number in numbers]

    def bounds(self, numbers: Sequence[int], inner: Sequence[int]) -> IntArray:
        """First byte and end of samples in shards that are not compressed ([samples, 2]).

        Args:
            numbers: numbers of the shards.
            inner: numbers of the samples in their shards.

        Raises:
            FormatError: a shard is damaged, or differs from the index.
            Exception: as `Files.read`.
        """
        found = np.zeros((len(numbers), 2), np.int64)
        large = list[int]()
        small = list[int]()
        for place, number in enumerate(numbers):
            if self._shards[number].head_nbytes > _LARGE:
                large.append(place)
            else:
                small.append(place)
        heads = self.of([numbers[place] for place in small])
        for place, head in zip(small, heads, strict=True):
            at = inner[place]
            found[place] = head.edges[at : at + 2]
        if large:
            found[large] = self._pairs([(numbers[place], inner[place]) for place in large])
        return found

    def _pairs(self, samples: Sequence[tuple[int, int]]) -> IntArray:
        """`bounds` for shards with large heads, of which only the two integers are read."""
        for number in {number for number, _ in samples}:
            size_of(self._files, self._shards[number])
        ranges = []
        for number, inner in samples:
            at = OFFSET * (1 + inner)
            ranges.append((self._shards[number].path, at, at + 2 * OFFSET))
        data = self._files.read_each(ByteRanges.of(ranges))
        found = np.array([np.frombuffer(one, "<u4") for one in data], np.int64)
        for (number, inner), (start, stop) in zip(samples, found.tolist(), strict=True):
            shard = self._shards[number]
            if not shard.head_nbytes <= start <= stop <= shard.nbytes:
                raise FormatError(
                    f"{redact(shard.path)} says that sample {inner:,} has bytes {start:,} to "
                    f"{stop:,} of {shard.nbytes:,}: {COPY}"
                )
        return found

    def frame_sizes(self) -> list[int]:
        """Decoded bytes of each frame, except in damaged shards."""
        framed = [number for number, shard in enumerate(self._shards) if shard.rows]
        heads = dict[int, Head]()
        try:
            heads.update(zip(framed, self.of(framed), strict=True))
        except (DataNotFoundError, FormatError):
            for number in framed:
                with contextlib.suppress(DataNotFoundError, FormatError):
                    [heads[number]] = self.of([number])
        sizes = list[int]()
        for number, head in heads.items():
            edges = head.edges[:: self._shards[number].rows]
            sizes += np.diff(edges, append=head.edges[-1]).tolist()
        return sizes
