"""The options of `pack`, the plan of a pack and of each of its files, and streams of samples."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from headrace.arguments import check_choice, check_integer
from headrace.display import Lines, progress_bar
from headrace.dtypes import AnyArray, IntArray, distinct
from headrace.errors import ConfigError, SampleError
from headrace.formats.arrays.codecs import COMPRESSIONS
from headrace.formats.arrays.packed import OFFSETS, PackedInfo
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.resolve.file_set import PackedNames
from headrace.formats.resolve.manifests import checked_text
from headrace.formats.source import sources_of
from headrace.io.ordered import in_order
from headrace.memory.budget import format_size, parse_size
from headrace.memory.limits import usable_cpus
from headrace.memory.processes import check_may_start, read_full, write_full
from headrace.packing.destination import PartFile

T = TypeVar("T")
LARGEST_SIDE = 65_500  # pixels: what libjpeg can write
_MOST_PARTS = 1_000_000
GROUP_SAMPLES, GROUP_BYTES = 64, 4 << 20
"""A task reads so many samples, or fewer where they are large: what is read ahead stays small
whatever the dataset's size.
"""
_ESTIMATED_BY = 32  # samples
_CHUNK_BYTES = 1 << 20
"""Decoded bytes of a compressed chunk, at most: random access decodes no more for a sample, a block
shuffle decodes a chunk once for all its samples, and the cost of a chunk (a read, a call, an entry
of the index) is small beside that of decoding it.
"""
# some of them are in memory while they are packed, and while they are read
_MOST_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True)
class PackOptions:
    """The keywords of `pack` with their defaults; see there.

    Raises:
        ConfigError: they make no sense, or not together.
    """

    store: str | None = None
    max_size: int | None = None
    quality: int = 90
    check: str = "decode"
    end_token: int | None = None
    compression: str | None = None
    chunks: int | None = None
    shard_size: int | str | None = None
    part: str | None = None
    workers: int | None = None
    processes: int = 1
    executor: Executor | None = None
    storage_options: dict[str, Any] | None = None
    overwrite: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "store": ("encoded", "jpeg", "decoded", None),
            "check": ("decode", "header"),
            "compression": (*COMPRESSIONS, None),
        }
        for name, allowed in choices.items():
            check_choice(name, getattr(self, name), allowed)
        if self.store != "jpeg" and (self.max_size is not None or self.quality != 90):
            raise ConfigError("max_size and quality are for store='jpeg'")
        for name, most in (("max_size", LARGEST_SIDE), ("quality", 100)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 1 <= value <= most):
                raise ConfigError(f"{name} must be an integer from 1 to {most}, not {value!r}")
        end = self.end_token
        if end is not None and (type(end) is not int or not 0 <= end < 2**31):
            raise ConfigError(f"end_token must be an id that fits int32, not {end!r}")
        check_integer("chunks", self.chunks, 1, optional=True)
        check_integer("workers", self.workers, 1, optional=True)
        check_integer("processes", self.processes, 1)
        if self.processes > 1:
            check_may_start(f"processes={self.processes}")
        if self.shard_size is None:
            for name in ("part", "processes", "executor", "storage_options"):
                if getattr(self, name) not in (None, 1):
                    raise ConfigError(
                        f"{name} is for packs of several parts: pass shard_size, such as '1GB', "
                        "or leave it out"
                    )
        _ = self.part_nbytes
        self.share(1 << 62)

    @property
    def threads(self) -> int:
        """Number of threads of each process."""
        return self.workers or max(1, usable_cpus() // self.processes)

    @property
    def part_nbytes(self) -> int:
        """Approximate bytes of a part; for a single file more than any has."""
        if self.shard_size is None:
            return 1 << 62
        nbytes = parse_size(self.shard_size, "shard_size")
        if nbytes < 1:
            raise ConfigError("shard_size must be at least 1 byte")
        return nbytes

    def share(self, count: int) -> range:
        """The numbers of the parts that this call packs, out of `count`.

        Raises:
            ConfigError: `part` makes no sense.
        """
        if self.part is None:
            return range(count)
        match = re.fullmatch(r"(\d+)/(\d+)", str(self.part), re.ASCII)
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigError(
                f"part must be 'i/N' with i from 0 to N - 1, such as '3/8', not {self.part!r}"
            )
        return range(int(match[1]), count, int(match[2]))


class Rows(NamedTuple):
    """What the samples of a pack have in common."""

    store: str
    """ "decoded": rows of one shape; "ragged", "encoded" and "tokens": the first axis differs."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Of a sample; where the first axis differs without that."""
    values: str | None = None
    """ "bytes" or "str": what the samples are, if they are no arrays."""

    @property
    def nbytes(self) -> int:
        """Bytes of a sample; where the first axis differs for each item of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        """JSON values, for the options of a plan."""
        # lists, as they are when it is read
        dtype = json.loads(json.dumps(dtype_to_descr(self.dtype)))
        values = {} if self.values is None else {"values": self.values}
        return {"store": self.store, "dtype": dtype, "shape": list(self.shape), **values}


@dataclass(frozen=True)
class PackPlan:
    """The plan of a pack, as `plan.json` holds it; `print` shows it.

    Attributes:
        kind: "image", "text", or "array".
        store: "encoded", "decoded", "ragged" or "tokens".
        fingerprint: of the dataset.
        count: number of samples.
        edges: [parts + 1], the first sample of each part, and `count`.
        nbytes: [parts], bytes of the samples of each part before they are compressed; about, for
            re-encoded images and tokens.
        options: what else decides the bytes, by name; under "versions" those of the libraries that
            do.
        classes: class names, or None.
        sources: [parts], a CRC of the names and sizes of the samples where they come from, by which
            a changed source is noticed; []: they are known by the fingerprint alone.
        version: of this layout.
    """

    kind: str
    store: str
    fingerprint: str
    count: int
    edges: list[int]
    nbytes: list[int]
    sources: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    classes: list[str] | None = None
    version: int = 1

    def __str__(self) -> str:
        nbytes = sum(self.nbytes)
        return Lines(
            f"{self.count:,} samples, about {format_size(nbytes)}, store {self.store}\n"
            f"parts: {self.parts:,}, about {format_size(nbytes // self.parts)} each"
        )

    @functools.cached_property
    def text(self) -> bytes:
        """The content of `plan.json`: the same for the same plan."""
        # `asdict` would copy each number
        return checked_text({one.name: getattr(self, one.name) for one in fields(self)})

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the plan: 16 hexadecimal digits."""
        return hashlib.blake2b(self.text, digest_size=8).hexdigest()

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self.nbytes)

    @property
    def rows(self) -> Rows | None:
        """What the samples of all parts have in common, if finding out requires reading them."""
        rows = self.options.get("rows")
        if rows is None:
            return None
        dtype = descr_to_dtype(rows["dtype"])
        return Rows(rows["store"], dtype, tuple(rows["shape"]), rows.get("values"))

    def name(self, part: int, ending: str = ".h5") -> str:
        """The name of the file of a part."""
        return f"part-{part:05d}-of-{self.parts:05d}{ending}"

    def sidecar_name(self, part: int) -> str:
        """The name of the sidecar of a part."""
        return self.name(part, ".json")


