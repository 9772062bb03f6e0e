"""Reads samples that are rows of Zarr arrays."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError, HeadraceError
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.library_errors import asking
from headrace.io.local.files import LocalFiles
from headrace.io.paths import redact
from headrace.io.remote_files import RemoteFiles
from headrace.storage.arrays.chunks import Chunks
from headrace.storage.arrays.reader import ArrayReader, ChunkCache
from headrace.storage.arrays.rows import ArraysSource
from headrace.storage.zarr.chunks import LibraryArray, chunks_of, library_chunks, library_key
from headrace.storage.zarr.metadata import array_named
from headrace.storage.zarr.stores import FarStore, Store, open_store
from headrace.storage.zarr.strings import StringRows, holds_strings


class _LibraryArrays:
    """Opens arrays with zarr-python, each process for itself, and each array alone: what else is in a store may be anything. Picklable.

    Attributes:
        far: stores behind URLs, by their URL.
    """

    def __init__(self) -> None:
        self.far: dict[str, FarStore] = {}

    def __call__(self, key: str) -> Any:
        """The array that a key names; see `library_key`.

        Raises:
            FormatError: it can't be opened.
            HeadraceError: what reading from far away raises.
        """
        import zarr

        path, _, name = key.partition("\0")
        store: Any = path
        if path in self.far:
            from headrace.storage.zarr.library import FarZarr

            store = FarZarr(self.far[path])
        elif os.path.isfile(path):
            store = zarr.storage.ZipStore(path, mode="r")
        try:
            return zarr.open_array(store, path=name, mode="r")
        except HeadraceError:
            raise
        except Exception as error:  # whatever zarr-python makes of metadata that it doesn't like
            cause = " ".join(str(error).split())
            raise FormatError(
                f"{redact(path)}: {name!r} can't be opened by zarr-python: {cause}; where a codec or data type is unknown, install and "
                "import the package that registers it with zarr"
            ) from error


def _close_array(array: Any) -> None:
    """Closes the store of an array."""
    array.store.close()


class OpenZarr:
    """What each process has open of Zarr stores, and the chunks that it has decoded.

    Args:
        far: the files of the server that they lie on; None: of this machine.
    """

    def __init__(self, far: RemoteFiles | None = None) -> None:
        self.far = far
        self.files: Files = far or LocalFiles()
        self._arrays = _LibraryArrays()
        self.library: WorkerFiles[Any] = WorkerFiles(self._arrays, _close_array, 16, survives_fork=False)
        self.chunks = ChunkCache(0)

    def store(self, path: str | os.PathLike[Any], names: str | Sequence[str | None] | None = ()) -> Store:
        """The store at a path or URL.

        Args:
            path: of the store.
            names: of nodes whose metadata will be read.

        Raises:
            DataNotFoundError, AccessError, FormatError, RemoteError: see `open_store`.
        """
        wanted = [names] if isinstance(names, str) else list(names or ())
        nodes, known = [name.strip("/") for name in wanted if name], self._arrays.far.get(os.fspath(path))
        if known is not None:
            known.know(nodes)
            return known
        store = open_store(path, self.far, nodes)
        if isinstance(store, FarStore):
            self._arrays.far[store.path] = store
        return store

    def close(self) -> None:
        """Closes and forgets it all; it is opened again when it is needed."""
        for part in (self.library, self.files, self.chunks):
            part.close()


def zarr_reader(
    store: Store,
    name: str,
    said: dict[str, Any],
    opened: OpenZarr,
    *,
    direct: bool = True,
    missing: str = "fill",
    by_row: bool = True,
) -> ArrayReader:
    """A reader of an array of numbers, of its rows or of boxes.

    Raises:
        FormatError: zarr-python can't open it either, or its elements are no numbers.
        ConfigError: missing="error", and only zarr-python can read it, which does not tell.
    """

    def library(why: str) -> Chunks:
        _check_missing(store, name, missing, why)
        with asking("zarr-python", f"{redact(store.path)}: {name!r} ({why})"), opened.library.reading(library_key(store, name)) as array:
            found = library_chunks(array, opened.library, store, name, why)
        if found.dtype.hasobject or found.dtype.kind not in "biufcSUV":
            raise FormatError(
                f"{redact(store.path)}: {name!r} holds {found.dtype}, of which samples can't be made: numbers can, and strings as rows"
            )
        opened.library.close()
        return found

    chunks = chunks_of(store, name, said, opened.files, library, direct=direct, missing=missing, by_row=by_row)
    return ArrayReader(chunks, opened.chunks, f"{store.path}\0{name}")


def rows_reader(
    store: Store, name: str, said: dict[str, Any], opened: OpenZarr, *, direct: bool = True, missing: str = "fill"
) -> ArrayReader | StringRows:
    """A reader of the rows of an array.

    Raises:
        FormatError, ConfigError: see `zarr_reader`.
    """
    if not holds_strings(said):
        return zarr_reader(store, name, said, opened, direct=direct, missing=missing)
    _check_missing(store, name, missing, "strings")
    with asking("zarr-python", f"{redact(store.path)}: {name!r}"), opened.library.reading(library_key(store, name)) as array:
        shape = tuple(array.shape)
    opened.library.close()
    return StringRows(LibraryArray(opened.library, store, name), shape)


def _check_missing(store: Store, name: str, missing: str, why: str) -> None:
    if missing == "error":
        raise ConfigError(f"missing='error' can't be had for {name!r} of {redact(store.path)}, which zarr-python reads: {why}")


class ZarrSource(ArraysSource):
    """Rows of arrays of a Zarr store.

    Args:
        path: a local folder or zip file, or a URL.
        name: array inside the store, or several of equal length; None: the only one there is.
        direct: read the files themselves where their layout is known; False: through zarr-python alone.
        missing: "fill": a chunk that was never written has the fill value; "error": it is an error.
        opened: what is open and decoded, to be shared with other sources; for a URL it knows the server.
        column: the name of an array of which `column` will be asked for.

    Raises:
        DataNotFoundError, FormatError, MissingNameError: see `open_store`, `array_named`, `zarr_reader`.
    """

    def __init__(
        self,
        path: str | os.PathLike[Any],
        name: str | Sequence[str] | None = None,
        *,
        direct: bool = True,
        missing: str = "fill",
        opened: OpenZarr | None = None,
        column: str | None = None,
    ) -> None:
        self._opened = opened or OpenZarr()
        self._chunks = self._opened.chunks
        wanted = [name] if name is None or isinstance(name, str) else list(name)
        self._store = self._opened.store(path, [*wanted, column])
        self.path = redact(self._store.path)
        found = [array_named(self._store, one) for one in wanted]
        self.name: str | tuple[str, ...] = found[0][0] if name is None or isinstance(name, str) else tuple(one for one, _ in found)
        fields = {one: rows_reader(self._store, one, said, self._opened, direct=direct, missing=missing) for one, said in found}
        for one, field in fields.items():
            if not field.shape:
                raise FormatError(f"{self.path}: {one!r} is a single value, it has no axis of samples")
        self._fields = fields
        self.grids: list[list[Any]] = [
            [one, f.shape, f.dtype.str, f.chunks.grid.chunks if isinstance(f, ArrayReader) else None] for one, f in fields.items()
        ]
        self._check_lengths()
        self.far = self._opened.far if self.is_direct else None

    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole array with one row a sample, such as the targets.

        Raises:
            MissingNameError, FormatError: no such array; another number of rows.
        """
        one, said = array_named(self._store, name)
        reader = rows_reader(self._store, one, said, self._opened)
        if not reader.shape or reader.shape[0] != len(self):
            raise FormatError(f"{self.path}: {name!r} has shape {reader.shape}, not one row for each of {len(self)} samples")
        if isinstance(reader, StringRows):
            return reader.whole()
        column = np.empty(reader.shape, reader.dtype)
        reader.read_span(0, column, self.run)
        return column

    def take_counts(self) -> Counter[str]:
        counts = super().take_counts()
        if self.far is None and self._opened.far is not None:
            counts.update(self._opened.far.take_counts())
        return counts

    def close(self) -> None:
        """Closes what this process has open of this source and those that share it; decoded chunks are forgotten."""
        self._opened.close()
