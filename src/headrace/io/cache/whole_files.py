"""The disk cache of remote files that are a sample each.

NOTE [ versions of whole files ]

* A kept file must be known with its version, which the server is asked for once in a run: all processes share what was said, as a number a
  file in shared memory.
* What is not kept is asked for again with its version, and fetched in that: so what is kept under a version is of that version.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from headrace.io.cache.disk_cache import DiskCache
from headrace.io.files import Version
from headrace.io.ranges import ByteRanges
from headrace.io.remote.client import Remote
from headrace.memory.anonymous import SharedArray


class WholeFiles:
    """Files of a server, each read whole, through the disk cache.

    Args:
        remote: of the server.
        cache: of this machine; None: everything is fetched at each read.
        count: how many files there are.
        path: number of a file -> its path on the server.
    """

    def __init__(self, remote: Remote, cache: DiskCache | None, count: int, path: Callable[[int], str]) -> None:
        self.remote: Remote = remote
        self.cache: DiskCache | None = cache
        self._path = path
        self._known: SharedArray | None = None  # [count] uint64: a hash of each file's version; 0: nobody has asked
        if cache is not None:
            self._known = SharedArray(np.zeros(count, np.uint64))
            self._known.moved()  # into memory that workers share, while there are none

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """The contents of some files.

        Raises:
            RemoteError, FileChangedError, DataNotFoundError, AccessError: see `Remote.read`.
        """
        each = list(dict.fromkeys(numbers))
        paths = dict(zip(each, map(self._path, each), strict=True))
        if self.cache is None or self._known is None:
            contents = dict(zip(each, self.remote.read_files(list(paths.values())), strict=True))
        else:
            contents = self._through_cache(paths, self.cache, self._known)
        return [contents[number] for number in numbers]

    def _through_cache(self, paths: dict[int, str], cache: DiskCache, shared: SharedArray) -> dict[int, bytes]:
        known = shared.moved()
        versions = self._ask([number for number in paths if not known[number]], paths, known)
        contents: dict[int, bytes] = {}
        for number, path in paths.items():
            data = cache.get(self._key(path, int(known[number])))
            if data is not None:
                contents[number] = data
        missing = [number for number in paths if number not in contents]
        versions |= self._ask([number for number in missing if number not in versions], paths, known)
        keys = {number: self._key(paths[number], int(known[number])) for number in missing}
        with cache.claim(keys.values(), self.remote.deadline):
            for number in list(missing):
                data = cache.get(keys[number])
                if data is not None:
                    contents[number] = data
            missing = [number for number in missing if number not in contents]
            wanted = ByteRanges.of((paths[number], 0, versions[number].size) for number in missing)
            of = {paths[number]: versions[number] for number in missing}
            for number, content in zip(missing, self.remote.read(wanted, [of[path] for path in wanted.paths]), strict=True):
                contents[number] = data = bytes(content)
                if versions[number].tag is not None:  # else nobody could say whether it still holds
                    cache.put(keys[number], data)
        return contents

    def _ask(self, numbers: Sequence[int], paths: dict[int, str], known: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> dict[int, Version]:
        if not numbers:
            return {}
        found = dict(zip(numbers, self.remote.versions([paths[number] for number in numbers]), strict=True))
        for number, version in found.items():
            digest = hashlib.blake2b(repr((version.size, version.tag)).encode(), digest_size=8).digest()
            known[number] = int.from_bytes(digest, "little") or 1
        return found

    def _key(self, path: str, known: int) -> str:
        return DiskCache.key(path, (self.remote.place, "whole", known), 0)

    def take_counts(self) -> Counter[str]:
        """What was counted in this process since the last call."""
        counts = self.remote.take_counts()
        if self.cache is not None:
            counts.update(self.cache.take_counts())
        return counts

    def close(self) -> None:
        """Ends this process's connections."""
        self.remote.close()
