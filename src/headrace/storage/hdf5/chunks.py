"""The chunks of an HDF5 dataset, read directly or through h5py.

Straight from the file, by a table of offsets and with our own codecs, where that is known to give what HDF5 would; else through h5py.
Which one a dataset takes, and why, stands in `Chunks.how`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import math
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.array_file import ArrayFile
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.library_errors import asking
from headrace.io.paths import cache_folder, redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.chunks import ChunkIndex, Chunks, DirectChunks, Grid, LibraryChunks
from headrace.storage.arrays.codecs import Pipeline
from headrace.storage.hdf5.filters import codecs_of
from headrace.storage.hdf5.probe import doubt_of, is_as_stored
from headrace.storage.hdf5.remote import FarHDF5, patiently
from headrace.storage.hdf5.versions import Versions

_log = logging.getLogger(__name__)

TABLE_VERSION = 1
KEPT_FROM = 20_000
"""Chunks from which on a table is kept in the cache folder: fewer are counted in some 40 ms."""

_COUNTABLE = (1 << 63) - 1
_SPARSE = 4  # times as many chunks as were written, from which on those are listed alone


class _Library:
    """Reads parts of a dataset through h5py."""

    def __init__(self, opened: WorkerFiles[h5py.File], path: str, name: str, versions: Versions, axes: int) -> None:
        self._opened, self._path, self._name, self._versions, self._axes = opened, path, name, versions, axes

    def check(self, numbers: Sequence[int]) -> None:
        """Are the files that hold chunks still those that were opened? The chunks of what lies in several files are rows."""
        with self._opened.reading(self._path) as file:
            self._versions.check(file, numbers)

    def __call__(self, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        return patiently(functools.partial(self._read, part))

    def _read(self, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        with self._opened.reading(self._path) as file, asking("h5py", f"{redact(self._path)}: {self._name!r}"):
            found = np.asarray(file[self._name][part[: self._axes]])
        rest: Any = (..., *part[self._axes :])  # elements may be arrays, which have axes of their own
        return np.asarray(found[rest])


class _LibraryChunks(LibraryChunks):
    """Chunks that h5py reads, of the versions of files that were opened; what is read from a server is checked there."""

    def __init__(self, grid: Grid, dtype: np.dtype[Any], library: _Library, how: str, is_local: bool) -> None:
        super().__init__(grid, dtype, library, how)
        self._library, self._is_local = library, is_local

    def read(self, numbers: Sequence[int]) -> list[Any]:
        if self._is_local:
            self._library.check(numbers)
        return super().read(numbers)

    def check_held(self, number: int) -> None:
        """As `read` checks it, for a chunk that is held decoded."""
        if self._is_local:
            self._library.check([number])


class _Contiguous(ChunkIndex):
    """Where a contiguous dataset lies, as if it were one chunk."""

    def __init__(self, path: str, files: Files, begin: int, nbytes: int) -> None:
        self._path, self._files, self._begin, self._end = path, files, begin, begin + nbytes

    def ranges(self, numbers: IntArray) -> ByteRanges:
        zeros = np.zeros(len(numbers), np.int64)
        return ByteRanges([self._path], zeros, zeros + self._begin, zeros + self._end)

    def check(self, number: int) -> None:
        self._files.check(self._path)


class _Table(ChunkIndex):
    """Where the chunks of a dataset lie.

    Args:
        path, files: of the file which they lie in, and by which it is read.
        rows: [3, chunks] int64 of offsets, bytes (0: never written) and skipped filters.
        numbers: of the chunks, sorted, where most were never written and only the others have a place in `rows`; None: it has all.
    """

    def __init__(self, path: str, files: Files, rows: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64] | None = None) -> None:
        self._path, self._files, self._rows = path, files, SharedArray(rows)
        self._numbers = None if numbers is None else SharedArray(numbers)
        self._has_masks = bool(rows[2].any())

    def _find(self, numbers: IntArray) -> npt.NDArray[np.int64]:
        if self._numbers is None:
            return self._rows.array[:, numbers]
        if not len(self._numbers):
            return np.zeros((3, len(numbers)), np.int64)
        known = self._numbers.array
        places = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
        return np.where(known[places] == numbers, self._rows.array[:, places], 0)

    def ranges(self, numbers: IntArray) -> ByteRanges:
        offsets, nbytes, _ = self._find(numbers)
        is_written = nbytes > 0
        return ByteRanges.in_file(self._path, np.where(is_written, offsets, -1), np.where(is_written, offsets + nbytes, -1))

    def unused_codecs(self, numbers: IntArray) -> IntArray | None:
        return self._find(numbers)[2] if self._has_masks else None

    @property
    def nbytes(self) -> int:
        return int(self._rows.array[1].sum())

    def check(self, number: int) -> None:
        self._files.check(self._path)

    def written(self) -> npt.NDArray[np.int64]:
        """The numbers of the chunks that were written."""
        return np.flatnonzero(self._rows.array[1]) if self._numbers is None else self._numbers.array


class _Where:
    """Names a chunk for messages."""

    def __init__(self, path: str, name: str, grid: Grid) -> None:
        self._path, self._name, self._grid = path, name, grid

    def __call__(self, number: int) -> str:
        return f"{redact(self._path)}, chunk {self._grid.place(number)} of {self._name!r}"


def chunks_of(
    dataset: h5py.Dataset,
    path: str,
    name: str,
    files: Files,
    opened: WorkerFiles[h5py.File],
    versions: Versions,
    *,
    far: FarHDF5 | None = None,
    direct: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Chunks:
    """The chunks of a dataset of numbers with at least one axis.

    Args:
        dataset: open.
        path, name: of the file, and in it.
        files, opened: what each process opens to read from it, itself and through h5py.
        versions: of the files that hold it.
        far: of the server, for a URL.
        direct: False: through h5py in any case.
        cache_dir: where the table of a dataset of many chunks is kept; None: in the user's cache folder.

    Raises:
        FormatError: the file is shorter than its own table says; a source of a virtual dataset is missing.
    """
    elements, dtype = _elements(dataset)
    shape = (*dataset.shape, *elements)
    why = _obstacle(dataset) if direct else "direct=False"
    load, known = _Library(opened, path, name, versions, len(dataset.shape)), versions.known
    height = dataset.chunks or (1, *dataset.shape[1:])
    library = _LibraryChunks(Grid(shape, (*height, *elements)), dtype, load, f"h5py: {why}", far is None)
    if why is not None or known is None or not dataset.size:
        return library
    if dataset.chunks is None:
        begin, nbytes = dataset.id.get_offset(), math.prod(shape) * dtype.itemsize
        if begin is None:
            library.how = "h5py: nothing has been written"
            return library
        if begin + nbytes > known.size:
            raise FormatError(f"{redact(versions.path)} is cut short: {known.size:,} bytes are not enough for {name!r}")
        where = _Where(versions.path, name, Grid(shape, shape))
        return DirectChunks(Grid(shape, shape), dtype, _Contiguous(versions.path, files, begin, nbytes), Pipeline(), files, where=where)
    grid = Grid(tuple(dataset.shape), dataset.chunks)
    if math.prod(grid.counts) > _COUNTABLE:
        raise FormatError(f"{redact(path)}: {name!r} has shape {list(shape)}, more chunks than can be counted: the file is damaged")
    table = _table(dataset, versions, files, far, name, grid, cache_dir)
    if table is None:
        library.how = "h5py: the index of its chunks is unusual"
        return library
    written, fill = table.written(), _fill_value(dataset, dtype)
    if fill is None and len(written) < math.prod(grid.counts):
        library.how = "h5py: what was not written is no zeros, and each element an array"
        return library
    pipeline, where = Pipeline(codecs_of(dataset)), _Where(versions.path, name, grid)
    found = DirectChunks(Grid(shape, (*grid.chunks, *elements)), dtype, table, pipeline, files, fill=fill, where=where)
    look = functools.partial(doubt_of, dataset, found, written)
    doubt = look() if far is None else far.doubt(path, name, look)
    if doubt is not None:
        library.how = f"h5py: {doubt}"
        return library
    return found


def _elements(dataset: h5py.Dataset) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape of an element, where each is an array, and the dtype of what is in it; else () and the dtype."""
    dtype: np.dtype[Any] = dataset.dtype
    return ((), dtype) if dtype.subdtype is None else (dtype.subdtype[1], dtype.subdtype[0])


