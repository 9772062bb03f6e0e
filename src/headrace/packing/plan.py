"""What a packed file holds: its samples, in groups and in order, and the columns beside them.

The columns are offsets, names, targets, boxes, and where masks begin. Targets are one array or,
where they are dicts, one for each of their columns, named by `target_named`. Boxes lie as
`CocoTargets.columns` gives them.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.format import dtype_to_descr

from headrace.core.dataset import BaseDataset
from headrace.core.views import ColumnTargets
from headrace.datasets.image.coco import CocoTargets
from headrace.datasets.image.labels import FOLDERS
from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, SampleError
from headrace.formats.arrays.packed import (
    NAME_OFFSETS,
    NAMES,
    OFFSETS,
    TARGETS,
    PackedInfo,
    bytes_of,
    crc_of,
    target_named,
)
from headrace.formats.concat import ConcatSource
from headrace.formats.files import FilesSource, PairedSource
from headrace.formats.hdf5.rows import HDF5Source
from headrace.io.ordered import in_order
from headrace.io.packed_strings import PackedNames
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
        """The same as the options of a plan of several parts hold it."""
        # lists, as they are when it is read
        dtype = json.loads(json.dumps(dtype_to_descr(self.dtype)))
        values = {} if self.values is None else {"values": self.values}
        return {"store": self.store, "dtype": dtype, "shape": list(self.shape), **values}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a packed file will hold.

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
    """What is written, and how.

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


def make_plan(
    options: PackOptions,
    info: PackedInfo,
    rows: Rows,
    lengths: IntArray | None,
    names: PackedNames | None,
    columns: dict[str, Column],
) -> Plan:
    """The plan of a file.

    Args:
        options: of chunks.
        info: what it says of itself, but for checksums and version.
        rows: what its samples have in common.
        lengths: [n] int64, of samples that lie flat the items of the first axis; None: rows.
        names: of the samples, or None.
        columns: beside the samples, by name; offsets and names are added.

    Raises:
        ConfigError: see `chunks_for`; a chunk would be too large.
    """
    if lengths is None:
        shape = (info.count, *rows.shape)
        sizes = np.full(info.count, rows.nbytes, np.int64)
    else:
        shape = (int(lengths.sum()), *rows.shape)
        sizes = lengths * rows.nbytes
        columns[OFFSETS] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if names is not None:
        columns[NAMES], columns[NAME_OFFSETS] = names.arrays
    checksums = {name: crc_of(column) for name, column in sorted(columns.items())}
    info = replace(info, checksums=checksums, version=_version_of(info))
    chunks = chunks_for(options, rows)
    compression = None if chunks is None else options.compression
    nbytes = min(chunks or 0, info.count) * rows.nbytes
    if nbytes > _MOST_CHUNK_BYTES:
        raise ConfigError(
            f"{options.layout}: a chunk of {chunks:,} samples has {format_size(nbytes)}, more "
            f"than {format_size(_MOST_CHUNK_BYTES)}: chunks are compressed and decoded whole, use "
            "fewer, or leave out chunks and compression"
        )
    return Plan(info, rows, shape, sizes, sizes, columns, compression, chunks)


def _version_of(info: PackedInfo) -> int:
    """The first layout that has all that a file says of itself."""
    if info.target_columns is not None:
        return 7
    if info.text.get("unit") == "chat":
        return 5
    if "targets" in info.image:
        return 4
    if info.values is not None:
        return 3
    return 2 if info.store == "ragged" or info.part is not None else 1


def chunks_for(options: PackOptions, rows: Rows) -> int | None:
    """Samples a chunk: the largest power of two that stays below `_CHUNK_BYTES`, unless `chunks`
    says how many. None: contiguous, as samples of nothing are.

    Raises:
        ConfigError: samples that lie flat have no chunks.
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
    return options.chunks or 1 << max(0, (_CHUNK_BYTES // rows.nbytes).bit_length() - 1)


# -- columns


def files_of(source: Any) -> list[HDF5Source]:
    """The sources of rows, or of what was packed, that a source consists of; []: it is another
    one.
    """
    each = source.sources if isinstance(source, ConcatSource) else [source]
    return list(each) if all(isinstance(one, HDF5Source) for one in each) else []


def names_of(dataset: BaseDataset) -> PackedNames | None:
    """The names of a dataset's samples, where they are files or have been."""
    source = dataset.sample_source
    if isinstance(source, PairedSource):
        source = source.files
    names = None
    if isinstance(source, FilesSource):
        names = source.listing.names
    elif files := files_of(source):
        names = PackedNames.joined([one.names for one in files])
    return None if names is None else names.take(dataset.whole_indices(np.arange(len(dataset))))


