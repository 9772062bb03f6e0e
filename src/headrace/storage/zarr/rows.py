"""Rows of Zarr arrays as samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.io.paths import redact
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.arrays.rows import ArraysSource
from headrace.storage.zarr.library import StringRows
from headrace.storage.zarr.opened import OpenZarr


class ZarrSource(ArraysSource):
    """Rows of arrays of a Zarr store.

    Args:
        path: a local folder or zip file, or a URL.
        name: array inside the store, or several of equal length; None: the only one there is.
        opened: what is open and decoded, to be shared with other sources; for a URL it knows the server.
        column: the name of an array of which `column` will be asked for.
        **options: of `OpenZarr`, where there is none.

    Raises:
        DataNotFoundError, FormatError, MissingNameError: see `open_store`, `Store.array`, `OpenZarr.reader`.
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
        self._opened = opened or OpenZarr(**options)
        self.files, self._chunks = self._opened.files, self._opened.chunks
        wanted = [name] if name is None or isinstance(name, str) else list(name)
        self._store = self._opened.store(path, [*wanted, column])
        self.path = redact(self._store.path)
        arrays = dict(self._store.array(one) for one in wanted)
        self.name: str | tuple[str, ...] = next(iter(arrays)) if name is None or isinstance(name, str) else tuple(arrays)
        fields = {one: self._opened.rows(self._store, one, metadata) for one, metadata in arrays.items()}
        for one, field in fields.items():
            if not field.shape:
                raise FormatError(f"{self.path}: {one!r} is a single value, it has no axis of samples")
        self._fields = fields
        self.grids: list[list[Any]] = [
            [one, f.shape, f.dtype.str, f.chunks.grid.chunks if isinstance(f, ArrayReader) else None] for one, f in fields.items()
        ]
        self._check_lengths()

    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole array with one row a sample, such as the targets.

        Raises:
            MissingNameError, FormatError: no such array; another number of rows.
        """
        reader = self._opened.rows(self._store, *self._store.array(name), is_column=True)
        if not reader.shape or reader.shape[0] != len(self):
            raise FormatError(f"{self.path}: {name!r} has shape {reader.shape}, not one row for each of {len(self)} samples")
        if isinstance(reader, StringRows):
            return reader.whole()
        column = np.empty(reader.shape, reader.dtype)
        reader.read_span(0, column, self.run)
        return column

    @property
    def is_remote(self) -> bool:
        return self.is_direct and super().is_remote

    def close(self) -> None:
        """Closes what this process has open of this source and those that share it; decoded chunks are forgotten."""
        self._opened.close()
