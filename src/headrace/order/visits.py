"""Counts the processes that read each block in an epoch.

A block (a chunk, a shard, a file) is read and decoded once by each process that has samples of it.
Which processes those are follows from the order by arithmetic: along a lane of the block shuffle
(see `order.lanes`) the ranks take turns within each of its global batches and the workers from one
to the next, both periodically, so that a segment of a lane is counted by its length and where it
begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from headrace.dtypes import IntArray
from headrace.order.epoch import EpochOrder
from headrace.order.lanes import AlignedLanes, Lanes
from headrace.order.ranks import RankBatches
from headrace.order.sequence import BlockSequence
from headrace.sorting import distinct


@dataclass(frozen=True, slots=True)
class Visits:
    """How an epoch goes through the blocks, over all ranks and their workers.

    Attributes:
        blocks: blocks that samples are taken from.
        segments: stretches that these lie in: more than blocks, where the end of a lane cuts some,
            whose parts come at different times.
        readings: pairs of a segment and a process that has samples of it: how often blocks are read
            and decoded.
        repeated: readings beside these, for padding: the epoch's first samples once more at its
            end.
    """

    blocks: int
    segments: int
    readings: int
    repeated: int = 0

    @property
    def cut(self) -> int:
        """Stretches that there are only because a lane ends within a block."""
        return self.segments - self.blocks

    @property
    def processes(self) -> float:
        """Processes that share a segment, on average; 0 without samples."""
        return self.readings / max(1, self.segments)


def count_visits(batches: RankBatches, workers: int, blocks: ArrayLike) -> Visits:
    """Counts how many processes go through each block in an epoch.

    Takes O(blocks) time and memory, however many samples they have, beside that for two global
    batches.

    Args:
        batches: of any rank; the counts are those of all ranks together. Its order must be in
            sequence (``shuffle=False``) or laned (``shuffle="block"``): a full shuffle sends every
            process through every block, again and again.
        workers: processes that each rank's batches are dealt to in turn; 0 counts as one.
        blocks: integer array [blocks] of the sizes of consecutive runs of samples that are stored
            together.

    Raises:
        ValueError: the order is a full shuffle, or another that is no `EpochOrder`.
    """
    order = batches.order
    edges = np.concatenate([[0], np.cumsum(np.asarray(blocks, np.int64))])
    if not isinstance(order, EpochOrder) or order.shuffle is True:
        raise ValueError(
            f"an order of the kind shuffle={order.shuffle!r} has no segments of blocks to count"
        )
    if order.shuffle == "block":
        if isinstance(order.lanes, AlignedLanes):
            return _AlignedEpoch(
                batches, order.lanes, order.sequence().edges(), max(1, workers)
            ).count()
        lanes = Lanes(order.n, order.global_batch, order.interleave, order.turns)
        edges = BlockSequence(edges, order.seed, order.epoch).edges()
    else:
        lanes = Lanes(order.n, order.global_batch, 1, 1)  # in sequence: a single lane
    return _Epoch(batches, lanes, edges, max(1, workers)).count()


class _Ranks:
    """The processes of one epoch, of which number r x workers + w is worker w of rank r.

    `edges` ([blocks + 1]) says where blocks begin in the sequence that the lanes are cut from.
    """

    def __init__(self, batches: RankBatches, lanes: Lanes, edges: IntArray, workers: int) -> None:
        self._batches, self._edges = batches, edges
        self._world, self._workers = batches.world_size, workers
        # depths of a lane until the same rank comes again
        self._rank_period = self._world // np.gcd(lanes.interleave, self._world)
        # rounds until the same worker does
        self._worker_period = workers // np.gcd(lanes.turns, workers)
        self._place_of = lanes.place_of

    def _slots(self, places: IntArray) -> IntArray:
        return np.searchsorted(self._edges, places, side="right") - 1

    def _processes_of(self, start: IntArray, end: IntArray, depth: IntArray) -> IntArray:
        """The number of processes that have samples of each segment: its places within the lane,
        and those in each global batch.
        """
        ranks, workers = self._rank_period, self._worker_period
        (first, above), (last, below) = np.divmod(start, depth), np.divmod(end - 1, depth)
        between = last - first - 1  # whole global batches
        alone = np.minimum(end - start, ranks)  # all within one global batch
        upper, lower = np.minimum(depth - above, ranks), np.minimum(below + 1, ranks)
        # the upper part's ranks begin here, in a circle of so many; the lower part's at 0
        at = above % ranks
        shared = np.maximum(0, np.minimum(at + upper, lower) - at) + np.maximum(
            0, np.minimum(at + upper - ranks, lower)
        )
        # both by the same worker
        ends = upper + lower - np.where(last - first == workers, shared, 0)
        of_steps = between * np.minimum(depth, ranks) + ends
        processes: IntArray = np.where(
            between < 0,
            alone,
            np.where(between >= workers, workers * np.minimum(depth, ranks), of_steps),
        )
        return processes

    def _repeated(self) -> int:
        """Readings for padding."""
        n, total = self._batches.order.n, self._batches.total_size
        if not n or total <= n:
            return 0
        positions = np.arange(n, total)
        blocks = self._slots(self._place_of(positions % n))
        return len(np.unique(np.stack([blocks, positions % self._world], axis=1), axis=0))


class _Epoch(_Ranks):
    """An epoch over lanes that end within blocks.

    All steps but the last two are whole: there arithmetic counts. The last two, which may be cut,
    padded and dropped, are counted position by position.
    """

    def __init__(self, batches: RankBatches, lanes: Lanes, edges: IntArray, workers: int) -> None:
        super().__init__(batches, lanes, edges, workers)
        self._lanes = lanes
        self._last_start = batches.samples_before(max(0, batches.steps - 1))
        self._whole = self._last_start // lanes.global_batch  # steps that arithmetic counts
        rounds = np.maximum(0, -(-(self._whole - np.arange(lanes.turns)) // lanes.turns))
        self._counted = np.outer(rounds, lanes.share).ravel()  # places of each lane in whole steps

    def count(self) -> Visits:
        starts, ends, lane, slot = self._segments()
        share = self._lanes.share[lane % self._lanes.interleave]
        readings = int(
            self._processes_of(
                starts - self._lanes.first[lane], ends - self._lanes.first[lane], share
            ).sum()
        )
        new = [
            (lane, slot)
            for lane, slot, process in self._tail().tolist()
            if not self._is_counted(lane, slot, process)
        ]
        # segments that only the last steps take from
        further = {entry for entry in new if np.greater_equal(*self._counted_part(*entry))}
        known = slot[np.diff(slot, prepend=-1) > 0]
        blocks = len(known) + len(np.setdiff1d([slot for _, slot in further], known))
        return Visits(blocks, len(lane) + len(further), readings + len(new), self._repeated())

    def _segments(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Start, end, lane and block (by its place in the sequence) of each segment of places
        that whole steps take from.
        """
        first = self._lanes.first
        # they are sorted but for a few
        points = np.sort(np.concatenate([self._edges, first, first + self._counted]), kind="stable")
        points = points[points < self._edges[-1]]
        points = points[np.diff(points, prepend=-1) > 0]
        ends = np.append(points[1:], self._edges[-1])
        # never an empty one: the next begins where it does
        lane = np.searchsorted(first, points, side="right") - 1
        inside = points - first[lane] < self._counted[lane]
        points, ends, lane = points[inside], ends[inside], lane[inside]
        return points, ends, lane, self._slots(points)

    def _tail(self) -> IntArray:
        """Lane, block and process of each position of the last steps, each once: [entries, 3]."""
        positions = np.arange(
            self._whole * self._lanes.global_batch, min(self._batches.total_size, self._edges[-1])
        )
        steps = np.where(
            positions >= self._last_start,
            self._batches.steps - 1,
            positions // self._lanes.global_batch,
        )
        process = positions % self._world * self._workers + steps % self._workers
        slot = self._slots(self._lanes.place_of(positions))
        entries: IntArray = np.unique(
            np.stack([self._lanes.lane_of(positions), slot, process], axis=1), axis=0
        )
        return entries

    def _counted_part(self, lane: int, slot: int) -> tuple[int, int]:
        """Start and end, within the lane, of what whole steps take from a block there."""
        first = int(self._lanes.first[lane])
        return max(0, int(self._edges[slot]) - first), min(
            int(self._counted[lane]), int(self._edges[slot + 1]) - first
        )

    def _is_counted(self, lane: int, slot: int, process: int) -> bool:
        """True if a process of the last steps had samples of the same segment before them."""
        (start, end), share = (
            self._counted_part(lane, slot),
            int(self._lanes.share[lane % self._lanes.interleave]),
        )
        # from there on the processes repeat
        places = np.arange(start, min(end, start + share * int(self._worker_period)))
        rounds, depths = np.divmod(places, share)
        turn, column = divmod(lane, self._lanes.interleave)
        ranks = (depths * self._lanes.interleave + column) % self._world
        workers = (rounds * self._lanes.turns + turn) % self._workers
        return bool((ranks * self._workers + workers == process).any())


