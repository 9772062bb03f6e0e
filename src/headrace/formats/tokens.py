"""Reads documents, windows and blocks out of one long array of tokens, with random access.

A document is a range of the array, a window a part of a document, and a block the next so many
tokens of any documents. All are found by arithmetic, and read from memory or by ranges of a file.

Packed files hold the tokens in one flat array, which is read by ranges. The edges of the documents
are in memory that workers share. Everything else in a remote file is read by h5py when the file is
opened; these bytes are its index, which later runs find in `cache_dir`.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import AnyArray, IntArray, distinct
from headrace.errors import ConfigError, FormatError
from headrace.formats.arrays.packed import DATA, TARGETS, PackedInfo, fingerprint_of_files
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.resolve.file_set import PackedNames
from headrace.formats.source import Column, Description, Locatable
from headrace.formats.text.index import first_from
from headrace.formats.tree import OpenTrees
from headrace.io.array_file import FileArrays
from headrace.io.files import Files
from headrace.io.local_files import LocalFiles, changed
from headrace.io.paths import in_one_line, redact
from headrace.io.ranges import GAP, ByteRanges
from headrace.memory.anonymous import SharedArray

KIND = "text"
STORE = "tokens"
"""The kind and store of packed files of tokens."""


class PackedTokens:
    """The concatenated tokens of packed files, which are local or on one server. A window lies in
    one file, as its document does; a block may cross files.

    It has the properties and methods of `FileArrays` that tokens need.

    Args:
        paths: of the files, one at least; or their URLs.
        opened: the open files.

    Attributes:
        files: reads the files.
        path: path of the first file, and the number of further files, for messages.
        count: number of tokens.
        dtype: dtype of the ids.
        info: metadata of all files as if they were one.
        targets: one for each document, or None.
        names: of the documents, or None.

    Raises:
        FormatError: a file holds no texts that were packed, is of a later version, damaged, or
            shorter than it says; or the files were packed in different ways.
        RemoteError, FileChangedError, DataNotFoundError, AccessError: a file is not there, or can't
            be read; see `Files.read`.
    """

    def __init__(self, paths: Sequence[str], opened: OpenTrees[Any]) -> None:
        self.files: Files = opened.files
        self._paths = list(paths)
        if not self.files.is_remote:
            self._paths = list(map(os.path.abspath, paths))
        each = opened.each(self._paths, lambda path: _opened_pack(path, opened))
        sources, infos, targets, places = zip(*each, strict=True)
        ways = list(map(_packed_with, infos, targets))
        for source, way in zip(sources, ways, strict=True):
            different = [name for name, value in way.items() if value != ways[0][name]]
            if different:
                raise FormatError(
                    f"{source.path} and {sources[0].path} can't be one dataset: they were "
                    f"packed with other {', '.join(different)}: pack them from one dataset"
                )
        self._shown = [source.path for source in sources]
        self.path: str = self._shown[0]
        self._dtypes = [source.dtype for source in sources]
        self.dtype: np.dtype[Any] = np.result_type(*self._dtypes)
        # of each file: the first token, the first document, the first byte, bytes of a token
        self._starts: IntArray = np.cumsum([0, *(source.shape[0] for source in sources)])
        self._documents: IntArray = np.cumsum([0, *map(len, sources)])
        self._begins = np.array([edges[0] for edges in places])
        self._sizes = np.array([dtype.itemsize for dtype in self._dtypes])
        self.count: int = int(self._starts[-1])
        edges = [np.zeros(1, np.int64)]
        for number, begins in enumerate(places):
            offsets = (begins[1:] - begins[0]) // self._sizes[number]
            edges.append(offsets + self._starts[number])
        self._edges = SharedArray(np.concatenate(edges))
        self.info: PackedInfo = infos[0]
        self.targets: AnyArray | None = None
        if targets[0] is not None:
            self.targets = np.concatenate(targets)
        self.names: PackedNames | None = PackedNames.joined([source.names for source in sources])
        if len(each) > 1:
            self.path += f" and {len(each) - 1:,} more"
            count = int(self._documents[-1])
            prints = [info.fingerprint for info in infos]
            fingerprint = fingerprint_of_files([source.part for source in sources], count, prints)
            self.info = replace(
                self.info, count=count, fingerprint=fingerprint, checksums={}, part=None
            )

    @property
    def short(self) -> list[AnyArray]:
        """Where each document begins and the last one ends ([documents + 1] int64)."""
        return [self._edges.array]

    def parts(self, begins: IntArray, ends: IntArray) -> list[AnyArray]:
        """Tokens ``begins[i]`` to ``ends[i] - 1``.

        Raises:
            AccessError, FileChangedError, RemoteError, DataNotFoundError: see `Files.read`.
        """
        edges = np.cumsum(ends - begins)
        return np.split(self._joined(begins, ends), edges)[:-1]

    def rows(self, length: int, numbers: IntArray) -> AnyArray:
        """Blocks of so many tokens, by number ([blocks, length]).

        Raises:
            Exception: as `parts`.
        """
        return self._joined(numbers * length, (numbers + 1) * length).reshape(-1, length)

    def _joined(self, begins: IntArray, ends: IntArray) -> AnyArray:
        """Tokens, one range behind the other. They are read, and not mapped: a file may be cut
        short meanwhile.
        """
        ranges = self.byte_ranges(begins, ends)
        if isinstance(self.files, LocalFiles):
            for number in set(ranges.file.tolist()):
                # an open file does not show that another one has taken its name
                if not self.files.is_same(self._paths[number]):
                    raise changed(self._paths[number])
        if len(self._paths) == 1:
            return np.frombuffer(self.files.read_joined(ranges), self.dtype)
        # copies: what was fetched with them need not be held
        found = [np.empty(0, self.dtype)]
        for data, number in zip(self.files.read_each(ranges), ranges.file.tolist(), strict=True):
            found.append(np.frombuffer(data, self._dtypes[number]))
        return np.concatenate(found, dtype=self.dtype)

    def byte_ranges(self, begins: IntArray, ends: IntArray) -> ByteRanges:
        """Where tokens ``begins[i]`` to ``ends[i] - 1`` lie in files; they may overlap."""
        file = np.zeros(len(begins), np.int64)
        if len(self._paths) > 1:  # ranges are cut where files end
            first = np.searchsorted(self._starts, begins, side="right") - 1
            counts = np.searchsorted(self._starts, ends, side="left") - first
            counts = np.where(ends > begins, counts, 0)
            of = np.repeat(np.arange(len(begins)), counts)
            file = np.arange(len(of)) + (first - np.cumsum(counts) + counts)[of]
            begins = np.maximum(begins[of], self._starts[file])
            ends = np.minimum(ends[of], self._starts[file + 1])
        sizes = self._sizes[file]
        heads = self._begins[file] - self._starts[file] * sizes
        return ByteRanges(self._paths, file, heads + begins * sizes, heads + ends * sizes)

    def location(self, document: int) -> str:
        """Where a document lies, with the name that it had, if it had one of its own."""
        number = int(np.searchsorted(self._documents, document, side="right")) - 1
        name = ""
        if self.names is not None:
            name = f" ({in_one_line(self.names[document])})"
        inside = document - int(self._documents[number])
        return f"{self._shown[number]}, document {inside:,}{name}"


def _opened_pack(
    path: str, opened: OpenTrees[Any]
) -> tuple[HDF5Source, PackedInfo, AnyArray | None, IntArray]:
    """A packed file of tokens, its metadata, its targets, and the first byte of each document in
    it, with the end of the last ([documents + 1]).
    """
    with opened.tree(path) as tree:
        info = tree.info()
    if info is None or info.kind != KIND:
        raise FormatError(
            f"{redact(path)} holds no texts that headrace packed: open it with "
            "HDF5Dataset(path, dataset_name)"
        )
    source = HDF5Source(path, opened=opened)
    edges = source.edges()
    if not source.shape[0]:  # without tokens there are no bytes
        edges = np.zeros(len(source) + 1, np.int64)
    is_flat = len(source.shape) == 1 and source.dtype.kind in "iu" and source.dtype.isnative
    if not is_flat or edges is None:
        raise FormatError(
            f"{source.path}: {DATA!r} is not the flat array of integers that headrace writes: "
            "pack it again"
        )
    targets = source.column(TARGETS) if source.has_column(TARGETS) else None
    return source, info, targets, edges


def _packed_with(info: PackedInfo, targets: AnyArray | None) -> dict[str, Any]:
    """What files of one dataset have in common, by name."""
    way = {name: info.text.get(name) for name in ("tokenizer", "class", "end_token", "unit")}
    of_targets = None
    if targets is not None:
        of_targets = (targets.dtype, targets.shape[1:])
    return {**way, "classes": info.classes, "targets": of_targets}


# -- samples


class TokensSource(Locatable):
    """Parts of documents, as arrays of ids. The common part of the sources below.

    Args:
        tokens: of all documents. The short arrays of `FileArrays` are where each document begins
            and the last one ends ([documents + 1] int64), and the numbers of those left out.
        fingerprint: of the texts and of what they were made with.
        where: says where a document lies, by its number.

    Attributes:
        count: of all tokens.
        dtype: of the ids.
    """

    def __init__(
        self, tokens: FileArrays | PackedTokens, fingerprint: str, where: Callable[[int], str]
    ) -> None:
        self.tokens: FileArrays | PackedTokens = tokens
        self._fingerprint = fingerprint
        self.where: Callable[[int], str] = where
        self.count: int = tokens.count
        self.dtype: np.dtype[Any] = tokens.dtype
        self.files: Files = LocalFiles()
        if isinstance(tokens, PackedTokens):
            self.files = tokens.files

    @abstractmethod
    def _reach(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """Where the tokens of each sample begin and end. Later samples begin at later tokens, or
        at the same.
        """

    def document_of(self, indices: IntArray) -> IntArray:
        """The number of the document that each sample begins in."""
        return np.searchsorted(self.tokens.short[0], self._reach(indices)[0], side="right") - 1

    def lengths(self) -> IntArray:
        """Tokens of each sample ([n] int64)."""
        begins, ends = self._reach(np.arange(len(self)))
        return ends - begins

    def read(self, indices: Sequence[int]) -> list[npt.NDArray[Any]]:
        return self.tokens.parts(*self._reach(np.asarray(indices, np.int64)))

    def blocks_of(self, nbytes: int) -> IntArray:
        """Samples that begin within the same `nbytes` of the tokens, as they are stored."""
        # the first token of each block
        places = np.arange(0, self.count, nbytes // self.dtype.itemsize)
        firsts = first_from(places, len(self), lambda numbers: self._reach(numbers)[0])
        return np.diff(distinct(np.concatenate([[0], firsts, [len(self)]])))

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        if isinstance(self.tokens, PackedTokens):
            return self.tokens.byte_ranges(*self._reach(distinct(indices)))
        return ByteRanges.of([])

    @property
    def stored_nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def describe(self) -> Description:
        tokens = self.tokens
        where = "in memory, which workers share"
        if tokens.path:
            where = f"by ranges from {redact(tokens.path)}"
        way = f"{self.count:,} of {len(tokens.short[0]) - 1:,} documents, as {self.dtype}, {where}"
        nbytes = self.count * self.dtype.itemsize
        mean = nbytes // max(1, len(self))
        column = Column("tokens", way, str(self.dtype), nbytes=mean, read=mean)
        return Description([column], stored=nbytes)

    def fingerprint(self) -> str:
        return self._fingerprint

    def location(self, index: int) -> str:
        return self.where(int(self.document_of(np.array([index]))[0]))


class DocumentsSource(TokensSource):
    """Documents, of each its first `max_length` tokens, with the fingerprint of the texts; or, with
    a stride, windows over all of it.

    Args:
        max_length: tokens of a sample, at most; None: all.
        stride: tokens from the beginning of one window to that of the next; a document's last
            window is as long as what is left.
    """

    def __init__(
        self,
        tokens: FileArrays | PackedTokens,
        fingerprint: str,
        where: Callable[[int], str],
        max_length: int | None,
        stride: int | None = None,
    ) -> None:
        super().__init__(tokens, fingerprint, where)
        self._max_length = max_length
        self._stride = stride or 1
        sizes = np.diff(tokens.short[0])
        size = self.dtype.itemsize
        self._nbytes = self.count * size
        if stride is None and max_length is not None:
            self._nbytes = int(np.minimum(sizes * size, max_length * size + GAP).sum())
        self._first: SharedArray | None = None  # the number of each document's first window
        if stride is not None and max_length is not None:
            counts = 1 + np.maximum(0, -(-(sizes - max_length) // stride))
            for left_out in tokens.short[1:]:
                counts[left_out] = 0
            self._first = SharedArray(np.concatenate([[0], np.cumsum(counts)]))
            self._fingerprint = f"{fingerprint}:{max_length}:{stride}:{len(self)}"

    def __len__(self) -> int:
        if self._first is None:
            return len(self.tokens.short[0]) - 1
        return int(self._first.array[-1])

    def _reach(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        edges = self.tokens.short[0]
        documents = self.document_of(indices)
        begins = edges[documents]
        ends = edges[documents + 1]
        if self._first is not None:
            begins = begins + (indices - self._first.array[documents]) * self._stride
        if self._max_length is not None:
            ends = np.minimum(ends, begins + self._max_length)
        return begins, ends

    @property
    def stored_nbytes(self) -> int:
        """Of documents that are cut also what is fetched between them."""
        return self._nbytes

    def document_of(self, indices: IntArray) -> IntArray:
        """The number of each sample's document: an empty one begins where the next does."""
        if self._first is None:
            return indices
        return np.searchsorted(self._first.array, indices, side="right") - 1


