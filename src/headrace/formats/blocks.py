"""The length of blocks, where records may be cut into blocks anywhere."""

from __future__ import annotations

LONGEST = 2 << 20
"""Bytes of a block, where there is much data: a long read, from a disk and from a server."""
SHORTEST = 128 << 10
"""Bytes of a block, where there is little."""
ENOUGH = 72
"""Blocks of a dataset with which 8 workers have blocks of their own: the 8 x 8 lanes of
`headrace.order.lanes`, and some more, since the last block of a shard is shorter.
"""


def block_length(nbytes: int) -> int:
    """The bytes of a block of a dataset of so many stored bytes: few shards have blocks enough
    too.
    """
    return min(LONGEST, max(SHORTEST, nbytes // ENOUGH))