class _AlignedEpoch(_Ranks):
    """An epoch over lanes of whole blocks: all its samples, also those that ``drop_last=True``
    leaves out.

    Blocks of leads and tails are read by several lanes of a turn at one time. Where turns or ranks
    don't divide, their readings are counted as if no two of these lanes were the same process's: at
    most so many.
    """

    def __init__(
        self, batches: RankBatches, lanes: AlignedLanes, edges: IntArray, workers: int
    ) -> None:
        super().__init__(batches, lanes, edges, workers)
        self._lanes = lanes

    def count(self) -> Visits:
        lanes, size = self._lanes, self._lanes.size
        lane = np.repeat(np.arange(len(lanes.own)), lanes.own)
        start = (
            lanes.lead[lane]
            + (np.arange(len(lane)) - np.repeat(np.cumsum(lanes.own) - lanes.own, lanes.own)) * size
        )
        readings = int(
            self._processes_of(start, start + size, lanes.share[lane % lanes.interleave]).sum()
        )
        stretches, shared = self._shared()
        return Visits(
            len(self._edges) - 1, len(lane) + stretches, readings + shared, self._repeated()
        )

    def _shared(self) -> tuple[int, int]:
        """How many stretches the blocks of leads and tails come in, and how often these are
        read.
        """
        lanes, size = self._lanes, self._lanes.size
        lane = np.tile(np.arange(len(lanes.own)), 2)
        is_tail = np.repeat([0, 1], len(lanes.own))
        place, length = (
            np.concatenate([lanes.lead_start, lanes.tail_start]),
            np.concatenate([lanes.lead, lanes.tail]),
        )
        within = np.where(is_tail, lanes.lead[lane] + lanes.own[lane] * size, 0)
        head = np.minimum(length, -place % size)  # what lies before the next block's beginning
        pieces = [
            np.concatenate(both)
            for both in (
                (lane, lane),
                (is_tail, is_tail),
                (place, place + head),
                (within, within + head),
            )
        ]
        lane, is_tail, place, within = pieces
        length = np.concatenate([head, length - head])
        lane, is_tail, place, within, length = (
            values[length > 0] for values in (lane, is_tail, place, within, length)
        )
        turn, column = np.divmod(lane, lanes.interleave)
        stretch = (place // size * lanes.turns + turn) * 2 + is_tail
        if self._rank_period == self._worker_period == 1:
            processes = column % self._world * self._workers + turn % self._workers
            pairs = distinct(stretch * (self._world * self._workers) + processes)
            return len(distinct(stretch)), len(pairs)
        each = self._processes_of(within, within + length, lanes.share[column])
        order = np.argsort(stretch, kind="stable")
        first = np.flatnonzero(np.diff(stretch[order], prepend=-1))
        sums = np.add.reduceat(each[order], first) if len(first) else np.zeros(0, np.int64)
        return len(first), int(np.minimum(sums, self._world * self._workers).sum())
