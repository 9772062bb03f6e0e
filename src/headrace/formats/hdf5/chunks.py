"""The chunks of an HDF5 dataset, read directly or through h5py.

Straight from the file, by a table of offsets and with our own codecs, where that is known to give
what HDF5 would; else through h5py. Which one a dataset takes, and why, stands in `Chunks.how`.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from headrace.dtypes import AnyArray, IntArray
from headrace.errors import ConfigError, FormatError
from headrace.formats.arrays.chunks import (
    COUNTABLE,
    ChunkTable,
    DirectChunks,
    Grid,
    LibraryChunks,
)
from headrace.formats.arrays.codecs import (
    BLOSC,
    FLETCHER32,
    INFLATE,
    LEVELS,
    ZSTD,
    Codec,
    Pipeline,
    codec_versions,
    shuffles,
    unshuffle,
)
from headrace.formats.hdf5.files import (
    check_files,
    check_has_values,
    files_behind,
    ordered,
    read_part,
    without_gc,
)
from headrace.formats.tree import OpenTrees
from headrace.io.files import Files
from headrace.io.library_errors import asking
from headrace.io.paths import redact

_CODECS = {1: INFLATE, 3: FLETCHER32, 32001: BLOSC, 32015: ZSTD}


Filter = tuple[int, Sequence[int], str]
"""The code of a filter, its values, and its name, as the file says it."""


class Layout(NamedTuple):
    """What it takes to read a dataset directly.

    Attributes:
        path: of the file that it lies in.
        shape, chunks: of its grid.
        filters: of its chunks.
        fill: the value of chunks that were never written ([], of the elements' dtype).
        places, written: see `ChunkTable`.
        extents: see `Chunks`.
    """

    path: str
    shape: Sequence[int]
    chunks: Sequence[int]
    filters: Sequence[Filter]
    fill: AnyArray
    places: IntArray
    written: IntArray | None
    extents: Sequence[int] | None

    def opened(self, name: str, files: Files) -> DirectChunks:
        """The chunks of the dataset of that name."""
        chunks = DirectChunks(
            Grid(tuple(self.shape), tuple(self.chunks)),
            self.fill.dtype,
            ChunkTable(self.path, self.places, self.written),
            _pipeline_of(self.filters),
            files,
            path=self.path,
            name=name,
            fill=self.fill[()],
        )
        if self.extents is not None:
            chunks.extents = tuple(self.extents)
        return chunks


class HDF5Array(LibraryChunks):
    """A dataset as h5py reads it, from the files that each process has open.

    Args:
        dataset: open.
        path, name: of the file in which it was looked for, and in it.
        opened: these files.
        behind: files that its values come from, which must not change.
        why: h5py reads it.
        are_objects: True if its elements have any size.
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        path: str,
        name: str,
        opened: OpenTrees[h5py.File],
        behind: Sequence[str],
        why: str,
        are_objects: bool,
    ) -> None:
        elements: tuple[int, ...] = ()
        dtype = ordered(dataset.dtype)
        if not are_objects:
            elements, dtype = _elements(dataset)
        height = dataset.chunks or (1, *dataset.shape[1:])
        grid = Grid((*dataset.shape, *elements), (*height, *elements))
        super().__init__(grid, dtype, f"h5py: {why}")
        self.holds_objects = are_objects
        self.extents = dataset.chunks
        self._library = opened.library
        self._path = path
        self._name = name
        self._files = opened.files
        self._behind = behind

    def check_cached(self, number: int) -> None:
        check_files(self._files, self._path, self._behind)

    def rows(self, rows: Sequence[int]) -> list[Any]:
        return [part[0] for part in self._read_parts([(slice(row, row + 1),) for row in rows])]

    def decode(self, number: int, data: Any) -> AnyArray:
        return self._read_parts([self.grid.part(number)])[0]

    def _read_parts(self, parts: Sequence[tuple[slice, ...]]) -> list[AnyArray]:
        with (
            self._library.reading(self._path) as file,
            asking("h5py", f"{redact(self._path)}: {self._name!r}"),
        ):
            # once it is open: another one may have been opened just now
            check_files(self._files, self._path, self._behind)
            dataset = file[self._name]
            axes = len(dataset.shape)  # elements may be arrays, which have axes of their own
            arrays = [read_part(dataset, part[:axes]) for part in parts]
        rest: list[Any] = [(..., *part[axes:]) for part in parts]
        return [array[inner] for array, inner in zip(arrays, rest, strict=True)]


