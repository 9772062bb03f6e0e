"""HDF5 files, local or remote: what is open of them, each as a tree of groups and arrays, and their
rows: those of datasets, and the samples of what `headrace.pack` wrote.
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
import numpy.typing as npt

from headrace.dtypes import AnyArray, ArraySpec, IntArray
from headrace.errors import FileChangedError, FormatError, HeadraceError, RemoteError, warn
from headrace.formats.arrays.chunks import Chunks, LibraryRows
from headrace.formats.arrays.packed import (
    BESIDE,
    CRC,
    DATA,
    IMAGE,
    MASK,
    MASK_STARTS,
    NAME_OFFSETS,
    NAMES,
    OFFSETS,
    PACKED_ATTRIBUTE,
    TARGETS,
    PackedInfo,
    are_offsets,
    are_targets,
    crc_of,
    info_in,
    offsets_named,
    target_named,
)
from headrace.formats.arrays.reader import ArrayReader
from headrace.formats.hdf5.chunks import Layout, is_as_stored, place_of, rows_of
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
from headrace.formats.hdf5.remote import (
    Known,
    is_plain,
    open_remote,
    read_each,
    reading_remote,
    recorded,
)
from headrace.formats.resolve.file_set import PackedNames
from headrace.formats.source import Description, PackPart, Rows
from headrace.formats.tree import NodeKind, OpenTrees, StoredArray, Tree, TreeSource
from headrace.io.array_file import Arrays
from headrace.io.index import IndexKind, learn_indexed
from headrace.io.local_files import LocalFiles
from headrace.io.paths import in_one_line, redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.memory.anonymous import SharedArray

_COLUMN_BYTES = 64 << 20
T = TypeVar("T")


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
        opener: Any = open_file
        if server is not None:
            opener = functools.partial(open_remote, server, INDEX)
        super().__init__(server or LocalFiles(), opener, h5py.File.close)

    @contextlib.contextmanager
    def tree(
        self, path: str | os.PathLike[str], nodes: Sequence[str | None] = ()
    ) -> Iterator[HDF5Tree]:
        path = os.fspath(path)
        if self._server is not None:
            with reading_remote(self._server, INDEX, path) as known:
                yield RemoteTree(known, self)
            return
        path = os.path.abspath(os.path.expanduser(path))
        with reading(path) as file:
            yield HDF5Tree(lambda: file, path, self)

    def learn(self, paths: Sequence[str]) -> None:
        learn_indexed(self.files, paths, INDEX)

    def each(
        self, paths: Sequence[str], function: Callable[[str], T], in_threads: bool = False
    ) -> list[T]:
        if self._server is None:
            return super().each(paths, function)
        return read_each(self._server, INDEX, paths, function, in_threads)


class HDF5Tree(Tree):
    """An HDF5 file, local or remote.

    Args:
        open_file: opens it by h5py, if it is not open.
        path, opened: see `Tree`.
    """

    dataset_class = "HDF5Dataset"
    opened: OpenHDF5

    def __init__(self, open_file: Callable[[], h5py.File], path: str, opened: OpenHDF5) -> None:
        super().__init__(path, opened)
        self._open_file = open_file
        self._number: int | None = None  # of the file, once it was compared with its version
        self._parent: tuple[str, Any] | None = None  # the group that was looked into last

    @property
    def file(self) -> h5py.File:
        return self._open_file()

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
            return only_dataset(self.file, self.path, DATA, targets)
        return name

    def extents(self, name: str, reader: ArrayReader | LibraryRows) -> tuple[int, ...] | None:
        extents: tuple[int, ...] | None = self.dataset(name).chunks
        return extents

    def dataset(self, name: str) -> h5py.Dataset:
        """A dataset of the file; see `find_dataset`."""
        return find_dataset(self.file, name, self.path, self.opened.files.is_remote)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.dataset(name).shape or ())

    def dtype(self, name: str) -> np.dtype[Any]:
        return ordered(self.dataset(name).dtype)

    def _rows(self, name: str) -> Layout | Chunks | LibraryRows:
        return rows_of(self.dataset(name), self.path, name, self.opened)

    def reader(self, name: str, *, by_row: bool = True) -> ArrayReader | LibraryRows:
        opened = self.opened
        rows = self._rows(name)
        if isinstance(rows, LibraryRows):
            return rows
        if isinstance(rows, Layout):
            rows = rows.opened(name, opened.files)
        return ArrayReader(rows, opened.chunks, f"{self.path}\0{name}")

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


class RemoteTree(HDF5Tree):
    """A remote HDF5 file, which h5py opens for what its index doesn't say.

    Args:
        known: of the file.
        opened: see `Tree`.
    """

    def __init__(self, known: Known, opened: OpenHDF5) -> None:
        super().__init__(known.opened, known.url, opened)
        self._known = known

    def info(self) -> PackedInfo | None:
        def text() -> str | None:
            info_in(self.attrs(""), self.path)  # compares the checksum
            return self.text("", PACKED_ATTRIBUTE)

        return info_in({PACKED_ATTRIBUTE: self._known.fact("pack", text)}, self.path)

    def kind(self, name: str) -> NodeKind | None:
        return self._known.fact(f"kind {name}", functools.partial(super().kind, name))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._known.fact(f"shape {name}", functools.partial(super().shape, name)))

    def extents(self, name: str, reader: ArrayReader | LibraryRows) -> tuple[int, ...] | None:
        find = functools.partial(super().extents, name, reader)
        return self._known.fact(f"extents {name}", find)

    def array_named(self, name: str | None, targets: str | None = None) -> str:
        find = functools.partial(super().array_named, name, targets)
        return self._known.fact(f"array {[name, targets]}", find)

    def _rows(self, name: str) -> Layout | Chunks | LibraryRows:
        key = f"layout {name}"
        if self.opened.direct and key in self._known.facts:
            return Layout(self.path, *self._known.facts[key])
        rows = super()._rows(name)
        if isinstance(rows, Layout) and is_plain(rows.fill.dtype):
            self._known.note(key, rows[1:])
        return rows

    def whole(self, name: str) -> AnyArray:
        return self._known.column(name, functools.partial(super().whole, name))


# -- the index of a remote file


def _make_index(files: RemoteFiles, url: str) -> Arrays:
    """Of all datasets of a file, whichever will be asked for."""
    files.learn([url])
    known = Known(files, url)
    recorded(known, functools.partial(_read_all, OpenHDF5(files)))
    return known.arrays()


def _read_all(opened: OpenHDF5, url: str) -> None:
    """Reads what opening each dataset takes, and the values of those that may be targets, or
    columns of a packed file.
    """
    with opened.tree(url) as tree:
        is_packed = tree.info() is not None
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
                    tree.whole(name)
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


INDEX = IndexKind("hdf5", 3, ("<i8", "u1", "u1"), _make_index)
"""See `Known.arrays`."""


# -- rows


class HDF5Source(TreeSource):
    """Rows of datasets of an HDF5 file, or the samples of a packed file.

    Records are arrays of one row (its shape and dtype, in the file's byte order); strings, vlen and
    compounds with them as h5py gives them; for several names dicts of these; 1-D arrays where a
    packed file holds encoded samples or tokens. Samples of packed files are checked against their
    CRC.

    Args:
        path, name, opened, targets: see `TreeSource`.

    Attributes:
        names: of the samples of a pack, or None.
        gives_pairs, gives_images: records are pairs of an image and its mask; or images alone, out
            of pairs.
    """

    names: PackedNames | None = None
    gives_pairs = False
    gives_images = False
    _offsets: SharedArray | None = None
    _crc: SharedArray | None = None
    _mask_starts: SharedArray | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str | Sequence[str] | None = DATA,
        opened: OpenTrees[Any] | None = None,
        targets: str | None = None,
    ) -> None:
        super().__init__(path, name, opened or OpenHDF5(), targets)

    # -- packs

    def _look_into(self, tree: Tree) -> None:
        """Reads offsets, checksums and names of a packed file, which must fit each other."""
        packed = self.info
        if packed is None or self.name != DATA:
            return
        self.of_samples = packed
        self.part = None if packed.part is None else PackPart(*packed.part)
        wrong: list[str] = []
        if packed.is_flat:
            offsets = self._whole(tree, OFFSETS).astype(np.int64, copy=False)
            self._offsets = SharedArray(offsets)
            if not are_offsets(offsets, packed.count, self.shape[0]):
                wrong.append(OFFSETS)
        elif self.shape[0] != packed.count:
            wrong.append(DATA)
        if tree.is_array(NAMES):
            joined = self._whole(tree, NAMES)
            edges = self._whole(tree, NAME_OFFSETS)
            self.names = PackedNames.from_arrays(joined, edges)
            if not are_offsets(edges, packed.count, len(joined)):
                wrong.append(NAME_OFFSETS)
        if tree.is_array(CRC):
            self._crc = SharedArray(self._whole(tree, CRC))
            if self._crc.array.shape != (packed.count,):
                wrong.append(CRC)
        if wrong:
            raise FormatError(
                f"{self.path} is damaged: {', '.join(wrong)} don't fit the {packed.count:,} "
                "samples it should hold: pack it again"
            )

    def give_pairs(self, images_alone: bool = False) -> None:
        """Makes `read` return pairs of an image and its mask, as bytes or pixels; or images alone.

        Raises:
            FormatError: where masks begin doesn't fit the samples.
        """
        spans = self._spans(slice(None))
        if spans is not None:
            begins = self.column(MASK_STARTS)
            fit = begins.dtype == np.int64 and begins.ndim == 1
            if not fit or (begins < spans[0]).any() or (begins > spans[1]).any():
                raise FormatError(
                    f"{self.path} is damaged: {MASK_STARTS} don't fit the samples: pack it again"
                )
            self._mask_starts = SharedArray(begins)
        elif self.dtype.names != (IMAGE, MASK):
            raise FormatError(
                f"{self.path} is damaged: its rows have the fields {self.dtype.names}: pack it "
                "again"
            )
        self.gives_pairs = not images_alone
        self.gives_images = images_alone

    def _spans(self, indices: IntArray | slice) -> tuple[IntArray, IntArray] | None:
        """Where samples begin and end that lie flat, one behind the other; None: they are rows."""
        if self._offsets is None:
            return None
        offsets = self._offsets.array
        return offsets[:-1][indices], offsets[1:][indices]

    def _whole(self, tree: Tree, name: str) -> AnyArray:
        column = tree.whole(name)
        expected = self.info.checksums.get(name) if self.info is not None else None
        if expected is not None and crc_of(column) != expected:
            raise FormatError(
                f"{self.path}: {name!r} has a wrong checksum, the file is damaged: pack it again"
            )
        return column

    def column(self, name: str) -> AnyArray:
        """A whole array with one row a sample, such as the targets; of targets that are dicts a
        compound, with a field for each column.

        Raises:
            MissingNameError, FormatError: no such array; another number of rows.
        """
        columns = self._columns_of(name)
        arrays = dict[str, AnyArray]()
        for one, stored in columns.items():
            arrays[one] = super().column(stored)
        if columns.keys() == {""}:
            return arrays[""]
        kinds = [(one, array.dtype, array.shape[1:]) for one, array in arrays.items()]
        rows = np.empty(len(self), kinds)
        for one, array in arrays.items():
            rows[one] = array
        return rows

    def whole(self, name: str) -> AnyArray:
        """An array as a whole, compared with its checksum."""
        with self.tree() as tree:
            return self._whole(tree, name)

    def has_column(self, name: str) -> bool:
        """True if there is such a `column`."""
        with self.tree() as tree:
            return all(map(tree.is_array, self._columns_of(name).values()))

    def _columns_of(self, name: str) -> dict[str, str]:
        """The arrays of the columns of targets that are dicts; of others one without a name."""
        columns = None
        if self.info is not None and name == TARGETS:
            columns = self.info.target_columns
        if columns is None:
            return {"": name}
        return {column: target_named(number) for number, (column, _) in enumerate(columns)}

    def ragged(self, name: str) -> tuple[AnyArray, IntArray]:
        """An array of `RAGGED`, and where the items of each sample begin ([n + 1]).

        Raises:
            MissingNameError, FormatError: no such array; it is damaged.
        """
        items = self.whole(name)
        offsets = self.whole(offsets_named(name))
        if not are_offsets(offsets, len(self), len(items)):
            raise FormatError(
                f"{self.path} is damaged: {offsets_named(name)} don't fit {name}: pack it again"
            )
        return items, offsets.astype(np.int64, copy=False)

    @property
    def checksums(self) -> npt.NDArray[np.uint32] | None:
        """The CRC of each sample ([n]); None: there are none."""
        if self._crc is None:
            return None
        return self._crc.array

    def edges(self) -> IntArray | None:
        """The first byte of each sample in the file, and the end of the last ([n + 1]), where
        they lie one behind the other as they are.
        """
        reader = self._readers[0] if self._readers else None
        begin = None if reader is None else reader.begin
        if begin is None:
            return None
        rows = np.arange(len(self) + 1)
        if self._offsets is not None:
            rows = self._offsets.array
        edges: IntArray = begin + rows * self._row_bytes
        return edges

    # -- what it is

    @property
    def is_flat(self) -> bool:
        return self._offsets is not None

    def describe(self) -> Description:
        found = super().describe()
        info = self.of_samples
        if info is None:
            return found
        if self.is_flat:
            reader = self._readers[0]
            found.columns = [reader.describe(DATA, [reader.shape[0] / max(1, len(self))])]
        found.facts["packed"] = f"{info.kind}, stored {info.store}"
        if info.target_columns is not None:
            found.facts["targets"] = ", ".join(name for name, _ in info.target_columns)
        return found

    def __len__(self) -> int:
        if self._offsets is None:
            return super().__len__()
        return len(self._offsets.array) - 1

    def sizes(self) -> IntArray:
        spans = self._spans(slice(None))
        if spans is None:
            return super().sizes()
        return (spans[1] - spans[0]) * self._row_bytes

    def image_sizes(self) -> IntArray:
        """Bytes of each image without its mask ([n] int64), where samples are pairs."""
        spans = self._spans(slice(None))
        if spans is None or self._mask_starts is None:
            return np.full(len(self), self.dtype[IMAGE].itemsize, np.int64)
        sizes: IntArray = self._mask_starts.array - spans[0]
        return sizes

    @property
    def array_spec(self) -> ArraySpec | None:
        if self.is_flat:
            return None
        return super().array_spec

    def blocks_of(self, nbytes: int) -> IntArray:
        spans = self._spans(slice(None))
        if spans is None:
            return super().blocks_of(nbytes)
        numbers = spans[0] * self._row_bytes // nbytes
        return np.unique(numbers, return_counts=True)[1].astype(np.int64)

    def fingerprint(self) -> str:
        """The one of the packed dataset; else a hash of names, shapes, dtypes and chunk grids."""
        if self.of_samples is None:
            return super().fingerprint()
        return self.of_samples.fingerprint

    def location(self, index: int) -> str:
        if self.names is None:
            return super().location(index)
        return f"{super().location(index)} ({in_one_line(self.names[index])})"

    # -- reading

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        super().read_into(indices, rows)
        self._check(indices, rows)

    def read(self, indices: Sequence[int]) -> list[Any]:
        spans = self._spans(np.asarray(indices, np.int64))
        if spans is None:
            records = super().read(indices)
        else:
            sizes = (spans[1] - spans[0]).tolist()
            records = [np.empty((size, *self.shape[1:]), self.dtype) for size in sizes]
            self._readers[0].read_spans(spans[0], records, self.run)
        self._check(indices, records)
        if not (self.gives_pairs or self.gives_images):
            return records
        if spans is None or self._mask_starts is None:
            # a copy: in the row it may be at any address
            pairs = [(row[IMAGE], np.array(row[MASK])) for row in records]
        else:
            begins = self._mask_starts.array[np.asarray(indices, np.int64)] - spans[0]
            each = zip(records, begins.tolist(), strict=True)
            pairs = [(record[:size], record[size:]) for record, size in each]
        if self.gives_images:
            return [image for image, _ in pairs]
        return pairs

    def _located(self, indices: IntArray, missing: bool) -> list[ByteRanges]:
        spans = self._spans(indices)
        if spans is None:
            return super()._located(indices, missing)
        return [self._readers[0].span_ranges(*spans, missing)]

    def _check(self, indices: Sequence[int], records: Rows | Sequence[Any]) -> None:
        if self._crc is None:
            return
        for index, array in zip(indices, records, strict=True):
            if crc_of(array) != int(self._crc.array[index]):
                raise FormatError(self.damaged(index))

    def damaged(self, index: int) -> str:
        """The message for a sample with a wrong checksum."""
        return f"{self.location(index)}: wrong checksum, the file is damaged: pack it again"