def _fill_value(dataset: h5py.Dataset, dtype: np.dtype[Any]) -> Any:
    """What HDF5 gives of chunks that were never written; None: h5py can't tell it."""
    plist = dataset.id.get_create_plist()
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED or plist.get_fill_time() == h5py.h5d.FILL_TIME_NEVER:
        return np.zeros((), dtype)[()]
    return dataset.fillvalue if dataset.dtype == dtype else None


def _obstacle(dataset: h5py.Dataset) -> str | None:
    """Why a dataset can't be read directly, if it can't."""
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
    if len(grows) == 1 and grows != [0]:  # HDF5 2.0 gives wrong places for them, where they are kept in an extensible array
        return "HDF5 can't list the chunks of what grows along another axis than the first"
    try:
        Pipeline(codecs_of(dataset))
    except ValueError as error:
        return str(error)
    return None


def _table(
    dataset: h5py.Dataset,
    versions: Versions,
    files: Files,
    far: FarHDF5 | None,
    name: str,
    grid: Grid,
    cache_dir: str | os.PathLike[str] | None,
) -> _Table | None:
    """Where the chunks lie; None: HDF5 may find others than those that it lists."""
    number, version = math.prod(grid.counts), versions.known
    assert version is not None
    shown = redact(versions.path)
    about = {"path": shown, "size": version.size, "mtime": version.tag, "name": name, "grid": [grid.shape, grid.chunks]}
    if versions.is_linked:  # the name is none of that file
        about["header"] = h5py.h5o.get_info(dataset.id).addr
    if far is not None:
        about["place"] = far.files.place
    folder = cache_folder(cache_dir)
    is_kept = number >= KEPT_FROM and version.tag is not None
    kept = ArrayFile(os.fspath(folder), "chunks", about, TABLE_VERSION, ["<i8"]) if is_kept else None
    # h5py's own list must be part of the index of what is far away
    is_wanted = kept is not None and (far is None or far.is_found(versions.path))
    table, numbers = _kept(kept, number) if kept is not None and is_wanted else None, None
    if table is None:
        found = _counted(dataset, grid, shown)
        if found is None:
            return None
        numbers, table = found
        if number <= max(KEPT_FROM, _SPARSE * len(numbers)):
            whole = np.zeros((3, number), np.int64)
            whole[:, numbers] = table
            numbers, table = None, whole
            if kept is not None:
                _keep(kept, table, folder, is_default=cache_dir is None)
    outside = (table[0] < 0) | (table[1] < 0) | (table[0] > version.size - table[1])
    if outside.any():
        at = np.flatnonzero(outside)[0]
        place = grid.place(int(at if numbers is None else numbers[at]))
        raise FormatError(f"{shown} is cut short: chunk {place} of {name!r} lies beyond its {version.size:,} bytes")
    return _Table(versions.path, files, table, numbers)


