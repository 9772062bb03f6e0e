"""Estimates how many processes read each block in an epoch.

A block (a chunk, a shard, a file) is read and decoded once by each process that has samples of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from headrace.order.ranks import RankBatches
from headrace.sorting import distinct

MOST = 1 << 20
"""Positions of an epoch that are looked at."""


class Visits(NamedTuple):
    """How often blocks are read in an epoch, over all ranks and their workers."""

    blocks: int
    """Blocks that samples are taken from."""
    readings: int
    """Pairs of a block and a process that has samples of it, about."""

    @property
    def rate(self) -> float:
        """Processes that read a block, on average; 0 without samples."""
        return self.readings / max(1, self.blocks)


def estimate_visits(batches: RankBatches, workers: int, blocks: ArrayLike) -> Visits:
    """Estimates how many processes go through each block in an epoch.

    Exact for epochs of up to `MOST` samples, padding aside. Of a longer one the beginning is looked
    at, and those of its blocks that come wholly within it.

    Args:
        batches: of any rank; the estimate is that of all ranks together.
        workers: processes that each rank's batches are dealt to in turn; 0 counts as one.
        blocks: integer array [blocks] of the sizes of consecutive runs of samples that are stored
            together.
    """
    order = batches.order
    sizes = np.asarray(blocks, np.int64)
    total = min(batches.total_size, order.n)
    positions = np.arange(min(total, MOST))
    block = np.searchsorted(np.cumsum(sizes), order[positions], side="right")
    workers = max(1, workers)
    worker = positions // batches.global_batch % workers
    process = positions % batches.world_size * workers + worker
    processes = batches.world_size * workers
    seen = np.bincount(block, minlength=len(sizes))
    pairs = distinct(block * processes + process)
    readers = np.bincount(pairs // processes, minlength=len(sizes))
    if len(positions) == total:
        return Visits(int((seen > 0).sum()), int(readers.sum()))
    is_whole = seen == sizes
    if not is_whole.any():
        is_whole = seen == seen.max()
    return Visits(len(sizes), round(float(readers[is_whole].mean()) * len(sizes)))
