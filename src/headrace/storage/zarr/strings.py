"""Rows of Zarr arrays of variable-length strings, through zarr-python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.zarr.chunks import LibraryArray


def holds_strings(said: dict[str, Any]) -> bool:
    """True if metadata describe an array of variable-length strings: of version 2 by the codec vlen-utf8, of version 3 by their type."""
    if said.get("zarr_format") == 3:
        return said.get("data_type") == "string"
    filters = said.get("filters")
    first = filters[0] if isinstance(filters, list) and filters else None
    return said.get("dtype") == "|O" and isinstance(first, dict) and first.get("id") == "vlen-utf8"


class StringRows(LibraryRows):
    """Rows of strings. What a batch needs is read by one call, so that each chunk is decoded once a batch.

    Args:
        array: as each process opens it.
        shape: of the array.
    """

    def __init__(self, array: LibraryArray, shape: tuple[int, ...]) -> None:
        self._array, self.shape, self.dtype = array, shape, np.dtype(object)
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
