"""HDF5 files, local or remote: what is open of them, what is kept of remote ones, and each as a
tree of groups and arrays.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import h5py
import numpy as np

from headrace.dtypes import AnyArray
from headrace.errors import FileChangedError, HeadraceError, RemoteError, warn
from headrace.formats.arrays.chunks import DirectChunks
from headrace.formats.arrays.packed import BESIDE, are_targets, info_in
from headrace.formats.arrays.reader import ArrayReader, OpenArrays
from headrace.formats.arrays.rows import LibraryRows
from headrace.formats.hdf5.chunks import ObjectRows, is_as_stored, place_of, rows_of
from headrace.formats.hdf5.files import (
    check_has_values,
    dataset_names,
    files_behind,
    find_dataset,
    open_file,
    ordered,
    read_part,
    reading,
)
from headrace.formats.hdf5.kind import HDF5
from headrace.formats.hdf5.remote import Pages, open_remote, read_each, reading_remote, recorded
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.resolve.resolver import DataPath, resolve
from headrace.formats.tree import NodeKind, StoredArray, Tree
from headrace.io.array_file import Arrays
from headrace.io.index import IndexKind, learn_indexed
from headrace.io.local_files import LocalFiles
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles

_COLUMN_BYTES = 64 << 20
T = TypeVar("T")


class OpenHDF5(OpenArrays[h5py.File]):
    """What each process has open of HDF5 files of a server, or of this machine, and the chunks
    that it has decoded.

    Args:
        server: that they lie on; None: on this machine.
        direct: read the files themselves where their layout is known; False: through h5py alone.
    """

    def __init__(self, server: RemoteFiles | None = None, *, direct: bool = True) -> None:
        self.direct = direct
        self._server = server
        opener: Any = open_file
        if server is not None:
            opener = functools.partial(open_remote, server, INDEX)
        super().__init__(server or LocalFiles(), opener, h5py.File.close)

    @contextlib.contextmanager
    def tree(self, path: str | os.PathLike[str]) -> Iterator[HDF5Tree]:
        """A file as a tree, which is open inside.

        Raises:
            DataNotFoundError, AccessError, FormatError, BudgetError: see `reading`.
        """
        path = os.fspath(path)
        if self._server is not None:
            with reading_remote(self._server, INDEX, path) as file:
                yield HDF5Tree(file, path, self)
            return
        path = os.path.abspath(os.path.expanduser(path))
        with reading(path) as file:
            yield HDF5Tree(file, path, self)

    def learn(self, paths: Sequence[str]) -> None:
        """Asks at once for what opening these files takes; of files of this machine nothing."""
        if self._server is not None:
            learn_indexed(self._server, paths, INDEX)

    def each(
        self, paths: Sequence[str], function: Callable[[str], T], in_threads: bool = False
    ) -> list[T]:
        """What a function makes of each file.

        Args:
            paths: of the files.
            function: called with a path.
            in_threads: True if several threads may call it, once it was called for the first file.
        """
        if self._server is None:
            return [function(path) for path in paths]
        return read_each(self._server, INDEX, paths, function, in_threads)


class HDF5Tree(Tree):
    """An HDF5 file, local or remote.

    Args:
        file: by h5py.
        path, opened: see `Tree`.
    """

    dataset_class = "HDF5Dataset"
    opened: OpenHDF5

    def __init__(self, file: h5py.File, path: str, opened: OpenHDF5) -> None:
        super().__init__(path, opened)
        self.file = file
        self._number: int | None = None  # of the file, once it was compared with its version
        self._parent: tuple[str, Any] | None = None  # the group that was looked into last

    def kind(self, name: str) -> NodeKind | None:
        found = self.file.get(name, getclass=True) if name else h5py.Group
        if found is h5py.Group:
            return "group"
        return "array" if found is h5py.Dataset else None

    def nodes(self, group: str = "") -> list[str]:
        names: list[str] = []
        found = self.file.get(group or "/")
        if isinstance(found, h5py.Group):
            found.visit(names.append)
        if group:
            return [f"{group}/{name}" for name in names]
        return names

    def children(self, group: str) -> list[str]:
        found = self.file.get(group or "/")
        return list(found) if isinstance(found, h5py.Group) else []

    def attrs(self, name: str) -> Mapping[str, Any]:
        return _Attributes(self.file[name or "/"].attrs)

    def dataset(self, name: str) -> h5py.Dataset:
        """A dataset of the file; see `find_dataset`."""
        return find_dataset(self.file, name, self.path, self.opened.files.is_remote)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.dataset(name).shape or ())

    def dtype(self, name: str) -> np.dtype[Any]:
        return ordered(self.dataset(name).dtype)

    def reader(self, name: str) -> ArrayReader | LibraryRows:
        opened = self.opened
        dataset = self.dataset(name)
        rows = rows_of(dataset, self.path, name, opened.files, opened.library, opened.direct)
        if isinstance(rows, ObjectRows):
            return rows
        return ArrayReader(rows, opened.chunks, f"{self.path}\0{name}")

    def whole(self, name: str) -> AnyArray:
        dataset = self.dataset(name)
        check_has_values(dataset, f"{self.shown}: {name!r}")
        files_behind(dataset, self.path, self.opened.files)
        return read_part(dataset, ())

    def stored(self, name: str) -> StoredArray | None:
        if self._number is not None:
            plain = self._plain(name)
            if plain is not None:
                return plain
        elif self.opened.direct and hasattr(os, "preadv") and not self.file.swmr_mode:
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


def open_files(
    data_path: DataPath | FileSet, options: RemoteOptions, direct: bool = True
) -> tuple[list[str], OpenHDF5]:
    """The paths or URLs of the HDF5 files that a path means, and what is open of them.

    Args:
        data_path, options: what is meant, and how URLs are reached.
        direct: see `OpenHDF5`.

    Raises:
        ConfigError, DataNotFoundError, AccessError, RemoteError: see
            `headrace.formats.resolve.resolver.resolve`.
    """
    files = resolve(data_path, HDF5, options)
    return files.urls(), OpenHDF5(files.server, direct=direct)


# -- the index of a remote file


def _make_index(files: RemoteFiles, url: str) -> Arrays:
    """Of all datasets of a file, whichever will be asked for."""
    pages = Pages(url, files.learn([url])[0].size)
    recorded(pages, functools.partial(_read_all, OpenHDF5(files)))
    return pages.arrays()


def _read_all(opened: OpenHDF5, url: str) -> None:
    """Reads what opening each dataset takes, and the values of those that may be targets, or
    columns of a packed file.
    """
    with opened.tree(url) as tree:
        is_packed = info_in(tree.file.attrs, url) is not None
        tree.file.visititems(_read_attributes)
        for name in dataset_names(tree.file):
            try:
                dataset = tree.dataset(name)
                shape = dataset.shape
                is_column = is_packed and (name in BESIDE or are_targets(name))
                if shape is not None and len(shape) == 1 and dataset.nbytes <= _COLUMN_BYTES:
                    # the values of a sparse matrix are no part of what opening it takes
                    is_column |= not name.endswith(("/data", "/indices"))
                if is_column:
                    np.asarray(dataset)
                if shape:
                    tree.reader(name)
            except (RemoteError, FileChangedError):
                raise
            except (HeadraceError, TypeError) as error:
                warn(f"{redact(url)}: {name!r} is left out of the index: {error}")


def _read_attributes(_: str, item: h5py.Group | h5py.Dataset) -> None:
    for key in item.attrs:
        # of a type that h5py lacks
        with contextlib.suppress(OSError, TypeError, ValueError, KeyError):
            item.attrs.get(key)


INDEX = IndexKind("hdf5", 2, ("<i8", "u1"), _make_index)
"""The numbers of the pages that h5py reads of a file to open datasets, and these pages."""