def edges_of(sizes: IntArray, shard_size: int) -> list[int]:
    """Cuts samples into parts of about `shard_size` bytes (at most one sample more), as equal as
    possible.

    Args:
        sizes: [n] int64, bytes of each sample.
        shard_size: bytes.

    Raises:
        ConfigError: there would be too many parts.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(sizes.sum())
    count = max(1, -(-total // shard_size))
    if count > _MOST_PARTS:
        raise ConfigError(
            f"shard_size={shard_size:,} cuts {format_size(total)} into {count:,} parts: use a "
            "larger shard_size"
        )
    wanted = np.arange(1, count) * (total / count)
    inner = np.searchsorted(ends, wanted, side="left") + 1
    edges = distinct(np.concatenate([[0], np.minimum(inner, len(sizes)), [len(sizes)]]))
    numbers: list[int] = edges.tolist()
    return numbers


def checks_of(names: PackedNames | None, sizes: IntArray, edges: list[int]) -> list[int]:
    """Computes `PackPlan.sources` from the names (None: there are none) and sizes of samples ([n]
    bytes).
    """
    texts = (b"%d " % size for size in sizes.tolist())
    if names is not None:
        texts = (b"%s%s " % pair for pair in zip(texts, names, strict=True))
    checks = []
    for start, stop in itertools.pairwise(edges):
        crc = 0
        for text in itertools.islice(texts, stop - start):
            crc = zlib.crc32(text, crc)
        checks.append(crc)
    return checks


@dataclass(frozen=True)
class Plan:
    """The contents and layout of a packed file, and how its samples are read.

    Attributes:
        info: the file's description of itself.
        rows: what its samples have in common.
        columns: the datasets beside the samples and their checksums, by name.
        compression: of the chunks of samples that are rows. None: not compressed.
        chunks: samples per chunk; the last one may have fewer. None: contiguous.
        prepare: returns the samples of a group as they will be stored; a SampleError for one that
            may be left out.
        read_sizes: [n] int64, bytes of each sample in the source. None: as in the file.
        left_out: the error of each sample that can't be read, by its number, if samples were read
            to plan the file.
    """

    info: PackedInfo
    rows: Rows
    columns: dict[str, AnyArray]
    compression: str | None
    chunks: int | None
    prepare: Callable[[range], Sequence[AnyArray | SampleError]] = lambda group: ()
    read_sizes: IntArray | None = None
    left_out: dict[int, str] = field(default_factory=dict)

    @functools.cached_property
    def sizes(self) -> IntArray:
        """Bytes of each sample in the file ([n])."""
        if OFFSETS in self.columns:
            return np.diff(self.columns[OFFSETS]) * self.rows.nbytes
        return np.full(self.info.count, self.rows.nbytes, np.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dataset of samples: [n, *row], or [items, *item] of flat ones."""
        length = self.info.count
        if OFFSETS in self.columns:
            length = int(self.columns[OFFSETS][-1])
        return (length, *self.rows.shape)


