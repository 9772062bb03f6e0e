"""How is a sample read that is a row of a Zarr array?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError
from headrace.storage.arrays import ArraysSource
from headrace.storage.chunks import ArrayReader, ChunkCache, Chunks
from headrace.storage.foreign import asking
from headrace.storage.handles import WorkerFiles
from headrace.storage.paths import redact
from headrace.storage.zarr_chunks import chunks_of, library_chunks
from headrace.storage.zarr_files import ZarrFolder, ZarrZip, array_named, open_store


def open_with_zarr(path: str) -> Any:
    """The root node of a store, opened by zarr-python.

    Raises:
        FormatError: it can't be.
    """
    import zarr

    try:
        return zarr.open(zarr.storage.ZipStore(path, mode="r") if os.path.isfile(path) else path, mode="r")
    except Exception as error:  # whatever zarr-python makes of metadata that it doesn't like
        raise FormatError(f"{redact(path)} can't be opened by zarr-python: {' '.join(str(error).split())}") from error


def _close_root(root: Any) -> None:
    store = getattr(root, "store", None)
    if store is not None:
        store.close()


class OpenZarr:
    """What each process has open of Zarr stores, and the chunks that it has decoded."""

    def __init__(self) -> None:
        self.files: WorkerFiles[int] = WorkerFiles()
        self.library: WorkerFiles[Any] = WorkerFiles(open_with_zarr, _close_root, 16, survives_fork=False)
        self.chunks = ChunkCache(0)

    def close(self) -> None:
        """Closes and forgets it all; it is opened again when it is needed."""
        for part in (self.files, self.library, self.chunks):
            part.close()


def zarr_reader(
    store: ZarrFolder | ZarrZip, name: str, said: dict[str, Any], opened: OpenZarr, *, direct: bool = True, missing: str = "fill"
) -> ArrayReader:
    """A reader of an array.

    Raises:
        FormatError: zarr-python can't open it either, or its elements are no numbers.
        ConfigError: missing="error", and only zarr-python can read it, which does not tell.
    """

    def library(why: str) -> Chunks:
        if missing == "error":
            raise ConfigError(f"missing='error' can't be had for {name!r} of {redact(store.path)}, which zarr-python reads: {why}")
        with opened.library.reading(store.path) as root, asking("zarr-python", f"{redact(store.path)}: {name!r} ({why})"):
            array = root[name] if name else root
            found = library_chunks(array, opened.library, store.path, name, why)
        if found.dtype.hasobject or found.dtype.kind not in "biufcSUV":
            raise FormatError(f"{redact(store.path)}: {name!r} holds {found.dtype}; only numbers are read by now")
        opened.library.close()
        return found

    chunks = chunks_of(store, name, said, opened.files, library, direct=direct, missing=missing)
    return ArrayReader(chunks, opened.chunks, f"{store.path}\0{name}")


class ZarrSource(ArraysSource):
    """Rows of arrays of a Zarr store.

    Args:
        path: a local folder or zip file.
        name: array inside the store, or several of equal length; None: the only one there is.
        direct: read the files themselves where their layout is known; False: through zarr-python alone.
        missing: "fill": a chunk that was never written has the fill value; "error": it is an error.
        opened: what is open and decoded, to be shared with other sources.

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
    ) -> None:
        self._store = open_store(path)
        self.path = redact(self._store.path)
        self._opened = opened or OpenZarr()
        self._chunks = self._opened.chunks
        wanted = [name] if name is None or isinstance(name, str) else list(name)
        found = [array_named(self._store, one) for one in wanted]
        self.name = found[0][0] if name is None or isinstance(name, str) else tuple(one for one, _ in found)
        fields = {one: zarr_reader(self._store, one, said, self._opened, direct=direct, missing=missing) for one, said in found}
        for one, field in fields.items():
            if not field.shape:
                raise FormatError(f"{self.path}: {one!r} is a single value, it has no axis of samples")
        self._fields = fields
        self.grids = [[one, f.shape, f.dtype.str, f.chunks.grid.chunks] for one, f in fields.items()]
        self._check_lengths()

    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole array with one row a sample, such as the targets.

        Raises:
            MissingNameError, FormatError: no such array; another number of rows.
        """
        one, said = array_named(self._store, name)
        reader = zarr_reader(self._store, one, said, self._opened)
        if not reader.shape or reader.shape[0] != len(self):
            raise FormatError(f"{self.path}: {name!r} has shape {reader.shape}, not one row for each of {len(self)} samples")
        column = np.empty(reader.shape, reader.dtype)
        reader.read_span(0, column, self.run)
        return column

    def close(self) -> None:
        """Closes what this process has open of this source and those that share it; decoded chunks are forgotten."""
        self._opened.close()
