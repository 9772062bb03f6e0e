"""Byte ranges of remote files, read through the disk cache: in blocks, or as whole files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from headrace.io.cache.disk_cache import DiskCache
from headrace.io.files import Version
from headrace.io.ranges import WHOLE, ByteRanges
from headrace.io.remote.client import Remote

BLOCK = 1 << 20
"""Bytes of a block: what is cached, and fetched at least."""
_WORTH = BLOCK // 2  # bytes of a range for which whole blocks are fetched in any case

_Block = tuple[str, int]
"""A path, and the number of a block in that file; `WHOLE`: all of it."""


async def fetch_cached(
    remote: Remote,
    cache: DiskCache | None,
    ranges: ByteRanges,
    versions: Mapping[str, Version],
    *,
    bypass: bool = False,
    all_fits: bool = True,
    urgent: bool = True,
) -> list[memoryview]:
    """See `Remote.fetch`. Files of no known version are not cached: nobody could say whether what
    is cached still holds.

    Args:
        remote: the server.
        cache: None: everything is fetched.
        ranges, urgent: as there; whole files too.
        versions: of paths; of all whose whole files are read.
        bypass: what is cached is not trusted, and replaced.
        all_fits: True if all files that will be read have room in the cache. Else small ranges are
            not worth a block, which would be gone before the rest of it is read.
    """
    needed = []
    is_whole = ranges.is_whole
    if is_whole.any():
        needed = [_blocks_of(*one) for one in ranges.each()]
        sizes = np.array([versions[path].size for path in ranges.paths])
        ranges = ranges._replace(stop=np.where(is_whole, sizes[ranges.file], ranges.stop))
    columns = list(ranges.each())
    if cache is None or any(
        path not in versions or versions[path].tag is None for path, _, _ in columns
    ):
        return await remote.fetch(ranges, versions, urgent)
    needed = needed or [_blocks_of(*one) for one in columns]
    keys = {
        block: block_key(remote.place, block, versions[block[0]])
        for blocks in needed
        for block in blocks
    }
    found = dict.fromkeys(keys) if bypass else await asyncio.to_thread(_cached, cache, keys)
    alone: dict[int, memoryview] = {}
    if not all_fits:
        lacking = [any(found[block] is None for block in blocks) for blocks in needed]
        small = [
            n for n, (_, start, stop) in enumerate(columns) if lacking[n] and stop - start < _WORTH
        ]
        alone = dict(
            zip(
                small,
                await remote.fetch(ranges.take(np.array(small, np.int64)), versions, urgent),
                strict=True,
            )
        )
    missing = {
        block: keys[block]
        for n, blocks in enumerate(needed)
        if n not in alone
        for block in blocks
        if found[block] is None
    }
    if missing:
        async with cache.claimed(missing.values(), remote.deadline):
            if not bypass:
                found |= await asyncio.to_thread(_cached, cache, missing)
            missing = {block: key for block, key in missing.items() if found[block] is None}
            blocks = ByteRanges.of(
                _bounds(path, number, versions[path].size) for path, number in missing
            )
            for (block, key), data in zip(
                missing.items(), await remote.fetch(blocks, versions, urgent), strict=True
            ):
                found[block] = content = bytes(data)
                await asyncio.to_thread(cache.put, key, content)
    return [
        alone[n] if n in alone else _assembled(needed[n], start, stop, found)
        for n, (_, start, stop) in enumerate(columns)
    ]


def version_hash(version: Version) -> int:
    """A number of 64 bits that stands for a version; never 0."""
    digest = hashlib.blake2b(repr((version.size, version.tag)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def block_key(place: str, block: _Block, version: Version | int) -> str:
    """The name of a block in the cache.

    Args:
        place: of the server.
        block: of which file.
        version: of the file; of whole files its hash will do.
    """
    path, number = block
    if number == WHOLE:
        return DiskCache.key(
            path,
            (place, "whole", version if isinstance(version, int) else version_hash(version)),
            0,
        )
    assert isinstance(version, Version)
    return DiskCache.key(path, (place, version.size, version.tag), number)


def cached_wholes(cache: DiskCache, place: str, hashes: Mapping[str, int]) -> dict[str, bytes]:
    """The contents of those of some files, of which hashes of versions are known, that are
    cached.
    """
    found = {
        path: cache.get(block_key(place, (path, WHOLE), version))
        for path, version in hashes.items()
    }
    return {path: data for path, data in found.items() if data is not None}


def _cached(cache: DiskCache, keys: Mapping[_Block, str]) -> dict[_Block, bytes | None]:
    return {block: cache.get(key) for block, key in keys.items()}


def _blocks_of(path: str, start: int, stop: int) -> list[_Block]:
    if stop == WHOLE:
        return [(path, WHOLE)]
    if start < stop:
        return [(path, number) for number in range(start // BLOCK, -(-stop // BLOCK))]
    return []


def _bounds(path: str, number: int, size: int) -> tuple[str, int, int]:
    if number == WHOLE:
        return (path, 0, size)
    return (path, number * BLOCK, min((number + 1) * BLOCK, size))


def _assembled(
    blocks: Iterable[_Block], start: int, stop: int, found: Mapping[_Block, bytes | None]
) -> memoryview:
    parts = []
    for path, number in blocks:
        data = found[path, number]
        begin = max(0, number) * BLOCK
        assert data is not None
        parts.append(memoryview(data)[max(0, start - begin) : stop - begin])
    if len(parts) == 1:
        return parts[0]
    return memoryview(b"".join(parts))
