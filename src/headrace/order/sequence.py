"""The blocks of one epoch of a block shuffle, one after the other, in an order that is drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.dtypes import IntArray
from headrace.order.permutation import KEY_COUNT, Keys, derive_keys, mix, permute, permute_within
from headrace.sorting import distinct

_MOST_LISTED = 1 << 22
"""Most blocks of one size whose order is listed once it has been asked for often: 16 MB."""


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
        cuts: IntArray,
        size: int = 0,
        is_aligned: bool = False,
    ) -> None:
        block_keys = derive_keys("blocks", seed, epoch, count=KEY_COUNT)
        self._keys = derive_keys("samples", seed, epoch, count=1 + KEY_COUNT)
        self._stored = edges
        self._slots: _Slots | _EvenSlots
        if size:
            self._slots = _EvenSlots(edges, size, block_keys, is_aligned)
        else:
            self._slots = _Slots(edges, block_keys)
        cuts = distinct(cuts)
        cuts = cuts[(cuts > 0) & (cuts < edges[-1])]
        # others lie where a block ends in any case
        cuts = cuts[self._slots.start_of(self._slots.slot_of(cuts)) < cuts]
        self._ends = np.append(cuts, edges[-1])
        self._starts = np.append(0, cuts)

    def segments(self) -> IntArray:
        """Gives where segments begin in stored order, and the end: int64 array [segments + 1]."""
        cuts = self._starts[1:]
        slots = self._slots.slot_of(cuts)
        firsts = self._stored[self._slots.block_of(slots)]
        return distinct(np.append(self._stored, firsts + cuts - self._slots.start_of(slots)))

    def index_at(self, places: IntArray) -> IntArray:
        """Gives the index of the sample at each place."""
        slots = self._slots.slot_of(places)
        block_starts = self._slots.start_of(slots)
        cut = np.searchsorted(self._ends, places, side="right")
        starts = np.maximum(block_starts, self._starts[cut])
        ends = np.minimum(self._slots.start_of(slots + 1), self._ends[cut])
        # keys of a segment's own: those of the epoch, mixed with its number
        own = mix((slots + cut).astype(np.uint32), self._keys[0])
        keys = mix(own, self._keys[1:, np.newaxis])
        first = self._stored[self._slots.block_of(slots)] + starts - block_starts
        indices: IntArray = first + permute_within(places - starts, ends - starts, keys)
        return indices


class _Slots:
    """Blocks that have samples, of any sizes, in the order of the sequence: slot 0, 1, ..."""

    def __init__(self, edges: IntArray, keys: Keys) -> None:
        count = len(edges) - 1
        blocks = permute(np.arange(count), count, keys)
        sizes = np.diff(edges)[blocks]
        if not sizes.all():
            blocks = blocks[sizes > 0]
            sizes = sizes[sizes > 0]
        self._blocks = blocks.astype(np.int32 if count < 2**31 else np.int64)
        self._edges = np.append(0, np.cumsum(sizes))

    def slot_of(self, places: IntArray) -> IntArray:
        """The slot that each place falls into."""
        return np.searchsorted(self._edges, places, side="right") - 1

    def start_of(self, slots: IntArray) -> IntArray:
        """The place that each slot begins at; for the slot after the last the sequence's end."""
        starts: IntArray = self._edges[slots]
        return starts

    def block_of(self, slots: IntArray) -> IntArray:
        """The block in each slot, by its number in stored order."""
        return self._blocks[slots].astype(np.int64)


class _EvenSlots:
    """`_Slots` of blocks of one size, of which only the last stored may be smaller: its slot says
    where all others begin.

    Which block lies in a slot is computed at first, so that an epoch begins at once, and looked up
    later on.
    """

    def __init__(self, edges: IntArray, size: int, keys: Keys, is_aligned: bool) -> None:
        count = len(edges) - 1
        self._size = size
        self._keys = keys
        self._count = count
        self._missing = count * size - int(edges[-1])  # from the last block
        self._moved = count  # blocks that change places
        last = np.array([count - 1])
        if not is_aligned:
            self._smaller = int(permute(last, count, keys, inverse=True)[0])
        else:
            self._smaller = count - 1
            if self._missing:
                self._moved -= 1
        self._after = (self._smaller + 1) * size - self._missing  # the place where it ends
        self._asked = 0
        self._blocks: NDArray[np.int32] | None = None

    def slot_of(self, places: IntArray) -> IntArray:
        slots: IntArray = (places + self._missing * (places >= self._after)) // self._size
        return slots

    def start_of(self, slots: IntArray) -> IntArray:
        starts: IntArray = slots * self._size - self._missing * (slots > self._smaller)
        return starts

    def block_of(self, slots: IntArray) -> IntArray:
        self._asked += 1
        is_often = self._asked > self._count >> 12
        if self._blocks is None and is_often and self._count <= _MOST_LISTED:
            self._blocks = self._permuted(np.arange(self._count)).astype(np.int32)
        if self._blocks is None:
            return self._permuted(slots)
        return self._blocks[slots].astype(np.int64)

    def _permuted(self, slots: IntArray) -> IntArray:
        if self._moved == self._count:
            return permute(slots, self._count, self._keys)
        blocks = permute(np.minimum(slots, self._moved - 1), self._moved, self._keys)
        return np.where(slots < self._moved, blocks, slots)
