"""Chooses how the rows of packed arrays are cut into chunks."""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.errors import ConfigError
from headrace.memory.budget import format_size
from headrace.packing.options import StoreOptions
from headrace.packing.plan import Plan

CHUNK_BYTES = 1 << 20
"""Decoded bytes of a compressed chunk, at most: random access decodes no more for a sample, a block
shuffle decodes a chunk once for all its samples, and the cost of a chunk (a read, a call, an entry
of the index) is small beside that of decoding it.
"""
# some of them are in memory while they are packed, and while they are read
_MOST_CHUNK_BYTES = 256 << 20

_FLAT = {
    "encoded": (
        "encoded images are compressed already and lie one behind the other: pass store='decoded' "
        "for their pixels"
    ),
    "tokens": "tokens lie flat, and are read as they are",
    "ragged": (
        "arrays of several lengths lie flat, one behind the other, and are read by their offsets: "
        "give all one shape"
    ),
}


def laid_out(plan: Plan, options: StoreOptions) -> Plan:
    """The plan with its samples in chunks.

    Raises:
        ConfigError: samples that lie flat have none; a chunk would be too large.
    """
    if not options.is_chunked:
        return plan
    if plan.info.store != "decoded":
        raise ConfigError(
            f"{options.layout}: only samples that are arrays of one shape are cut into chunks; "
            f"{_FLAT[plan.info.store]}"
        )
    row_bytes = math.prod(plan.shape[1:]) * plan.dtype.itemsize
    chunks = chunks_for(options, row_bytes)
    nbytes = min(chunks or 0, plan.shape[0]) * row_bytes
    if nbytes > _MOST_CHUNK_BYTES:
        remedy = "use fewer" if chunks != 1 else "leave out chunks and compression"
        raise ConfigError(
            f"{options.layout}: a chunk of {chunks:,} samples has {format_size(nbytes)}, more "
            f"than {format_size(_MOST_CHUNK_BYTES)}: "
            f"chunks are compressed and decoded whole, {remedy}"
        )
    return replace(plan, compression=None if chunks is None else options.compression, chunks=chunks)


def chunks_for(options: StoreOptions, row_bytes: int) -> int | None:
    """Samples a chunk, where each has so many bytes; None: contiguous, as samples of nothing
    are.
    """
    if not options.is_chunked or not row_bytes:
        return None
    return options.chunks or rows_a_chunk(row_bytes)


def rows_a_chunk(row_bytes: int) -> int:
    """Samples of a compressed chunk: the largest power of two that stays below `CHUNK_BYTES`,
    and at least 1.
    """
    return 1 << max(0, (CHUNK_BYTES // row_bytes).bit_length() - 1)


def reason_for(
    store: str, compression: str | None, chunks: int | None, row_bytes: int, asked: StoreOptions
) -> str:
    """How the samples lie in a file, and why so; in a line.

    Args:
        store: as `PackedInfo` has it.
        compression, chunks: of the plan.
        row_bytes: of a sample of "decoded".
        asked: the arguments.
    """
    if store != "decoded":
        return "flat, one behind the other, with offsets: samples have sizes of their own"
    if chunks is None:
        return "contiguous: a random sample is one read, and nothing is decoded"
    size = (
        f"{compression or 'uncompressed'}, {chunks:,} sample{'s' * (chunks > 1)} a chunk "
        f"({format_size(chunks * row_bytes)})"
    )
    if asked.chunks is not None:
        return f"{size}: as chunks={asked.chunks} says"
    if chunks == 1:
        return f"{size}: two would have more than {format_size(CHUNK_BYTES)}"
    return (
        f"{size}: the power of two that stays below {format_size(CHUNK_BYTES)}, so a random "
        "sample decodes little more than itself, and "
        "shuffle='block' decodes each chunk once"
    )
