"""Arrays that zarr-python reads: of layouts that are not known here, and of strings."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError, HeadraceError
from headrace.formats.arrays.chunks import COUNTABLE, Grid, LibraryChunks, shown_array
from headrace.formats.arrays.rows import LibraryRows
from headrace.formats.zarr.store import Store, key_of
from headrace.io.handles import WorkerFiles
from headrace.io.library_errors import asking


class LibraryArrays:
    """Opens arrays with zarr-python, each process for itself, and each array alone: what else is in
    a store may be anything. Picklable.

    Attributes:
        stores: those that zarr-python reads by our requests, by their path or URL.
    """

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}

    def __call__(self, key: str) -> Any:
        """The array that a key names: path of the store, a zero, and path of the array in it.

        Raises:
            FormatError: it can't be opened.
            HeadraceError: what reading a remote store raises.
        """
        import zarr

        path, _, name = key.partition("\0")
        store: Any = path
        if path in self.stores:
            from headrace.formats.zarr.library_store import LibraryStore

            store = LibraryStore(self.stores[path])
        try:
            return zarr.open_array(store, path=name, mode="r")
        except HeadraceError:
            raise
        except Exception as error:  # whatever zarr-python makes of metadata that it doesn't like
            cause = " ".join(str(error).split())
            raise FormatError(
                f"{shown_array(path, name)} can't be opened by zarr-python: {cause}: install and "
                "import the package that registers its codec or data type with zarr, such as "
                "numcodecs[pcodec]"
            ) from error


def close_array(array: Any) -> None:
    """Closes the store of an array."""
    array.store.close()


class LibraryArray:
    """An array that zarr-python reads.

    Args:
        opened: what each process has open, see `LibraryArrays`.
        store, name: of the array.
    """

    def __init__(self, opened: WorkerFiles[Any], store: Store, name: str) -> None:
        self._opened, self._store, self._name = opened, store, name

    @contextlib.contextmanager
    def reading(self, why: str = "") -> Iterator[Any]:
        """The array, inside of the context; what it raises there names it, and why zarr-python
        reads it.

        Raises:
            FileChangedError: it was changed after the store was opened.
        """
        self._store.check_version(self._name)
        key = f"{self._store.path}\0{self._name}"
        with (
            asking("zarr-python", f"{shown_array(self._store.path, self._name)}{why}"),
            self._opened.reading(key) as array,
        ):
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
        if self._store.files.is_remote or not all(array.shape):
            return
        extents = array.shards or array.chunks
        files = [
            range(cut.start // extent, -(-cut.stop // extent))
            for cut, extent in zip(part, extents, strict=True)
        ]
        keys = [array.metadata.encode_chunk_key(place) for place in itertools.product(*files)]
        self._store.ranges([key_of(self._name, key) for key in keys])

    def __call__(self, part: tuple[slice, ...]) -> npt.NDArray[Any]:
        with self.reading() as array:
            found = np.asarray(array[part])
            self.check_part(array, part)
            return found


def library_chunks(load: LibraryArray, where: str, why: str) -> LibraryChunks:
    """The chunks of an array of numbers.

    Args:
        load: reads it.
        where: names it in messages.
        why: zarr-python is needed.

    Raises:
        FormatError: it can't be opened, or its elements are no numbers.
    """
    with load.reading(f" ({why})") as array:
        shape, chunks, dtype = tuple(array.shape), tuple(array.chunks), array.dtype
        if 0 not in shape and (
            min(chunks, default=1) < 1 or math.prod(chunks) * dtype.itemsize > COUNTABLE
        ):
            raise FormatError(
                f"{where} has chunks of {list(chunks)} elements: its metadata are damaged"
            )
        fill = 0 if array.fill_value is None else array.fill_value
    if dtype.hasobject or dtype.kind not in "biufcSUV":
        raise FormatError(
            f"{where} holds {dtype}, of which samples can't be made: numbers can, and strings as "
            "rows"
        )
    return LibraryChunks(Grid(shape, chunks), dtype, load, f"zarr-python: {why}", fill)


def holds_strings(metadata: dict[str, Any]) -> bool:
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


class StringRows(LibraryRows):
    """Rows of strings. What a batch needs is read by one call, so that each chunk is decoded once a
    batch.

    Args:
        array: reads them.
    """

    def __init__(self, array: LibraryArray) -> None:
        self._array, self.dtype = array, np.dtype(object)
        with array.reading() as opened:
            self.shape: tuple[int, ...] = tuple(opened.shape)
        self.how = "zarr-python: strings of any length"

    def read(self, rows: Sequence[int]) -> list[Any]:
        """The rows: str, or arrays of such.

        Raises:
            FormatError: they are damaged.
            FileChangedError: they were changed after the store was opened.
        """
        wanted, places = np.unique(np.asarray(rows, np.int64), return_inverse=True)
        if not len(wanted):
            return []
        with self._array.reading() as array:
            found = _as_objects(array.get_orthogonal_selection((wanted,)))
            inner = tuple(slice(0, extent) for extent in self.shape[1:])
            for row in wanted[:: max(1, len(wanted) // 8)].tolist():  # some of their files
                self._array.check_part(array, (slice(row, row + 1), *inner))
        return [found[place] for place in places.tolist()]

    def whole(self) -> npt.NDArray[Any]:
        """All rows."""
        with self._array.reading() as array:
            return _as_objects(array[...])


def _as_objects(found: Any) -> npt.NDArray[Any]:
    return np.asarray(found).astype(object)
