"""Files of one server: versions, ranges through the disk cache, prefetch.

NOTE [ versions of whole files ]

* A whole file (`headrace.io.ranges.WHOLE`) is read in its current version, unless its version was
  requested before.
* To cache a whole file, its version must be known. It is requested from the server at each read;
  for numbered files (`share_versions`) once per run: all processes share the answers, as one number
  per file in shared memory.
* A file that is not cached is requested again with its version, and fetched in this version: so
  what is cached under a version is of that version.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, BinaryIO, cast

import numpy as np

from headrace.errors import AccessError, FormatError
from headrace.io import ordered
from headrace.io.disk_cache import DiskCache
from headrace.io.files import Files, Version
from headrace.io.paths import cache_folder, redact, with_index
from headrace.io.ranges import WHOLE, ByteRanges
from headrace.io.remote.client import Remote
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote.prefetch import Prefetcher
from headrace.io.remote.requests import is_http
from headrace.memory.anonymous import SharedArray
from headrace.memory.budget import parse_size

BLOCK = 1 << 20
"""Bytes of a block: what is cached, and fetched at least."""
_WORTH = BLOCK // 2  # bytes of a range for which whole blocks are fetched in any case

_bypasses_cache = ContextVar("_bypasses_cache", default=False)
"""True: cached blocks are not trusted, but replaced; coroutines have their caller's context."""

_Block = tuple[str, int]
"""A path, and the number of a block in that file; `WHOLE`: all of it."""


