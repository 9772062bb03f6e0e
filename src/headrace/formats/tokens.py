"""Documents, windows and blocks of one long array of tokens, read at random.

A document is a stretch of it, a window a part of a document, a block the next so many tokens
whatever documents they are of. All are found by arithmetic, and read where they lie: in memory, or
by ranges of a file.

Of files that `headrace.pack` wrote, the flat array of tokens is read by ranges. Where each document
begins is in memory that workers share. What else a remote file holds is read when it is opened, by
h5py, and is its index: a later start finds that in `cache_dir`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import h5py
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import AccessError, ConfigError, FormatError
from headrace.formats.arrays.packed import (
    CRC,
    DATA,
    NAME_OFFSETS,
    NAMES,
    OFFSETS,
    TARGETS,
    PackedInfo,
    are_offsets,
    crc_of,
)
from headrace.formats.hdf5.files import HDF5Files, leads_out, packed_info
from headrace.formats.source import Column, Description, Locatable, PackPart, fingerprint_of_files
from headrace.formats.text.index import first_from
from headrace.io.array_file import FileArrays
from headrace.io.files import Files
from headrace.io.local_files import LocalFiles, changed
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import in_one_line, redact
from headrace.io.ranges import GAP, ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.sorting import distinct

KIND = "text"
STORE = "tokens"
"""What a packed file of tokens says of itself."""
_SHOWN = 80  # characters of what a tokenizer is known by


class Tokens(ABC):
    """All tokens of some documents, and where each begins. Picklable, thread-safe.

    Attributes:
        files: what they are read from, where they are not in memory.
        shown: where they lie, in words; "": in memory.
        made_with: the tokenizer, in words, where that is known.
        count: of all tokens.
        dtype: of the ids.
    """

    made_with = ""
    files: Files
    shown: str
    count: int
    dtype: np.dtype[Any]

    @property
    @abstractmethod
    def short(self) -> list[npt.NDArray[Any]]:
        """Where each document begins and the last one ends ([documents + 1] int64); and the numbers
        of documents that are left out, where there may be such.

        Raises:
            AccessError, FileChangedError: their file is gone, or has been changed.
        """

    @abstractmethod
    def parts(self, begins: IntArray, ends: IntArray) -> list[npt.NDArray[Any]]:
        """Tokens ``begins[i]`` to ``ends[i] - 1``: read-only views of local ones, copies of others.

        Raises:
            AccessError, FileChangedError: as `short`.
            RemoteError, DataNotFoundError: see `Files.read`.
        """

    def blocks(self, numbers: IntArray, length: int) -> npt.NDArray[Any]:
        """Copies of blocks of so many tokens, by number ([blocks, length]).

        Raises:
            Exception: as `parts`.
        """
        parts = self.parts(numbers * length, (numbers + 1) * length)
        return np.concatenate([np.empty(0, self.dtype), *parts]).reshape(-1, length)

    def byte_ranges(self, begins: IntArray, ends: IntArray) -> ByteRanges:
        """Where tokens ``begins[i]`` to ``ends[i] - 1`` lie in files; they may overlap."""
        return ByteRanges.of([])


class ArrayTokens(Tokens):
    """Tokens in one array, in a file of `cache_dir` or in memory.

    Args:
        arrays: the ids, of any integer dtype; and as short arrays `short`.
    """

    def __init__(self, arrays: FileArrays) -> None:
        self._arrays = arrays
        self.files: Files = LocalFiles()
        self.shown: str = redact(arrays.path)
        self.count: int = arrays.count
        self.dtype: np.dtype[Any] = arrays.dtype

    @property
    def long(self) -> npt.NDArray[Any]:
        """[tokens] ids, all of them.

        Raises:
            AccessError, FileChangedError: as `short`.
        """
        return self._arrays.long

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        return self._arrays.short

    def parts(self, begins: IntArray, ends: IntArray) -> list[npt.NDArray[Any]]:
        return self._arrays.parts(begins, ends)

    def blocks(self, numbers: IntArray, length: int) -> npt.NDArray[Any]:
        return self._arrays.rows(length, numbers)


class PackedFile:
    """A packed file of tokens, local or remote.

    Args:
        path: a file that `headrace.pack` made of texts, or its URL.
        hdf5: opens it; None: a local file.

    Attributes:
        info: what the file says of itself.
        dtype, count: of the tokens.
        begin: where they begin in the file.
        offsets: where each document begins among the tokens, and the last one ends.
        targets: one for each document, or None.
        names: of the documents, or None.
        checksums: the CRC of each document of a local file ([n]); None: there are none.

    Raises:
        FormatError: the file holds no texts that were packed, is of a later version, damaged, or
            shorter than it says.
        RemoteError, FileChangedError, DataNotFoundError, AccessError: it is not there, or can't be
            read; see `Files.read`.
    """

    def __init__(self, path: str | os.PathLike[str], hdf5: HDF5Files | None = None) -> None:
        self._hdf5 = hdf5 = hdf5 or HDF5Files()
        self.files = hdf5.files
        self.path = os.fspath(path)
        if not self.files.is_remote:
            self.path = os.path.abspath(os.path.expanduser(self.path))
        self.shown: str = redact(self.path)
        info = packed_info(self.path, hdf5)
        if info is None or info.kind != KIND:
            raise FormatError(
                f"{self.shown} holds no texts that headrace packed: open it with "
                "HDF5Dataset(path, dataset_name)"
            )
        self.info: PackedInfo = info
        self.targets: npt.NDArray[Any] | None = None
        self.names: PackedNames | None = None
        self.checksums: npt.NDArray[np.uint32] | None = None
        with hdf5.reading(self.path) as file:
            self.dtype, self.count, self.begin = self._layout(file, DATA)
            self._layout(file, OFFSETS)
            self.offsets: IntArray = self._column(file, OFFSETS)
            if TARGETS in file:
                self.targets = self._column(file, TARGETS)
            if NAMES in file:
                names = self._column(file, NAMES)
                self.names = PackedNames.from_arrays(names, self._column(file, NAME_OFFSETS))
            crc_shape = self._hdf5.dataset(file, CRC, self.path).shape if CRC in file else None
            if crc_shape is not None and not self.files.is_remote:
                self.checksums = self._column(file, CRC)
        self._check(crc_shape)

    def _layout(self, file: h5py.File, name: str) -> tuple[np.dtype[Any], int, int]:
        """Dtype, length, and first byte in the file of a dataset."""
        dataset = self._hdf5.dataset(file, name, self.path)
        shape: tuple[int, ...] = dataset.shape or ()
        begin = dataset.id.get_offset()
        dtype = dataset.dtype
        is_flat = len(shape) == 1 and dtype.kind in "iu" and dtype.isnative
        is_elsewhere = dataset.external or leads_out(file, name) is not None
        if not is_flat or (shape[0] and begin is None) or is_elsewhere:
            raise FormatError(
                f"{self.shown}: {name!r} is no flat array of integers in one piece, as headrace "
                "writes it: pack it again"
            )
        size = self.files.version(self.path).size
        if (begin or 0) + shape[0] * dtype.itemsize > size:
            raise FormatError(
                f"{self.shown} is cut short: {size:,} bytes are not enough for {name!r}"
            )
        return dtype, shape[0], begin or 0

    def _column(self, file: h5py.File, name: str) -> npt.NDArray[Any]:
        column = np.asarray(self._hdf5.dataset(file, name, self.path))
        if crc_of(column) != self.info.checksums.get(name, crc_of(column)):
            raise FormatError(
                f"{self.shown}: {name!r} has a wrong checksum, the file is damaged: pack it again"
            )
        return column

    def _check(self, crc_shape: tuple[int, ...] | None) -> None:
        """Compares the arrays with each other."""
        count = self.info.count
        wrong = []
        if self.offsets.dtype != np.int64 or not are_offsets(self.offsets, count, self.count):
            wrong.append(OFFSETS)
        if self.names is not None:
            data, offsets = self.names.arrays
            if not are_offsets(offsets, count, len(data)):
                wrong.append(NAME_OFFSETS)
        if self.targets is not None and self.targets.shape[:1] != (count,):
            wrong.append(TARGETS)
        if crc_shape is not None and crc_shape[:1] != (count,):
            wrong.append(CRC)
        if wrong:
            raise FormatError(
                f"{self.shown} is damaged: {', '.join(wrong)} don't fit the {count:,} documents "
                "it should hold: pack it again"
            )

    def location(self, document: int) -> str:
        """Where a document lies, with the name that it had, if it had one of its own."""
        name = ""
        if self.names is not None:
            name = f" ({in_one_line(self.names[document])})"
        return f"{self.shown}, document {document:,}{name}"

    def damaged(self, document: int) -> str:
        """What messages say of a document that is not what was packed."""
        return f"{self.location(document)}: wrong checksum, the file is damaged: pack it again"

    def edges(self) -> IntArray:
        """The first byte of each document in the file, and the end of the last ([n + 1])."""
        return self.begin + self.offsets * self.dtype.itemsize


class PackedTokens(Tokens):
    """Tokens of packed files, local or of one server, each file's behind those of the file before
    it. Windows are parts of documents, and so of one file; blocks go on from file to file.

    Args:
        each: the files, one at least.

    Attributes: those of `Tokens`, and:
        info: what the files say of themselves, as if they were one.
        targets: one for each document, or None.
        names: of the documents, or None.

    Raises:
        FormatError: the files were packed in different ways.
    """

    def __init__(self, each: Sequence[PackedFile]) -> None:
        first = each[0]
        for file in each[1:]:
            _check_alike(first, file)
        self.files = first.files
        self.shown: str = first.shown
        made_with = first.info.text.get("tokenizer")
        made_with = str(made_with or f"a {first.info.text.get('class')} that can't be known again")
        self.made_with: str = made_with
        if len(made_with) > _SHOWN:
            self.made_with = f"{made_with[:_SHOWN]}..."
        self.dtype = np.result_type(*(file.dtype for file in each))
        # of each file: the first token, the first document, the first byte, bytes of a token
        self._starts: IntArray = np.cumsum([0, *(file.count for file in each)])
        self._documents: IntArray = np.cumsum([0, *(file.info.count for file in each)])
        self._begins = np.array([file.begin for file in each])
        self._dtypes = [file.dtype for file in each]
        self._sizes = np.array([dtype.itemsize for dtype in self._dtypes])
        self._paths = [file.path for file in each]
        self._shown = [file.shown for file in each]
        self.count: int = int(self._starts[-1])
        edges = [file.offsets[:-1] + start for file, start in zip(each, self._starts, strict=False)]
        self._edges = SharedArray(np.concatenate([*edges, self._starts[-1:]]))
        self.targets: npt.NDArray[Any] | None = None
        if first.targets is not None:
            self.targets = np.concatenate([cast(Any, file.targets) for file in each])
        self.names: PackedNames | None = PackedNames.joined([file.names for file in each])
        self.info: PackedInfo = first.info
        if len(each) > 1:
            self.shown += f" and {len(each) - 1:,} more"
            infos = [file.info for file in each]
            parts = [None if info.part is None else PackPart(*info.part) for info in infos]
            count = int(self._documents[-1])
            fingerprint = fingerprint_of_files(parts, count, [info.fingerprint for info in infos])
            self.info = replace(
                first.info, count=count, fingerprint=fingerprint, checksums={}, part=None
            )

    @property
    def short(self) -> list[npt.NDArray[Any]]:
        return [self._edges.array]

    def parts(self, begins: IntArray, ends: IntArray) -> list[npt.NDArray[Any]]:
        edges = np.cumsum(ends - begins)
        if len(edges):
            return np.split(self._joined(begins, ends), edges[:-1])
        return []

    def blocks(self, numbers: IntArray, length: int) -> npt.NDArray[Any]:
        return self._joined(numbers * length, (numbers + 1) * length).reshape(-1, length)

    def _joined(self, begins: IntArray, ends: IntArray) -> npt.NDArray[Any]:
        """Tokens, one range behind the other. They are read, and not mapped: a file may be cut
        short meanwhile.
        """
        ranges = self.byte_ranges(begins, ends)
        if not self.files.is_remote:
            for number in set(ranges.file.tolist()):
                self._check_same(self._paths[number])
        if len(self._paths) == 1:
            return np.frombuffer(self.files.read_joined(ranges), self.dtype)
        # copies: what was fetched with them need not be held
        found = [np.empty(0, self.dtype)]
        for data, number in zip(self.files.read_each(ranges), ranges.file.tolist(), strict=True):
            found.append(np.frombuffer(data, self._dtypes[number]))
        return np.concatenate(found, dtype=self.dtype)

    def _check_same(self, path: str) -> None:
        """An open file does not show that another one has taken its name."""
        try:
            is_same = cast(LocalFiles, self.files).is_same(path)
        except OSError as error:
            raise AccessError(f"{redact(path)} can't be read any more: {error.strerror}") from error
        if not is_same:
            raise changed(path)

    def byte_ranges(self, begins: IntArray, ends: IntArray) -> ByteRanges:
        first = np.zeros(len(begins), np.int64)
        if len(self._paths) > 1:  # ranges are cut where files end; empty ones have none
            first = np.searchsorted(self._starts, begins, side="right") - 1
            last = np.searchsorted(self._starts, ends, side="left") - 1
            counts = np.where(ends > begins, last - first + 1, 0)
            of = np.repeat(np.arange(len(begins)), counts)
            first = first[of] + np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
            begins = np.maximum(begins[of], self._starts[first])
            ends = np.minimum(ends[of], self._starts[first + 1])
            filled = ends > begins
            first = first[filled]
            begins = begins[filled]
            ends = ends[filled]
        heads = self._begins[first] - self._starts[first] * self._sizes[first]
        sizes = self._sizes[first]
        return ByteRanges(self._paths, first, heads + begins * sizes, heads + ends * sizes)

    def location(self, document: int) -> str:
        """Where a document lies, with the name that it had, if it had one of its own."""
        number = int(np.searchsorted(self._documents, document, side="right")) - 1
        name = ""
        if self.names is not None:
            name = f" ({in_one_line(self.names[document])})"
        inside = document - int(self._documents[number])
        return f"{self._shown[number]}, document {inside:,}{name}"


def _check_alike(first: PackedFile, other: PackedFile) -> None:
    """Raises a FormatError where two files can't be one dataset."""

    def said(file: PackedFile) -> dict[str, Any]:
        targets = None
        if file.targets is not None:
            targets = f"{file.targets.dtype} {list(file.targets.shape[1:])}"
        names = ("tokenizer", "class", "end_token", "unit")
        of_text = {name: file.info.text.get(name) for name in names}
        return {**of_text, "classes": file.info.classes, "targets": targets}

    ours = said(first)
    different = [name for name, value in said(other).items() if value != ours[name]]
    if different:
        raise FormatError(
            f"{redact(other.path)} and {redact(first.path)} can't be one dataset: they were "
            f"packed with other {', '.join(different)}: pack them from one dataset"
        )


