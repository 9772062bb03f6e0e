"""HDF5 files, local or remote, as trees of groups and arrays; and the index of a remote one: what
opening it has read, so that the next start needs neither requests nor h5py.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

import h5py
import numpy as np

from headrace.dtypes import AnyArray
from headrace.errors import (
    BudgetError,
    FileChangedError,
    FormatError,
    HeadraceError,
    MissingNameError,
    RemoteError,
    warn,
)
from headrace.formats.arrays.chunks import Chunks
from headrace.formats.arrays.packed import (
    BESIDE,
    PACKED_ATTRIBUTE,
    PackedInfo,
    are_targets,
    info_in,
)
from headrace.formats.arrays.reader import ArrayReader
from headrace.formats.hdf5.chunks import HDF5Array, Layout, chunks_of, is_as_stored, place_of
from headrace.formats.hdf5.files import (
    check_files,
    check_has_values,
    dataset_names,
    files_behind,
    find_dataset,
    only_dataset,
    open_file,
    ordered,
    read_part,
    reading,
)
from headrace.formats.hdf5.remote import PAGE, RemoteFile
from headrace.formats.tree import NodeKind, OpenTrees, StoredArray, Tree
from headrace.io.array_file import Arrays
from headrace.io.index import IndexKind, found_index, keep_index, learn_indexed
from headrace.io.library_errors import asking
from headrace.io.local_files import LocalFiles
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles

_COLUMN_BYTES = 64 << 20
ENDS = 128 << 10
"""Bytes at the beginning and the end of each file that are fetched before h5py asks: most of
what describes a file lies there.
"""
TOGETHER = 64
"""Files whose ends are fetched at once."""
_THREADS = 16

T = TypeVar("T")


_opening: ContextVar[RemoteTree | None] = ContextVar("_opening", default=None)
"""The remote file that is being opened, which nobody need open again."""


class OpenHDF5(OpenTrees[h5py.File]):
    """What each process has open of HDF5 files of a server, or of this machine, and the chunks
    that it has decoded.

    Args:
        server: that they lie on; None: on this machine.
        direct: read the files themselves where their layout is known; False: through h5py alone.
    """

    def __init__(self, server: RemoteFiles | None = None, *, direct: bool = True) -> None:
        self.direct = direct
        self._server = server
        opener = open_file if server is None else functools.partial(_open_remote, server)
        super().__init__(server or LocalFiles(), opener, h5py.File.close)

    @contextlib.contextmanager
    def tree(
        self, path: str | os.PathLike[str], nodes: Sequence[str | None] = ()
    ) -> Iterator[HDF5Tree]:
        path = os.fspath(path)
        if self._server is None:
            path = os.path.abspath(os.path.expanduser(path))
            with reading(path) as file:
                yield HDF5Tree(path, self, lambda: file)
            return
        tree = _opening.get()
        with asking("h5py", redact(path)), contextlib.ExitStack() as stack:
            if tree is None or tree.path != path:
                tree = stack.enter_context(contextlib.closing(self.trees([path])[0]))
            yield tree

    def trees(self, urls: Sequence[str]) -> list[RemoteTree]:
        """Remote files with their indices, or their ends, which are fetched together."""
        assert self._server is not None
        trees: list[RemoteTree] = []
        ends: list[tuple[RemoteTree, int, int]] = []
        for url in urls:
            tree = RemoteTree(url, self, found_index(self._server, url, INDEX))
            trees.append(tree)
            if tree.is_new:
                size = self._server.version(url).size
                first = min(ENDS, size)
                ends += [(tree, 0, first), (tree, max(first, (size - ENDS) // PAGE * PAGE), size)]
        if ends:
            ranges = ByteRanges.of((tree.path, start, stop) for tree, start, stop in ends)
            for (tree, start, _), piece in zip(ends, self._server.read(ranges), strict=True):
                tree.remote.hold(start, piece)
        return trees

    def learn(self, paths: Sequence[str]) -> None:
        learn_indexed(self.files, paths, INDEX)

    def each(
        self, paths: Sequence[str], function: Callable[[str], T], in_threads: bool = False
    ) -> list[T]:
        if self._server is None:
            return super().each(paths, function)
        self.learn(paths)
        results: list[T] = []
        read = functools.partial(self._read, function)
        with ThreadPoolExecutor(_THREADS if in_threads else 1, "headrace-open") as pool:
            for start in range(0, len(paths), TOGETHER):
                trees = self.trees(paths[start : start + TOGETHER])
                # of those with an index nothing is fetched: threads only wait
                while trees and not (results and trees[0].is_new):
                    results.append(read(trees.pop(0)))
                tasks = [pool.submit(read, tree) for tree in trees]
                try:
                    results += [task.result() for task in tasks]
                finally:
                    for task in tasks:
                        task.cancel()
        return results

    def _read(self, function: Callable[[str], T], tree: RemoteTree) -> T:
        """What a function makes of a file. What it reads is cached as the file's index."""
        began = time.monotonic()
        try:
            result = tree.recorded(function)
        except (FormatError, MissingNameError, BudgetError):
            # what was read before may have been damaged on its way, or here
            tree = RemoteTree(tree.path, self)
            with self.files.bypassing_cache():
                result = tree.recorded(function)
        if tree.is_new:
            keep_index(self.files, tree.path, INDEX, tree.index(), time.monotonic() - began)
        return result