class RemoteFiles(Remote, Files):
    """The files of one server; see `headrace.io.files.Files`. Thread-safe. A pickle contains
    options and versions, but no connections.

    Args:
        url: URL of any of the files.
        options: how URLs are read.

    Raises:
        ConfigError: an option is invalid, or the protocol is unknown.
    """

    is_remote = True

    def __init__(self, url: str, options: RemoteOptions) -> None:
        super().__init__(url, options)
        self.options: RemoteOptions = options
        self.cache_dir = options.cache_dir
        self.cache: DiskCache | None = None
        if options.disk_cache_size is not None:
            self.cache = DiskCache(
                str(cache_folder(options.cache_dir)),
                parse_size(options.disk_cache_size, "disk_cache_size"),
            )
        self._versions: dict[str, Version] = {}
        self._nbytes = 0  # of the files in `_versions`
        self._beside: dict[str, bytes | None] = {}
        self._numbered: Sequence[str] = ()
        # [len(_numbered)] uint64: of the versions; 0: not requested yet
        self._hashes: SharedArray | None = None
        self._prefetcher = Prefetcher(self.begin)

    # -- which files

    def learn(self, urls: Sequence[str]) -> list[Version]:
        """Requests the versions of files, all at once. All later reads are of these versions.

        Raises:
            DataNotFoundError, AccessError, RemoteError: see `versions`.
        """
        new = [url for url in dict.fromkeys(urls) if url not in self._versions]
        if new:
            self.run(self._learn(new))
        return [self._versions[url] for url in urls]

    def learn_beside(self, urls: Iterable[str]) -> None:
        """Fetches the index next to each file, for `beside`."""
        new = [url for url in dict.fromkeys(urls) if url not in self._beside]
        # without the right to list a bucket, S3 denies access to what is missing
        with contextlib.suppress(AccessError):
            if new:
                found = self.find_metadata(list(map(with_index, new)))
                self._beside.update(zip(new, found, strict=True))

    def find_versions(self, urls: Sequence[str]) -> list[Version | None]:
        """Requests the versions of files that may be missing (None).

        Raises:
            AccessError, RemoteError: see `versions_if_there`.
        """
        new = [url for url in dict.fromkeys(urls) if url not in self._versions]
        if new:
            for url, version in zip(new, self.run(self.versions_if_there(new)), strict=True):
                self._note(url, version)
        return [self._versions.get(url) for url in urls]

    async def _learn(self, urls: Sequence[str]) -> None:
        for url, version in zip(urls, await self.versions(urls), strict=True):
            self._note(url, version)

    def forget(self, urls: Iterable[str]) -> None:
        """Drops the versions of files: they are read in whatever version they have then."""
        for url in urls:
            self._note(url, None)

    def share_versions(self, paths: Sequence[str]) -> None:
        """Shares the versions of numbered files among processes: for ranges with these very `paths`
        each version is requested once, if there is a disk cache.
        """
        self._numbered = paths
        if self.cache is not None:
            self._hashes = SharedArray(np.zeros(len(paths), np.uint64))
            self._hashes.moved()  # into memory that workers share, while there are none

    def _note(self, url: str, version: Version | None) -> None:
        before = self._versions.pop(url, None)
        self._nbytes -= 0 if before is None else before.size
        if version is not None:
            self._versions[url] = version
            self._nbytes += version.size

    def version(self, url: str) -> Version:
        return self._versions.get(url) or self.learn([url])[0]

    def identity(self, url: str) -> list[str | int | None]:
        version = self.version(url)
        return [self.place, redact(url), version.size, version.tag]

    def beside(self, url: str) -> bytes | None:
        return self._beside.get(url)

    def check_ranges(self, url: str) -> None:
        """Requests the last byte of a file, if its server has not announced byte ranges.

        Raises:
            RemoteError: it sends whole files instead.
        """
        size = self.version(url).size
        if not self.knows_ranges and size > 1 and is_http(self.filesystem):
            self.run(self.piece({}, url, size - 1, size))

    # -- reading

    def read(self, ranges: ByteRanges) -> list[memoryview | None]:
        if _bypasses_cache.get():
            return self.run(self._fetch(ranges))
        taken = self._prefetcher.take(ranges)
        left = [number for number, one in enumerate(taken) if one is None]
        if len(left) == ranges.size:
            return self.run(self._fetch(ranges))
        fetched = iter(self.run(self._fetch(ranges.take(np.array(left)))) if left else [])
        return [next(fetched) if one is None else one[0] for one in taken]

    def stream(self, path: str) -> BinaryIO:
        return io.BufferedReader(_Raw(self, path), 1 << 16)

    def begin(self, ranges: ByteRanges, urgent: bool = True) -> Future[list[memoryview | None]]:
        """Begins to read ranges; see `read`."""
        return self.submit(self._fetch(ranges, urgent))

    def find_metadata(self, urls: Sequence[str]) -> list[bytes | None]:
        """The content of small files, without the disk cache; None for those that are missing,
        or may not be read though others may.

        Raises:
            AccessError, RemoteError: see `find_files`.
        """
        return self.run(self.find_files(urls, are_metadata=True))

    @contextlib.contextmanager
    def bypassing_cache(self) -> Iterator[None]:
        before = _bypasses_cache.set(True)
        try:
            yield
        finally:
            _bypasses_cache.reset(before)

    async def _fetch(self, ranges: ByteRanges, urgent: bool = True) -> list[memoryview | None]:
        parts: dict[int, tuple[str, int, int]] = {}
        wholes: dict[str, int] = {}
        for number, (path, start, stop) in enumerate(ranges.each()):
            if start == 0 and stop == WHOLE:
                if path not in self._versions:
                    wholes[path] = int(ranges.file[number])
                    continue
                stop = self._versions[path].size
            if start >= 0:
                parts[number] = (path, start, stop)
        found = await self._fetch_parts(parts, urgent)
        if wholes:
            is_numbered = ranges.paths is self._numbered
            contents = await self._fetch_wholes(wholes, is_numbered, urgent)
            for number in np.flatnonzero(ranges.is_whole).tolist():
                content = contents.get(ranges.paths[ranges.file[number]])
                if content is not None:
                    found[number] = memoryview(content)
        return [found.get(number) for number in range(ranges.size)]

    async def _fetch_parts(
        self, parts: Mapping[int, tuple[str, int, int]], urgent: bool
    ) -> dict[int, memoryview]:
        """The bytes of ranges, by their numbers."""
        versions = self._versions
        new = {path for path, _, _ in parts.values()} - versions.keys()
        if new:
            await self._learn(list(new))
        blocks: dict[int, list[_Block]] = {}
        # small ranges are not worth a block, which would be gone before its rest is read
        least = 1
        if self.cache is not None and self._nbytes > self.cache.limit:
            least = _WORTH
        for number, (path, start, stop) in parts.items():
            if stop > versions[path].size:
                raise FormatError(
                    f"{redact(path)} ends before byte {stop:,}: the file is cut short"
                )
            if self.cache is not None and versions[path].tag and stop - start >= least:
                of_file = range(start // BLOCK, -(-stop // BLOCK))
                blocks[number] = [(path, one) for one in of_file]
        others = [number for number in parts if number not in blocks]
        data = await self.fetch(ByteRanges.of(parts[n] for n in others), versions, urgent)
        found = dict(zip(others, data, strict=True))
        needed = set(itertools.chain(*blocks.values()))
        keys = {(path, n): self._key(path, n, _hash_of(versions[path])) for path, n in needed}
        contents = await self._fetch_blocks(keys, versions, urgent)
        for number, some in blocks.items():
            first = some[0][1] * BLOCK
            joined = contents[some[0]]
            if len(some) > 1:
                joined = b"".join([contents[block] for block in some])
            _, start, stop = parts[number]
            found[number] = memoryview(joined)[start - first : stop - first]
        return found

    async def _fetch_wholes(
        self, paths: Mapping[str, int], is_numbered: bool, urgent: bool
    ) -> Mapping[str, bytes | None]:
        """The contents of files, by path with its number; None: there is no such file. See NOTE
        [ versions of whole files ].
        """
        if self.cache is None:
            return dict(zip(paths, await self.find_files([*paths], urgent=urgent), strict=True))
        hashes = None
        if is_numbered and self._hashes is not None:
            hashes = self._hashes.moved()
        known: dict[_Block, str] = {}
        if hashes is not None:
            for path, number in paths.items():
                if hashes[number]:
                    known[path, WHOLE] = self._key(path, WHOLE, int(hashes[number]))
        blocks = await asyncio.to_thread(self._cached, known)
        left = [path for path in paths if (path, WHOLE) not in blocks]
        versions: dict[str, Version] = {}
        keys: dict[_Block, str] = {}
        found = await self.versions_if_there(left)
        for path, version in zip(left, found, strict=True):
            if version is None:
                continue
            versions[path] = version
            if hashes is not None:
                hashes[paths[path]] = _hash_of(version)
            if version.tag is not None:
                keys[path, WHOLE] = self._key(path, WHOLE, _hash_of(version))
        blocks |= await self._fetch_blocks(keys, versions, urgent)
        contents = dict.fromkeys(paths) | {path: content for (path, _), content in blocks.items()}
        left = [path for path in versions if contents[path] is None]
        return contents | dict(zip(left, await self.find_files(left, urgent=urgent), strict=True))

    # -- the disk cache

    def _key(self, path: str, number: int, version: int) -> str:
        """The name of a block in the cache; `version` is the hash of its file's version."""
        return DiskCache.key(path, (self.place, version), number)

    def _cached(self, keys: Mapping[_Block, str]) -> dict[_Block, bytes]:
        if self.cache is None or _bypasses_cache.get():
            return {}
        found = {block: self.cache.get(key) for block, key in keys.items()}
        return {block: data for block, data in found.items() if data is not None}

    async def _fetch_blocks(
        self, keys: Mapping[_Block, str], versions: Mapping[str, Version], urgent: bool
    ) -> dict[_Block, bytes]:
        """Blocks from the cache; missing ones are fetched, each by one process of this machine."""
        if self.cache is None or not keys:
            return {}
        found = await asyncio.to_thread(self._cached, keys)
        missing = {block: key for block, key in keys.items() if block not in found}
        if not missing:
            return found
        async with self.cache.claimed(missing.values(), self.patience):
            # another process may have fetched them meanwhile
            found |= await asyncio.to_thread(self._cached, missing)
            wanted = [block for block in missing if block not in found]
            ranges = ByteRanges.of(_bounds(*block, versions[block[0]].size) for block in wanted)
            data = await self.fetch(ranges, versions, urgent)
            for block, one in zip(wanted, data, strict=True):
                found[block] = bytes(one)
                await asyncio.to_thread(self.cache.put, keys[block], found[block])
        return found

    # -- what is read next

    def prefetch(self, pieces: Sequence[ByteRanges], urgent: bool = False) -> None:
        self._prefetcher.begin(pieces, urgent)

    def drop_prefetched(self) -> None:
        self._prefetcher.drop()

    def hold_prefetched(self, nbytes: int) -> None:
        self._prefetcher.resize(nbytes)

    @property
    def bytes_prefetched(self) -> int:
        return self._prefetcher.untouched

    def take_counts(self) -> Counter[str]:
        counts = super().take_counts()
        if self.cache is not None:
            counts.update(self.cache.take_counts())
        return counts

    def explain(self) -> str:
        if self.cache is None:
            return "read by ranges"
        return f"read by ranges; {self.cache.explain()}"

    def close(self) -> None:
        self._prefetcher.drop()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_prefetcher"]
        return {**state, "_beside": {}, "room": self._prefetcher.room}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._prefetcher = Prefetcher(self.begin, state.pop("room"))
        super().__setstate__(state)


def _hash_of(version: Version) -> int:
    """A hash of a version in 64 bits; never 0."""
    digest = hashlib.blake2b(repr((version.size, version.tag)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _bounds(path: str, number: int, size: int) -> tuple[str, int, int]:
    if number == WHOLE:
        return path, 0, size
    return path, number * BLOCK, min((number + 1) * BLOCK, size)


# -- files read once, from beginning to end, with several requests in flight

PIECE = 4 << 20
"""Bytes of a piece; of several small files together too."""
AHEAD = 8
"""Pieces, or groups of small files, that are in flight at once."""
_TOGETHER = 64  # small files of a group

Part = tuple[int, memoryview]
"""Where in its file a part begins, and its bytes."""


def in_order(files: RemoteFiles, ranges: ByteRanges) -> Iterator[Part]:
    """The bytes of ranges, one after the other, in parts of at most `PIECE` bytes; empty ranges
    have no part.

    Args:
        files: the files of the server.
        ranges: the ranges.

    Raises:
        FormatError, RemoteError, FileChangedError, DataNotFoundError, AccessError: see
            `RemoteFiles.read`.
    """
    pieces = ranges.split(PIECE)[0]
    numbers = np.arange(pieces.size)
    ends = np.cumsum(pieces.nbytes) - 1
    # fetched together: about `PIECE` bytes, and no more than some pieces
    cuts = np.flatnonzero(np.diff(ends // PIECE) | np.diff(numbers // _TOGETHER)) + 1
    groups = map(pieces.take, np.split(numbers, cuts))
    begun = ((group, files.begin(group)) for group in groups)
    with contextlib.closing(ordered.in_order(begun, AHEAD)) as fetched:
        for group, contents in fetched:
            yield from zip(group.start.tolist(), cast(list[memoryview], contents), strict=True)


class _Raw(io.RawIOBase):
    def __init__(self, files: RemoteFiles, url: str) -> None:
        self._parts = in_order(files, ByteRanges.of([(url, 0, files.version(url).size)]))
        self._left = memoryview(b"")
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if not self._left:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._left = part[1]
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        self._at = self._at + count
        return count

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._parts.close()  # type: ignore[attr-defined]
        super().close()