def _counted(dataset: h5py.Dataset, grid: Grid, shown: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """The chunks that were written: their numbers, sorted, and [3, n] offsets, bytes and skipped filters.

    None: they are listed in no order, so HDF5, which looks them up in it, would miss some.

    Raises:
        FormatError: one has no bytes, or none but a part of a checksum, over which HDF5 would crash.
    """
    found: list[Any] = []
    collects = gc.isenabled()
    gc.disable()  # it would look through what has been found again and again, and take as long as all the rest
    try:
        dataset.id.chunk_iter(found.append)  # goes on as long as None comes back
    finally:
        if collects:
            gc.enable()
    corners = np.fromiter(itertools.chain.from_iterable([info.chunk_offset for info in found]), np.int64)
    places, odd = np.divmod(corners.reshape(len(found), len(grid.shape)), np.array(grid.chunks))
    inside = (places < np.array(grid.counts)).all(axis=1)  # a dataset that has shrunk may keep others
    table = np.zeros((3, len(found)), np.int64)
    for row, name in enumerate(("byte_offset", "size", "filter_mask")):
        table[row] = np.fromiter(map(operator.attrgetter(name), found), np.int64, len(found))
    least = 4 if dataset.fletcher32 else 1
    if (table[1] < least).any():
        raise FormatError(f"{shown}: a chunk of {dataset.name!r} has {table[1].min()} bytes: the file is damaged")
    numbers, table = np.ravel_multi_index(tuple(places[inside].T), grid.counts), table[:, inside]
    if odd.any() or not _in_order(places):
        return None
    order = np.argsort(numbers, kind="stable")
    return numbers[order], table[:, order]


def _in_order(places: npt.NDArray[np.int64]) -> bool:
    """Does each chunk lie behind the last one in C order?"""
    steps = np.diff(places, axis=0)
    first = np.argmax(steps != 0, axis=1)  # the first coordinate that changes
    return bool((np.take_along_axis(steps, first[:, None], axis=1) > 0).all())


def _kept(kept: ArrayFile, number: int) -> npt.NDArray[np.int64] | None:
    arrays = kept.loaded()
    return arrays[0].reshape(3, number) if arrays is not None and arrays[0].size == 3 * number else None


def _keep(kept: ArrayFile, table: npt.NDArray[np.int64], folder: Path, is_default: bool) -> None:
    try:
        if is_default:
            os.makedirs(folder.parent, exist_ok=True)
        kept.write([table.reshape(-1)])
    except OSError as error:
        _log.info(
            "cache_dir=%r: the table of chunks is not kept (%s), so every start counts them anew", str(folder), error.strerror or error
        )