# -- samples


class TokensSource(Locatable):
    """Parts of documents, as arrays of ids. The common part of the sources below.

    Args:
        tokens: of all documents.
        fingerprint: of the texts and of what they were made with.
        where: says where a document lies, by its number.

    Attributes:
        count: of all tokens.
        dtype: of the ids.
    """

    def __init__(self, tokens: Tokens, fingerprint: str, where: Callable[[int], str]) -> None:
        self.tokens: Tokens = tokens
        self._fingerprint = fingerprint
        self.where: Callable[[int], str] = where
        self.count: int = tokens.count
        self.dtype: np.dtype[Any] = tokens.dtype
        self.files: Files = tokens.files

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

    @property
    def cut_nbytes(self) -> int:
        return self.stored_nbytes

    def blocks_of(self, nbytes: int) -> IntArray:
        """Samples that begin within the same `nbytes` of the tokens, as they are stored."""
        # the first token of each block
        places = np.arange(0, self.count, nbytes // self.dtype.itemsize)
        firsts = first_from(places, len(self), lambda numbers: self._reach(numbers)[0])
        return np.diff(distinct(np.concatenate([[0], firsts, [len(self)]])))

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        return self.tokens.byte_ranges(*self._reach(distinct(indices)))

    @property
    def stored_nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def describe(self) -> Description:
        tokens = self.tokens
        where = "in memory, which workers share"
        if tokens.shown:
            where = f"by ranges from {tokens.shown}"
        made = ""
        if tokens.made_with:
            made = f", made with {tokens.made_with}"
        way = (
            f"{self.count:,} of {len(tokens.short[0]) - 1:,} documents, as {self.dtype}, "
            f"{where}{made}"
        )
        nbytes = self.count * self.dtype.itemsize
        mean = nbytes // max(1, len(self))
        facts = {"files": self.files.explain()} if self.is_remote else {}
        column = Column("tokens", way, str(self.dtype), nbytes=mean, read=mean)
        return Description([column], facts, stored=nbytes)

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
        left_out: numbers of documents that have no windows.
    """

    def __init__(
        self,
        tokens: Tokens,
        fingerprint: str,
        where: Callable[[int], str],
        max_length: int | None,
        stride: int | None = None,
        left_out: IntArray | None = None,
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
            if left_out is not None:
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
        self, tokens: Tokens, fingerprint: str, where: Callable[[int], str], length: int
    ) -> None:
        self.length = length
        super().__init__(tokens, fingerprint, where)
        self._fingerprint = f"{fingerprint}:blocks of {length}:{len(self)}"
        if not len(self) and self.count:
            raise ConfigError(
                f"max_length={length}: packing=True makes blocks of so many tokens, and there are "
                f"{self.count:,} in all: use a smaller max_length"
            )

    def __len__(self) -> int:
        return self.count // self.length

    def _reach(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        begins = indices * self.length
        return begins, begins + self.length

    def read(self, indices: Sequence[int]) -> list[Any]:
        """For each block a dict of "input_ids" and "document_ids"."""
        documents = np.empty((len(indices), self.length), np.int32)
        self.documents_into(indices, documents)
        ids = super().read(indices)
        return [
            {"input_ids": one, "document_ids": numbers}
            for one, numbers in zip(ids, documents, strict=True)
        ]

    def read_into(self, indices: Sequence[int], rows: npt.NDArray[Any]) -> None:
        """Writes blocks into rows [blocks, length], which may be of a wider dtype."""
        # narrow, so they stay in the processor's cache
        np.copyto(rows, self.tokens.blocks(np.asarray(indices, np.int64), self.length))

    def documents_into(self, indices: Sequence[int], rows: npt.NDArray[Any]) -> None:
        """Writes the number of each token's document into rows [blocks, length]; numbered from 0
        in each block.
        """
        edges = self.tokens.short[0]
        length = self.length
        begins = np.asarray(indices, np.int64) * length
        firsts = np.searchsorted(edges, begins, side="right")
        # of the edges inside of each block
        counts = np.searchsorted(edges, begins + length, side="left") - firsts
        blocks = np.repeat(np.arange(len(begins)), counts)
        inside = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts - firsts, counts)
        rows[...] = 0
        # an empty document begins where the next one does, and is none
        rows[blocks, edges[inside] - begins[blocks]] = 1
        np.cumsum(rows, axis=1, out=rows)
