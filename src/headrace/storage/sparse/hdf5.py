"""HDF5 files of groups and arrays, as AnnData and replay buffers lay them out."""

from __future__ import annotations

import os
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.io.paths import redact
from headrace.storage.arrays.chunks import Chunks
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.arrays.spans import SpanReader
from headrace.storage.hdf5.chunks import ObjectRows, rows_of
from headrace.storage.hdf5.links import Versions
from headrace.storage.hdf5.rows import OpenHDF5
from headrace.storage.hdf5.times import check_has_values
from headrace.storage.sparse.groups import GroupFile, as_text


class HDF5Groups(GroupFile):
    """An HDF5 file that is open.

    Args:
        file: by h5py.
        path: of it, or its URL.
        opened: what each process has open of it.
        direct: False: arrays are read through h5py alone.
        cache_dir: where the table of an array of many chunks is kept.
    """

    reader_name = "HDF5Dataset"
    opened: OpenHDF5

    def __init__(
        self,
        file: h5py.File,
        path: str,
        opened: OpenHDF5,
        *,
        direct: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        place = path if opened.files.is_remote else os.path.abspath(os.path.expanduser(path))
        self.path, self.opened = redact(place), opened
        self._file, self._place, self._direct, self._cache_dir = file, place, direct, cache_dir

    def _node(self, name: str) -> Any:
        return self._file.get(name) if name else self._file["/"]

    def is_group(self, name: str) -> bool:
        return isinstance(self._node(name), h5py.Group)

    def is_array(self, name: str) -> bool:
        return isinstance(self._node(name), h5py.Dataset)

    def attribute(self, name: str, key: str) -> Any:
        value = self._node(name).attrs.get(key)
        if isinstance(value, np.generic):
            value = value.item()
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def top_names(self) -> list[str]:
        return list(self._file)

    def names(self) -> list[str]:
        found: list[str] = []
        self._file.visit(found.append)
        return found

    def _dataset(self, name: str) -> h5py.Dataset:
        return self.opened.hdf5.dataset(self._file, name, self._place)

    def described(self, name: str) -> str:
        dataset = self._dataset(name)
        return f"{dataset.dtype} {list(dataset.shape or ())}"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._dataset(name).shape or ())

    def _chunks(self, dataset: h5py.Dataset, name: str) -> Chunks | ObjectRows:
        opened = self.opened
        return rows_of(
            dataset,
            self._place,
            name,
            opened.hdf5,
            opened.library,
            direct=self._direct,
            cache_dir=self._cache_dir,
        )

    def spans(self, name: str) -> tuple[SpanReader, int | None]:
        dataset = self._dataset(name)
        rows = self._chunks(dataset, name)
        if isinstance(rows, ObjectRows):
            raise FormatError(f"{self.path}: {name!r} holds {rows.dtype}, and no numbers")
        return SpanReader(
            rows, self.opened.chunks, f"{self._place}\0{name}"
        ), None if dataset.chunks is None else int(dataset.chunks[0])

    def rows(self, name: str) -> ArrayReader | LibraryRows:
        rows = self._chunks(self._dataset(name), name)
        return (
            rows
            if isinstance(rows, ObjectRows)
            else ArrayReader(rows, self.opened.chunks, f"{self._place}\0{name}")
        )

    def column(self, name: str) -> npt.NDArray[Any]:
        dataset = self._dataset(name)
        check_has_values(dataset, f"{self.path}: {name!r}")
        Versions(dataset, self._place, name, self.opened.hdf5)
        return as_text(np.asarray(dataset), f"{self.path}: {name!r}")
