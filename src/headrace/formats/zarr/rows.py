"""Rows of Zarr arrays as samples, and the readers of arrays, directly or through zarr-python.

Chunks come straight from their files where the metadata say nothing but what is known here: a
regular grid, the codecs of `headrace.formats.arrays.codecs`, perhaps shards. Everything else goes
through zarr-python. `Chunks.how` says which, and why.

Remote chunks that are files of their own are fetched whole: so nobody needs to ask for their sizes
first. Where rows lie in chunks of several rows as they are, the sizes are asked for, and rows are
fetched.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from headrace.errors import ConfigError, FormatError
from headrace.formats.arrays.chunks import (
    ChunkIndex,
    ChunkNames,
    Chunks,
    DirectChunks,
    Grid,
    shown_array,
)
from headrace.formats.arrays.codecs import Pipeline
from headrace.formats.arrays.reader import ArrayReader, OpenArrays
from headrace.formats.arrays.rows import ArraysSource
from headrace.formats.zarr.layout import UnknownLayout, layout_of
from headrace.formats.zarr.library import (
    LibraryArray,
    LibraryArrays,
    StringRows,
    close_array,
    holds_strings,
    library_chunks,
)
from headrace.formats.zarr.shards import ArrayFiles, Shards
from headrace.formats.zarr.store import Store
from headrace.formats.zarr.stores import ZarrFolder, open_store
from headrace.io.files import Files
from headrace.io.local.files import LocalFiles
from headrace.io.paths import redact


class OpenZarr(OpenArrays[Any]):
    """What each process has open of Zarr stores, and the chunks that it has decoded.

    Args:
        files: of the server that they lie on; None: of this machine.
        direct: read the files themselves where their layout is known; False: through zarr-python
            alone.
        missing: "fill": a chunk that was never written has the fill value; "error": it is an error.
    """

    def __init__(
        self, files: Files | None = None, *, direct: bool = True, missing: str = "fill"
    ) -> None:
        self._direct = direct
        self._missing = missing
        self._arrays = LibraryArrays()
        super().__init__(files or LocalFiles(), self._arrays, close_array)

    def store(self, path: str | os.PathLike[Any], names: Sequence[str | None] = ()) -> Store:
        """The store at a path or URL.

        Args:
            path: of the store.
            names: of nodes whose metadata will be read.

        Raises:
            DataNotFoundError, AccessError, FormatError, RemoteError: see `open_store`.
        """
        nodes = [name.strip("/") for name in names if name]
        known = self._arrays.stores.get(os.fspath(path))
        if known is not None:
            known.fetch_metadata(nodes)
            return known
        store = open_store(path, self.files, nodes)
        if not isinstance(store, ZarrFolder):
            self._arrays.stores[store.path] = store
        return store

    def reader(
        self,
        store: Store,
        name: str,
        metadata: dict[str, Any],
        *,
        by_row: bool = True,
        is_column: bool = False,
    ) -> ArrayReader:
        """A reader of an array of numbers, of its rows or of boxes.

        Args:
            store, name: of the array.
            metadata: of it.
            by_row: True if rows will be read, and not boxes.
            is_column: True for targets, which are read directly where they can be, with fill
                values.

        Raises:
            FormatError: zarr-python can't open it either, or its elements are no numbers.
            ConfigError: missing="error", and only zarr-python can read it, which does not tell.
        """
        required = self._missing == "error" and not is_column
        chunks: Chunks | str = "direct=False"
        if self._direct or is_column:
            chunks = self._direct_chunks(store, name, metadata, required, by_row)
        if isinstance(chunks, str):
            array = self._library_array(store, name, required, chunks)
            chunks = library_chunks(array, shown_array(store.path, name), chunks)
            self.library.close()
        return ArrayReader(chunks, self.chunks, f"{store.path}\0{name}")

    def rows(
        self, store: Store, name: str, metadata: dict[str, Any], is_column: bool = False
    ) -> ArrayReader | StringRows:
        """A reader of the rows of an array.

        Raises:
            FormatError, ConfigError: see `reader`.
        """
        if not holds_strings(metadata):
            return self.reader(store, name, metadata, is_column=is_column)
        required = self._missing == "error" and not is_column
        rows = StringRows(self._library_array(store, name, required, "strings"))
        self.library.close()
        return rows

    def _library_array(self, store: Store, name: str, required: bool, why: str) -> LibraryArray:
        if required:
            raise ConfigError(
                f"missing='error' can't be had for {shown_array(store.path, name)}, which "
                f"zarr-python reads: {why}"
            )
        return LibraryArray(self.library, store, name)

    def _direct_chunks(
        self, store: Store, name: str, metadata: dict[str, Any], required: bool, by_row: bool
    ) -> DirectChunks | str:
        """The chunks of an array; or why only zarr-python can read it."""
        if not self.files.is_remote and not hasattr(os, "preadv"):
            return "this system has no preadv"
        try:
            layout = layout_of(metadata)
        except UnknownLayout as reason:
            return str(reason)
        if not store.is_stored:
            return "a zip file that is compressed itself"
        if not layout.shape or 0 in layout.shape:
            return "it has no elements"
        grid = Grid(layout.shape, layout.chunks)
        pipeline = Pipeline(layout.codecs)
        in_parts = by_row and not pipeline and layout.order == "C" and layout.chunks[0] > 1
        how = "ranges" if self.files.is_remote else "pread"
        check = None
        index: ChunkIndex
        if layout.index_at is not None:
            index = Shards(store, name, layout)
        else:
            index = ArrayFiles(store, name, layout, store.reads_whole and not in_parts)
            check = store.check_content
            if index.whole_files:
                how = "files fetched whole"
        if pipeline:
            how += f" + {pipeline}"
        if layout.index_at is not None:
            how += " out of shards"
        return DirectChunks(
            grid,
            layout.dtype,
            index,
            pipeline,
            self.files,
            fill=layout.fill,
            order=layout.order,
            where=ChunkNames(store.path, name, grid),
            how=how,
            check=check,
            required=required,
        )


class ZarrSource(ArraysSource):
    """Rows of arrays of a Zarr store.

    Args:
        path: a local folder or zip file, or a URL.
        name: array inside the store, or several of equal length; None: the only one there is.
        opened: what is open and decoded, to be shared with other sources; for a URL it knows the
            server.
        column: the name of an array of which `column` will be asked for.
        **options: of `OpenZarr`, where there is none.

    Raises:
        DataNotFoundError, FormatError, MissingNameError: see `open_store`, `Store.array`,
            `OpenZarr.reader`.
    """

    _opened: OpenZarr

    def __init__(
        self,
        path: str | os.PathLike[Any],
        name: str | Sequence[str] | None = None,
        *,
        opened: OpenZarr | None = None,
        column: str | None = None,
        **options: Any,
    ) -> None:
        opened = opened or OpenZarr(**options)
        wanted = [name] if name is None or isinstance(name, str) else list(name)
        self._store = opened.store(path, [*wanted, column])
        shown = redact(self._store.path)
        fields: dict[str, ArrayReader | StringRows] = {}
        cuts: list[Any] = []
        for one in wanted:
            found, metadata = self._store.array(one)
            field = opened.rows(self._store, found, metadata)
            if not field.shape:
                raise FormatError(
                    f"{shown_array(shown, found)} is a single value, it has no axis of samples"
                )
            fields[found] = field
            cuts.append(field.chunks.grid.chunks if isinstance(field, ArrayReader) else None)
        names = tuple(fields)
        is_one = name is None or isinstance(name, str)
        super().__init__(shown, opened, names[0] if is_one else names, fields, cuts)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole array with one row a sample, such as the targets.

        Raises:
            MissingNameError, FormatError: no such array; another number of rows.
        """
        reader = self._opened.rows(self._store, *self._store.array(name), is_column=True)
        if not reader.shape or reader.shape[0] != len(self):
            raise FormatError(
                f"{shown_array(self.path, name)} has shape {reader.shape}, not one row for each "
                f"of {len(self)} samples"
            )
        if isinstance(reader, StringRows):
            return reader.whole()
        return reader.whole(self.run)
