"""The blocks of one epoch of a block shuffle, one after the other, in an order that is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.dtypes import IntArray
from headrace.order.permutation import (
    KEY_COUNT,
    derive_keys,
    mix,
    permute,
    permute_within,
    unpermute,
)
from headrace.sorting import distinct

_HELD = 1 << 22
"""Most blocks of one size whose order is held once it has been asked for often: 16 MB."""


class BlockSequence:
    """The blocks of one epoch, permuted and cut by the lanes, as one sequence of samples that are
    permuted inside each segment.

    A segment is a block, or one of the parts that it is cut into. Blocks of size zero are skipped.
    Memory: 12 bytes a block where sizes differ, and otherwise nothing at first.

    Args:
        edges: int64 array of shape [blocks + 1]: block b holds the samples ``edges[b]`` to
            ``edges[b + 1] - 1``.
        seed: seed of the order.
        epoch: epoch number.
        cuts: int64 array: places of the sequence that end a segment.
        size: of all blocks but the last, which may be smaller; 0: they differ.
        is_aligned: with a `size`, a last block that is smaller stands at the end of the sequence
            too, so that all others begin at multiples of the size.
    """

    def __init__(
        self,
        edges: IntArray,
        seed: int,
        epoch: int,
        cuts: IntArray | Sequence[int] = (),
        size: int = 0,
        is_aligned: bool = False,
    ) -> None:
        block_keys = derive_keys("blocks", seed, epoch, count=KEY_COUNT)
        self._keys = derive_keys("samples", seed, epoch, count=1 + KEY_COUNT).astype(np.uint32)
        self._stored, self._n = edges, int(edges[-1])
        even = _AlignedSlots if is_aligned else _EvenSlots
        self._slots: _Slots = (
            even(edges, size, block_keys) if size else _HeldSlots(edges, block_keys)
        )
        cuts = distinct(np.asarray(cuts, np.int64))
        cuts = cuts[(cuts > 0) & (cuts < self._n)]
        if len(cuts):
            slots = self._slots.slot_of(cuts)
            # others lie where a block ends in any case
            cuts = cuts[self._slots.start_of(slots) < cuts]
        self._cuts = cuts

    def edges(self) -> IntArray:
        """Gives the places that the blocks begin at, in the order of the sequence, and the last
        one's end: int64 array [blocks + 1].
        """
        return np.append(self._slots.start_of(np.arange(self._slots.count)), self._n)

    def segments(self) -> IntArray:
        """Gives where segments begin in stored order, and the end: int64 array [segments + 1]."""
        slots = self._slots.slot_of(self._cuts)
        sources = (
            self._stored[self._slots.block_of(slots)] + self._cuts - self._slots.start_of(slots)
        )
        sources.sort()
        return distinct(np.insert(self._stored, np.searchsorted(self._stored, sources), sources))

    def block_at(self, places: IntArray) -> IntArray:
        """Gives the number of the block that each place falls into."""
        return self._slots.block_of(self._slots.slot_of(places))

    def index_at(self, places: IntArray) -> IntArray:
        """Gives the index of the sample at each place."""
        slots = self._slots.slot_of(places)
        block_starts, ends = self._slots.start_of(slots), self._slots.start_of(slots + 1)
        starts, cut = block_starts, np.searchsorted(self._cuts, places, side="right")
        if len(self._cuts):
            starts = np.maximum(starts, np.append(0, self._cuts)[cut])
            ends = np.minimum(ends, np.append(self._cuts, self._n)[cut])
        segments = slots + cut
        # keys of a segment's own: those of the epoch, mixed with its number
        keys = mix(
            mix(segments.astype(np.uint32), self._keys[0]), self._keys[1:, np.newaxis]
        ).astype(np.uint64)
        first = self._stored[self._slots.block_of(slots)] + starts - block_starts
        indices: IntArray = first + permute_within(places - starts, ends - starts, keys)
        return indices


class _Slots(Protocol):
    """Blocks that have samples, in the order of the sequence: slot 0, 1, ..."""

    count: int

    def slot_of(self, places: IntArray) -> IntArray:
        """The slot that each place falls into."""

    def start_of(self, slots: IntArray) -> IntArray:
        """The place that each slot begins at; for slot `count` the end of the sequence."""

    def block_of(self, slots: IntArray) -> IntArray:
        """The block in each slot, by its number in stored order."""


class _HeldSlots:
    """Blocks of any sizes, as two arrays."""

    def __init__(self, edges: IntArray, keys: NDArray[np.uint64]) -> None:
        count = len(edges) - 1
        blocks = permute(np.arange(count), count, keys)
        sizes = np.diff(edges)[blocks]
        if not sizes.all():
            blocks, sizes = blocks[sizes > 0], sizes[sizes > 0]
        self.count = len(blocks)
        self._blocks = blocks.astype(np.int32 if count < 2**31 else np.int64)
        self._edges = np.zeros(self.count + 1, np.int64)
        np.cumsum(sizes, out=self._edges[1:])

    def slot_of(self, places: IntArray) -> IntArray:
        return np.searchsorted(self._edges, places, side="right") - 1

    def start_of(self, slots: IntArray) -> IntArray:
        starts: IntArray = self._edges[slots]
        return starts

    def block_of(self, slots: IntArray) -> IntArray:
        return self._blocks[slots].astype(np.int64)


class _EvenSlots:
    """Blocks of one size, of which only the last stored may be smaller: its slot says where all
    others begin.

    Which block lies in a slot is computed at first, so that an epoch begins at once, and looked up
    later on.
    """

    def __init__(self, edges: IntArray, size: int, keys: NDArray[np.uint64]) -> None:
        self.count, self._size, self._keys = len(edges) - 1, size, keys
        self._missing = self.count * size - int(edges[-1])  # from the last block
        self._smaller = self._slot(self.count - 1)
        self._after = (self._smaller + 1) * size - self._missing  # the place where it ends
        self._asked = 0
        self._blocks: NDArray[np.integer] | None = None

    def slot_of(self, places: IntArray) -> IntArray:
        slots: IntArray = (
            np.where(places < self._after, places, places + self._missing) // self._size
        )
        return slots

    def start_of(self, slots: IntArray) -> IntArray:
        starts: IntArray = slots * self._size - self._missing * (slots > self._smaller)
        return starts

    def block_of(self, slots: IntArray) -> IntArray:
        self._asked += 1
        if self._blocks is None and self._asked > self.count >> 12 and self.count <= _HELD:
            self._blocks = self._permuted(np.arange(self.count)).astype(np.int32)
        return (
            self._permuted(slots) if self._blocks is None else self._blocks[slots].astype(np.int64)
        )

    def _slot(self, block: int) -> int:
        return int(unpermute(np.array([block]), self.count, self._keys)[0])

    def _permuted(self, slots: IntArray) -> IntArray:
        return permute(slots, self.count, self._keys)


class _AlignedSlots(_EvenSlots):
    """The same, where a smaller block is the last of the sequence in any case."""

    def __init__(self, edges: IntArray, size: int, keys: NDArray[np.uint64]) -> None:
        self._whole = int(edges[-1]) // size  # blocks that change places
        super().__init__(edges, size, keys)

    def _slot(self, block: int) -> int:
        return block

    def _permuted(self, slots: IntArray) -> IntArray:
        blocks: IntArray = np.where(
            slots < self._whole,
            permute(np.minimum(slots, self._whole - 1), self._whole, self._keys),
            slots,
        )
        return blocks
