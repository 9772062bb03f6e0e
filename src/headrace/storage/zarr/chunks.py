"""The chunks of a Zarr array, read directly or through zarr-python.

Its chunks straight from their files, where its metadata say nothing but what is known here: a regular grid, the codecs of
`headrace.storage.arrays.codecs`, perhaps shards. Everything else goes through zarr-python. `Chunks.how` says which, and why.

Of what is far away, chunks that are files of their own are fetched whole: so nobody needs to ask for their sizes first. Where rows lie in
chunks of several rows as they are, the sizes are asked for, and rows are fetched.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.library_errors import asking
from headrace.io.paths import redact
from headrace.storage.arrays.chunks import Chunks, DirectChunks, Grid, LibraryChunks
from headrace.storage.arrays.codecs import Pipeline
from headrace.storage.zarr.layout import UnknownLayout, layout_of
from headrace.storage.zarr.local import ZarrFolder, ZarrZip
from headrace.storage.zarr.shards import ArrayFiles, shards_of
from headrace.storage.zarr.stores import Store, ZarrUrl, ZarrZipUrl

_COUNTABLE = (1 << 63) - 1


class _Where:
    """Names a chunk for messages."""

    def __init__(self, path: str, name: str, grid: Grid) -> None:
        self._path, self._name, self._grid = path, name, grid

    def __call__(self, number: int) -> str:
        of = f" of {self._name!r}" if self._name else ""
        return f"{redact(self._path)}, chunk {self._grid.place(number)}{of}"


class LibraryArray:
    """An array that zarr-python reads.

    Args:
        opened: by what `library_key` gives, the array as each process has it open.
        store, name: of the array.
    """

    def __init__(self, opened: WorkerFiles[Any], store: Store, name: str) -> None:
        self._opened, self._store, self._name = opened, store, name

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """The array, inside of the context; what it raises there names it.

        Raises:
            FileChangedError: it was changed after the store was opened.
        """
        self._store.check_version(self._name)
        key = library_key(self._store, self._name)
        with asking("zarr-python", f"{redact(self._store.path)}: {self._name!r}"), self._opened.reading(key) as array:
            yield array

    def check(self, part: tuple[slice, ...]) -> None:
        """As `check_part`."""
        with self.reading() as array:
            self.check_part(array, part)

    def check_part(self, array: Any, part: tuple[slice, ...]) -> None:
        """Compares the files that a part lies in with the time when the store was opened.

        Raises:
            FileChangedError: one was changed since.
        """
        if not isinstance(self._store, ZarrFolder) or not all(array.shape):
            return
        extents = array.shards or array.chunks
        files = [range(cut.start // extent, -(-cut.stop // extent)) for cut, extent in zip(part, extents, strict=True)]
        keys = [array.metadata.encode_chunk_key(place) for place in itertools.product(*files)]
        self._store.ranges([f"{self._name}/{key}" if self._name else key for key in keys])

    def __call__(self, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        with self.reading() as array:
            found = np.asarray(array[part])
            self.check_part(array, part)
            return found


def library_key(store: Store, name: str) -> str:
    """What names an array among those that a process has opened by zarr-python: path of the store, and of the array in it."""
    return f"{store.path}\0{store.root if isinstance(store, ZarrZip) else ''}{name}"


def chunks_of(
    store: Store,
    name: str,
    said: dict[str, Any],
    files: Files,
    library: Callable[[str], Chunks],
    *,
    direct: bool = True,
    missing: str = "fill",
    by_row: bool = True,
) -> Chunks:
    """The chunks of an array.

    Args:
        store, name: of the array.
        said: its metadata.
        files: what is read from: what each process opens, or those of the store's server.
        library: a reason -> its chunks as zarr-python reads them.
        direct: False: through zarr-python in any case.
        missing: "fill" or "error": what becomes of a chunk that was never written.
        by_row: True if rows will be read, and not boxes.
    """
    if not direct:
        return library("direct=False")
    is_far = files.is_remote
    if not is_far and not hasattr(os, "preadv"):
        return library("this system has no preadv")
    try:
        layout = layout_of(said)
    except UnknownLayout as reason:
        return library(str(reason))
    if not store.is_stored:
        return library("a zip file that is compressed itself")
    if not layout.shape or 0 in layout.shape:
        return library("it has no elements")
    grid = Grid(layout.shape, layout.chunks)
    where = _Where(store.path, name, grid)
    pipeline, is_sharded = Pipeline(layout.codecs), layout.index_at is not None
    in_parts = by_row and not pipeline and layout.order == "C" and layout.chunks[0] > 1
    as_files = isinstance(store, ZarrUrl) and not is_sharded and not in_parts
    index = shards_of(store, name, layout, files) if is_sharded else ArrayFiles(store, name, layout, as_files)
    way = "files fetched whole" if as_files else "ranges" if is_far else "pread"
    how = (f"{way} + {pipeline}" if pipeline else way) + (" out of shards" if is_sharded else "")
    check = store.check if isinstance(store, ZarrZipUrl) and not is_sharded else None
    return DirectChunks(
        grid, layout.dtype, index, pipeline, files, fill=layout.fill, order=layout.order, where=where, how=how, check=check,
        required=missing == "error",
    )  # fmt: skip


def library_chunks(array: Any, opened: WorkerFiles[Any], store: Store, name: str, why: str) -> LibraryChunks:
    """The chunks of an array that zarr-python has opened."""
    shape, chunks = tuple(array.shape), tuple(array.chunks)
    if 0 not in shape and (min(chunks, default=1) < 1 or math.prod(chunks) * array.dtype.itemsize > _COUNTABLE):
        raise FormatError(f"{redact(store.path)}: {name!r} has chunks of {list(chunks)} elements: its metadata are damaged")
    fill = 0 if array.fill_value is None else array.fill_value
    load = LibraryArray(opened, store, name)
    return LibraryChunks(Grid(shape, chunks), array.dtype, load, f"zarr-python: {why}", fill, load.check)
