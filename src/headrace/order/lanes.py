"""Block shuffle: permutes blocks into a sequence, and interleaves it in lanes, so that workers and
ranks read blocks of their own.

The blocks (chunks, shards, files) stand in a permuted sequence, which is cut into ``turns`` x
``interleave`` lanes. Global batch s draws from the lanes of turn s mod ``turns`` only, and each of
its positions from one lane. With interleave=4, turns=2 and global batches of 4:

    ============  =========================================
    global batch  lanes that positions 0, 1, 2, 3 draw from
    ============  =========================================
    0             0, 1, 2, 3
    1             4, 5, 6, 7
    2             0, 1, 2, 3
    ============  =========================================

torch deals batches to its workers in turn, so with two workers one reads lanes 0 to 3 alone and the
other lanes 4 to 7; and of two ranks, which take the even and the odd positions, one reads lanes 0,
2, 4, 6. Wherever lanes are not shared, a block is read and decoded once.

`Lanes` mostly end within a block. The parts of such a block, each of which is a segment of the
storage, come at different times. That costs nothing if any part can be read, and twice the work if
blocks are decoded as a whole. For the latter, if they have one size, there are `AlignedLanes`.
"""

from __future__ import annotations

import math

import numpy as np

from headrace.dtypes import IntArray, distinct
from headrace.order.permutation import KEY_COUNT, derive_keys, mix, permute, permute_within

OPEN_BYTES = 2 << 30
"""Limit of the decoded bytes of the blocks in use, over all lanes."""
FEWEST = 8
"""Least `interleave` while there are several turns: 8 ranks can each have lanes of their own."""
_TURNS = (24, 12, 8, 6, 4, 2, 1)
"""Choices of `turns`; most numbers of workers divide 24."""


