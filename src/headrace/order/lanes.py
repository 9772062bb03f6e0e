"""Interleaves the blocks of a block shuffle in lanes, so that workers and ranks read blocks of their own.

The blocks (chunks, shards, files) stand in a permuted sequence, which is cut into ``turns`` x ``interleave`` lanes.
Global batch s draws from the lanes of turn s mod ``turns`` only, and each of its positions from one lane:

    ============  =======================================  (interleave=4, turns=2, global batch of 4)
    global batch  lanes that positions 0, 1, 2, 3 draw from
    ============  =======================================
    0             0, 1, 2, 3
    1             4, 5, 6, 7
    2             0, 1, 2, 3
    ============  =======================================

torch deals batches to its workers in turn, so with two workers one reads lanes 0 to 3 alone and the other lanes 4 to 7;
and of two ranks, which take the even and the odd positions, one reads lanes 0, 2, 4, 6. Wherever lanes are not shared,
a block is read and decoded once, bar the few that a lane's end cuts: those come in parts, at different times, each of which
is a segment of the storage by itself.
"""

from __future__ import annotations

import math

import numpy as np

from headrace.dtypes import IntArray

LAYOUT = 2
"""Another number whenever the samples of an epoch stand elsewhere than before: saved states of another layout can't be gone on from."""
OPEN_BYTES = 2 << 30
"""Most decoded bytes of the blocks that all lanes have open."""


TURNS = 24
"""Sets of lanes where there are blocks enough: divided by 1, 2, 3, 4, 6, 8, 12 and 24 workers."""
FEWEST = 8
"""Lanes that a batch draws from, so that 8 ranks can each have lanes of their own, before fewer blocks mean fewer turns."""
_FORMER_TURNS = 12


def lanes_for(blocks: int, block_nbytes: int = 0, interleave: int | None = None) -> tuple[int, int]:
    """Gives the (interleave, turns) that suit a layout of so many blocks: no more lanes than blocks.

    With more, a lane would be a part of a block, and a batch would draw from few blocks.

    * Blocks that are decoded as a whole, of `block_nbytes` bytes each: few go to `interleave` first (64 by default), which mixes. All
      lanes together stay below OPEN_BYTES: there half as many turns are enough, and then `interleave` is lowered.
    * Others may be cut anywhere, and have been cut so that there are `FEWEST` x 8. Few go to `turns` first, which spares workers from
      fetching a block twice, once a batch draws from `FEWEST` lanes (32 by default).
    """
    turns = TURNS
    divisors: tuple[int, ...] = (24, 12, 8, 6, 4, 2, 1)
    if block_nbytes:
        interleave, most = interleave or 64, max(1, OPEN_BYTES // block_nbytes)
        if most // turns < interleave:
            turns = _FORMER_TURNS
        interleave, blocks = min(interleave, most // turns), min(blocks, most)
    else:
        interleave, divisors = min(interleave or 32, max(FEWEST, _power_of_two(blocks // turns))), (24, 8, 4, 2, 1)
    interleave = max(1, min(interleave, blocks))
    return interleave, next(number for number in divisors if number <= max(1, min(turns, blocks // interleave)))


def former_lanes_for(blocks: int, block_nbytes: int = 0, interleave: int = 64) -> tuple[int, int]:
    """What `lanes_for` gave when all blocks that may be cut anywhere had 2 MiB, for states that were saved then."""
    if block_nbytes:
        most = max(1, OPEN_BYTES // block_nbytes)
        interleave, blocks = min(interleave, most // _FORMER_TURNS), min(blocks, most)
    interleave = max(1, min(interleave, blocks))
    return interleave, next(t for t in (12, 6, 4, 3, 2, 1) if t <= max(1, blocks // interleave))


def _power_of_two(number: int) -> int:
    """The largest that is not above it."""
    return 1 << max(1, number).bit_length() - 1


def interleave_for(mixed: int, samples: int, blocks: int, least: int = 1) -> int:
    """Gives the `interleave` with which a global batch draws from blocks of about `mixed` samples in all.

    A power of two, so that as many ranks as may be have lanes of their own, and no more than there are blocks.

    Args:
        mixed: samples.
        samples: of all blocks.
        blocks: number of blocks.
        least: lanes, where there are so many blocks.
    """
    wanted = max(least, mixed * blocks / max(1, samples))
    return 1 << min(round(math.log2(wanted)), max(1, blocks).bit_length() - 1)


class Lanes:
    """The arithmetic from positions of an epoch to places in its sequence of blocks: a bijection on [0, n).

    It depends on neither seed nor epoch. Memory: one integer a lane.

    Args:
        n: number of samples.
        global_batch: positions of one global batch, over all ranks.
        interleave: lanes that a global batch draws from.
        turns: global batches until the same lanes come again.

    Attributes:
        first: int64 array [turns x interleave]: the place that each lane begins at.
        share: int64 array [interleave]: how many positions of a full global batch each of its lanes gets.
    """

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

    def _shares(self, count: int) -> IntArray:
        """How many of a batch's first `count` positions each of its lanes gets."""
        return (count - 1 - np.arange(self.interleave, dtype=np.int64)) // self.interleave + 1

    def lane_of(self, positions: IntArray) -> IntArray:
        """Gives the number of the lane that each position draws from, in [0, turns x interleave)."""
        batches, offsets = np.divmod(positions, self.global_batch)
        lanes: IntArray = batches % self.turns * self.interleave + offsets % self.interleave
        return lanes

    def place_of(self, positions: IntArray) -> IntArray:
        """Gives each position's place in the sequence of blocks, in [0, n)."""
        batches, offsets = np.divmod(positions, self.global_batch)
        rounds, turns = np.divmod(batches, self.turns)
        depths, lanes = np.divmod(offsets, self.interleave)
        places: IntArray = self.first[turns * self.interleave + lanes] + rounds * self.share[lanes] + depths
        return places
