"""Rows of whole documents, which are packed by best fit decreasing.

NOTE [ from documents to rows ]

1. Documents that begin within the same so many tokens are a window: it follows from `length` and
  the documents alone. Rows are made of the
   documents of one window, so that a row is read near one place, and a window is a block of the
   storage.
2. Inside a window the longest document comes first, and goes to the row with the least room that it
  fits; to a new row, where it fits none.
   Those of one size go together: what k rows with equal room take of them is known at once.
3. Rows are numbered by their first document, and their documents stand in the order of the storage.

So rows are the same in each epoch, on each machine and rank, and which rows a batch has is the
business of `headrace.order` alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.sorting import distinct
from headrace.storage.tokens.source import Tokens, TokensSource

PADDING = -1
"""The number of the document that padding is of."""
_VERSION = 1  # another number whenever documents come to other rows than before
# full rows, and tokens, of a window at least: with fewer, more of a row is padding
_ROWS, _LEAST = 128, 1 << 17


def best_fit(sizes: IntArray, length: int) -> IntArray:
    """Packs items into bins by best fit decreasing (Johnson, 1973). Items of equal size go to bins
    together, without a search for each.

    Args:
        sizes: [n] of the items, in [1, length].
        length: of a bin.

    Returns:
        [n] int64: the number of the bin of each item, from 0 on.
    """
    bins, order = np.empty(len(sizes), np.int64), np.argsort(-sizes, kind="stable")
    edges = np.flatnonzero(np.diff(sizes[order], prepend=-1, append=-1)).tolist()
    # bins by the room that is left in them; a bit for each such room
    with_room, occupied, made = dict[int, IntArray](), 0, 0

    def leave(some: IntArray, room: int) -> int:
        if not room or not len(some):
            return 0
        with_room[room] = np.concatenate([with_room[room], some]) if room in with_room else some
        return 1 << room

    for first, last in itertools.pairwise(edges):
        size, at = int(sizes[order[first]]), first
        while at < last:
            fitting = occupied >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                some = with_room.pop(room)
                occupied ^= 1 << room
            else:
                room, count = length, -(-(last - at) // (length // size))
                some, made = np.arange(made, made + count), made + count
            each = room // size
            filled = min(len(some), (last - at) // each)
            bins[order[at : at + filled * each]] = np.repeat(some[:filled], each)
            at += filled * each
            occupied |= leave(some[:filled], room - each * size)
            rest = min(each - 1, last - at) if filled < len(some) else 0
            if rest:
                bins[order[at : at + rest]] = some[filled]
                at += rest
                occupied |= leave(some[filled : filled + 1], room - rest * size)
            occupied |= leave(some[filled + (rest > 0) :], room)
    return bins


class BestFitSource(TokensSource):
    """Rows of at most `length` tokens, of whole documents. A document that is longer is cut at its
    end; an empty one is in no row.

    Args:
        length: tokens of a row, with its padding.
        padding: what stands behind the documents of a row.
        left_out: numbers of documents that are in no row.
    """

    def __init__(
        self,
        tokens: Tokens,
        fingerprint: str,
        where: str | Callable[[int], str],
        length: int,
        padding: int = 0,
        left_out: IntArray | None = None,
    ) -> None:
        super().__init__(tokens, f"{fingerprint}:best fit {_VERSION} of {length}", where)
        self.length, self.padding = length, padding
        edges = tokens.short[0]
        sizes = np.minimum(np.diff(edges), length)
        sizes[np.empty(0, np.int64) if left_out is None else left_out] = 0
        chosen = np.flatnonzero(sizes)
        if not len(chosen) and self.count:
            raise ConfigError(
                f"max_length={length}: with packing='bfd' no document is left: raise max_length"
            )
        windows = edges[chosen] // max(_ROWS * length, _LEAST)
        cuts = [0, *(np.flatnonzero(np.diff(windows)) + 1).tolist(), len(chosen)]
        documents, counts, rows = list[IntArray](), list[IntArray](), list[int]()
        for first, last in itertools.pairwise(cuts):
            bins = (
                best_fit(sizes[chosen[first:last]], length)
                if last > first
                else np.empty(0, np.int64)
            )
            _, firsts, of = np.unique(bins, return_index=True, return_inverse=True)
            ranks = np.empty(len(firsts), np.int64)
            ranks[np.argsort(firsts)] = np.arange(len(firsts))  # by the first document of each
            numbers = ranks[of]
            documents.append(chosen[first:last][np.argsort(numbers, kind="stable")])
            counts.append(np.bincount(numbers, minlength=len(firsts)))
            rows.append(len(firsts))
        self._documents = SharedArray(np.concatenate(documents))
        self._firsts = SharedArray(
            np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
        )
        self._rows = SharedArray(np.array([count for count in rows if count], np.int64))
        self.filled: int = int(sizes.sum())
        """Tokens of all rows, without padding."""

    def __len__(self) -> int:
        return len(self._firsts.array) - 1

    def documents_of(self, indices: Sequence[int] | IntArray) -> tuple[IntArray, IntArray]:
        """The documents of rows, row by row, and how many each row has ([n])."""
        rows, firsts = np.asarray(indices, np.int64), self._firsts.array
        counts = firsts[rows + 1] - firsts[rows]
        starts = np.cumsum(counts) - counts
        return self._documents.array[
            np.arange(int(counts.sum())) + np.repeat(firsts[rows] - starts, counts)
        ], counts

    def _ranges_of(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        edges = self.tokens.short[0]
        begins = edges[documents]
        return begins, np.minimum(edges[documents + 1], begins + self.length)

    def document_of(self, indices: IntArray) -> IntArray:
        """The number of the first document of each row."""
        documents: IntArray = self._documents.array[self._firsts.array[indices]]
        return documents

    def lengths(self) -> IntArray:
        """Tokens of each row without padding ([n] int64)."""
        begins, ends = self._ranges_of(self._documents.array)
        return _sums(ends - begins, self._firsts.array[:-1])

    def _reach(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        return self._ranges_of(self.document_of(indices))

    def _first_from(self, places: IntArray) -> IntArray:
        first: IntArray = np.searchsorted(self._reach(np.arange(len(self)))[0], places, side="left")
        return first

    @property
    def cut_nbytes(self) -> int:
        return 0  # blocks are the windows that rows are made of

    def blocks(self) -> IntArray:
        return self._rows.array

    def blocks_of(self, nbytes: int) -> IntArray:
        return self.blocks()

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        return self.tokens.byte_ranges(*self._ranges_of(self.documents_of(distinct(indices))[0]))

    def how(self) -> dict[str, str]:
        share = self.filled / max(1, len(self) * self.length)
        rows = (
            f"{len(self):,} of {self.length:,} tokens, of whole documents by best fit decreasing; "
            f"{share:.2%} of them no padding"
        )
        return {**super().how(), "rows": rows}

    def read(self, indices: Sequence[int]) -> list[Any]:
        """For each row a dict of "input_ids", "document_ids" and "position_ids"."""
        dtypes = {"input_ids": np.int64, "document_ids": np.int32, "position_ids": np.int64}
        columns = {
            name: np.empty((len(indices), self.length), dtype) for name, dtype in dtypes.items()
        }
        self.read_columns(indices, columns)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def read_columns(self, indices: Sequence[int], outs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Writes rows into the rows of arrays [rows, length]: "input_ids"; "document_ids", numbered
        from 0 in each row, and `PADDING`; and "position_ids", which begin anew with each document
        and with the padding.
        """
        ids, length = outs["input_ids"], self.length
        documents, counts = self.documents_of(indices)
        begins, ends = self._ranges_of(documents)
        sizes, rows = ends - begins, np.repeat(np.arange(len(counts)), counts)
        firsts = np.cumsum(counts) - counts  # of the documents, that of each row
        before = np.cumsum(sizes) - sizes
        starts = before - before[firsts][rows]  # of each document, in its row
        flat = ids.reshape(-1)
        for part, to in zip(
            self.tokens.parts(begins, ends), (rows * length + starts).tolist(), strict=True
        ):
            flat[to : to + len(part)] = part
        used = _sums(sizes, firsts)
        for row, end in enumerate(used.tolist()):
            ids[row, end:] = self.padding
        # with the padding of each row as one more document
        each = np.insert(sizes, firsts + counts, length - used)
        numbers = np.insert(np.arange(len(sizes)) - firsts[rows], firsts + counts, PADDING)
        outs["document_ids"].reshape(-1)[:] = np.repeat(numbers, each)
        outs["position_ids"].reshape(-1)[:] = np.arange(len(counts) * length) - np.repeat(
            np.cumsum(each) - each, each
        )


def _sums(sizes: IntArray, firsts: IntArray) -> IntArray:
    """Sums of sizes from each of some places to the next."""
    sums: IntArray = np.add.reduceat(sizes, firsts) if len(firsts) else np.empty(0, np.int64)
    return sums