def lanes_for(blocks: int, block_nbytes: int = 0, interleave: int | None = None) -> tuple[int, int]:
    """The (interleave, turns) for a layout of so many blocks. There are no more lanes than blocks;
    otherwise a lane would be a part of a block, and a batch would draw from few blocks.

    * Blocks that are decoded as a whole, of `block_nbytes` bytes each: few go to `interleave` first
      (64 by default), which mixes. All lanes together stay below OPEN_BYTES: there half as many
      turns are enough, and then `interleave` is lowered.
    * Others may be cut anywhere, and have been cut so that there are `FEWEST` x 8. Few go to
      `turns` first, which spares workers from fetching a block twice, once a batch draws from
      `FEWEST` lanes (32 by default).
    """
    turns = _TURNS[0]
    divisors: tuple[int, ...] = _TURNS
    if block_nbytes:
        most = max(1, OPEN_BYTES // block_nbytes)
        interleave = interleave or 64
        if most // turns < interleave:
            turns = 12
        interleave = min(interleave, most // turns)
        blocks = min(blocks, most)
    else:
        divisors = (24, 8, 4, 2, 1)
        power_of_two = 1 << max(1, blocks // turns).bit_length() - 1
        interleave = min(interleave or 32, max(FEWEST, power_of_two))
    interleave = max(1, min(interleave, blocks))
    turns = max(1, min(turns, blocks // interleave))
    return interleave, next(number for number in divisors if number <= turns)


def interleave_for(mixed: int, samples: int, blocks: int, least: int = 1) -> int:
    """The `interleave` with which a global batch draws from blocks of about `mixed` samples in all.

    It is a power of two, so that many numbers of ranks get lanes of their own, and at most the
    number of blocks.

    Args:
        mixed: number of samples.
        samples: number of samples in all blocks.
        blocks: number of blocks.
        least: least result, if there are enough blocks.
    """
    wanted = max(least, mixed * blocks / max(1, samples))
    return 1 << min(round(math.log2(wanted)), max(1, blocks).bit_length() - 1)


class Lanes:
    """Maps positions of an epoch to places in its sequence of blocks: a bijection on [0, n).

    It depends on neither seed nor epoch. Memory: one integer per lane.

    Args:
        n: number of samples.
        global_batch: positions of one global batch, over all ranks.
        interleave: lanes that a global batch draws from.
        turns: global batches until the same lanes come again.

    Attributes:
        first: int64 array [turns x interleave]: the place that each lane begins at.
        share: int64 array [interleave]: how many positions of a full global batch each of its lanes
            gets.
        cuts: places where lanes end within a block.
        last_stays: True if the last block stands at the end of the sequence too.
        layout: version of the arithmetic, which a saved state contains.
    """

    layout = 2
    last_stays: bool = False

    def __init__(self, n: int, global_batch: int, interleave: int, turns: int) -> None:
        self.global_batch: int = global_batch
        self.interleave: int = interleave
        self.turns: int = turns
        self.share: IntArray = self._shares(global_batch)
        rounds, rest = divmod(n, turns * global_batch)
        full, part = divmod(rest, global_batch)  # the batches of the last, incomplete round
        lengths = np.tile(self.share * rounds, (turns, 1))
        lengths[:full] += self.share
        if part:
            lengths[full] += self._shares(part)
        self.first: IntArray = np.cumsum(lengths) - lengths.ravel()
        self.cuts: IntArray = self.first

    def _shares(self, count: int) -> IntArray:
        """How many of the first `count` positions of a batch each lane gets."""
        return (count - 1 - np.arange(self.interleave, dtype=np.int64)) // self.interleave + 1

    def place_of(self, positions: IntArray) -> IntArray:
        """The place of each position in the sequence of blocks, in [0, n)."""
        lanes, within = self.lane_of(positions)
        places: IntArray = self.first[lanes] + within
        return places

    def lane_of(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """The lane that each position draws from, in [0, turns x interleave), and how many samples
        of the lane come before it.
        """
        batches, offsets = np.divmod(positions, self.global_batch)
        rounds, turns = np.divmod(batches, self.turns)
        depths, columns = np.divmod(offsets, self.interleave)
        return turns * self.interleave + columns, rounds * self.share[columns] + depths


class AlignedLanes(Lanes):
    """Lanes of whole blocks, for blocks of one size.

    A lane has a lead, whole blocks of its own, and a tail. Leads and tails stand together at the
    end of the sequence, turn by turn, first the leads of all lanes of the turn and then their
    tails. So the blocks there too are read at one time by one turn, and all but two a turn are read
    once where `Lanes` read one a lane twice. Leads have from none to nearly all of a block's
    length, evenly spread over the lanes, so that a turn comes to new blocks in every batch, and
    never to as many as it has lanes.

    Args:
        n, global_batch, interleave, turns: as for `Lanes`.
        size: samples in each block of the sequence, bar the last, which may have fewer.
    """

    layout = 3

    def __init__(self, n: int, global_batch: int, interleave: int, turns: int, size: int) -> None:
        super().__init__(n, global_batch, interleave, turns)
        self.cuts: IntArray = self.first[:0]
        self.last_stays = n % size > 0
        columns = np.arange(interleave, dtype=np.int64)
        lengths = np.diff(self.first, append=n)
        lead = np.minimum(np.tile(columns * size // interleave, turns), lengths)
        own = (lengths - lead) // size * size
        tail = lengths - lead - own
        # Lanes of one rank stand side by side: those with equal remainders by 2, by 4, and by 8.
        reversed_bits = (columns & 1) << 2 | columns & 2 | (columns & 4) >> 2
        side = np.lexsort((columns, reversed_bits))
        # [turns, leads and tails, lanes]: where they begin, if they stand in that order
        parts = np.stack([lead.reshape(turns, -1), tail.reshape(turns, -1)], axis=1)
        sorted_parts = parts[:, :, side]
        ends = np.cumsum(sorted_parts).reshape(parts.shape)
        starts = np.empty_like(parts)
        starts[:, :, side] = int(own.sum()) + ends - sorted_parts
        # of lead, own blocks and tail: what is to add to a place in the lane
        self._own_first = lead
        self._own_end = lead + own
        self._shifts = np.stack(
            [
                starts[:, 0].ravel(),
                np.cumsum(own) - own - lead,
                starts[:, 1].ravel() - lead - own,
            ]
        )

    def place_of(self, positions: IntArray) -> IntArray:
        lanes, within = self.lane_of(positions)
        is_after_lead = within >= self._own_first[lanes]
        parts = np.add(is_after_lead, within >= self._own_end[lanes], dtype=np.int8)
        places: IntArray = self._shifts[parts, lanes] + within
        return places


class BlockSequence:
    """The blocks of one epoch, permuted and cut by the lanes, as one sequence of samples that are
    permuted inside each segment.

    A segment is a block, or one of the parts that it is cut into. The blocks that have samples
    stand in slots 0, 1, ... of the sequence. Memory: 12 bytes a block.

    Args:
        edges: int64 array of shape [blocks + 1]: block b holds the samples ``edges[b]`` to
            ``edges[b + 1] - 1``.
        seed: seed of the order.
        epoch: epoch number.
        cuts: int64 array: places of the sequence that end a segment.
        last_stays: True if the last block stands at the end of the sequence too: where it alone is
            smaller, all others begin at multiples of their size.
    """

    def __init__(
        self, edges: IntArray, seed: int, epoch: int, cuts: IntArray, last_stays: bool = False
    ) -> None:
        block_keys = derive_keys("blocks", seed, epoch, count=KEY_COUNT)
        self._keys = derive_keys("samples", seed, epoch, count=1 + KEY_COUNT)
        self._stored = edges
        count = len(edges) - 1
        moved = count - last_stays
        blocks = np.arange(count)
        blocks[:moved] = permute(blocks[:moved], moved, block_keys)
        sizes = np.diff(edges)[blocks]
        is_filled = sizes > 0
        if not is_filled.all():
            blocks = blocks[is_filled]
            sizes = sizes[is_filled]
        self._blocks = blocks.astype(np.min_scalar_type(count))
        self._edges = np.zeros(len(blocks) + 1, np.int64)  # places where slots begin
        np.cumsum(sizes, out=self._edges[1:])
        cuts = distinct(cuts)
        cuts = cuts[(cuts > 0) & (cuts < edges[-1])]
        # the others are ends of blocks anyway
        cuts = cuts[self._edges[self._slot_of(cuts)] < cuts]
        self._ends = np.append(cuts, edges[-1])
        self._starts = np.append(0, cuts)

    def _slot_of(self, places: IntArray) -> IntArray:
        return np.searchsorted(self._edges, places, side="right") - 1

    def segments(self) -> IntArray:
        """The starts of segments in stored order, and the end: int64 array [segments + 1]."""
        cuts = self._starts[1:]
        slots = self._slot_of(cuts)
        firsts = self._stored[self._blocks[slots]]
        return distinct(np.append(self._stored, firsts + cuts - self._edges[slots]))

    def index_at(self, places: IntArray) -> IntArray:
        """The index of the sample at each place."""
        slots = self._slot_of(places)
        block_starts = self._edges[slots]
        cut = np.searchsorted(self._ends, places, side="right")
        starts = np.maximum(block_starts, self._starts[cut])
        ends = np.minimum(self._edges[slots + 1], self._ends[cut])
        # keys of a segment's own: those of the epoch, mixed with its number
        own = mix((slots + cut).astype(np.uint32), self._keys[0])
        keys = mix(own, self._keys[1:, np.newaxis])
        first = self._stored[self._blocks[slots]] + starts - block_starts
        indices: IntArray = first + permute_within(places - starts, ends - starts, keys)
        return indices
