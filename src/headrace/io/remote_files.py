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
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from headrace.errors import AccessError, DataNotFoundError, FormatError
from headrace.io.cache.blocks import cached_wholes, fetch_cached, version_hash
from headrace.io.cache.disk_cache import DiskCache
from headrace.io.files import Files, Version
from headrace.io.paths import cache_folder, chain_of, redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote.client import Remote
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote.prefetch import Prefetcher
from headrace.memory.anonymous import SharedArray
from headrace.memory.budget import parse_size

INDEX = ".index"
"""What is appended to a URL, for what is needed to open it (see `headrace.io.index`)."""


class RemoteFiles(Files):
    """The files of one server, see `headrace.io.files.Files`. Thread-safe; a pickle takes along how
    to reach them, and versions.

    Args:
        url: of any of them.
        options: how they are reached.

    Raises:
        ConfigError: an option makes no sense, or the protocol is unknown.
    """

    is_remote = True

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self.options: RemoteOptions = options
        self._remote = Remote(url, options)
        self.patience: float = self._remote.deadline
        self.place: str = self._remote.place
        """What tells two servers apart whose URLs look alike."""
        self.cache: DiskCache | None = None
        if options.disk_cache_size is not None:
            self.cache = DiskCache(
                str(cache_folder(options.cache_dir)),
                parse_size(options.disk_cache_size, "disk_cache_size"),
            )
        self._versions: dict[str, Version] = {}
        self._nbytes = 0  # of all these files
        self._beside: dict[str, bytes] = {}
        self._handed_out: tuple[str, bytes] = "", b""
        self._numbered: Sequence[str] = ()
        # [len(_numbered)] uint64: of the versions; 0: nobody has asked
        self._hashes: SharedArray | None = None
        self._prefetcher = Prefetcher(self._begin_prefetch)
        self._bypass = _Bypass()
        self.has_warned = False
        """Was it said already that an index can't be kept?"""

    # -- which files

    @property
    def filesystem(self) -> Any:
        """fsspec's, of this process."""
        return self._remote.filesystem

    def ask(self, question: str, url: str, **options: Any) -> Any:
        """What is there, and not what is in it: see `Remote.ask`."""
        return self._remote.ask(question, url, **options)

    def url_of(self, path: str) -> str:
        """The URL of a path on the server, by which it may be read as well."""
        return self._remote.url_of(path)

    def shown(self, path: str) -> str:
        """A path on the server, or a URL, as messages name it: without secrets."""
        return self._remote.shown(path)

    def learn(
        self, urls: Sequence[str], beside: Callable[[str], bool] = lambda url: False
    ) -> list[Version]:
        """Sizes and versions of files, which all reads are of from now on, asked for at once.

        Args:
            urls: of the files.
            beside: True if what lies beside a file under the same name with ``.index`` is to be
                fetched too. It is called when the version is known.

        Raises:
            DataNotFoundError, AccessError, RemoteError: see `Remote.versions`.
        """
        new = [url for url in dict.fromkeys(urls) if url not in self._versions]
        if new:
            self._remote.run(self._learn(new))
        paths = [with_index(url) for url in new if beside(url)]
        # who may not list a bucket is told that what is missing is not for him
        with contextlib.suppress(AccessError):
            if paths:
                for path, data in zip(paths, self.find_metadata(paths), strict=True):
                    if data is not None:
                        self._beside[path] = data
        return [self._versions[url] for url in urls]

    def find_versions(self, urls: Sequence[str], afresh: bool = False) -> list[Version | None]:
        """The versions of files that may be missing: None then.

        Args:
            urls: of the files.
            afresh: ask also for those that are known.

        Raises:
            AccessError, RemoteError: see `Remote.find_versions`.
        """
        new = [url for url in dict.fromkeys(urls) if afresh or url not in self._versions]
        for url, version in zip(
            new, self._remote.run(self._remote.find_versions(new)) if new else [], strict=True
        ):
            self._note(url, version)
        return [self._versions.get(url) for url in urls]

    async def _learn(self, urls: Sequence[str]) -> None:
        for url, version in zip(urls, await self._remote.versions(urls), strict=True):
            self._note(url, version)

    def forget(self, urls: Iterable[str]) -> None:
        """From now on these files are read in whatever version they have."""
        for url in urls:
            self._note(url, None)

    def sizes(self, urls: Sequence[str]) -> list[int | None]:
        """Bytes of each file, now; None where the server does not say. See `Remote.sizes`."""
        return self._remote.run(self._remote.sizes(urls))

    def share_versions(self, paths: Sequence[str]) -> None:
        """Numbers files: of ranges with these very `paths` versions are asked for once, by all
        processes together, if they are cached.
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
        """What lay beside a file as its index when `learn` looked; None: nothing. It is handed
        out once, and again until another one is.
        """
        path = with_index(url)
        if path in self._beside:
            self._handed_out = path, self._beside.pop(path)
        if self._handed_out[0] == path:
            return self._handed_out[1]
        return None

    def drop_beside(self) -> None:
        """What was handed out last is of no use."""
        self._handed_out = "", b""

    def check_ranges(self, url: str) -> None:
        """Makes sure that a file can be read by ranges: see `Remote.check_ranges`."""
        self._remote.run(self._remote.check_ranges(url, self.version(url).size))

    def is_folder(self, url: str) -> bool:
        """True if there is a folder of that name.

        Raises:
            AccessError, RemoteError: as for `version`.
        """
        return bool(self.ask("isdir", url))

    # -- reading

    def read(self, ranges: ByteRanges) -> list[memoryview | None]:
        if self._bypass.is_on:
            return self._remote.run(self._fetch(ranges, bypass=True))
        taken = self._prefetcher.take(ranges)
        left = [number for number, one in enumerate(taken) if one is None]
        if len(left) == ranges.size:
            return self._remote.run(self._fetch(ranges))
        fetched = iter(self._remote.run(self._fetch(ranges.take(np.array(left)))) if left else [])
        return [next(fetched) if one is None else one[0] for one in taken]

    def read_each(self, ranges: ByteRanges) -> list[bytes]:
        found = []
        for number, data in enumerate(self.read(ranges)):
            if data is None:
                raise DataNotFoundError(
                    f"{self.shown(ranges.paths[ranges.file[number]])}: there is no such file"
                )
            found.append(
                data.obj
                if isinstance(data.obj, bytes) and len(data.obj) == data.nbytes
                else bytes(data)
            )
        return found

    def begin(self, ranges: ByteRanges) -> Future[list[memoryview | None]]:
        """`read`, begun and not waited for; past the disk cache where this thread is
        `bypassing_cache`.
        """
        return self._remote.submit(self._fetch(ranges, bypass=self._bypass.is_on))

    def find_metadata(self, urls: Sequence[str]) -> list[bytes | None]:
        """The content of small files, past the disk cache; None for those that are missing, or may
        not be read while others may.

        Raises:
            AccessError, RemoteError: see `Remote.find_files`.
        """
        return self._remote.run(self._remote.find_files(urls, denied=True, small=True))

    @contextlib.contextmanager
    def bypassing_cache(self) -> Iterator[None]:
        self._bypass.is_on = True
        try:
            yield
        finally:
            self._bypass.is_on = False

    def _fetch(
        self, ranges: ByteRanges, urgent: bool = True, bypass: bool = False
    ) -> Coroutine[Any, Any, Any]:
        is_plain = ranges.size and ranges.is_written.all() and not ranges.is_whole.any()
        return (self._fetch_parts if is_plain else self._fetch_all)(ranges, urgent, bypass)

    async def _fetch_all(
        self, ranges: ByteRanges, urgent: bool, bypass: bool
    ) -> list[memoryview | None]:
        found: list[memoryview | None] = [None] * ranges.size
        parts = np.flatnonzero(ranges.is_written & ~ranges.is_whole)
        wholes = np.flatnonzero(ranges.is_whole)
        if len(parts):
            for number, data in zip(
                parts.tolist(),
                await self._fetch_parts(ranges.take(parts), urgent, bypass),
                strict=True,
            ):
                found[number] = data
        if len(wholes):
            contents = await self._fetch_wholes(ranges.take(wholes), urgent, bypass)
            for number in wholes.tolist():
                content = contents[ranges.paths[ranges.file[number]]]
                found[number] = None if content is None else memoryview(content)
        return found

    async def _fetch_parts(
        self, ranges: ByteRanges, urgent: bool, bypass: bool
    ) -> list[memoryview]:
        used = {file: ranges.paths[file] for file in set(ranges.file.tolist())}
        new = [path for path in used.values() if path not in self._versions]
        if new:
            await self._learn(new)
        sizes = np.zeros(len(ranges.paths), np.int64)
        sizes[list(used)] = [self._versions[path].size for path in used.values()]
        beyond = np.flatnonzero(ranges.stop > sizes[ranges.file])
        if len(beyond):
            path = ranges.paths[ranges.file[beyond[0]]]
            stop = int(ranges.stop[beyond[0]])
            raise FormatError(f"{redact(path)} ends before byte {stop:,}: the file is cut short")
        if self.cache is None:
            return await self._remote.fetch(ranges, self._versions, urgent)
        all_fits = self._nbytes <= self.cache.limit
        return await fetch_cached(
            self._remote,
            self.cache,
            ranges,
            self._versions,
            bypass=bypass,
            all_fits=all_fits,
            urgent=urgent,
        )

    async def _fetch_wholes(
        self, ranges: ByteRanges, urgent: bool, bypass: bool
    ) -> dict[str, bytes | memoryview | None]:
        """The contents of files, by path; None: there is no such file. See NOTE [ versions of
        whole files ].
        """
        numbers = {ranges.paths[file]: file for file in ranges.file.tolist()}
        contents: dict[str, bytes | memoryview | None] = {}
        versions = {path: self._versions[path] for path in numbers if path in self._versions}
        unknown = [path for path in numbers if path not in versions]
        if self.cache is None:
            contents |= zip(
                unknown, await self._remote.find_files(unknown, urgent=urgent), strict=True
            )
        else:
            hashes = (
                self._hashes.moved()
                if self._hashes is not None and ranges.paths is self._numbered
                else None
            )
            if hashes is not None and not bypass:
                known = {
                    path: int(hashes[numbers[path]]) for path in unknown if hashes[numbers[path]]
                }
                contents |= await asyncio.to_thread(cached_wholes, self.cache, self.place, known)
                unknown = [path for path in unknown if path not in contents]
            for path, version in zip(
                unknown, await self._remote.find_versions(unknown), strict=True
            ):
                if version is None:
                    contents[path] = None
                    continue
                versions[path] = version
                if hashes is not None:
                    hashes[numbers[path]] = version_hash(version)
        if versions:
            wholes = ByteRanges.of_wholes(list(versions), range(len(versions)))
            fetched = await fetch_cached(
                self._remote, self.cache, wholes, versions, bypass=bypass, urgent=urgent
            )
            contents |= zip(versions, fetched, strict=True)
        return contents

    # -- what is read next

    def prefetch(self, pieces: Sequence[ByteRanges], urgent: bool = False) -> None:
        self._prefetcher.begin(pieces, urgent)

    def _begin_prefetch(self, ranges: ByteRanges, urgent: bool) -> Future[list[memoryview | None]]:
        return self._remote.submit(self._fetch(ranges, urgent))

    def drop_prefetched(self) -> None:
        self._prefetcher.drop()

    def hold_prefetched(self, nbytes: int) -> None:
        self._prefetcher.resize(nbytes)

    @property
    def bytes_prefetched(self) -> int:
        return self._prefetcher.untouched

    def take_counts(self) -> Counter[str]:
        counts = self._remote.take_counts()
        if self.cache is not None:
            counts.update(self.cache.take_counts())
        return counts

    def explain(self) -> str:
        if self.cache is None:
            return "read by ranges"
        return f"read by ranges; {self.cache.explain()}"

    def close(self) -> None:
        self._prefetcher.drop()
        self._remote.close()

    def __getstate__(self) -> dict[str, Any]:
        state = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_prefetcher", "_bypass")
        }
        return {**state, "_beside": {}, "_handed_out": ("", b""), "room": self._prefetcher.room}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._prefetcher = Prefetcher(self._begin_prefetch, state.pop("room"))
        self._bypass = _Bypass()
        self.__dict__.update(state)


class _Bypass(threading.local):
    is_on = False


def below(url: str, name: str) -> str:
    """The URL of what lies below another one: before the query, if there is one."""
    if name:
        return _with_path(
            url, lambda path: f"{path.rstrip('/') if path.rstrip('/')[-1:] != ':' else path}/{name}"
        )
    return url


def with_index(url: str) -> str:
    """The URL of what lies beside a file as its index: before the query, if there is one."""
    return _with_path(url, lambda path: path + INDEX)


def _with_path(url: str, change: Callable[[str], str]) -> str:
    first, *others = chain_of(url)
    if others and "://" not in first:  # of simplecache::s3://bucket/key the second is the file's
        return f"{first}::{_with_path('::'.join(others), change)}"
    path, question, query = first.partition("?")
    return "::".join([f"{change(path)}{question}{query}", *others])


def read_whole(url: str, options: RemoteOptions) -> bytes | None:
    """The bytes of one remote file; None: there is none."""
    server = RemoteFiles(url, options)
    try:
        return server.find_metadata([url])[0]
    finally:
        server.close()