def _open_remote(server: RemoteFiles, url: str) -> h5py.File:
    return OpenHDF5(server).trees([url])[0].remote.opened()


class HDF5Tree(Tree):
    """An HDF5 file, local or remote.

    Args:
        path, opened: see `Tree`.
        open_: opens the file.
    """

    dataset_class = "HDF5Dataset"
    opened: OpenHDF5

    def __init__(self, path: str, opened: OpenHDF5, open_: Callable[[], h5py.File]) -> None:
        super().__init__(path, opened)
        self._open = open_
        self._number: int | None = None  # of the file, once it was compared with its version

    @functools.cached_property
    def file(self) -> h5py.File:
        """The file, which h5py opens when it is needed."""
        return self._open()

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
        attributes: Mapping[str, Any] = self.file[name or "/"].attrs
        return attributes

    def array_named(self, name: str | None, targets: str | None = None) -> str:
        if name is None:
            return only_dataset(self.file, self.path, targets)
        return name

    def dataset(self, name: str) -> h5py.Dataset:
        """A dataset of the file; see `find_dataset`."""
        return find_dataset(self.file, name, self.path, self.opened.files.is_remote)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.dataset(name).shape or ())

    def dtype(self, name: str) -> np.dtype[Any]:
        return ordered(self.dataset(name).dtype)

    def _chunks(self, name: str) -> Layout | HDF5Array:
        return chunks_of(self.dataset(name), self.path, name, self.opened)

    def reader(self, name: str, *, by_row: bool = True) -> ArrayReader | HDF5Array:
        chunks: Layout | Chunks = self._chunks(name)
        if isinstance(chunks, Layout):
            chunks = chunks.opened(name, self.opened.files)
        if isinstance(chunks, HDF5Array) and chunks.holds_objects:
            return chunks
        return ArrayReader(chunks, self.opened.chunks, f"{self.path}\0{name}")

    def whole(self, name: str) -> AnyArray:
        dataset = self.dataset(name)
        check_has_values(dataset, f"{self.shown}: {name!r}")
        files_behind(dataset, self.path, self.opened.files)
        return read_part(dataset, ())

    def stored(self, name: str) -> StoredArray | None:
        if self._number is None and self.opened.direct and hasattr(os, "preadv"):
            files = self.opened.files
            files.version(self.path)
            check_files(files, self.path, [self.path])
            self._number = h5py.h5o.get_info(self.file["/"].id).fileno
        plain = None if self._number is None else self._plain(name)
        return plain or super().stored(name)

    def _plain(self, name: str) -> StoredArray | None:
        """A contiguous array of numbers in this very file, located in a tenth of the time; None: it
        is another one.
        """
        try:
            found = h5py.h5d.open(self.file.id, name.encode())
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


