"""HDF5 files as trees of groups and arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headrace.formats.arrays.chunks import DirectChunks
from headrace.formats.arrays.reader import ArrayReader
from headrace.formats.arrays.rows import LibraryRows
from headrace.formats.hdf5.chunks import ObjectRows, rows_of
from headrace.formats.hdf5.files import check_has_values
from headrace.formats.hdf5.links import Versions
from headrace.formats.hdf5.probe import is_as_stored, place_of
from headrace.formats.hdf5.rows import OpenHDF5
from headrace.formats.tree import NodeKind, StoredArray, Tree


class HDF5Tree(Tree):
    """An HDF5 file, local or remote.

    Args:
        file: by h5py.
        path, opened: see `Tree`.
        direct: False: arrays are read through h5py alone.
        cache_dir: where the table of an array of many chunks is cached.
    """

    dataset_class = "HDF5Dataset"
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
        if not opened.files.is_remote:
            path = os.path.abspath(os.path.expanduser(path))
        super().__init__(path, opened)
        self.file = file
        self._direct = direct
        self._cache_dir = cache_dir
        self._number: int | None = None  # of the file, once it was compared with its version
        self._parent: tuple[str, Any] | None = None  # the group that was looked into last

    def kind(self, name: str) -> NodeKind | None:
        found = self.file.get(name, getclass=True) if name else h5py.Group
        if found is h5py.Group:
            return "group"
        return "array" if found is h5py.Dataset else None

    def _group(self, name: str) -> h5py.Group | None:
        found = self.file.get(name or "/")
        return found if isinstance(found, h5py.Group) else None

    def nodes(self, group: str = "") -> list[str]:
        names: list[str] = []
        found = self._group(group)
        if found is not None:
            found.visit(names.append)
        if group:
            return [f"{group}/{name}" for name in names]
        return names

    def children(self, group: str) -> list[str]:
        return list(self._group(group) or ())

    def attrs(self, name: str) -> Mapping[str, Any]:
        return _Attributes(self.file[name or "/"].attrs)

    def _dataset(self, name: str) -> h5py.Dataset:
        return self.opened.hdf5.dataset(self.file, name, self.path)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._dataset(name).shape or ())

    def dtype(self, name: str) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self._dataset(name).dtype
        return dtype

    def reader(self, name: str) -> ArrayReader | LibraryRows:
        rows = rows_of(
            self._dataset(name),
            self.path,
            name,
            self.opened.hdf5,
            self.opened.library,
            direct=self._direct,
            cache_dir=self._cache_dir,
        )
        if isinstance(rows, ObjectRows):
            return rows
        return ArrayReader(rows, self.opened.chunks, f"{self.path}\0{name}")

    def chunk_length(self, name: str, reader: ArrayReader) -> int | None:
        chunks = self._dataset(name).chunks
        return None if chunks is None else int(chunks[0])

    def whole(self, name: str) -> npt.NDArray[Any]:
        dataset = self._dataset(name)
        check_has_values(dataset, f"{self.shown}: {name!r}")
        Versions(dataset, self.path, name, self.opened.hdf5)
        return np.asarray(dataset)

    def stored(self, name: str) -> StoredArray | None:
        if self._number is not None:
            plain = self._plain(name)
            if plain is not None:
                return plain
        elif self._direct and hasattr(os, "preadv") and not self.file.swmr_mode:
            # the first array goes the long way, which compares the file with its version
            self._number = h5py.h5o.get_info(self.file["/"].id).fileno
        found = super().stored(name)
        if found is None or not isinstance(found.reader, ArrayReader):
            return found
        chunks = found.reader.chunks
        is_whole = chunks.grid.chunks == chunks.grid.shape
        if isinstance(chunks, DirectChunks) and chunks.is_raw and is_whole:
            ranges = chunks.raw_ranges(np.zeros(1, np.int64))
            begin = int(ranges.start[0])
            if begin >= 0:
                path = ranges.paths[int(ranges.file[0])]
                return StoredArray(found.shape, found.dtype, path, begin, None)
        return found

    def _plain(self, name: str) -> StoredArray | None:
        """An array of numbers that lies in one piece in this very file, which takes a tenth of the
        time to find out; None: it is another.
        """
        parent, _, last = name.rpartition("/")
        try:
            if self._parent is None or self._parent[0] != parent:
                self._parent = (parent, h5py.h5g.open(self.file.id, (parent or "/").encode()))
            found = h5py.h5d.open(self._parent[1], last.encode())
        except (KeyError, TypeError):  # who opens it in the other way says what is wrong
            return None
        plist = found.get_create_plist()
        shape = found.shape
        dtype = found.dtype
        if plist.get_layout() != h5py.h5d.CONTIGUOUS or plist.get_external_count():
            return None
        if not shape or dtype.kind not in "biufc" or not is_as_stored(found.get_type(), dtype):
            return None
        if h5py.h5o.get_info(found).fileno != self._number:
            return None
        begin = place_of(found)
        nbytes = math.prod(shape) * dtype.itemsize
        if begin is None or not nbytes:
            return None
        if begin + nbytes > self.opened.files.version(self.path).size:
            return None
        return StoredArray(tuple(shape), dtype, self.path, begin, None)


class _Attributes(Mapping[str, Any]):
    """The attributes of a node, each read when it is asked for; those without a value don't count.

    Attributes that h5py can't read raise what it raises.
    """

    def __init__(self, attrs: h5py.AttributeManager) -> None:
        self._attrs = attrs

    def __getitem__(self, name: str) -> Any:
        value = self._attrs[name]
        if isinstance(value, h5py.Empty):
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in self._attrs.items() if not isinstance(value, h5py.Empty))

    def __len__(self) -> int:
        return sum(1 for _ in self)
