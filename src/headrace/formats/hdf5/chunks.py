"""The chunks of an HDF5 dataset, read directly or through h5py.

Straight from the file, by a table of offsets and with our own codecs, where that is known to give
what HDF5 would; else through h5py. Which one a dataset takes, and why, stands in `Chunks.how`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.formats.arrays.chunks import (
    COUNTABLE,
    ChunkIndex,
    ChunkNames,
    Chunks,
    DirectChunks,
    Grid,
    LibraryChunks,
)
from headrace.formats.arrays.codecs import Pipeline
from headrace.formats.arrays.rows import LibraryRows
from headrace.formats.hdf5.files import (
    HDF5Files,
    check_has_values,
    with_ordered_fields,
    without_gc,
)
from headrace.formats.hdf5.filters import check_filters, codecs_of
from headrace.formats.hdf5.links import Versions
from headrace.formats.hdf5.probe import doubt_of, is_as_stored, place_of
from headrace.io.array_file import ArrayFile, Unkept
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.library_errors import asking
from headrace.io.paths import cache_folder, redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray

TABLE_VERSION = 2
KEPT_FROM = 20_000
"""Chunks from which on a table is kept in the cache folder: fewer are counted in some 40 ms."""


class HDF5Array:
    """A dataset as h5py reads it, from the files that each process has open."""

    def __init__(
        self, library: WorkerFiles[h5py.File], path: str, name: str, versions: Versions
    ) -> None:
        self._library, self._path, self._name, self._versions = library, path, name, versions

    def __call__(self, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        return self.read([part])[0]

    def read(self, parts: Sequence[tuple[slice, ...]]) -> list[npt.NDArray[Any]]:
        """Parts of the dataset, out of files that are compared with their versions."""
        with (
            self._library.reading(self._path) as file,
            asking("h5py", f"{redact(self._path)}: {self._name!r}"),
        ):
            self._versions.check(file, [part[0].start for part in parts])
            dataset = with_ordered_fields(file[self._name])
            axes = len(dataset.shape)  # elements may be arrays, which have axes of their own
            arrays = [np.asarray(dataset[part[:axes]]) for part in parts]
        rest: list[Any] = [(..., *part[axes:]) for part in parts]
        return [array[inner] for array, inner in zip(arrays, rest, strict=True)]

    def check(self, part: tuple[slice, ...]) -> None:
        with self._library.reading(self._path) as file:
            self._versions.check(file, [part[0].start])


class ObjectRows(LibraryRows):
    """Rows of strings, of arrays of any length, and of compounds with such."""

    how = "h5py: elements of any size"

    def __init__(self, dataset: h5py.Dataset, array: HDF5Array) -> None:
        self.shape, self.dtype, self._array = tuple(dataset.shape), dataset.dtype, array

    def read(self, rows: Sequence[int]) -> list[Any]:
        parts = self._array.read([(slice(row, row + 1),) for row in rows])
        return [part[0] for part in parts]


class ChunkTable(ChunkIndex):
    """Where the chunks of a dataset lie; a contiguous one is one chunk.

    Args:
        path, files: of the file which they lie in, and by which it is read.
        table: [3, written chunks] int64 of offsets, bytes and skipped filters.
        numbers: of the chunks in `table`, sorted; None: it has all.
    """

    def __init__(
        self,
        path: str,
        files: Files,
        table: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._path = path
        self._files = files
        offsets, sizes, masks = table
        self._starts = SharedArray(offsets)
        self._stops = SharedArray(offsets + sizes)
        self._masks = SharedArray(masks) if masks.any() else None
        self._numbers = None if numbers is None else SharedArray(numbers)
        self.nbytes: int = int(sizes.sum())

    def _of(self, numbers: IntArray, column: SharedArray, missing: int) -> IntArray:
        if self._numbers is None:
            values: IntArray = column.array[numbers]
            return values
        known = self._numbers.array
        if not len(known):
            return np.full(len(numbers), missing, np.int64)
        places = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
        return np.where(known[places] == numbers, column.array[places], missing)

    def ranges(self, numbers: IntArray) -> ByteRanges:
        starts = self._of(numbers, self._starts, -1)
        return ByteRanges.in_file(self._path, starts, self._of(numbers, self._stops, -1))

    def unused_codecs(self, numbers: IntArray) -> IntArray | None:
        return None if self._masks is None else self._of(numbers, self._masks, 0)

    def check(self, number: int) -> None:
        self._files.check(self._path)

    def written(self) -> npt.NDArray[np.int64]:
        """The numbers of the chunks that were written."""
        return np.arange(len(self._starts.array)) if self._numbers is None else self._numbers.array


def rows_of(
    dataset: h5py.Dataset,
    path: str,
    name: str,
    hdf5: HDF5Files,
    library: WorkerFiles[h5py.File],
    *,
    direct: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Chunks | ObjectRows:
    """The chunks of a dataset of numbers, or the rows of one of objects.

    Args:
        dataset: open.
        path, name: of the file, and in it.
        hdf5, library: the files, and those that each process has open by h5py.
        direct: False: through h5py in any case.
        cache_dir: where the table of a dataset of many chunks is kept; None: in the user's cache
            folder.

    Raises:
        FormatError: no axis of rows, references, a filter that is missing, or a file that is
            shorter than its own table says.
        DataNotFoundError: a source of a virtual dataset is missing.
    """
    where = f"{redact(path)}: {name!r}"
    check_has_values(dataset, where)
    if not dataset.shape:
        raise FormatError(f"{where} is a single value, it has no axis of samples")
    dataset = with_ordered_fields(dataset)
    versions = Versions(dataset, path, name, hdf5)
    array = HDF5Array(library, path, name, versions)
    if holds_objects(dataset.dtype, where):
        check_filters(dataset, where)
        return ObjectRows(dataset, array)
    chunks = _direct_chunks(dataset, name, hdf5, versions, cache_dir) if direct else "direct=False"
    if isinstance(chunks, DirectChunks):
        return chunks
    check_filters(dataset, where)
    elements, dtype = _elements(dataset)
    height = dataset.chunks or (1, *dataset.shape[1:])
    return LibraryChunks(
        Grid((*dataset.shape, *elements), (*height, *elements)), dtype, array, f"h5py: {chunks}"
    )


def holds_objects(dtype: np.dtype[Any], where: str) -> bool:
    """True if elements of that dtype lie elsewhere in the file, each of its own size.

    Raises:
        FormatError: they are references, which mean nothing outside of their file.
    """
    if h5py.check_ref_dtype(dtype) is not None:
        raise FormatError(
            f"{where} holds references to other objects of its file, and no values: name the "
            "dataset that they lead to"
        )
    if dtype.names is not None:
        return any(
            [holds_objects(dtype[name], f"{where}, field {name!r},") for name in dtype.names]
        )
    return bool(dtype.hasobject) or (
        dtype.subdtype is not None and holds_objects(dtype.subdtype[0], where)
    )


def _direct_chunks(
    dataset: h5py.Dataset,
    name: str,
    hdf5: HDF5Files,
    versions: Versions,
    cache_dir: str | os.PathLike[str] | None,
) -> DirectChunks | str:
    """The chunks as they are read without h5py; or why they can't be."""
    why, known, path = obstacle_of(dataset), versions.known, versions.path
    if why is not None or known is None:
        return str(why)
    if not dataset.size:
        return "it has no elements"
    elements, dtype = _elements(dataset)
    shape = (*dataset.shape, *elements)
    grid = Grid(tuple(dataset.shape), dataset.chunks or dataset.shape)
    names = ChunkNames(path, name, grid)
    if dataset.chunks is None:
        begin, nbytes = place_of(dataset.id), math.prod(shape) * dtype.itemsize
        if begin is None:
            return "nothing has been written"
        if begin + nbytes > known.size:
            raise FormatError(
                f"{redact(path)} is cut short: {known.size:,} bytes are not enough for {name!r}"
            )
        table = ChunkTable(path, hdf5.files, np.array([[begin], [nbytes], [0]]))
        return DirectChunks(Grid(shape, shape), dtype, table, Pipeline(), hdf5.files, where=names)
    if math.prod(grid.counts) > COUNTABLE:
        raise FormatError(
            f"{redact(path)}: {name!r} has shape {list(shape)}, more chunks than can be counted: "
            "the file is damaged"
        )
    chunked = _table(dataset, versions, hdf5, names, cache_dir)
    if chunked is None:
        return "the index of its chunks is unusual"
    written, fill = chunked.written(), _fill_value(dataset, dtype)
    if fill is None and len(written) < math.prod(grid.counts):
        return "what was not written is no zeros, and each element an array"
    whole = Grid(shape, (*grid.chunks, *elements))
    chunks = DirectChunks(
        whole, dtype, chunked, Pipeline(codecs_of(dataset)), hdf5.files, fill=fill, where=names
    )
    return hdf5.doubt(path, name, functools.partial(doubt_of, dataset, chunks, written)) or chunks


