"""Zarr stores of groups and arrays, as AnnData and replay buffers lay them out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError, MissingNameError
from headrace.io.paths import redact
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.arrays.spans import SpanReader
from headrace.storage.source import one_after_the_other
from headrace.storage.sparse.groups import GroupFile, as_text
from headrace.storage.zarr.library import StringRows
from headrace.storage.zarr.rows import OpenZarr
from headrace.storage.zarr.store import Store


class ZarrGroups(GroupFile):
    """A Zarr store.

    Args:
        store: its files.
        opened: what each process has open of it.
    """

    reader_name = "ZarrDataset"
    opened: OpenZarr

    def __init__(self, store: Store, opened: OpenZarr) -> None:
        self.path, self.opened, self._store = redact(store.path), opened, store

    def _kind(self, name: str) -> Any:
        return (self._store.metadata(name) or {}).get("node_type")

    def is_group(self, name: str) -> bool:
        return bool(self._kind(name) == "group")

    def is_array(self, name: str) -> bool:
        return bool(self._kind(name) == "array")

    def attribute(self, name: str, key: str) -> Any:
        return self._store.attributes(name).get(key)

    def names(self) -> list[str]:
        try:
            return [name for name in self._store.nodes() if name]
        except MissingNameError:  # a server without listings
            return []

    def top_names(self) -> list[str]:
        return [name for name in self.names() if "/" not in name]

    def described(self, name: str) -> str:
        field = self._field(name)
        return f"{field.dtype} {list(field.shape)}"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._store.array(name)[1]["shape"])

    def rows(self, name: str) -> ArrayReader | LibraryRows:
        return self._field(name)

    def _field(self, name: str, is_column: bool = False) -> ArrayReader | StringRows:
        return self.opened.rows(self._store, *self._store.array(name), is_column=is_column)

    def spans(self, name: str) -> tuple[SpanReader, int | None]:
        field = self._field(name)
        if isinstance(field, StringRows):
            raise FormatError(f"{self.path}: {name!r} holds strings, and no numbers")
        return SpanReader(field.chunks, self.opened.chunks, f"{self._store.path}\0{name}"), int(
            field.chunks.grid.chunks[0]
        )

    def column(self, name: str) -> npt.NDArray[Any]:
        field = self._field(name, is_column=True)
        if isinstance(field, StringRows):
            return field.whole()
        column = np.empty(field.shape, field.dtype)
        field.read_spans(np.zeros(1, np.int64), [column], one_after_the_other)
        return as_text(column, f"{self.path}: {name!r}")
