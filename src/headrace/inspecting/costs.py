"""What a random row or patch of an array costs, by arithmetic on its layout.

The rules are those of `headrace.storage.arrays.reader`: where bytes lie as they are, those of the
row are read; else each chunk that the row crosses is read and decoded as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.inspecting.report import Access
from headrace.storage.arrays.chunks import Chunks, DirectChunks, Grid
from headrace.storage.arrays.packed import PackedInfo

_BATCH = 64
# decoded bytes that a process caches under a full shuffle (`core.budgeting.CHUNK_BYTES`)
_CACHED = 64 << 20
_DECODE, _RAW = 1500.0, 2000.0  # bytes a microsecond
# bytes a microsecond, and microseconds, that decoding a small chunk takes at most
_INFLATE, _CHUNK = 100.0, 20.0
_DIRECT_CALL, _LIBRARY_CALL, _ROW = 1.0, 30.0, 20.0  # microseconds


def of_row(name: str, chunks: Chunks, stored: float) -> Access:
    """What a random row costs.

    Args:
        name: of the array.
        chunks: of it.
        stored: bytes of a chunk as it is stored, on average.
    """
    is_whole = isinstance(chunks, DirectChunks) and chunks.index.whole_files
    is_raw = isinstance(chunks, DirectChunks) and chunks.is_raw
    return row_cost(
        name,
        chunks.how,
        chunks.grid,
        chunks.dtype.itemsize,
        stored,
        chunks.is_direct,
        is_raw and not is_whole,
    )


def row_cost(
    name: str, way: str, grid: Grid, itemsize: int, stored: float, is_direct: bool, is_raw: bool
) -> Access:
    """What a random row costs.

    Args:
        name: of the array.
        way: by which it is read.
        grid: of its chunks.
        itemsize: bytes of an element.
        stored: bytes of a chunk as it is stored, on average.
        is_direct: True if headrace decodes it.
        is_raw: True if the bytes of a row lie in its chunks as they are.
    """
    row = math.prod(grid.shape[1:]) * itemsize
    inner, chunk = grid.inner if all(grid.shape) else 0, math.prod(grid.chunks) * itemsize
    total, count = math.prod(grid.shape) * itemsize, math.prod(grid.counts)
    if is_direct and is_raw:
        return Access(name, "a row", way, row, 0, 0, row, max(1, inner), False, total, count)
    return Access(
        name,
        "a row",
        way,
        row,
        inner,
        inner * chunk,
        int(inner * stored),
        inner,
        not is_direct,
        total,
        count,
    )


def patch_cost(
    name: str,
    way: str,
    grid: Grid,
    itemsize: int,
    stored: float,
    is_direct: bool,
    patch: Sequence[int],
) -> Access:
    """What a patch at a random place costs: along each axis it crosses (extent - 1) / chunk + 1
    chunks on average, and no more than there are.

    Args:
        name, way, grid, itemsize, stored, is_direct: as for a row.
        patch: its extent along each axis.
    """
    crossed = 1.0
    for extent, chunk, count in zip(patch, grid.chunks, grid.counts, strict=True):
        crossed *= min(float(count), (extent - 1) / chunk + 1)
    chunk = math.prod(grid.chunks) * itemsize
    nbytes = math.prod(patch) * itemsize
    total, shown = math.prod(grid.shape) * itemsize, " x ".join(str(extent) for extent in patch)
    return Access(
        name,
        f"a patch of {shown}",
        way,
        nbytes,
        crossed,
        int(crossed * chunk),
        int(crossed * stored),
        crossed,
        not is_direct,
        total,
        math.prod(grid.counts),
    )


def of_flat(cost: Access, info: PackedInfo) -> Access:
    """What a random sample of a pack costs whose samples lie flat: it is not a row, but as many
    as it has.
    """
    if not info.count:
        return cost
    mean, sample = cost.total // info.count, "a document" if info.kind == "text" else "a sample"
    return Access(
        cost.name, sample, cost.way, mean, read=mean, by_library=cost.by_library, total=cost.total
    )


def least_time(access: Access) -> float:
    """Microseconds that a random row takes at least, from memory, in one process: neighbours in a
    batch of 64 that share a chunk decode it once, and 64 MiB of decoded chunks stay.
    """
    if not access.chunks:
        return _ROW / 4 + access.read / (8 * _RAW)
    bands = max(1.0, access.chunk_count / max(1.0, access.chunks))
    shared = bands * (1 - (1 - 1 / bands) ** _BATCH) / _BATCH
    missing = (
        max(0.0, 1 - _CACHED / access.total)
        if access.total and not (access.chunks == 1 and access.decoded == access.nbytes)
        else 1.0
    )
    call = _LIBRARY_CALL if access.by_library else _DIRECT_CALL
    return shared * missing * (access.chunks * call + access.decoded / _DECODE) + (
        access.nbytes or 0
    ) / (8 * _RAW)


def most_time_packed(nbytes: int) -> float:
    """Microseconds that a random row takes at most that lies in a contiguous array, from memory,
    in one process.
    """
    return _ROW + nbytes / _RAW


def gain_of_packing(access: Access, *, compressed: bool = False) -> float:
    """By how much the rate of random rows grows at least when they are packed: 1.0 where that is
    not sure.

    Args:
        access: what a row costs now.
        compressed: True: each row as a chunk of its own, by deflate; False: as they are.
    """
    nbytes = access.nbytes or 0
    decoding = _CHUNK + nbytes / _INFLATE if compressed else 0.0
    return max(1.0, least_time(access) / (most_time_packed(nbytes) + decoding))


def rounded_down(gain: float) -> float:
    """With one or two digits: 1.5, 7.0, 40.0."""
    if gain < 10:
        return math.floor(gain * 2) / 2
    unit = 10 ** math.floor(math.log10(gain))
    return float(math.floor(gain / unit) * unit)