class RemoteTree(HDF5Tree):
    """A remote HDF5 file, which h5py opens for what its index doesn't say.

    Args:
        path, opened: see `Tree`.
        arrays: see `index`; None: there is no index.

    Attributes:
        remote: the file.
    """

    def __init__(self, path: str, opened: OpenHDF5, arrays: Arrays | None = None) -> None:
        files: Any = opened.files
        self.remote: RemoteFile = RemoteFile(files, path)
        self._facts: dict[str, Any] = {}
        """JSON values and arrays of numbers, by kind and name."""
        if arrays is not None:
            numbers, data, facts = arrays
            self.remote = RemoteFile(files, path, numbers.tolist(), data)
            self._facts = json.loads(facts.tobytes(), object_hook=_array_in)
        super().__init__(path, opened, self.remote.opened)
        self._indexed = len(self.remote.pages), len(self._facts)

    @property
    def is_new(self) -> bool:
        """True if there is no index, or it lacks something that is known now."""
        indexed = len(self.remote.pages), len(self._facts)
        return self._indexed != indexed or indexed == (0, 0)

    def index(self) -> Arrays:
        """The index: the numbers of pages, sorted; their bytes; the facts."""
        numbers = sorted(self.remote.pages)
        pages = b"".join([self.remote.pages[number] for number in numbers])
        facts = json.dumps(self._facts, default=_as_json).encode()
        return [
            np.array(numbers, np.int64),
            np.frombuffer(pages, np.uint8),
            np.frombuffer(facts, np.uint8),
        ]

    def recorded(self, function: Callable[[str], T]) -> T:
        """Calls a function that opens the file, and records what it reads."""
        self.remote.is_recording = True
        before = _opening.set(self)
        try:
            return function(self.path)
        finally:
            _opening.reset(before)
            self.close()

    def close(self) -> None:
        if "file" in vars(self):
            self.file.close()
            del self.file

    def _fact(self, key: str, find: Callable[[], T]) -> T:
        """What `find` gives, or gave when the index was made."""
        if key not in self._facts:
            self._facts[key] = find()
        value: T = self._facts[key]
        return value

    def info(self) -> PackedInfo | None:
        def text() -> str | None:
            info_in(self.attrs(""), self.path)  # compares the checksum
            return self.text("", PACKED_ATTRIBUTE)

        return info_in({PACKED_ATTRIBUTE: self._fact("pack", text)}, self.path)

    def kind(self, name: str) -> NodeKind | None:
        return self._fact(f"kind {name}", functools.partial(super().kind, name))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._fact(f"shape {name}", functools.partial(super().shape, name)))

    def array_named(self, name: str | None, targets: str | None = None) -> str:
        find = functools.partial(super().array_named, name, targets)
        return self._fact(f"array {[name, targets]}", find)

    def _chunks(self, name: str) -> Layout | HDF5Array:
        key = f"layout {name}"
        if self.opened.direct and key in self._facts:
            return Layout(self.path, *self._facts[key])
        chunks = super()._chunks(name)
        if isinstance(chunks, Layout) and _is_plain(chunks.fill.dtype):
            self._facts[key] = chunks[1:]
        return chunks

    def whole(self, name: str) -> AnyArray:
        key = f"column {name}"
        column: AnyArray | None = self._facts.get(key)
        if column is None:
            pages = self.remote.pages.copy()
            column = super().whole(name)
            if _is_plain(column.dtype):
                self.remote.pages = pages  # those that it lies in need not be kept, too
                column.setflags(write=False)  # as it comes out of an index
                self._facts[key] = column
        return column


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """True if ``dtype.str`` says all of a dtype."""
    return dtype.kind in "biufc" and dtype.metadata is None


def _as_json(array: AnyArray) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": array.shape, "base64": data}


def _array_in(said: dict[str, Any]) -> Any:
    """The array that `_as_json` was given; other JSON objects as they are."""
    if "base64" not in said:
        return said
    return np.frombuffer(base64.b64decode(said["base64"]), said["dtype"]).reshape(said["shape"])


# -- the index of a remote file


def _make_index(files: RemoteFiles, url: str) -> Arrays:
    """Makes the index of a file, which covers all of its datasets."""
    files.learn([url])
    opened = OpenHDF5(files)
    tree = RemoteTree(url, opened)
    tree.recorded(functools.partial(_read_all, opened))
    return tree.index()


def _read_all(opened: OpenHDF5, url: str) -> None:
    """Reads what opening each dataset takes, and the values of those that may be targets, or
    columns of a packed file.
    """
    with opened.tree(url) as tree:
        is_packed = tree.info() is not None
        for name in tree.nodes():
            attributes = tree.attrs(name)
            for key in attributes:
                # of a type that h5py lacks
                with contextlib.suppress(OSError, TypeError, ValueError, KeyError):
                    attributes.get(key)
        for name in dataset_names(tree.file):
            try:
                dataset = tree.dataset(name)
                shape = dataset.shape
                is_column = is_packed and (name in BESIDE or are_targets(name))
                if shape is not None and len(shape) == 1 and dataset.nbytes <= _COLUMN_BYTES:
                    # the values of a sparse matrix are no part of what opening it takes
                    is_column |= not name.endswith(("/data", "/indices"))
                if is_column:
                    tree.whole(name)
                if shape:
                    tree.reader(name)
            except (RemoteError, FileChangedError):
                raise
            except (HeadraceError, TypeError) as error:
                warn(f"{redact(url)}: {name!r} is left out of the index: {error}")


INDEX = IndexKind("hdf5", 4, ("<i8", "u1", "u1"), _make_index)
"""See `RemoteTree.index`."""
