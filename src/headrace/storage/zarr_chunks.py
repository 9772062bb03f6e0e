"""By which path is a Zarr array read?

Its chunks straight from their files, where its metadata say nothing but what is known here: a regular grid, the codecs of
`headrace.storage.codecs`, perhaps shards. Everything else goes through zarr-python. `Chunks.how` says which, and why.

Of what is far away, chunks that are files of their own are fetched whole: so nobody needs to ask for their sizes first. Where rows lie in
chunks of several rows as they are, the sizes are asked for, and rows are fetched.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.storage.chunks import Chunks, DirectChunks, Grid, LibraryChunks
from headrace.storage.codecs import Pipeline
from headrace.storage.foreign import asking
from headrace.storage.handles import WorkerFiles
from headrace.storage.paths import redact
from headrace.storage.remote_files import RemoteFiles
from headrace.storage.stretches import Files, Stretch
from headrace.storage.zarr_layout import UnknownLayout, layout_of
from headrace.storage.zarr_shards import ArrayFiles, shards_of
from headrace.storage.zarr_stores import Store, ZarrUrl, ZarrZipUrl

_COUNTABLE = (1 << 63) - 1


class _Where:
    """Names a chunk for messages."""

    def __init__(self, path: str, name: str, grid: Grid) -> None:
        self._path, self._name, self._grid = path, name, grid

    def __call__(self, number: int) -> str:
        of = f" of {self._name!r}" if self._name else ""
        return f"{redact(self._path)}, chunk {self._grid.place(number)}{of}"


class _Required:
    """The same, and a chunk that was never written is an error."""

    def __init__(self, stretches: Callable[[Sequence[int]], list[Stretch | None]], where: _Where) -> None:
        self._stretches, self._where = stretches, where
        self.asks: bool = getattr(stretches, "asks", False)

    def __call__(self, numbers: Sequence[int]) -> list[Stretch | None]:
        found = self._stretches(numbers)
        for number, stretch in zip(numbers, found, strict=True):
            if stretch is None:
                raise FormatError(f"{self._where(number)} is missing, and missing='error'")
        return found


class _Library:
    """Reads parts of an array through zarr-python."""

    def __init__(self, opened: WorkerFiles[Any], path: str, name: str) -> None:
        self._opened, self._path, self._name = opened, path, name

    def __call__(self, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        with self._opened.reading(self._path) as root, asking("zarr-python", f"{redact(self._path)}: {self._name!r}"):
            array = root[self._name] if self._name else root
            return np.asarray(array[part])


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
        by_row: will rows be read, and not boxes?
    """
    if not direct:
        return library("direct=False")
    is_far = isinstance(files, RemoteFiles)
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
    found: Callable[[Sequence[int]], list[Stretch | None]]
    found = shards_of(store, name, layout, files) if is_sharded else ArrayFiles(store, name, layout, as_files)
    if missing == "error":
        found = _Required(found, where)
    way = "files fetched whole" if as_files else "ranges" if is_far else "pread"
    how = (f"{way} + {pipeline}" if pipeline else way) + (" out of shards" if is_sharded else "")
    check = store.check if isinstance(store, ZarrZipUrl) and not is_sharded else None
    return DirectChunks(
        grid, layout.dtype, found, pipeline, files, fill=layout.fill, order=layout.order, where=where, how=how, check=check,
        as_files=as_files, required=missing == "error",
    )  # fmt: skip


def library_chunks(array: Any, opened: WorkerFiles[Any], path: str, name: str, why: str) -> LibraryChunks:
    """The chunks of an array that zarr-python has opened."""
    shape, chunks = tuple(array.shape), tuple(array.chunks)
    if 0 not in shape and (min(chunks, default=1) < 1 or math.prod(chunks) * array.dtype.itemsize > _COUNTABLE):
        raise FormatError(f"{redact(path)}: {name!r} has chunks of {list(chunks)} elements: its metadata are damaged")
    return LibraryChunks(Grid(shape, chunks), array.dtype, _Library(opened, path, name), f"zarr-python: {why}")