class BlocksSource(TokensSource):
    """Blocks of `length` tokens, over all documents as if they were one; what is left at the end is
    no block.

    Args:
        length: tokens of a block.
    """

    def __init__(
        self,
        tokens: FileArrays | PackedTokens,
        fingerprint: str,
        where: Callable[[int], str],
        length: int,
    ) -> None:
        self.length = length
        super().__init__(tokens, fingerprint, where)
        self._fingerprint = f"{fingerprint}:blocks of {length}:{len(self)}"
        if not len(self) and self.count:
            raise ConfigError(
                f"max_length={length} is more than the {self.count:,} tokens in all, so "
                "packing=True has no block: use a smaller max_length"
            )

    def __len__(self) -> int:
        return self.count // self.length

    def _reach(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        begins = indices * self.length
        return begins, begins + self.length

    def read(self, indices: Sequence[int]) -> list[Any]:
        """For each block a dict of "input_ids" and "document_ids"."""
        ids = np.empty((len(indices), self.length), self.dtype)
        documents = np.empty(ids.shape, np.int32)
        self.read_into(indices, ids, documents)
        return [
            {"input_ids": one, "document_ids": numbers}
            for one, numbers in zip(ids, documents, strict=True)
        ]

    def read_into(self, indices: Sequence[int], ids: AnyArray, documents: AnyArray) -> None:
        """Writes blocks into rows [blocks, length].

        Args:
            indices: of the blocks.
            ids: for the tokens, perhaps of a wider dtype.
            documents: for the number of each token's document; numbered from 0 in each block.
        """
        numbers = np.asarray(indices, np.int64)
        # narrow, so they stay in the processor's cache
        np.copyto(ids, self.tokens.rows(self.length, numbers))
        edges = self.tokens.short[0]
        begins, ends = self._reach(numbers)
        firsts = np.searchsorted(edges, begins, side="right")
        # of the edges inside of each block
        counts = np.searchsorted(edges, ends, side="left") - firsts
        blocks = np.repeat(np.arange(len(begins)), counts)
        inside = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts - firsts, counts)
        documents[...] = 0
        # an empty document begins where the next one does, and is none
        documents[blocks, edges[inside] - begins[blocks]] = 1
        np.cumsum(documents, axis=1, out=documents)