def chunks_of(
    dataset: h5py.Dataset, path: str, name: str, opened: OpenTrees[h5py.File]
) -> Layout | HDF5Array:
    """The layout of a dataset that is read directly; else what reads it through h5py.

    Args:
        dataset: open.
        path, name: of the file, and in it.
        opened: by which they are read.

    Raises:
        FormatError: no axis of rows, references, a filter that is missing, or a file that is
            shorter than its own table says.
        DataNotFoundError: a source of a virtual dataset is missing.
    """
    where = f"{redact(path)}: {name!r}"
    check_has_values(dataset, where)
    if not dataset.shape:
        raise FormatError(f"{where} is a single value without an axis of samples")
    behind = files_behind(dataset, path, opened.files)
    layout: Layout | str = "direct=False"
    are_objects = holds_objects(dataset.dtype, where)
    if are_objects:
        layout = "elements of any size"
    elif opened.direct:
        layout = _layout_of(dataset, name, opened.files, behind[0])
    if isinstance(layout, Layout):
        return layout
    missing = [name for code, _, name in _filters_of(dataset) if not h5py.h5z.filter_avail(code)]
    if missing:
        raise FormatError(
            f"{where} is packed with {', '.join(missing)}, which h5py lacks: pip "
            "install hdf5plugin, and import it; or register the filter with HDF5 "
            "(HDF5_PLUGIN_PATH), or repack the file (h5repack)"
        )
    return HDF5Array(dataset, path, name, opened, behind, layout, are_objects)


def holds_objects(dtype: np.dtype[Any], where: str) -> bool:
    """True if elements of that dtype have variable length.

    Raises:
        FormatError: they are references, which mean nothing outside of their file.
    """
    if h5py.check_ref_dtype(dtype) is not None:
        raise FormatError(
            f"{where} holds references to other objects of its file, not values: name the dataset "
            "that they point to"
        )
    if dtype.names is not None:
        return any(
            [holds_objects(dtype[name], f"{where}, field {name!r},") for name in dtype.names]
        )
    return bool(dtype.hasobject) or (
        dtype.subdtype is not None and holds_objects(dtype.subdtype[0], where)
    )


def _elements(dataset: h5py.Dataset) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and dtype inside of an element that is an array; else () and the dtype."""
    dtype = ordered(dataset.dtype)
    return ((), dtype) if dtype.subdtype is None else (dtype.subdtype[1], dtype.subdtype[0])


# -- direct reads


def _layout_of(dataset: h5py.Dataset, name: str, files: Files, path: str) -> Layout | str:
    """The layout for direct reads, or why only h5py can read the dataset."""
    why = _obstacle_of(dataset)
    if why is not None:
        return why
    size = files.version(path).size
    shown = redact(path)
    elements, dtype = _elements(dataset)
    shape = (*dataset.shape, *elements)
    grid = Grid(tuple(dataset.shape), dataset.chunks or dataset.shape)
    if math.prod(grid.counts) > COUNTABLE:
        raise FormatError(
            f"{shown}: {name!r} has shape {list(shape)}, more chunks than can be counted: the "
            "file is damaged"
        )
    counted: tuple[IntArray, IntArray] | None
    if dataset.chunks is None:
        begin = place_of(dataset.id)
        if begin is None:
            return "nothing has been written"
        nbytes = math.prod(shape) * dtype.itemsize
        counted = (np.zeros(1, np.int64), np.array([[begin], [nbytes], [0]]))
    else:
        counted = _counted(dataset, grid, shown)
    if counted is None:
        return "the index of its chunks is unusual"
    written, places = counted
    outside = (places[0] < 0) | (places[1] < 0) | (places[0] > size - places[1])
    if outside.any():
        what = repr(name)
        if dataset.chunks is not None:
            what = f"chunk {grid.place(int(written[np.flatnonzero(outside)[0]]))} of {what}"
        raise FormatError(
            f"{shown} is cut short: {what} lies beyond its {size:,} bytes: copy it again"
        )
    is_whole = len(written) == math.prod(grid.counts)
    fill = _fill_value(dataset, dtype)
    if fill is None and not is_whole:
        return "what was not written is no zeros, and each element an array"
    layout = Layout(
        path,
        shape,
        (*grid.chunks, *elements),
        _filters_of(dataset),
        np.zeros((), dtype) if fill is None else fill,
        places,
        None if is_whole else written,
        dataset.chunks,
    )
    if layout.filters and _lacks_filters(layout.opened(name, files), grid, written, places):
        return "chunks at its edge may lie there without their filters"
    return layout


def _lacks_filters(chunks: DirectChunks, grid: Grid, written: IntArray, places: IntArray) -> bool:
    """True if chunks at the edge may be stored without their filters, which HDF5 does not record:
    one is as long as in memory, and its filters can't decode it.
    """
    is_edge = np.zeros(len(written), bool)
    along = zip(np.unravel_index(written, grid.counts), *grid, grid.counts, strict=True)
    for at, extent, chunk, count in along:
        is_edge |= (at == count - 1) & bool(extent % chunk)
    doubtful = written[is_edge & (places[1] == chunks.nbytes) & (places[2] == 0)]
    try:
        for number in doubtful[:1].tolist():
            chunks.decode(number, chunks.read([number])[0])
    except FormatError:
        return True
    return len(doubtful) > 0 and all(codec.adds == 0 for codec in chunks.pipeline.codecs)


def _obstacle_of(dataset: h5py.Dataset) -> str | None:
    """Why a dataset can't be read directly, by its header alone; None: nothing is in the way."""
    plist = dataset.id.get_create_plist()
    if not hasattr(os, "preadv"):
        return "this system has no preadv"
    if dataset.is_virtual:
        return "a virtual dataset"
    if dataset.external:
        return "its bytes lie in external files"
    if plist.get_layout() == h5py.h5d.COMPACT:
        return "a compact dataset lies in the file's head"
    if not is_as_stored(dataset.id.get_type(), dataset.dtype):
        return f"its elements are converted to {dataset.dtype}"
    if not dataset.size:
        return "it has no elements"
    if dataset.chunks is None:
        return None
    if dataset.file.userblock_size and h5py.version.hdf5_version_tuple < (2, 0, 0):
        return "this HDF5 may list its chunks without the file's user block"
    grows = [axis for axis, extent in enumerate(dataset.maxshape) if extent is None]
    # HDF5 2.0 gives wrong places for them, where they are kept in an extensible array
    if len(grows) == 1 and grows != [0]:
        return "HDF5 can't list the chunks of what grows along another axis than the first"
    try:
        _pipeline_of(_filters_of(dataset))
    except ValueError as error:
        return str(error)
    return None


