"""Rows of Zarr arrays as samples, and the readers of arrays, directly or through zarr-python.

Chunks come straight from their files where the metadata say nothing but what is known here: a
regular grid, the codecs of `headrace.formats.arrays.codecs`, perhaps shards. Everything else goes
through zarr-python. `Chunks.how` says which, and why.

Remote chunks that are files of their own are fetched whole: so nobody needs to ask for their sizes
first. Where rows lie in chunks of several rows as they are, the sizes are asked for, and rows are
fetched.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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
from headrace.formats.arrays.reader import ArrayReader, OpenArrays
from headrace.formats.arrays.rows import ArraysSource, LibraryRows
from headrace.formats.resolve.resolver import resolve
from headrace.formats.source import one_after_the_other
from headrace.formats.tree import NodeKind, Tree
from headrace.formats.zarr.shards import ArrayFiles, Shards
from headrace.formats.zarr.stores import (
    NODE_FILES,
    OBJECT,
    ZARR,
    ChunkFiles,
    Store,
    ZarrFolder,
    ZarrUrl,
    is_zarr,
    key_of,
)
from headrace.formats.zarr.zips import ZarrZip
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.library_errors import asking
from headrace.io.paths import chain_of, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles

# -- through zarr-python


def _open(stores: dict[str, Store], key: str) -> Any:
    """The array that a key names: path of the store, a zero, and path of the array in it.

    Args:
        stores: those that zarr-python reads by our requests, by their path or URL.
    """
    from headrace.formats.zarr.library import open_array

    path, _, name = key.partition("\0")
    return open_array(path, name, stores.get(path))


def _leave(array: Any) -> None:
    """Arrays are not closed: that would close the store, which may be an object of the caller's."""