def _elements(dataset: h5py.Dataset) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape of an element, where each is an array, and the dtype of what is in it; else ()
    and the dtype.
    """
    dtype: np.dtype[Any] = dataset.dtype
    return ((), dtype) if dtype.subdtype is None else (dtype.subdtype[1], dtype.subdtype[0])


def _fill_value(dataset: h5py.Dataset, dtype: np.dtype[Any]) -> Any:
    """What HDF5 gives of chunks that were never written; None: h5py can't tell it."""
    plist = dataset.id.get_create_plist()
    if (
        plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED
        or plist.get_fill_time() == h5py.h5d.FILL_TIME_NEVER
    ):
        return np.zeros((), dtype)[()]
    return dataset.fillvalue if dataset.dtype == dtype else None


def obstacle_of(dataset: h5py.Dataset) -> str | None:
    """Why a dataset can't be read directly, as far as its header says so; None: it can be, or
    its chunks say that it can't.
    """
    plist = dataset.id.get_create_plist()
    if not hasattr(os, "preadv"):
        return "this system has no preadv"
    if dataset.file.swmr_mode:
        return "another process is writing to the file"
    if dataset.is_virtual:
        return "a virtual dataset"
    if dataset.external:
        return "its bytes lie in external files"
    if plist.get_layout() == h5py.h5d.COMPACT:
        return "a compact dataset lies in the file's head"
    if not is_as_stored(dataset.id.get_type(), dataset.dtype):
        return f"its elements are converted to {dataset.dtype}"
    if dataset.chunks is None:
        return None
    if not hasattr(dataset.id, "chunk_iter"):
        return "this HDF5 has no chunk_iter"
    grows = [axis for axis, extent in enumerate(dataset.maxshape) if extent is None]
    # HDF5 2.0 gives wrong places for them, where they are kept in an extensible array
    if len(grows) == 1 and grows != [0]:
        return "HDF5 can't list the chunks of what grows along another axis than the first"
    try:
        Pipeline(codecs_of(dataset))
    except ValueError as error:
        return str(error)
    return None