def target_arrays(targets: Any) -> dict[str, Column]:
    """The arrays that a pack has of the targets, by name; {}: there are none.

    Raises:
        ConfigError: see `as_column`, `check_names`.
    """
    if targets is None:
        return {}
    columns = _columns_in(targets)
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


def target_columns_of(
    dataset: BaseDataset, targets: Any, packed: PackedInfo | None = None
) -> list[Any] | None:
    """What `PackedInfo.target_columns` says of targets that are dicts; None: they are none.

    Args:
        dataset: what is packed.
        targets: its targets.
        packed: what the pack says that they are from; None: they are from none.
    """
    columns = _columns_in(targets)
    if columns is None:
        return None
    classes: Any = getattr(dataset, "column_classes", None)
    if not isinstance(classes, Mapping):
        classes = {} if packed is None else dict(packed.target_columns or ())
    return [[name, list(classes[name]) if classes.get(name) else None] for name in columns]


def _columns_in(targets: Any) -> Mapping[str, Any] | None:
    """The columns of targets that are dicts with the same names; None: they are something else."""
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
    """Raises a ConfigError where one of the names in dicts is no text, as which it would come
    back, or is empty.
    """
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{what} can't be packed: names in dicts must be texts of one character at least, "
                f"and {name!r} is none: rename it"
            )


def as_column(targets: Sequence[Any] | Column, name: str | None = None) -> Column:
    """Targets as an array whose rows give back the same targets.

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


def annotations_check(dataset: BaseDataset) -> dict[str, int]:
    """What a plan has of targets that lie beside the samples, by which other ones are noticed; {}:
    there are none, or they follow from the names of the files.
    """
    boxes = boxes_of(dataset)
    if boxes is not None:
        return {"annotations": crc_of_columns(boxes.columns(boxes.sizes))}
    given = dataset._arguments.get("targets", FOLDERS)
    by_folders = isinstance(dataset.sample_source, FilesSource) and (
        isinstance(given, str) and given == FOLDERS
    )
    if dataset.targets is None or by_folders or dataset.sample_decoder.splits_targets:
        return {}
    return {"annotations": crc_of_columns(target_arrays(dataset.targets))}


def boxes_of(dataset: BaseDataset) -> CocoTargets | None:
    """The annotations of objects, if these are the targets."""
    targets = dataset.targets
    return targets if isinstance(targets, CocoTargets) else None


# -- samples in groups


def groups_of(sizes: IntArray, most: int = GROUP_SAMPLES, together: int = 1) -> Iterator[range]:
    """Samples in groups.

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
    """The numbers of samples by which sizes are estimated, evenly spread over all `count`."""
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
    """The results of a task for each group, in order, with a progress bar; threads work at most
    `workers` + 1 groups ahead; 0: this thread. They have ended when the generator is closed.
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


def each_sample(
    dataset: BaseDataset, group: range, make: Callable[[int, int, Any], T | SampleError]
) -> list[T | SampleError]:
    """What is made of each sample of a group: of its number in the dataset, that in its source,
    and its record. A SampleError is of a sample that may be left out.
    """
    whole = dataset.whole_indices(group).tolist()
    records = dataset.sample_reader.records(whole, dataset.sample_source.read)
    samples = []
    for position, index, record in zip(group, whole, records, strict=True):
        made = record
        if not isinstance(record, SampleError):
            made = make(position, index, record)
        # a callable makes up a sample: that is no matter for a file
        if isinstance(made, SampleError) and dataset.on_error != "skip":
            raise made
        samples.append(made)
    return samples


class Spool:
    """Samples in a temporary file without a name, one behind the other: a file is laid out when all
    sizes are known.

    Args:
        part: beside which the file is, which takes as much room as the samples, and with which it
            is closed.
    """

    def __init__(self, part: PartFile) -> None:
        self._part = part
        self._fd = part.scratch()
        self._sizes = list[int]()

    def append(self, *pieces: Any) -> None:
        """Adds the next sample, of bytes or arrays."""
        with self._part.explained():
            for piece in pieces:
                write_full(self._fd, piece)
        self._sizes.append(sum(len(piece) for piece in pieces))

    @property
    def sizes(self) -> IntArray:
        """Bytes of each sample ([n] int64)."""
        return np.array(self._sizes, np.int64)

    def reader(self) -> Callable[[range], list[npt.NDArray[np.uint8]]]:
        """What gives the bytes of the samples of a group; for any thread."""
        edges = np.concatenate([[0], np.cumsum(self.sizes)])

        def read(group: range) -> list[npt.NDArray[np.uint8]]:
            first = int(edges[group.start])
            data = np.empty(int(edges[group.stop]) - first, np.uint8)
            read_full(self._fd, [data.data], first)
            return np.split(data, (edges[group.start + 1 : group.stop] - first).tolist())

        return read
