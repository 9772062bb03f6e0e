"""Reads many spans of 1-D arrays, such as `indices` and `data` of a sparse matrix: those of an
array one behind the other.

The spans of a batch are a hundred parts of some kB, out of as many cached chunks. They are joined
as memoryviews: a copy of each part by NumPy takes three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.dtypes import AnyArray, IntArray
from headrace.formats.arrays.chunks import Chunks
from headrace.formats.arrays.reader import GROUP, ArrayReader, Block, Cuts
from headrace.formats.source import Map
from headrace.memory.lru import held_bytes


class AlignedChunks(Chunks):
    """The chunks of several 1-D arrays that are cut alike. Those of one number are decoded, cached
    and dropped together.
    """

    def __init__(self, arrays: Sequence[Chunks]) -> None:
        super().__init__(arrays[0].grid, arrays[0].dtype, arrays[0].how)
        self.nbytes: int = sum(array.nbytes for array in arrays)
        self.decodes: bool = arrays[0].decodes
        self.width: int = len(arrays)
        self._arrays = arrays

    def read(self, numbers: Sequence[int]) -> list[Any]:
        return list(zip(*[array.read(numbers) for array in self._arrays], strict=True))

    def decode(self, number: int, data: Any) -> Any:
        chunks: list[AnyArray] = []
        for array, stored in zip(self._arrays, data, strict=True):
            chunk = array.decode(number, stored)
            if chunk is None:
                chunk = np.full(array.grid.chunks, array.fill, array.dtype)
            elif held_bytes(chunk) > chunk.nbytes:  # a view would keep all that was read with it
                chunk = chunk.copy()
            chunks.append(chunk)
        views = [chunk.data for chunk in chunks]
        return Block(views, len(views[0]), sum(chunk.nbytes for chunk in chunks))

    def check_cached(self, number: int) -> None:
        for array in self._arrays:
            array.check_cached(number)


class JoinedReader(ArrayReader):
    """Reads the same spans of several 1-D arrays.

    Args:
        readers: of arrays whose chunks have the same rows; they share a cache.
    """

    def __init__(self, readers: Sequence[ArrayReader]) -> None:
        chunks = AlignedChunks([reader.chunks for reader in readers])
        super().__init__(chunks, readers[0].cache, "\0".join(reader.key for reader in readers))
        self._readers = readers
        for reader in readers:  # which asks what is cached
            reader.key = self.key

    def read(self, firsts: IntArray, ends: IntArray, run: Map) -> list[AnyArray]:
        """Of each array the elements ``firsts[i]`` to ``ends[i] - 1`` of all spans, one span behind
        the other, perhaps read-only.

        Spans that follow one another are read as one, and each chunk is decoded once.

        Args:
            firsts, ends: [spans].
            run: calls a function in threads.

        Raises:
            FormatError, OSError: a chunk is damaged; a file can't be read.
        """
        is_full = ends > firsts
        firsts = firsts[is_full]
        ends = ends[is_full]
        if not len(firsts):
            return [np.empty(0, reader.dtype) for reader in self._readers]
        is_new = np.ones(len(firsts), bool)
        np.not_equal(firsts[1:], ends[:-1], out=is_new[1:])
        if not is_new.all():
            ends = ends[np.append(np.flatnonzero(is_new)[1:], len(ends)) - 1]
            firsts = firsts[is_new]
        cuts = Cuts.of_spans(firsts, ends, self.height)
        if self._readers[0].raw is not None:
            return [reader.raw_joined(cuts) for reader in self._readers]
        starts = cuts.starts.tolist()
        stops = cuts.stops.tolist()
        pieces: list[Sequence[Any]] = [()] * len(starts)
        # views of many chunks would hold all of them
        is_copied = len(starts) * self.chunks.nbytes > GROUP

        def take(numbers: IntArray, chunk: Any) -> None:
            for number in numbers.tolist():
                parts = [view[starts[number] : stops[number]] for view in chunk.content]
                pieces[number] = list(map(bytes, parts)) if is_copied else parts

        self._visit_parts(self.chunks, cuts.chunks, cuts.stops - cuts.starts, take, run)
        each = zip(self._readers, zip(*pieces, strict=True), strict=True)
        return [np.frombuffer(b"".join(parts), reader.dtype) for reader, parts in each]


def joined_readers(readers: Sequence[ArrayReader]) -> list[JoinedReader]:
    """What reads the same spans of arrays: together, where their chunks have the same rows."""
    kinds = {(reader.height, reader.raw is None, reader.chunks.decodes) for reader in readers}
    if len(kinds) == 1:
        return [JoinedReader(readers)]
    return [JoinedReader([reader]) for reader in readers]
