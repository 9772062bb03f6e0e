"""Caches the layouts of remote HDF5 files, so that datasets of them can be opened again without
h5py.

NOTE [ kept layouts ]

* To locate rows, h5py takes about a millisecond per file, even if everything that it reads is in
  the file's index. For arrays that are read directly, the result is a shape, a dtype and a table of
  chunks. The layouts of all files that were opened together are cached in one file of `cache_dir`,
  with their targets.
* That file is identified by URL, size and version of each of them, and by what was read from them.
  If one of them has changed, no cached layout matches, and h5py opens all of them.
* Arrays that are converted on reading or read by h5py, and packed files have no cached layout.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.array_file import ArrayFile, Unkept
from headrace.io.files import Files
from headrace.io.paths import cache_folder
from headrace.storage.arrays.chunks import ChunkNames, Chunks, DirectChunks, Grid
from headrace.storage.arrays.codecs import Pipeline
from headrace.storage.hdf5.chunks import ChunkTable
from headrace.storage.hdf5.filters import codecs_with, codes_of

_KIND, _VERSION = "hdf5-layout", 1
_MOST = 64 << 20  # bytes of tables and targets together


class ArrayLayout(NamedTuple):
    """What it takes to read an array directly.

    Attributes:
        name: in its file.
        shape, dtype: of the array (``dtype.str``).
        grid: the extents of a chunk, or of the whole array.
        chunks: the same as the file has it: None of an array that is not chunked.
        codecs: see `codes_of`.
        fill: the bytes of what was never written.
        table: see `ChunkTable`.
        numbers: see `ChunkTable`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, ...]
    chunks: tuple[int, ...] | None
    codecs: list[tuple[int, int]]
    fill: bytes
    table: npt.NDArray[np.int64]
    numbers: IntArray | None

    def opened(self, path: str, files: Files) -> DirectChunks:
        """The chunks of the array in that file."""
        dtype, grid, table = (
            np.dtype(self.dtype),
            Grid(self.shape, self.grid),
            ChunkTable(path, files, self.table, self.numbers),
        )
        where, fill = ChunkNames(path, self.name, grid), np.frombuffer(self.fill, dtype)[0]
        return DirectChunks(
            grid, dtype, table, Pipeline(codecs_with(self.codecs)), files, where=where, fill=fill
        )


def layout_of(chunks: Chunks, cut: tuple[int, ...] | None) -> ArrayLayout | None:
    """The layout of an array, the chunks of which are `cut` in the file; None where it has none
    that is kept.
    """
    if not (
        isinstance(chunks, DirectChunks)
        and isinstance(chunks.index, ChunkTable)
        and _is_plain(chunks.dtype)
    ):
        return None
    name, grid, fill = (
        chunks.where.name,
        chunks.grid,
        np.asarray(chunks.fill, chunks.dtype).tobytes(),
    )
    table, numbers = chunks.index.table, chunks.index.numbers
    if chunks.where.grid != grid:  # elements are arrays
        return None
    return ArrayLayout(
        name,
        grid.shape,
        chunks.dtype.str,
        grid.chunks,
        cut,
        codes_of(chunks.pipeline.codecs),
        fill,
        table,
        numbers,
    )


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """True if ``dtype.str`` says all of it."""
    return (
        dtype.metadata is None
        and dtype.names is None
        and not dtype.hasobject
        and np.dtype(dtype.str) == dtype
    )


class KeptLayouts:
    """The layouts of some remote files that are opened together, on this machine.

    Args:
        files: of their server.
        urls: of the files.
        asked: what was asked of them (JSON values).
        cache_dir: where layouts are kept; None: in the user's cache folder.
    """

    def __init__(
        self,
        files: Files,
        urls: Sequence[str],
        asked: Any,
        cache_dir: str | os.PathLike[str] | None,
    ) -> None:
        self._files, self._urls, self._asked, self._cache_dir = (
            files,
            urls,
            asked,
            cache_folder(cache_dir),
        )

    @functools.cached_property
    def _file(self) -> ArrayFile | None:
        """Known when versions are; None where the server says none."""
        identities = [self._files.identity(url) for url in self._urls]
        if any(tag is None for *_, tag in identities):
            return None
        about = {
            "files": hashlib.blake2b(json.dumps(identities).encode(), digest_size=16).hexdigest(),
            "asked": self._asked,
        }
        return ArrayFile(str(self._cache_dir), _KIND, about, _VERSION, ("<i8", "u1", "u1"))

    def are_kept(self) -> bool:
        """True if there is such a file; asks for the versions of the files."""
        return self._file is not None and os.path.exists(self._file.path)

    def load(self) -> tuple[list[list[ArrayLayout]], list[npt.NDArray[Any]] | None] | None:
        """The layouts of the arrays of each file, and the targets of each, if these were asked
        for; None: they are not kept.
        """
        arrays = None if self._file is None else self._file.loaded()
        if arrays is None:
            return None
        numbers, data, text = arrays
        said, tables, columns = json.loads(text.tobytes()), _Cut(numbers), _Cut(data)
        layouts = [[_from_json(one, tables) for one in of_file] for of_file in said["layouts"]]
        if said["targets"] is None:
            return layouts, None
        return layouts, [
            columns.take(nbytes).view(dtype).reshape(shape)
            for dtype, shape, nbytes in said["targets"]
        ]

    def keep(
        self,
        layouts: Sequence[Sequence[ArrayLayout] | None],
        targets: Sequence[npt.NDArray[Any] | None],
    ) -> None:
        """Keeps them, if there are all, and not too large."""
        if self._file is None:
            return
        columns = [column for column in targets if column is not None]
        known = [of_file for of_file in layouts if of_file is not None]
        if len(known) < len(layouts) or not all(_is_plain(column.dtype) for column in columns):
            return
        tables = [one for of_file in known for layout in of_file for one in _numbers_of(layout)]
        if sum(one.nbytes for one in (*tables, *columns)) > _MOST:
            return
        said: dict[str, Any] = {
            "layouts": [list(map(_as_json, of_file)) for of_file in known],
            "targets": None,
        }
        if columns:
            said["targets"] = [
                [column.dtype.str, column.shape, column.nbytes] for column in columns
            ]
        data = np.frombuffer(b"".join(column.tobytes() for column in columns), np.uint8)
        with Unkept(
            str(self._cache_dir), "layouts of arrays are", "h5py opens the files at every start"
        ):
            self._file.write(
                [np.concatenate(tables), data, np.frombuffer(json.dumps(said).encode(), np.uint8)]
            )


def _numbers_of(layout: ArrayLayout) -> Iterator[npt.NDArray[np.int64]]:
    yield layout.table.reshape(-1)
    if layout.numbers is not None:
        yield layout.numbers


def _as_json(layout: ArrayLayout) -> list[Any]:
    *values, fill, table, numbers = layout
    return [*values, fill.hex(), table.shape[1], numbers is not None]


def _from_json(said: list[Any], tables: _Cut) -> ArrayLayout:
    name, shape, dtype, grid, chunks, codecs, fill, count, is_sparse = said
    table = tables.take(3 * count).reshape(3, count)
    cut = None if chunks is None else tuple(chunks)
    numbers = tables.take(count) if is_sparse else None
    return ArrayLayout(
        name, tuple(shape), dtype, tuple(grid), cut, codecs, bytes.fromhex(fill), table, numbers
    )


class _Cut:
    """Gives the parts of an array, one after the other."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._values, self._at = values, 0

    def take(self, count: int) -> npt.NDArray[Any]:
        start, self._at = self._at, self._at + count
        return self._values[start : self._at]