def chunks_for(options: PackOptions, rows: Rows, count: int) -> int | None:
    """Samples per chunk: `chunks`, or the largest power of two that stays below `_CHUNK_BYTES`.
    None: contiguous, which empty samples always are.

    Raises:
        ConfigError: these samples have no chunks; a chunk would be too large.
    """
    given = {"compression": options.compression, "chunks": options.chunks}
    layout = " and ".join(f"{name}={value!r}" for name, value in given.items() if value)
    if not layout:
        return None
    if rows.store != "decoded":
        raise ConfigError(
            f"{layout}: encoded images, tokens and arrays of several lengths have no chunks: pass "
            "store='decoded' for the pixels of images, give all arrays one shape, or leave it out"
        )
    if not rows.nbytes:
        return None
    chunks = options.chunks or 1 << max(0, (_CHUNK_BYTES // rows.nbytes).bit_length() - 1)
    nbytes = min(chunks, count) * rows.nbytes
    if nbytes > _MOST_CHUNK_BYTES:
        raise ConfigError(
            f"{layout}: a chunk of {chunks:,} samples has {format_size(nbytes)}, more than "
            f"{format_size(_MOST_CHUNK_BYTES)}: chunks are compressed and decoded whole; use "
            "fewer samples, or leave out chunks and compression"
        )
    return chunks


def files_of(source: Any) -> list[HDF5Source]:
    """The HDF5 sources that a source consists of; empty if it is another one."""
    each = sources_of(source)
    return each if all(isinstance(one, HDF5Source) for one in each) else []


# -- samples in groups


def groups_of(sizes: IntArray, most: int = GROUP_SAMPLES, together: int = 1) -> Iterator[range]:
    """Divides samples into groups.

    Args:
        sizes: [n] int64, bytes that each takes while it is read.
        most: samples of a group.
        together: so many that lie one after the other are never parted.
    """
    units = np.add.reduceat(sizes, np.arange(0, len(sizes), together))
    ends = np.cumsum(units)
    most = max(1, most // together)
    start = 0
    while start < len(units):
        fitting = np.searchsorted(ends, ends[start] - units[start] + GROUP_BYTES, side="right")
        stop = min(max(start + 1, int(fitting)), start + most)
        yield range(start * together, min(stop * together, len(sizes)))
        start = stop


def some_of(count: int) -> list[int]:
    """Numbers of samples, evenly spread, by which sizes are estimated."""
    spread = np.linspace(0, count - 1, min(_ESTIMATED_BY, count)).astype(np.int64)
    numbers: list[int] = distinct(spread).tolist()
    return numbers


def stream(
    task: Callable[[range], T],
    groups: Iterator[range],
    workers: int,
    progress: bool | None,
    total: int,
    desc: str,
) -> Generator[tuple[range, T], None, None]:
    """Yields the result of a task for each group, in order, with a progress bar. Threads work at
    most `workers` + 1 groups ahead (0: no threads), and end when the generator is closed.
    """
    with progress_bar(progress, total=total, desc=desc, unit="sample") as bar:
        if not workers:
            for group in groups:
                yield group, task(group)
                bar.update(len(group))
            return
        pool = ThreadPoolExecutor(workers, "headrace-pack")
        try:
            begun = ((group, pool.submit(task, group)) for group in groups)
            for group, made in in_order(begun, workers + 2):
                yield group, made
                bar.update(len(group))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class Spool:
    """Samples in an unnamed temporary file, for a file that is laid out when all sizes are known.

    Args:
        part: beside which the file is, which takes as much room as the samples, and with which it
            is closed.
    """

    def __init__(self, part: PartFile) -> None:
        self._part = part
        self._fd = part.scratch()
        self._sizes = list[int]()

    def append(self, *pieces: Any) -> None:
        """Adds the next sample, as bytes or arrays."""
        with self._part.explained():
            for piece in pieces:
                write_full(self._fd, piece)
        self._sizes.append(sum(len(piece) for piece in pieces))

    @property
    def sizes(self) -> IntArray:
        """Bytes of each sample ([n] int64)."""
        return np.array(self._sizes, np.int64)

    @functools.cached_property
    def _edges(self) -> IntArray:
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def read(self, group: range) -> list[npt.NDArray[np.uint8]]:
        """The bytes of the samples of a group, after all were added. Thread-safe."""
        edges = self._edges[group.start : group.stop + 1] - self._edges[group.start]
        data = np.empty(int(edges[-1]), np.uint8)
        read_full(self._fd, [data.data], int(self._edges[group.start]))
        return np.split(data, edges[1:-1].tolist())
