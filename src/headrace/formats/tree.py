"""What HDF5 files and Zarr stores have in common: a tree of groups and arrays.

Conventions inside of them (AnnData, episodes, packs) are read through it, each written once.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from headrace.dtypes import AnyArray
from headrace.errors import FormatError, HeadraceError, MissingNameError, one_line
from headrace.formats.arrays.chunks import LibraryChunks, shown_array
from headrace.formats.arrays.packed import PackedInfo, crc_of, info_in
from headrace.formats.arrays.reader import ArrayReader, OpenArrays
from headrace.formats.arrays.rows import ArraysSource
from headrace.formats.source import Column
from headrace.io.paths import listed_names, redact

NodeKind = Literal["group", "array"]
H = TypeVar("H")
T = TypeVar("T")


class StoredArray(NamedTuple):
    """An array, and how its rows are read.

    Attributes:
        path, begin: the file and its first byte, if it lies there as it is, in one piece.
        reader: reads it otherwise.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: str
    begin: int = -1
    reader: ArrayReader | LibraryChunks | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Tree(ABC):
    """An HDF5 file or a Zarr store while a dataset is opened.

    Names are paths in it, without slashes at their ends; "" is the root.

    Args:
        path: of the file, or its URL.
        opened: what each process has open of it.

    Attributes:
        shown: the path in messages.
        dataset_class: the class that reads dense arrays of such files.
    """

    dataset_class: str

    def __init__(self, path: str, opened: OpenArrays[Any]) -> None:
        self.path = path
        self.opened = opened
        self.shown: str = redact(path)

    @abstractmethod
    def kind(self, name: str) -> NodeKind | None:
        """None: there is no such node."""

    @abstractmethod
    def nodes(self, group: str = "") -> list[str]:
        """All groups and arrays below a group; [] if the server does not list them."""

    @abstractmethod
    def children(self, group: str) -> list[str]:
        """The names of the members of a group; [] if it is none."""

    @abstractmethod
    def attrs(self, name: str) -> Mapping[str, Any]:
        """The attributes of a node."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array; () of a single value.

        Raises:
            MissingNameError: there is none; the message lists those there are.
        """

    @abstractmethod
    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of an array."""

    def info(self) -> PackedInfo | None:
        """What a pack says about itself; None: it is none."""
        return info_in(self.attrs(""), self.path)

    def axis_names(self, name: str) -> Sequence[str]:
        """The names of an array's axes; empty ones where the file doesn't say."""
        return [""] * len(self.shape(name))

    @abstractmethod
    def reader(self, name: str, *, by_row: bool = True) -> ArrayReader | LibraryChunks:
        """Reads an array.

        Args:
            name: of the array.
            by_row: True if rows will be read, and not boxes, which must be of numbers.

        Raises:
            MissingNameError: there is none; the message lists those there are.
            FormatError: it has none, or is damaged.
        """

    @abstractmethod
    def whole(self, name: str) -> AnyArray:
        """A whole array, as it is stored."""

    @abstractmethod
    def array_named(self, name: str | None, targets: str | None = None) -> str:
        """The array that a name means; without one the array that holds the samples.

        Args:
            name: as a user wrote it.
            targets: the name of the array of targets, if there is one.

        Raises:
            MissingNameError: there is none of that name; or several, and no name. The message
                lists them.
        """

    def stored(self, name: str) -> StoredArray | None:
        """An array, and how its rows are read; None: there is none."""
        if self.kind(name) != "array":
            return None
        reader = self.reader(name)
        return StoredArray(tuple(reader.shape), reader.dtype, self.path, reader=reader)

    def numbers(self, name: str) -> ArrayReader:
        """Reads an array of numbers.

        Raises:
            FormatError: it holds something else, or is damaged.
        """
        reader = self.reader(name)
        if not isinstance(reader, ArrayReader):
            raise FormatError(f"{self.shown}: {name!r} holds {reader.dtype}, not numbers")
        return reader

    def is_group(self, name: str) -> bool:
        return self.kind(name) == "group"

    def is_array(self, name: str) -> bool:
        return self.kind(name) == "array"

    def text(self, name: str, key: str) -> str | None:
        """An attribute that is a text; None: there is none."""
        value = self.attrs(name).get(key)
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        return value if isinstance(value, str) else None

    def column(self, name: str) -> AnyArray:
        """A whole array with one value per row, with strings as str objects.

        Raises:
            FormatError: it is damaged, or its strings are no UTF-8.
        """
        values = self.whole(name)
        if values.dtype.kind not in "SUO":
            return values
        texts = np.empty(len(values), object)
        for row, value in enumerate(values.tolist()):
            try:
                texts[row] = value.decode() if isinstance(value, bytes) else str(value)
            except UnicodeDecodeError as error:
                raise FormatError(
                    f"{self.shown}: {name!r}, row {row}: a string is not UTF-8: {error}"
                ) from error
        return texts

    def described(self, name: str) -> str:
        """Dtype and shape of an array in messages."""
        return f"{self.dtype(name)} {list(self.shape(name))}"

    def arrays(self) -> list[Column]:
        """All arrays: how each is read, and what a random row costs. Chunks of remote ones are not
        looked for.
        """
        columns: list[Column] = []
        for name in filter(self.is_array, ["", *self.nodes()]):
            column = Column(name, "")
            try:
                shape = self.shape(name)
                dtype = self.dtype(name)
                column.sample = f"{dtype} {list(shape)}"
                # of elements of any size at least
                itemsize = 1 if dtype.hasobject else dtype.itemsize
                column.total = math.prod(shape) * itemsize
                if shape and not self.opened.files.is_remote:
                    column = replace(self.reader(name).describe(name), sample=column.sample)
            except (HeadraceError, OSError, TypeError, ValueError) as error:
                column.read_by = f"can't be read: {one_line(error)}"
            columns.append(column)
        return columns

    def check_has(self, group: str, *names: str) -> None:
        """Raises a FormatError if a group lacks one of some arrays."""
        missing = [name for name in names if not self.is_array(join(group, name))]
        if missing:
            raise FormatError(
                f"{self.shown}: {group or '/'!r} has no {' and no '.join(map(repr, missing))}: the "
                "file is damaged, or cut short"
            )

    def missing(self, what: str, name: str, others: list[str]) -> MissingNameError:
        """The error of a name that does not exist, which lists those that do."""
        return MissingNameError(
            f"{self.shown} has no {what} {name!r}; it has: {listed_names(others, name, repr)}"
        )


class OpenTrees(OpenArrays[H], ABC):
    """What each process has open of HDF5 files or Zarr stores, and the chunks that it has
    decoded.
    """

    direct: bool
    """False: arrays are read by h5py or zarr-python alone."""
    has_objects = False
    """True if stores are objects, which need not survive a fork."""

    @abstractmethod
    def tree(
        self, path: str | os.PathLike[str], nodes: Sequence[str | None] = ()
    ) -> AbstractContextManager[Tree]:
        """A file or store as a tree, which is open inside.

        Args:
            path: of it, or its URL.
            nodes: those whose metadata will be read, which a server is asked for together.

        Raises:
            DataNotFoundError, AccessError, RemoteError, FormatError: there is nothing; it can't be
                read; it is something else, or damaged.
        """

    def learn(self, paths: Sequence[str]) -> None:
        """Asks a server at once for what opening these files takes."""

    def each(
        self, paths: Sequence[str], function: Callable[[str], T], in_threads: bool = False
    ) -> list[T]:
        """What a function makes of each file.

        Args:
            paths: of the files.
            function: called with a path; of a remote file perhaps twice.
            in_threads: True if several threads may call it, once it was called for the first file.
        """
        return [function(path) for path in paths]


class TreeSource(ArraysSource):
    """Rows of arrays of an HDF5 file or a Zarr store.

    Args:
        path: of the file or store, or its URL.
        name: array in it, or several of equal length; None: the only one there is.
        opened: what is open and decoded, shared with other sources.
        targets: the name of the array of targets, which `column` will read.

    Attributes:
        info: what the pack says about itself; None: it is none.

    Raises:
        DataNotFoundError, AccessError, RemoteError: see `OpenTrees.tree`.
        MissingNameError: there is no such array; the message lists those there are.
        FormatError, BudgetError: see `Tree.reader` and `ArraysSource`.
    """

    _opened: OpenTrees[Any]

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str | Sequence[str] | None,
        opened: OpenTrees[Any],
        targets: str | None = None,
    ) -> None:
        is_one = name is None or isinstance(name, str)
        wanted: list[Any] = [name] if is_one else list(name or ())
        with opened.tree(path, [*wanted, targets]) as tree:
            self._file = tree.path
            self.info: PackedInfo | None = tree.info()
            found = [tree.array_named(one, targets) for one in wanted]
            fields = {one: tree.reader(one) for one in found}
            for one, field in fields.items():
                if not field.shape:
                    raise FormatError(
                        f"{shown_array(tree.path, one)} is a single value without an axis of "
                        "samples: name another array"
                    )
            names = found[0] if is_one else tuple(fields)
            super().__init__(tree.shown, opened, names, fields)
            self._look_into(tree)

    def _look_into(self, tree: Tree) -> None:
        """Reads more metadata of the rows while the file is open."""

    def tree(self) -> AbstractContextManager[Tree]:
        """The file or store, which is open inside."""
        return self._opened.tree(self._file)

    def column(self, name: str) -> AnyArray:
        """A whole array with one row a sample, such as the targets.

        Raises:
            MissingNameError, FormatError: no such array; another number of rows.
        """
        with self.tree() as tree:
            shape = tree.shape(name)
            if shape[:1] != (len(self),):
                raise FormatError(
                    f"{shown_array(self.path, name)} has shape {list(shape)}, not one row for each "
                    f"of {len(self)} samples"
                )
            return self._whole(tree, name)

    def _whole(self, tree: Tree, name: str) -> AnyArray:
        """A whole array; one of a pack is compared with its checksum."""
        column = tree.whole(name)
        expected = None if self.info is None else self.info.checksums.get(name)
        if expected is not None and crc_of(column) != expected:
            raise FormatError(
                f"{self.path}: {name!r} has a wrong checksum, the file is damaged: pack it again"
            )
        return column


def join(group: str, name: str) -> str:
    """The path of a node in a group."""
    if group:
        return f"{group}/{name}"
    return name