def is_as_stored(kind: h5py.h5t.TypeID, dtype: np.dtype[Any]) -> bool:
    """True if elements are stored with the very bytes that h5py gives; not so bit fields, or
    integers of 12 bits in two bytes.
    """
    return bool(kind.equal(h5py.h5t.py_create(dtype, logical=True)))


def place_of(dataset: h5py.h5d.DatasetID) -> int | None:
    """The first byte of a contiguous dataset in its file; None: nothing has been written.

    Of a file with a user block, `get_offset` gives a number then too.
    """
    if dataset.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
        return None
    place: int | None = dataset.get_offset()
    return place


def _fill_value(dataset: h5py.Dataset, dtype: np.dtype[Any]) -> AnyArray | None:
    """The value of chunks that were never written ([]); None: h5py can't tell it."""
    plist = dataset.id.get_create_plist()
    if (
        plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED
        or plist.get_fill_time() == h5py.h5d.FILL_TIME_NEVER
    ):
        return np.zeros((), dtype)
    if ordered(dataset.dtype) != dtype:
        return None
    fill = np.zeros((), dtype)
    plist.get_fill_value(fill)
    return fill


def _counted(dataset: h5py.Dataset, grid: Grid, shown: str) -> tuple[IntArray, IntArray] | None:
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
    steps = np.diff(places, axis=0)
    changing = np.argmax(steps != 0, axis=1)[:, None]  # the first coordinate that changes
    in_order = (np.take_along_axis(steps, changing, axis=1) > 0).all()
    if odd.any() or not in_order:
        return None
    return np.ravel_multi_index(tuple(places[inside].T), grid.counts), table[:, inside]


# -- filters


def _filters_of(dataset: h5py.Dataset) -> list[Filter]:
    """The filters, in the order in which they encode."""
    plist = dataset.id.get_create_plist()
    filters: list[Filter] = []
    for number in range(plist.get_nfilters()):
        code, _, values, name = plist.get_filter(number)
        if code == 2 and not values:  # shuffle
            values = (dataset.dtype.itemsize,)
        shown = name.decode("utf-8", "replace").partition(";")[0] or f"filter {code}"
        filters.append((code, values, shown))
    return filters


def _pipeline_of(filters: Iterable[Filter]) -> Pipeline:
    """Our own codecs for filters.

    Raises:
        ValueError: there is one that we have not; see `Pipeline`.
    """
    codecs: list[Codec] = []
    for code, values, name in filters:
        if code == 2:
            codecs.append(unshuffle(values[0]))
        elif code in _CODECS:
            codecs.append(_CODECS[code])
        else:
            raise ValueError(f"filter {name}")
    return Pipeline(codecs)


def add_filters(plist: h5py.h5p.PropDCID, compression: str, dtype: np.dtype[Any]) -> None:
    """Adds the filters by which `headrace.formats.arrays.codecs` encodes to the properties of a new
    dataset.
    """
    if shuffles(dtype):
        plist.set_shuffle()
    if compression == "gzip":
        plist.set_deflate(LEVELS["gzip"])
        return
    plugin_version()
    plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (LEVELS["zstd"],))


def plugin_version() -> str:
    """The version of hdf5plugin, whose filters h5py knows from then on: HDF5 writes the names of
    filters that it knows into files.

    Raises:
        ConfigError: it is missing.
    """
    try:
        import hdf5plugin
    except ImportError:
        raise ConfigError(
            "compression='zstd' needs the package hdf5plugin: pip install 'headrace[hdf5]', or "
            "use 'gzip'"
        ) from None
    return str(hdf5plugin.version)


def filter_versions(compression: str) -> dict[str, str]:
    """By name, the versions of the libraries that decide the bytes of compressed chunks."""
    versions = codec_versions(compression)
    if compression == "gzip":
        return versions
    return versions | {"hdf5plugin": plugin_version()}
