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
        shown, arrays = redact(self._store.path), dict(self._store.array(one) for one in wanted)
        fields = {one: opened.rows(self._store, one, metadata) for one, metadata in arrays.items()}
        for one, field in fields.items():
            if not field.shape:
                raise FormatError(f"{shown}: {one!r} is a single value, it has no axis of samples")
        chunks = [field.chunks.grid.chunks if isinstance(field, ArrayReader) else None for field in fields.values()]
        is_one = name is None or isinstance(name, str)
        super().__init__(shown, opened, next(iter(arrays)) if is_one else tuple(arrays), fields, chunks)

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
        reader.read_spans(np.zeros(1, np.int64), [column], self.run)
        return column

    @property
    def is_remote(self) -> bool:
        return self.is_direct and super().is_remote
