"""Reads rows of an HDF5 or Zarr array as one NumPy array, directly from its chunks: without torch
or a dataset.

NOTE [ how rows are gathered ]

1. Indices are converted to row numbers, which are sorted. Each thread takes a part of them.
2. Rows that are stored uncompressed are read directly into the result; those that follow one
  another by one call.
3. Rows of chunks that need decoding: each part reads and decodes a chunk once, and takes all of its
  rows.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack

import numpy as np

from headrace.arguments import check_integer, check_names, described
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import ConfigError, FormatError
from headrace.formats.arrays.rows import ArraysSource, check_fits, concatenated_rows
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.hdf5.tree import OpenHDF5
from headrace.formats.source import Source, sources_of
from headrace.formats.tree import TreeSource
from headrace.formats.trees import open_trees
from headrace.io.remote.options import RemoteKeywords, RemoteOptions
from headrace.memory.limits import usable_cpus

_MOST_THREADS = 8
_WORTH = 1 << 20  # bytes of rows for each thread that is to take part


def read_rows(
    path: Any,
    name: str | None,
    indices: Any,
    *,
    threads: int | None = None,
    direct: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    **options: Unpack[RemoteKeywords],
) -> AnyArray:
    """Reads rows of an HDF5 dataset or a Zarr array into one NumPy array, like ``array[indices]``.

    Each call opens the file, locates its chunks, and closes it. For many calls pass an
    `HDF5Dataset` or a `ZarrDataset`, which stays open and caches decoded chunks.

    Args:
        path: an HDF5 file or a Zarr store, its URL, or a `zarr.abc.store.Store`; several of them (a
            folder, a glob, a list), whose rows are concatenated; or an open dataset whose samples
            are rows, with its own `direct` and `options`.
        name: name of the array. None: the only one, or "data", of the same name in all files; for a
            dataset the one that it reads.
        indices: an integer, a slice, a boolean mask, or integers (a list, a range, an array of any
            shape). Negative ones count from the end, and duplicates are allowed.
        threads: number of threads that read and decode. None: one per usable core, at most 8.
        direct: False: always use h5py or zarr-python.
        cache_dir: folder for what is cached of remote files. None: the user's cache folder.
        **options: for URLs: see `RemoteOptions`.

    Returns:
        An array of the array's dtype (in the file's byte order) and of shape ``indices' shape + the
        row's``. Strings and rows of variable
            length give an array of objects, as in h5py or zarr-python.

    Raises:
        IndexError: an index is out of range or not an integer, or a mask has another length.
        ConfigError: an argument is invalid.
        DataNotFoundError, FormatError, MissingNameError, AccessError, RemoteError: see
            `HDF5Dataset` and `ZarrDataset`.
        FileChangedError: the file changed since it was opened.
        BudgetError: the rows don't fit the free memory.
    """
    number = check_integer("threads", threads, 1, optional=True) or min(
        _MOST_THREADS, usable_cpus()
    )
    if hasattr(path, "sample_source"):
        return _gathered(_of_dataset(path, name), indices, number, path)
    check_names(
        "read_rows", options, {"threads", "direct", "cache_dir", *RemoteKeywords.__optional_keys__}
    )
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"name must be that of one array, or None, not {name!r}")
    reach, _ = RemoteOptions.split({**options, "cache_dir": cache_dir})
    paths, opened = open_trees(path, None, reach, direct=direct)
    opens: type[TreeSource] = HDF5Source if isinstance(opened, OpenHDF5) else TreeSource
    with contextlib.closing(opened):
        sources = opened.each(paths, lambda path: opens(path, name, opened))
        first = sources[0]
        for other in sources:
            if other.name != first.name:
                raise ConfigError(
                    f"{other.path} holds {other.name!r}, and {first.path} {first.name!r}: pass the "
                    "name of an array that all have, or read each by itself"
                )
        return _gathered(concatenated_rows(sources), indices, number, None)


def _of_dataset(dataset: Any, name: str | None) -> Source:
    """The source of an open dataset, whose samples must be rows of the array of that name."""
    source: Source = dataset.sample_source
    first = sources_of(source)[0]
    if not isinstance(first, ArraysSource) or not isinstance(first.name, str):
        raise ConfigError(
            "read_rows takes a path, or an HDF5Dataset or ZarrDataset whose samples are the rows "
            f"of one array, not {described(dataset)}"
        )
    if name not in (None, first.name):
        raise ConfigError(
            f"the samples of this dataset are rows of {first.name!r}, not of {name!r}: pass "
            "name=None, or the path"
        )
    return source


# -- indices


def rows_of(indices: Any, length: int, what: str) -> tuple[IntArray, tuple[int, ...]]:
    """The numbers of rows that indices mean, flat, and the shape of the indices; see `read_rows`.

    Args:
        indices: as NumPy takes them for the first axis.
        length: rows that there are.
        what: the array, for messages.

    Raises:
        IndexError: one is outside of the array, or no integer; a mask has another length.
    """
    if isinstance(indices, slice):
        indices = np.arange(*indices.indices(length))
    array = np.asarray(indices)
    if array.dtype == bool:
        if array.shape != (length,):
            raise IndexError(
                f"{what}: the mask has shape {list(array.shape)}, but there are {length:,} rows"
            )
        array = np.flatnonzero(array)
    elif not array.size and array.dtype == float:  # an empty list
        array = array.astype(np.int64)
    elif array.dtype.kind not in "iu":
        raise IndexError(
            f"{what}: indices are integers, a slice or a mask, not {described(indices)}"
        )
    rows = array.reshape(-1)
    outside = (rows < -length) | (rows >= length)
    if outside.any():
        raise IndexError(f"{what}: index {rows[outside][0]} is outside of {length:,} rows")
    rows = rows.astype(np.int64)
    return np.where(rows < 0, rows + length, rows), array.shape


# -- reading


def _gathered(source: Any, indices: Any, threads: int, dataset: Any) -> AnyArray:
    sources: list[ArraysSource] = sources_of(source)
    first = sources[0]
    if isinstance(first, HDF5Source) and first.is_flat:
        raise FormatError(
            f"{first.path}: {first.name!r} holds samples of several lengths, one after the other: "
            "open it with headrace.open_dataset"
        )
    what = f"{first.path}: {first.name!r}"
    rows, shape = rows_of(indices, len(source) if dataset is None else len(dataset), what)
    if dataset is not None:
        rows = dataset.whole_indices(rows)
    row_shape = tuple(first.shape[1:])
    nbytes = len(rows) * int(np.prod(row_shape, dtype=np.int64)) * first.dtype.itemsize
    if nbytes > _WORTH:
        check_fits(nbytes, f"{what}: an array of {len(rows):,} rows", "ask for fewer")
    out = np.empty((len(rows), *row_shape), first.dtype)
    if first.holds_objects:
        for at, record in enumerate(source.read(rows.tolist())):
            out[at] = record
    elif source is not first:
        source.read_into(rows.tolist(), out)
    elif len(rows):
        order = np.argsort(rows, kind="stable")
        is_sorted = np.array_equal(order, np.arange(len(rows)))
        parts = np.array_split(order, max(1, min(threads, -(-nbytes // _WORTH), len(rows))))

        def read(places: IntArray) -> None:
            outs: Any = [out[place, ...] for place in places]
            if is_sorted:
                outs = out[places[0] : places[-1] + 1]
            source.read_into(rows[places].tolist(), outs)

        if len(parts) == 1:  # threads take longer to start than few rows to be read
            read(order)
        else:
            with ThreadPoolExecutor(len(parts), "headrace-rows") as pool:
                list(pool.map(read, parts))
    whole = out.reshape((*shape, *row_shape))
    return whole if shape or first.holds_objects else whole[()]
