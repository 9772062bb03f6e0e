"""What a packed file holds: its samples, in groups and in order, and the columns beside them.

The columns are offsets, names, targets, boxes, and where masks begin. Targets are one array or,
where they are dicts, one for each of their columns, named by `target_named`. Boxes lie as
`CocoTargets.columns` gives them.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.format import dtype_to_descr

from headrace.arguments import described
from headrace.core.views import ColumnTargets
from headrace.display import progress_bar
from headrace.dtypes import BFLOAT16, IntArray
from headrace.errors import ConfigError, SampleError
from headrace.formats.arrays.packed import (
    TARGETS,
    PackedInfo,
    bytes_of,
    target_named,
)
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.source import ConcatSource
from headrace.io.ordered import in_order
from headrace.memory.budget import format_size
from headrace.memory.processes import read_full, write_full
from headrace.packing.options import PackOptions
from headrace.packing.part import PartFile
from headrace.sorting import distinct

Column = npt.NDArray[Any]
T = TypeVar("T")
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
        """The same as the options of a plan hold it."""
        # lists, as they are when it is read
        dtype = json.loads(json.dumps(dtype_to_descr(self.dtype)))
        values = {} if self.values is None else {"values": self.values}
        return {"store": self.store, "dtype": dtype, "shape": list(self.shape), **values}


@dataclass(frozen=True, slots=True)
class Plan:
    """The contents and layout of a packed file.

    Attributes:
        info: what it will say about itself.
        rows: what its samples have in common.
        shape: of the dataset of samples: [n, *row], or [items, *item] of flat ones.
        sizes: [n] int64, bytes of each sample in the file.
        read_sizes: [n] int64, bytes of each sample where it comes from.
        columns: the datasets beside the samples and their checksums, by name.
        compression: of the chunks of samples that are rows; None: they are as they are.
        chunks: samples a chunk, of the last one fewer; None: there are no chunks.
    """

    info: PackedInfo
    rows: Rows
    shape: tuple[int, ...]
    sizes: IntArray
    read_sizes: IntArray
    columns: dict[str, Column]
    compression: str | None = None
    chunks: int | None = None


class Packing(NamedTuple):
    """A plan, and how its samples are read.

    Attributes:
        plan: of the file.
        prepare: gives the samples of a group as they will be stored; a SampleError for one that may
            be left out.
        left_out: what is wrong with each sample that can't be read, by its number; of samples that
            are read when they are written none.
    """

    plan: Plan
    prepare: Callable[[range], Sequence[npt.NDArray[Any] | SampleError]]
    left_out: dict[int, str]


def chunks_for(options: PackOptions, rows: Rows, count: int) -> int | None:
    """Samples per chunk: `chunks`, or the largest power of two that stays below `_CHUNK_BYTES`.
    None: contiguous, which empty samples always are.

    Raises:
        ConfigError: samples that lie flat have no chunks; one would be too large.
    """
    if not options.is_chunked:
        return None
    if rows.store == "encoded":
        raise ConfigError(
            f"{options.layout}: encoded images are compressed already and lie one behind the "
            "other: pass store='decoded' for their pixels"
        )
    if rows.store != "decoded":
        raise ConfigError(
            f"{options.layout}: only samples that are arrays of one shape are cut into chunks, and "
            "arrays of several lengths lie flat: give all one shape"
        )
    if not rows.nbytes:
        return None
    chunks = options.chunks or 1 << max(0, (_CHUNK_BYTES // rows.nbytes).bit_length() - 1)
    nbytes = min(chunks, count) * rows.nbytes
    if nbytes > _MOST_CHUNK_BYTES:
        raise ConfigError(
            f"{options.layout}: a chunk of {chunks:,} samples has {format_size(nbytes)}, more "
            f"than {format_size(_MOST_CHUNK_BYTES)}: chunks are compressed and decoded whole, use "
            "fewer, or leave out chunks and compression"
        )
    return chunks


# -- columns


def files_of(source: Any) -> list[HDF5Source]:
    """The HDF5 sources that a source consists of; empty if it is another one."""
    each = source.sources if isinstance(source, ConcatSource) else [source]
    return list(each) if all(isinstance(one, HDF5Source) for one in each) else []


# -- columns


def target_arrays(targets: Any) -> dict[str, Column]:
    """The arrays of a pack that hold the targets, by name.

    Raises:
        ConfigError: see `as_column`, `check_names`.
    """
    if targets is None:
        return {}
    columns = columns_in(targets)
    if columns is None:
        return {TARGETS: as_column(targets)}
    check_names(columns)
    return {
        target_named(number): as_column(column, name)
        for number, (name, column) in enumerate(columns.items())
    }


def crc_of_columns(columns: Mapping[str, Column]) -> int:
    """One CRC of all columns."""
    crc = 0
    for _, column in sorted(columns.items()):
        crc = zlib.crc32(bytes_of(column).data, crc)
    return crc


def columns_in(targets: Any) -> Mapping[str, Any] | None:
    """The columns of targets that are dicts with the same names. None: they are not."""
    if isinstance(targets, ColumnTargets):
        return targets.columns
    if isinstance(targets, np.ndarray):
        names = targets.dtype.names
        return None if names is None else {name: targets[name] for name in names}
    is_of_dicts = (
        isinstance(targets, Sequence)
        and len(targets) > 0
        and all(isinstance(one, dict) for one in targets)
    )
    if not is_of_dicts or not targets[0]:
        return None
    if any(one.keys() != targets[0].keys() for one in targets):
        return None
    return {name: [one[name] for one in targets] for name in targets[0]}


def check_names(names: Iterable[Any], what: str = "these targets") -> None:
    """Raises a ConfigError if a name in dicts is not a str, or is empty."""
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{what} can't be packed: names in dicts must be texts of one character at least, "
                f"and {name!r} is none: rename it"
            )


def as_column(targets: Sequence[Any] | Column, name: str | None = None) -> Column:
    """Targets as an array whose rows are equal to them.

    Args:
        targets: one a sample.
        name: of the column that they are; None: they are no columns.

    Raises:
        ConfigError: they are not all numbers, or all arrays of one shape.
    """
    try:
        column = np.asarray(targets)
    except ValueError:  # rows of different lengths
        column = np.empty(0, object)
    types = set[type]()
    if not isinstance(targets, np.ndarray):
        types = {type(target) for target in targets}
    # NumPy rounds integers that neither int64 nor uint64 holds together
    is_rounded = int in types and column.dtype.kind == "f"
    is_sound = column.ndim == 1 or types <= {np.ndarray}
    if column.dtype.kind not in "biufc" or len(types) > 1 or not is_sound or is_rounded:
        what = "these targets" if name is None else f"the column {name!r} of these targets"
        raise ConfigError(
            f"{what} can't be packed: they must be numbers of one dtype, or NumPy arrays of one "
            "shape, or dicts of these with the same names; choose such columns of a table of "
            "labels by target_name=, or pack without any (images: targets=None; texts: no "
            "target_field=) and look them up by the numbers of the samples, which return_index "
            "gives"
        )
    return np.ascontiguousarray(column)


def as_row(what: str, value: Any) -> Column:
    """The array of a number, array or tensor; of a dict of these a compound, with its fields sorted
    by name.

    Raises:
        ConfigError: it is something else, or a dict whose names are no texts.
    """
    if isinstance(value, dict) and value:
        check_names(value, what)
        what = what.rstrip(",")
        fields = {name: as_row(f"{what}, {name!r},", value[name]) for name in sorted(value)}
        row = np.zeros((), [(name, field.dtype, field.shape) for name, field in fields.items()])
        for name, field in fields.items():
            row[name] = field
        return row
    made: Column | None = None
    if isinstance(value, torch.Tensor):
        try:
            made = value.numpy(force=True)
        # a dtype that NumPy doesn't have, or no strided tensor
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"{what} can't be packed: {error}: convert it in decode, or in __getitem__"
            ) from error
    elif isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        made = np.asarray(value)
    if made is None or made.dtype.kind not in "biufc" or made.dtype.char in "gG":
        shown = described(value)
        if made is not None:
            shown = f"an array of {'bfloat16' if made.dtype == BFLOAT16 else made.dtype}"
        raise ConfigError(
            f"{what} can't be packed: it is {shown}. Samples are arrays, tensors, numbers, dicts "
            "of these, bytes, str, and (input, target) tuples; fields and targets are no bytes or "
            "str: convert it in decode or __getitem__; of a table choose columns= "
            "or column=; of a tar give what is packed by "
            "split_target (docs/packing.md)"
        )
    return made


# -- samples in groups


def groups_of(sizes: IntArray, most: int = GROUP_SAMPLES, together: int = 1) -> Iterator[range]:
    """Divides samples into groups.

    Args:
        sizes: [n] int64, bytes that each takes while it is read.
        most: samples of a group.
        together: so many that lie one after the other are never parted.
    """
    if together > 1 and len(sizes):
        units = np.add.reduceat(sizes, np.arange(0, len(sizes), together))
        for group in groups_of(units, max(1, most // together)):
            yield range(group.start * together, min(group.stop * together, len(sizes)))
        return
    start = 0
    nbytes = 0
    for i, size in enumerate(sizes.tolist()):
        if i > start and (nbytes + size > GROUP_BYTES or i - start >= most):
            yield range(start, i)
            start = i
            nbytes = 0
        nbytes += size
    if start < len(sizes):
        yield range(start, len(sizes))


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