class LibraryArray(LibraryRows):
    """An array that zarr-python reads: of numbers, or rows of strings.

    Args:
        opened: what each process has open.
        store, name: of the array.
        why: zarr-python reads it.

    Raises:
        FormatError: it can't be opened.
    """

    def __init__(self, opened: WorkerFiles[Any], store: Store, name: str, why: str) -> None:
        self._opened = opened
        self._store = store
        self._name = name
        self.where = shown_array(store.path, name)
        self.how = f"zarr-python: {why}"
        with self._reading(f" ({why})") as array:
            self.shape = tuple(array.shape)
            self.dtype = array.dtype

    @contextlib.contextmanager
    def _reading(self, why: str = "") -> Iterator[Any]:
        """The array, inside of the context; what it raises there names it, and why zarr-python
        reads it.

        Raises:
            FileChangedError: it was changed after the store was opened.
        """
        self._store.check_version(self._name)
        with (
            asking("zarr-python", f"{self.where}{why}"),
            self._opened.reading(f"{self._store.path}\0{self._name}") as array,
        ):
            yield array

    def check_part(self, part: tuple[slice, ...], array: Any = None) -> None:
        """Compares the files that a part lies in with the time when the store was opened.

        Raises:
            FileChangedError: one was changed since.
        """
        if array is None:
            with self._reading() as array:
                self.check_part(part, array)
            return
        if self._store.files.is_remote or not all(array.shape):
            return
        extents = array.shards or array.chunks
        files = [
            range(cut.start // extent, -(-cut.stop // extent))
            for cut, extent in zip(part, extents, strict=True)
        ]
        keys = [array.metadata.encode_chunk_key(place) for place in itertools.product(*files)]
        self._store.ranges([key_of(self._name, key) for key in keys])

    def read_part(self, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        with self._reading() as array:
            try:
                return np.asarray(array[part])
            finally:  # a file that was changed may look damaged
                self.check_part(part, array)

    def read(self, rows: Sequence[int]) -> list[Any]:
        """Rows of strings, read by one call, so that each chunk is decoded once a batch."""
        wanted, places = np.unique(np.asarray(rows, np.int64), return_inverse=True)
        if not len(wanted):
            return []
        with self._reading() as array:
            found = np.asarray(array.get_orthogonal_selection((wanted,))).astype(object)
            inner = tuple(slice(0, extent) for extent in self.shape[1:])
            for row in wanted[:: max(1, len(wanted) // 8)].tolist():  # some of their files
                self.check_part((slice(row, row + 1), *inner), array)
        return [found[place] for place in places.tolist()]

    def whole(self) -> npt.NDArray[Any]:
        """All rows of strings."""
        with self._reading() as array:
            return np.asarray(array[...]).astype(object)

    def chunks(self) -> LibraryChunks:
        """The chunks of an array of numbers.

        Raises:
            FormatError: its elements are no numbers.
        """
        with self._reading() as array:
            grid = Grid(self.shape, tuple(array.chunks))
            fill = 0 if array.fill_value is None else array.fill_value
        nbytes = math.prod(grid.chunks) * self.dtype.itemsize
        if 0 not in grid.shape and (min(grid.chunks, default=1) < 1 or nbytes > COUNTABLE):
            raise FormatError(
                f"{self.where} has chunks of {list(grid.chunks)} elements: its metadata are damaged"
            )
        if self.dtype.hasobject or self.dtype.kind not in "biufcSUV":
            raise FormatError(
                f"{self.where} holds {self.dtype}, of which samples can't be made: numbers can, "
                "and strings as rows"
            )
        return LibraryChunks(grid, self.dtype, self.read_part, self.check_part, self.how, fill)


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
        self.direct = direct
        self.missing = missing
        self._stores: dict[str, Store] = {}
        super().__init__(files or ChunkFiles(), functools.partial(_open, self._stores), _leave)

    @property
    def has_objects(self) -> bool:
        """True if stores are objects, which need not survive a fork."""
        return any(store.only_library == OBJECT for store in self._stores.values())

    def take(self, store: Any) -> str:
        """The path by which `tree` opens a store object; a local one is read as its folder."""
        from zarr.storage import LocalStore

        from headrace.formats.zarr.library import ObjectStore

        if isinstance(store, LocalStore):
            return str(store.root)
        path = str(store)
        self._stores[path] = ObjectStore(path, self.files, store)
        return path

    def tree(self, path: str | os.PathLike[Any], names: Sequence[str | None] = ()) -> ZarrTree:
        """The store at a path or URL. A URL that ends in .zip is a zip file's, any other one that
        of a folder.

        Args:
            path: of the store.
            names: of nodes whose metadata will be read.

        Raises:
            DataNotFoundError, AccessError, FormatError: there is nothing; it can't be read; it is
                no Zarr store.
            RemoteError: the server does not answer.
        """
        place = os.fspath(path)
        nodes = [name.strip("/") for name in names if name]
        store = self._stores.get(place)
        if store is not None:
            store.fetch_metadata(nodes)
            return ZarrTree(store, self)
        metadata = ", ".join(NODE_FILES)
        if isinstance(self.files, ChunkFiles):
            place = os.path.abspath(os.path.expanduser(place))
            if zipfile.is_zipfile(place):
                store = ZarrZip(place, self.files)
            elif is_zarr(place):
                return ZarrTree(ZarrFolder(place, self.files), self)
            elif not os.path.exists(place):
                raise DataNotFoundError(
                    f"{redact(place)} does not exist (working folder: {os.getcwd()})"
                )
            elif not os.access(place, os.R_OK):
                raise AccessError(f"{redact(place)}: this user may not read it")
            else:
                raise FormatError(f"{redact(place)} is no Zarr store: it has neither of {metadata}")
        elif redact(chain_of(place)[0]).lower().endswith(".zip"):
            store = ZarrZip(place, self.files)
        else:
            assert isinstance(self.files, RemoteFiles)
            store = ZarrUrl(place, self.files)
            store.fetch_metadata(nodes)
            if all(store.read(name) is None for name in NODE_FILES):
                raise DataNotFoundError(
                    f"{redact(place)}: there is no Zarr store: none of {metadata} is found below "
                    "it: is the address right?"
                )
        self._stores[place] = store
        return ZarrTree(store, self)


def objects_in(data_path: Any) -> list[Any]:
    """The store objects of zarr-python that are given in place of paths; []: it is a path."""
    library = sys.modules.get("zarr.abc.store")
    given = [*data_path] if isinstance(data_path, (list, tuple)) else [data_path]
    if library is None or not all(isinstance(one, library.Store) for one in given):
        return []
    return given


def open_stores(data_path: Any, reach: RemoteOptions, **options: Any) -> tuple[OpenZarr, list[str]]:
    """What is open of stores, and their paths.

    Args:
        data_path: what `resolve` takes, or what `objects_in` finds.
        reach: how URLs are reached.
        **options: of `OpenZarr`.
    """
    objects = objects_in(data_path)
    if objects:
        opened = OpenZarr(**options)
        return opened, [opened.take(store) for store in objects]
    files = resolve(data_path, ZARR, reach)
    return OpenZarr(files.server, **options), files.urls()


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

    def kind(self, name: str) -> NodeKind | None:
        metadata = self.store.metadata(name)
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
        return self.store.attributes(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.store.array(name)[1]["shape"])

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.reader(name).dtype

    def reader(
        self, name: str, *, by_row: bool = True, is_column: bool = False
    ) -> ArrayReader | LibraryArray:
        """A reader of an array.

        Args:
            name: of the array.
            by_row: True if rows will be read, and not boxes, which must be of numbers.
            is_column: True for targets, which are read directly where they can be, with fill
                values.

        Raises:
            FormatError: zarr-python can't open it either, or its elements are no numbers.
            ConfigError: missing="error", and only zarr-python can read it, which does not tell.
        """
        name, metadata = self.store.array(name)
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
                f"missing='error' can't be had for {shown_array(self.path, name)}, which "
                f"zarr-python reads: {chunks}"
            )
        try:
            array = LibraryArray(opened.library, self.store, name, chunks)
            if holds_strings:
                array.dtype = np.dtype(object)
                return array
            return ArrayReader(array.chunks(), opened.chunks, key)
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
        how = "ranges" if files.is_remote else "pread"
        check = None
        index: ChunkIndex
        if layout.index_at is not None:
            index = Shards(store, name, layout)
        else:
            index = ArrayFiles(store, name, layout, store.reads_whole and not in_parts)
            check = store.check_content
            if index.whole_files and files.is_remote:
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
            files,
            fill=layout.fill,
            order=layout.order,
            path=store.path,
            name=name,
            how=how,
            check=check,
            required=required,
        )

    def whole(self, name: str) -> npt.NDArray[Any]:
        reader = self.reader(name, is_column=True)
        if isinstance(reader, LibraryArray):
            return reader.whole()
        if not reader.shape:
            return np.asarray(reader.chunks.decode(0, reader.chunks.read([0])[0]))
        return reader.whole(one_after_the_other)


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
        DataNotFoundError, FormatError, MissingNameError: see `OpenZarr` and `Store.array`.
    """

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
        is_one = name is None or isinstance(name, str)
        wanted: list[Any] = [name] if is_one else list(name or ())
        self.tree = opened.tree(path, [*wanted, column])
        shown = self.tree.shown
        fields: dict[str, ArrayReader | LibraryArray] = {}
        cuts: list[Any] = []
        for one in wanted:
            found, _ = self.tree.store.array(one)
            field = self.tree.reader(found)
            if not field.shape:
                raise FormatError(
                    f"{shown_array(shown, found)} is a single value, it has no axis of samples"
                )
            fields[found] = field
            cuts.append(field.chunks.grid.chunks if isinstance(field, ArrayReader) else None)
        names = tuple(fields)
        super().__init__(shown, opened, names[0] if is_one else names, fields, cuts)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole array with one row a sample, such as the targets.

        Raises:
            MissingNameError, FormatError: no such array; another number of rows.
        """
        shape = self.tree.shape(name)
        if shape[:1] != (len(self),):
            raise FormatError(
                f"{shown_array(self.path, name)} has shape {shape}, not one row for each "
                f"of {len(self)} samples"
            )
        return self.tree.whole(name)