def _table(
    dataset: h5py.Dataset,
    versions: Versions,
    hdf5: HDF5Files,
    names: ChunkNames,
    cache_dir: str | os.PathLike[str] | None,
) -> ChunkTable | None:
    """Where the chunks lie; None: HDF5 may find others than those that it lists."""
    _, name, grid = names
    version = versions.known
    assert version is not None
    shown = redact(versions.path)
    folder = os.fspath(cache_folder(cache_dir))
    kept: ArrayFile | None = None
    arrays: Any = None
    if math.prod(grid.counts) >= KEPT_FROM and version.tag is not None:
        about = {
            "of": hdf5.files.identity(versions.path),
            "header": h5py.h5o.get_info(dataset.id).addr,
            "grid": [grid.shape, grid.chunks],
        }
        kept = ArrayFile(folder, "chunks", about, TABLE_VERSION, ["<i8", "<i8"])
        arrays = kept.loaded()
    if arrays is None:
        arrays = _counted(dataset, grid, shown)
        if arrays is None:
            return None
        if kept is not None:
            with Unkept(folder, "tables of chunks are", "every start counts them anew"):
                kept.write([arrays[0], arrays[1].reshape(-1)])
    numbers = arrays[0]
    table = arrays[1].reshape(3, len(numbers))
    outside = (table[0] < 0) | (table[1] < 0) | (table[0] > version.size - table[1])
    if outside.any():
        place = grid.place(int(numbers[np.flatnonzero(outside)[0]]))
        raise FormatError(
            f"{shown} is cut short: chunk {place} of {name!r} lies beyond its {version.size:,} "
            "bytes"
        )
    if len(numbers) == math.prod(grid.counts):
        numbers = None
    return ChunkTable(versions.path, hdf5.files, table, numbers)


def _counted(
    dataset: h5py.Dataset, grid: Grid, shown: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """The chunks that were written: their numbers, sorted, and [3, n] offsets, bytes and skipped
    filters.

    None: they are listed in no order, so HDF5, which looks them up in it, would miss some.

    Raises:
        FormatError: one has no bytes, or none but a part of a checksum, over which HDF5 would
            crash.
    """
    found: list[Any] = []
    # it would look through what has been found again and again, and take as long as all the rest
    with without_gc():
        dataset.id.chunk_iter(found.append)  # goes on as long as None comes back
    corners = np.fromiter(
        itertools.chain.from_iterable([info.chunk_offset for info in found]), np.int64
    )
    places, odd = np.divmod(corners.reshape(len(found), len(grid.shape)), np.array(grid.chunks))
    # a dataset that has shrunk may keep others
    inside = (places < np.array(grid.counts)).all(axis=1)
    table = np.zeros((3, len(found)), np.int64)
    for row, name in enumerate(("byte_offset", "size", "filter_mask")):
        table[row] = np.fromiter(map(operator.attrgetter(name), found), np.int64, len(found))
    least = 4 if dataset.fletcher32 else 1
    if (table[1] < least).any():
        raise FormatError(
            f"{shown}: a chunk of {dataset.name!r} has {table[1].min()} bytes: the file is damaged"
        )
    if odd.any() or not _in_order(places):
        return None
    return np.ravel_multi_index(tuple(places[inside].T), grid.counts), table[:, inside]


def _in_order(places: npt.NDArray[np.int64]) -> bool:
    """True if each chunk lies behind the last one in C order."""
    steps = np.diff(places, axis=0)
    first = np.argmax(steps != 0, axis=1)  # the first coordinate that changes
    return bool((np.take_along_axis(steps, first[:, None], axis=1) > 0).all())
