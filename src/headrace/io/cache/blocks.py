"""Byte ranges of remote files, read through the disk cache."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np

from headrace.io.cache.disk_cache import DiskCache
from headrace.io.files import Version
from headrace.io.ranges import ByteRanges
from headrace.io.remote.client import Remote

BLOCK = 1 << 20
"""Bytes of a block: what is cached, and fetched at least."""
_WORTH = BLOCK // 2  # bytes of a range for which whole blocks are fetched in any case

_Block = tuple[int, int]
"""Numbers of a path, and of a block in that file."""


class CachedRemote:
    """A `Remote`, and what of it is cached on this machine's disk.

    Args:
        remote: of one server.
        cache: None: everything is fetched.
    """

    def __init__(self, remote: Remote, cache: DiskCache | None = None) -> None:
        self.remote: Remote = remote
        self.cache: DiskCache | None = cache

    async def fetch(
        self,
        ranges: ByteRanges,
        versions: Sequence[Version | None],
        *,
        bypass: bool = False,
        all_fits: bool = True,
        urgent: bool = True,
    ) -> list[memoryview]:
        """See `Remote.fetch`. Ranges of no known version are not cached: nobody could say whether they still hold.

        Args:
            ranges, versions, urgent: as there.
            bypass: what is cached is not trusted, and replaced.
            all_fits: have all files that will be read room in the cache? Where not, small ranges are not worth a block: it would be gone
                before the rest of it is read.
        """
        cache, known = self.cache, {file: versions[file] for file in set(ranges.file.tolist())}
        if cache is None or any(version is None or version.tag is None for version in known.values()):
            return await self.remote.fetch(ranges, versions, urgent)
        columns = list(zip(ranges.file.tolist(), ranges.start.tolist(), ranges.stop.tolist(), strict=True))
        needed = [_blocks_of(*one) for one in columns]
        keys = {(file, number): self._key(ranges.paths[file], known[file], number) for blocks in needed for file, number in blocks}
        found: dict[_Block, bytes | None] = dict.fromkeys(keys) if bypass else await asyncio.to_thread(_held, cache, keys)
        alone: dict[int, memoryview] = {}
        if not all_fits:
            lacking = [any(found[block] is None for block in blocks) for blocks in needed]
            small = [n for n, (_, start, stop) in enumerate(columns) if lacking[n] and stop - start < _WORTH]
            alone = dict(zip(small, await self.remote.fetch(ranges.take(np.array(small, np.int64)), versions, urgent), strict=True))
        missing = {block: keys[block] for n, blocks in enumerate(needed) if n not in alone for block in blocks if found[block] is None}
        if missing:
            async with cache.claimed(missing.values(), self.remote.deadline):
                if not bypass:
                    found |= await asyncio.to_thread(_held, cache, missing)
                missing = {block: key for block, key in missing.items() if found[block] is None}
                blocks = ByteRanges.of((ranges.paths[file], *_bounds(number, known[file])) for file, number in missing)
                of = dict(zip(ranges.paths, versions, strict=True))
                fetched = await self.remote.fetch(blocks, [of[path] for path in blocks.paths], urgent)
                for (block, key), data in zip(missing.items(), fetched, strict=True):
                    found[block] = bytes(data)
                    await asyncio.to_thread(cache.put, key, bytes(data))
        return [alone[n] if n in alone else _assembled(needed[n], start, stop, found) for n, (_, start, stop) in enumerate(columns)]

    async def fetch_files(self, urls: Sequence[str], *, bypass: bool = False, urgent: bool = True) -> list[bytes | None]:
        """See `Remote.fetch_files`. With a cache each file's version is asked for first: what is cached may be of an older one."""
        if self.cache is None:
            return await self.remote.fetch_files(urls, urgent=urgent)
        versions = await self.remote.ask_seek(urls)
        there = ByteRanges.of((url, 0, version.size) for url, version in zip(urls, versions, strict=True) if version is not None)
        of = dict(zip(urls, versions, strict=True))
        found = iter(await self.fetch(there, [of[url] for url in there.paths], bypass=bypass, urgent=urgent))
        return [None if version is None else bytes(next(found)) for version in versions]

    def _key(self, url: str, version: Version | None, number: int) -> str:
        assert version is not None
        return DiskCache.key(url, (self.remote.place, version.size, version.tag), number)

    def take_counts(self) -> Counter[str]:
        """What was counted since the last call."""
        counts = self.remote.take_counts()
        if self.cache is not None:
            counts.update(self.cache.take_counts())
        return counts

    def close(self) -> None:
        """Ends connections."""
        self.remote.close()


def _held(cache: DiskCache, keys: dict[_Block, str]) -> dict[_Block, bytes | None]:
    return {block: cache.get(key) for block, key in keys.items()}


def _blocks_of(file: int, start: int, stop: int) -> list[_Block]:
    return [(file, number) for number in range(start // BLOCK, -(-stop // BLOCK))] if start < stop else []


def _bounds(number: int, version: Version | None) -> tuple[int, int]:
    assert version is not None
    return number * BLOCK, min((number + 1) * BLOCK, version.size)


def _assembled(blocks: Sequence[_Block], start: int, stop: int, found: dict[_Block, bytes | None]) -> memoryview:
    parts = []
    for file, number in blocks:
        data = found[file, number]
        assert data is not None
        parts.append(memoryview(data)[max(0, start - number * BLOCK) : stop - number * BLOCK])
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
