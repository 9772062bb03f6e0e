"""Zarr stores as trees, whose arrays are read directly or through zarr-python.

Chunks come straight from their files where the metadata say nothing but what is known here: a
regular grid, the codecs of `headrace.formats.arrays.codecs`, perhaps shards. Everything else goes
through zarr-python. `Chunks.how` says which, and why.

Remote chunks that are files of their own are fetched whole, without asking for their sizes first.
Where rows lie in chunks of several rows as they are, the sizes are asked for, and rows are fetched.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from posixpath import join
from typing import Any

import numpy as np

from headrace.dtypes import AnyArray
from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FormatError,
    MissingNameError,
)
from headrace.formats.arrays.chunks import (
    COUNTABLE,
    ChunkIndex,
    DirectChunks,
    Grid,
    LibraryChunks,
    shown_array,
)
from headrace.formats.arrays.codecs import Pipeline
from headrace.formats.arrays.reader import ArrayReader
from headrace.formats.source import one_after_the_other
from headrace.formats.tree import NodeKind, OpenTrees, Tree
from headrace.formats.zarr.shards import ArrayFiles, Shards
from headrace.formats.zarr.stores import (
    NODE_FILES,
    ChunkFiles,
    Store,
    ZarrFolder,
    ZarrUrl,
    ZarrZip,
    is_zarr,
)
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.library_errors import asking
from headrace.io.paths import chain_of, listed_names, redact
from headrace.io.remote_files import RemoteFiles

# -- through zarr-python


def _open(stores: dict[str, Store], key: str) -> Any:
    """The array that a key names: path of the store, a zero, and path of the array in it.

    Args:
        stores: by their path or URL.
    """
    from headrace.formats.zarr.library import open_array

    path, _, name = key.partition("\0")
    return open_array(stores[path], name)


def _leave(array: Any) -> None:
    """Arrays are not closed: that would close the store, which may be an object of the caller's."""


