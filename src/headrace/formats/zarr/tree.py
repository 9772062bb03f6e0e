"""Zarr stores as trees of groups and arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import MissingNameError
from headrace.formats.arrays.reader import ArrayReader
from headrace.formats.source import one_after_the_other
from headrace.formats.tree import NodeKind, Tree
from headrace.formats.zarr.library import StringRows
from headrace.formats.zarr.rows import OpenZarr
from headrace.formats.zarr.store import Store


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

    def reader(self, name: str) -> ArrayReader | StringRows:
        return self.opened.rows(self.store, *self.store.array(name))

    def chunk_length(self, name: str, reader: ArrayReader) -> int:
        return int(reader.chunks.grid.chunks[0])

    def whole(self, name: str) -> npt.NDArray[Any]:
        reader = self.opened.rows(self.store, *self.store.array(name), is_column=True)
        if isinstance(reader, StringRows):
            return reader.whole()
        if not reader.shape:
            return np.asarray(reader.chunks.decode(0, reader.chunks.read([0])[0]))
        return reader.whole(one_after_the_other)
