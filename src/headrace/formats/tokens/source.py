"""Documents, windows and blocks of one long array of tokens, read at random.

A document is a stretch of it, a window a part of a document, a block the next so many tokens
whatever documents they are of. All are found by arithmetic, and read where they lie: in memory, or
by ranges of a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.formats.describe import Column, Description
from headrace.formats.source import Locatable
from headrace.io.array_file import FileArrays
from headrace.io.files import Files
from headrace.io.local.files import LocalFiles
from headrace.io.paths import redact
from headrace.io.ranges import GAP, ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.sorting import distinct


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

    @abstractmethod
    def _first_from(self, places: IntArray) -> IntArray:
        """The number of the first sample that begins at a token or behind it, for each of some
        tokens; where none does, `len`.
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
        return np.diff(
            distinct(np.concatenate([[0], self._first_from(places), [len(self)]]))
        ).astype(np.int64)

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
        found = Description(
            [Column("tokens", way, str(self.dtype), nbytes=mean, read=mean)], stored=nbytes
        )
        if self.is_remote:
            found.facts["files"] = self.files.explain()
        return found

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

    def _first_from(self, places: IntArray) -> IntArray:
        edges = self.tokens.short[0]
        # the first of each that begins there
        documents = np.searchsorted(edges[:-1], places, side="left")
        if self._first is None:
            return documents
        first = self._first.array
        before = np.maximum(documents - 1, 0)
        # a window of the one before it
        inside = first[before] + -(-np.maximum(0, places - edges[before]) // self._stride)
        return np.where(documents > 0, np.minimum(first[documents], inside), 0)

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
                f"max_length={length}: with packing=True a sample has so many tokens, and there "
                f"are {self.count:,} in all"
            )

    def __len__(self) -> int:
        return self.count // self.length

    def _reach(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        begins = indices * self.length
        return begins, begins + self.length

    def _first_from(self, places: IntArray) -> IntArray:
        return np.minimum(-(-places // self.length), len(self))

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