class LibraryArray(LibraryChunks):
    """An array that zarr-python reads: of numbers, or rows of strings.

    Args:
        opened: what each process has open.
        store, name: of the array.
        why: zarr-python reads it.
        are_strings: True if its elements are strings.

    Raises:
        FormatError: it can't be opened, or its elements are neither numbers nor strings.
    """

    def __init__(
        self, opened: WorkerFiles[Any], store: Store, name: str, why: str, are_strings: bool
    ) -> None:
        self._opened = opened
        self._store = store
        self._name = name
        self.where = shown_array(store.path, name)
        self._why = why
        self.holds_objects = are_strings
        with self.reading() as array:
            grid = Grid(tuple(array.shape), tuple(array.chunks))
            dtype = np.dtype(object) if are_strings else array.dtype
            fill = 0 if array.fill_value is None else array.fill_value
        super().__init__(grid, dtype, f"zarr-python: {why}", fill)
        if are_strings:
            return
        self.extents = grid.chunks
        if 0 not in grid.shape and (min(grid.chunks, default=1) < 1 or self.nbytes > COUNTABLE):
            raise FormatError(
                f"{self.where} has chunks of {list(grid.chunks)} elements: its metadata are damaged"
            )
        if dtype.hasobject or dtype.kind not in "biufcSUV":
            raise FormatError(
                f"{self.where} holds {dtype}: samples are numbers, or rows of strings"
            )

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """The array, inside of the context; what it raises there names it.

        Raises:
            FileChangedError: it was changed after the store was opened.
        """
        self._store.check_version(self._name)
        with (
            asking("zarr-python", f"{self.where} ({self._why})"),
            self._opened.reading(f"{self._store.path}\0{self._name}") as array,
        ):
            yield array

    def check_cached(self, number: int) -> None:
        if self._store.files.is_remote:
            return
        with self.reading() as array:
            extents = array.shards or array.chunks
            files = [
                range(cut.start // extent, -(-cut.stop // extent))
                for cut, extent in zip(self.grid.part(number), extents, strict=True)
            ]
            keys = [array.metadata.encode_chunk_key(place) for place in itertools.product(*files)]
        self._store.ranges([join(self._name, key) for key in keys])

    def decode(self, number: int, data: Any) -> AnyArray:
        with self.reading() as array:
            return np.asarray(array[self.grid.part(number)])

    def rows(self, rows: Sequence[int]) -> list[Any]:
        """Rows of strings, read by one call, so that each chunk is decoded once a batch."""
        wanted, places = np.unique(np.asarray(rows, np.int64), return_inverse=True)
        if not len(wanted):
            return []
        with self.reading() as array:
            found = np.asarray(array.get_orthogonal_selection((wanted,))).astype(object)
        return [found[place] for place in places.tolist()]


def _holds_strings(metadata: dict[str, Any]) -> bool:
    """True if metadata describe an array of variable-length strings: of version 2 by the codec
    vlen-utf8, of version 3 by their type.
    """
    if metadata.get("zarr_format") == 3:
        return metadata.get("data_type") == "string"
    filters = metadata.get("filters")
    first = filters[0] if isinstance(filters, list) and filters else None
    return (
        metadata.get("dtype") == "|O" and isinstance(first, dict) and first.get("id") == "vlen-utf8"
    )


# -- what is open


class OpenZarr(OpenTrees[Any]):
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
        self.direct = direct
        self.missing = missing
        self._stores: dict[str, Store] = {}
        super().__init__(files or ChunkFiles(), functools.partial(_open, self._stores), _leave)

    def take(self, store: Any) -> str:
        """The path by which `tree` opens a store object; a local one is read as its folder."""
        from zarr.storage import LocalStore

        from headrace.formats.zarr.library import ObjectStore

        if isinstance(store, LocalStore):
            return str(store.root)
        path = str(store)
        self._stores[path] = ObjectStore(path, self.files, store)
        self.has_objects = True
        return path

    @contextlib.contextmanager
    def tree(
        self, path: str | os.PathLike[Any], nodes: Sequence[str | None] = ()
    ) -> Iterator[ZarrTree]:
        """See `OpenTrees.tree`. A URL that ends in .zip is a zip file's, any other one that of a
        folder.
        """
        place = os.fspath(path)
        if isinstance(self.files, ChunkFiles) and place not in self._stores:
            place = os.path.abspath(os.path.expanduser(place))
        store = self._stores.get(place) or self._opened_store(place)
        if isinstance(store, ZarrUrl):
            store.fetch_metadata([name.strip("/") for name in nodes if name])
            if all(store.read(name) is None for name in NODE_FILES):
                raise DataNotFoundError(
                    f"{redact(place)} is not a Zarr store: it has none of {', '.join(NODE_FILES)}: "
                    "check the URL"
                )
        self._stores[place] = store
        yield ZarrTree(store, self)

    def _opened_store(self, place: str) -> Store:
        if isinstance(self.files, RemoteFiles):
            if redact(chain_of(place)[0]).lower().endswith(".zip"):
                return ZarrZip(place, self.files)
            return ZarrUrl(place, self.files)
        assert isinstance(self.files, ChunkFiles)
        if zipfile.is_zipfile(place):
            return ZarrZip(place, self.files)
        if is_zarr(place):
            return ZarrFolder(place, self.files)
        if not os.path.exists(place):
            raise DataNotFoundError(
                f"{redact(place)} does not exist (working folder: {os.getcwd()})"
            )
        if not os.access(place, os.R_OK):
            raise AccessError(f"{redact(place)}: this user may not read it")
        raise FormatError(
            f"{redact(place)} is not a Zarr store: it has none of {', '.join(NODE_FILES)}"
        )


def objects_in(data_path: Any) -> list[Any]:
    """The store objects of zarr-python that are given in place of paths; []: it is a path."""
    library = sys.modules.get("zarr.abc.store")
    given = [*data_path] if isinstance(data_path, (list, tuple)) else [data_path]
    if library is None or not all(isinstance(one, library.Store) for one in given):
        return []
    return given


class ZarrTree(Tree):
    """A Zarr store, local or remote.

    Args:
        store: its files.
        opened: see `Tree`.
    """

    dataset_class = "ZarrDataset"
    opened: OpenZarr

    def __init__(self, store: Store, opened: OpenZarr) -> None:
        super().__init__(store.path, opened)
        self.store = store
        # several questions about an array read its file once
        self._metadata = functools.lru_cache(16)(store.metadata)

    def kind(self, name: str) -> NodeKind | None:
        metadata = self._metadata(name)
        return None if metadata is None else metadata["node_type"]

    @functools.cached_property
    def _names(self) -> list[str]:
        try:
            return [name for name in self.store.nodes() if name]
        except MissingNameError:  # a server without listings
            return []

    def nodes(self, group: str = "") -> list[str]:
        below = f"{group}/" if group else ""
        return [name for name in self._names if name.startswith(below)]

    def children(self, group: str) -> list[str]:
        start = len(group) + 1 if group else 0
        return list(dict.fromkeys(name[start:].partition("/")[0] for name in self.nodes(group)))

    def attrs(self, name: str) -> Mapping[str, Any]:
        attributes = (self._metadata(name) or {}).get("attributes")
        return attributes if isinstance(attributes, dict) else {}

    def _array(self, name: str | None) -> tuple[str, dict[str, Any]]:
        """The name of an array, and its metadata; without a name the only one there is.

        Raises:
            MissingNameError: there is none of that name, or several and no name; the message lists
                them, where they are known.
        """
        wanted = (name or "").strip("/")
        metadata = self._metadata(wanted)
        if metadata is not None and metadata["node_type"] == "array":
            return wanted, metadata
        try:
            arrays = [node for node in self.store.nodes() if self.is_array(node)]
        except MissingNameError as why:
            absent = "" if name is None else f"it has no array {name!r}; "
            raise MissingNameError(f"{self.shown}: {absent}{why}") from None
        if name is not None:
            raise self.missing("array", name, arrays)
        if len(arrays) == 1:
            return self._array(arrays[0])
        raise MissingNameError(
            f"{self.shown} has {len(arrays)} arrays, name one of them as dataset_name: "
            f"{listed_names(arrays, show=repr)}"
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._array(name)[1]["shape"])

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.reader(name).dtype

    def array_named(self, name: str | None, targets: str | None = None) -> str:
        return self._array(name)[0]

    def axis_names(self, name: str) -> Sequence[str]:
        _, metadata = self._array(name)
        names = metadata.get("dimension_names") or self.attrs(name).get("_ARRAY_DIMENSIONS")
        if not isinstance(names, list) or len(names) != len(metadata["shape"]):
            return super().axis_names(name)
        return [str(axis or "") for axis in names]

    def reader(
        self, name: str, *, by_row: bool = True, is_column: bool = False
    ) -> ArrayReader | LibraryArray:
        """See `Tree.reader`.

        Args:
            name, by_row: see there.
            is_column: True for targets, which are read directly where they can be, with fill
                values.

        Raises:
            ConfigError: missing="error", and only zarr-python can read it, which does not tell.
        """
        name, metadata = self._array(name)
        opened = self.opened
        required = opened.missing == "error" and not is_column
        chunks: DirectChunks | str = "direct=False"
        holds_strings = by_row and _holds_strings(metadata)
        if holds_strings:
            chunks = "strings of any length"
        elif opened.direct or is_column:
            chunks = self._direct_chunks(name, metadata, required, by_row)
        key = f"{self.path}\0{name}"
        if isinstance(chunks, DirectChunks):
            return ArrayReader(chunks, opened.chunks, key)
        if required:
            raise ConfigError(
                f"missing='error' is not supported for {shown_array(self.path, name)}, which only "
                f"zarr-python can read: {chunks}: leave it out"
            )
        try:
            array = LibraryArray(opened.library, self.store, name, chunks, holds_strings)
            return array if holds_strings else ArrayReader(array, opened.chunks, key)
        finally:
            opened.library.close()

    def _direct_chunks(
        self, name: str, metadata: dict[str, Any], required: bool, by_row: bool
    ) -> DirectChunks | str:
        """The chunks of an array; or why only zarr-python can read it."""
        from headrace.formats.zarr.library import UnknownLayout, layout_of

        store = self.store
        files = store.files
        if store.only_library:
            return store.only_library
        if not files.is_remote and not hasattr(os, "preadv"):
            return "this system has no preadv"
        try:
            layout = layout_of(metadata)
        except UnknownLayout as reason:
            return str(reason)
        if not layout.shape or 0 in layout.shape:
            return "it has no elements"
        grid = Grid(layout.shape, layout.chunks)
        pipeline = Pipeline(layout.codecs)
        in_parts = by_row and not pipeline and layout.order == "C" and layout.chunks[0] > 1
        check = None
        index: ChunkIndex
        if layout.index_at is not None:
            index = Shards(store, name, layout)
        else:
            index = ArrayFiles(store, name, layout, store.reads_whole and not in_parts)
            check = store.check_content
        chunks = DirectChunks(
            grid,
            layout.dtype,
            index,
            pipeline,
            files,
            fill=layout.fill,
            order=layout.order,
            path=store.path,
            name=name,
            check=check,
            required=required,
        )
        chunks.extents = grid.chunks
        if layout.index_at is not None:
            chunks.how += " out of shards"
        elif files.is_remote and store.reads_whole and not in_parts:
            chunks.how = chunks.how.replace("ranges", "files fetched whole", 1)
        return chunks

    def whole(self, name: str) -> AnyArray:
        reader = self.reader(name, is_column=True)
        if isinstance(reader, LibraryArray):
            with reader.reading() as array:
                return np.asarray(array[...]).astype(object)
        if not reader.shape:
            return np.asarray(reader.chunks.decode(0, reader.chunks.read([0])[0]))
        return reader.whole(one_after_the_other)
