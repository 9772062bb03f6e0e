"""Estimates how many processes read each block in an epoch.

A block (a chunk, a shard, a file) is read and decoded once by each process that has samples of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from headrace.order.ranks import RankBatches
from headrace.sorting import distinct

MOST = 1 << 20
"""Positions of an epoch that are looked at."""


def estimate_readings(batches: RankBatches, workers: int, blocks: ArrayLike) -> int:
    """Estimates how many times blocks are read in an epoch: the pairs of a block and a process, of
    all ranks and their workers, that has samples of it.

    Exact for epochs of up to `MOST` samples, padding aside. Of a longer one the beginning is looked
    at, and those of its blocks that come wholly within it.

    Args:
        batches: of any rank; the estimate is that of all ranks together.
        workers: processes that each rank's batches are dealt to in turn; 0 counts as one.
        blocks: integer array [blocks] of the sizes of consecutive runs of samples that are stored
            together.
    """
    sizes = np.asarray(blocks, np.int64)
    total = min(batches.total_size, batches.order.n)
    positions = np.arange(min(total, MOST))
    block = np.searchsorted(np.cumsum(sizes), batches.order[positions], side="right")
    workers = max(1, workers)
    worker = positions // batches.global_batch % workers
    process = positions % batches.world_size * workers + worker
    processes = batches.world_size * workers
    pairs = distinct(block * processes + process)
    readers = np.bincount(pairs // processes, minlength=len(sizes))
    if len(positions) == total:
        return len(pairs)
    seen = np.bincount(block, minlength=len(sizes))
    is_whole = seen == sizes
    if not is_whole.any():
        is_whole = seen == seen.max()
    return round(float(readers[is_whole].mean()) * len(sizes))
