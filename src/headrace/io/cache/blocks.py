"""How are ranges of remote files read through the disk cache?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace.io.cache.disk_cache import DiskCache
from headrace.io.remote.client import Range, Remote, Version

BLOCK = 1 << 20
"""Bytes of a block: what is cached, and fetched at least."""
_WORTH = BLOCK // 2  # bytes of a range for which whole blocks are fetched in any case


class CachedRemote:
    """A `Remote`, and what of it is kept on this machine's disk.

    Args:
        remote: of one server.
        cache: None: everything is fetched.
    """

    def __init__(self, remote: Remote, cache: DiskCache | None = None) -> None:
        self.remote: Remote = remote
        self.cache: DiskCache | None = cache

    def versions(self, urls: Sequence[str]) -> list[Version]:
        """See `Remote.versions`."""
        return self.remote.versions(urls)

    def read(self, ranges: Sequence[Range], afresh: bool = False, all_fits: bool = True) -> list[bytes]:
        """See `Remote.read`. Ranges of no known version are not cached: nobody could say whether they still hold.

        Args:
            ranges: of files.
            afresh: what is kept is not trusted, and replaced.
            all_fits: have all files that will be read room in the cache? Where not, small ranges are not worth a block: it would be gone
                before the rest of it is read.
        """
        cache = self.cache
        if cache is None or any(one.version is None or one.version.tag is None for one in ranges):
            return self.remote.read(ranges)
        wanted = {block: None for one in ranges for block in _blocks_of(one)}
        found = {block: None if afresh else cache.get(self._key(block)) for block in wanted}
        if not all_fits:
            alone = [one for one in ranges if len(one) < _WORTH and any(found[block] is None for block in _blocks_of(one))]
            fetched = dict(zip(alone, self.remote.read(alone), strict=True))
            kept = {block for one in ranges if one not in fetched for block in _blocks_of(one)}
        else:
            fetched, kept = {}, set(found)
        missing = [block for block, data in found.items() if data is None and block in kept]
        if missing:
            with cache.claim(map(self._key, missing), self.remote.deadline):
                found.update((block, None if afresh else cache.get(self._key(block))) for block in missing)
                missing = [block for block in missing if found[block] is None]
                for block, data in zip(missing, self.remote.read(missing), strict=True):
                    found[block] = data
                    cache.put(self._key(block), data)
        return [fetched[one] if one in fetched else _assembled(one, found) for one in ranges]

    def find_files(self, urls: Sequence[str], afresh: bool = False) -> list[bytes | None]:
        """See `Remote.find_files`. With a cache each file's version is asked for first, so that nothing that is kept is taken for new."""
        if self.cache is None:
            return self.remote.find_files(urls)
        versions = self.remote.seek(urls)
        there = [Range(url, 0, version.size, version) for url, version in zip(urls, versions, strict=True) if version is not None]
        found = iter(self.read(there, afresh))
        return [None if version is None else next(found) for version in versions]

    def _key(self, block: Range) -> str:
        version = block.version
        assert version is not None
        return DiskCache.key(block.path, (self.remote.place, version.size, version.tag), block.start // BLOCK)

    def take_counts(self) -> Counter[str]:
        """What was counted since the last call."""
        counts = self.remote.take_counts()
        if self.cache is not None:
            counts.update(self.cache.take_counts())
        return counts

    def close(self) -> None:
        """Ends connections."""
        self.remote.close()


def _blocks_of(wanted: Range) -> list[Range]:
    assert wanted.version is not None
    size = wanted.version.size
    first = wanted.start // BLOCK
    return [
        Range(wanted.path, number * BLOCK, min((number + 1) * BLOCK, size), wanted.version)
        for number in range(first, -(-wanted.stop // BLOCK) if len(wanted) else first)
    ]


def _assembled(wanted: Range, found: dict[Range, bytes | None]) -> bytes:
    parts = []
    for block in _blocks_of(wanted):
        data = found[block]
        assert data is not None
        parts.append(memoryview(data)[max(0, wanted.start - block.start) : wanted.stop - block.start])
    return b"".join(parts)
