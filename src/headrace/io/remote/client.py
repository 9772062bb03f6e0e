"""Reads byte ranges from a server, with retries, deadlines, limited concurrency and versions.

NOTE [ a fetch ]

* Ranges with small gaps between them are merged. Long ranges are cut, so that several connections
  share them. Each piece is one request.
* A piece is requested again after temporary errors (5xx, 408, 429, resets, time-outs, bodies of
  another length), after a random wait that grows ("full jitter": M. Brooker, "Exponential backoff
  and jitter", AWS Architecture Blog, 2015), or as long as Retry-After says. All its attempts end at
  the deadline, which is extended by the time that an attempt takes longer because bytes still
  arrive. Time is measured by the monotonic clock.
* At most `MOST_URGENT` pieces that a reader waits for are in flight, and besides them at most
  `MOST_AHEAD` prefetched ones: more would share the bandwidth with what is needed first.
* Files are identified with size and version (ETag). If the protocol supports it, each request names
  the expected version. Many servers ignore that: so the ETag, or Last-Modified, of each answer is
  compared with that at opening; otherwise the length. A file that was replaced is an error;
  versions are never mixed.
* Only the bytes that were asked for are returned: Content-Range, length and version of each answer
  are compared. The first error of a fetch cancels the rest of it.
* While the server has never answered, an unknown host or a refused connection fails within a
  second, since a wrong URL is more likely than a restarting server. Each retry is logged, from the
  second on at WARNING.
* After a piece has failed, each further piece is requested only once until one succeeds, so that
  reading many pieces from a dead server does not wait for a deadline each.

NOTE [ mirrors ]

* A redirection may lead to servers that give one object different tags. Of a file behind one a
  range is read at opening. At another tag this range is read again from the server that gave it: if
  the bytes and the size are the same, the tag counts as one of the file's, with a warning. Else the
  file was replaced.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    RemoteError,
    warn,
)
from headrace.io.files import Version
from headrace.io.paths import chain_of, is_url, redact
from headrace.io.ranges import GAP, MOST, ByteRanges, coalesce
from headrace.io.remote import requests
from headrace.io.remote.http import HTTPRanges, NotPlainError, plain_headers
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote.requests import (
    Answer,
    Attempt,
    WrongLengthError,
    check_encoding,
    judged,
    status_of,
    was_replaced,
)
from headrace.memory.processes import PerProcess, renew_after_fork

MOST_URGENT = 64
MOST_AHEAD = 16
_MOST_QUESTIONS = 128  # whose answers are short
_WAIT = 0.1
_LONGEST_WAIT = 10.0
_SAMPLE = 64 << 10  # bytes that are compared to know a mirror
_LISTS = ("find", "glob", "ls")
_SHORT = 10  # the part of the deadline that a piece gets while the server gives nothing
_OPENING_RETRIES = 2  # of a server that has never answered, where nobody answers under its address
# pieces given up, or denied, one after the other, after which it is the server's fault and not
# theirs
_GONE = 4
# names under which file systems give a version
_TAGS = (
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "LastModified",
    "Last-Modified",
    "mtime",
    "created",
)

_log = logging.getLogger(__name__)

T = TypeVar("T")
Ask = Callable[[Attempt], Awaitable[Any]]


class Remote:
    """Reads byte ranges of the files of one server, in any thread and process. Its coroutines are
    for `run` and `submit`.

    Files are named by their URLs, or by their paths on the server.

    Args:
        url: URL of any file there.
        options: how URLs are read.
    """

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self.retries: int = options.retries
        self.patience: float = float(options.deadline)
        self._url = url
        passed = options.storage_options or {}
        self.place: str = repr(
            [
                passed.get("endpoint_url"),
                (passed.get("client_kwargs") or {}).get("endpoint_url"),
                passed.get("account_name"),
            ]
        )
        """Tells servers apart whose URLs are equal."""
        self._filesystem: PerProcess[Any] = PerProcess(
            functools.partial(requests.open_filesystem, url, options.storage_options),
            requests.close_filesystem,
        )
        self.knows_ranges: bool = False
        """True once the server has said that it supports byte ranges."""
        # of files behind a redirection: a range, and the hash of its bytes
        self._samples: dict[str, tuple[int, int, bytes]] = {}
        self._has_answered = False  # pickled too: a server that once answered may be restarting
        self._reset()

    def _reset(self) -> None:
        self._urgent = asyncio.Semaphore(MOST_URGENT)
        self._ahead = asyncio.Semaphore(MOST_AHEAD)
        self._questions = asyncio.Semaphore(_MOST_QUESTIONS)
        self._counts: Counter[str] = Counter()
        self._given_up = 0  # pieces, since something came
        self._denied = 0  # the same, since this user may not have them
        self._plain: HTTPRanges | None = None
        self._is_plain: bool | None = None  # nobody has looked
        # of URL and tag: those of its mirrors, and its own
        self._tags: dict[tuple[str, str], set[str]] = {}
        self._lock = threading.Lock()
        renew_after_fork(self)

    after_fork = _reset  # requests in flight and counts are the parent's

    # -- what callers ask for

    async def versions(self, urls: Sequence[str]) -> list[Version]:
        """Size and tag of each file.

        Raises:
            DataNotFoundError, AccessError: there is none, or it may not be read.
            RemoteError: the server does not tell.
        """
        return await self._each(self._version, urls)

    async def versions_if_there(self, urls: Sequence[str]) -> list[Version | None]:
        """Size and tag of files that may be missing: None then.

        Raises:
            AccessError: one may not be read, so it is unknown whether it exists.
            RemoteError: the server does not tell.
        """
        return await self._each(functools.partial(self._version, may_be_missing=True), urls)

    def sizes(self, urls: Sequence[str]) -> list[int | None]:
        """The present size of each file in bytes; None where the server does not tell.

        Raises:
            DataNotFoundError, AccessError, RemoteError: as for `versions`.
        """

        infos = self.run(self._each(self._info, urls))
        return [None if info["size"] is None else int(info["size"]) for info in infos]

    async def fetch(
        self, ranges: ByteRanges, versions: Mapping[str, Version], urgent: bool = True
    ) -> list[memoryview]:
        """The bytes of each range.

        Args:
            ranges: all of which were written.
            versions: the version that each path must have; other paths may have any.
            urgent: a reader waits for them.

        Raises:
            RemoteError: they can't be fetched within retries and deadline.
            FileChangedError: a file has another version.
            DataNotFoundError, AccessError: there is no such file, or it may not be read.
        """
        wanted = coalesce(ranges, GAP, MOST)
        pieces, edges = wanted.ranges.split(MOST)
        slots = self._urgent if urgent else self._ahead
        data = await self._each(lambda one: self.piece(versions, *one), pieces.each(), slots)
        found = [memoryview(b"")] * ranges.size
        for request, begin in enumerate(wanted.ranges.start.tolist()):
            parts = data[edges[request] : edges[request + 1]]
            whole = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
            numbers = wanted.order[wanted.edges[request] : wanted.edges[request + 1]]
            for number, (_, start, stop) in zip(
                numbers.tolist(), ranges.take(numbers).each(), strict=True
            ):
                found[number] = whole[start - begin : stop - begin]
        return found

    async def find_files(
        self, urls: Sequence[str], urgent: bool = True, are_metadata: bool = False
    ) -> list[bytes | None]:
        """The content of whole files, however long they are, that may be missing: None then.

        Args:
            urls: of the files.
            urgent: a reader waits for them.
            are_metadata: they are small, so that more of them may be in flight. One that may not be
                read counts as missing if another one exists: without the right to list a bucket,
                S3 denies access to what is missing.

        Raises:
            RemoteError, AccessError: as for `fetch`.
        """
        refusals: list[AccessError] = []

        async def one(url: str) -> bytes | None:
            try:
                answer = await self._range(url, 0, None, self.shown(url))
                self._count(bytes_fetched=len(answer.data))
                return bytes(answer.data)
            except DataNotFoundError:
                return None
            except AccessError as error:
                if not are_metadata:
                    raise
                refusals.append(error)
                return None

        slots = self._urgent if urgent else self._ahead
        found = await self._each(one, urls, self._questions if are_metadata else slots)
        if refusals and all(data is None for data in found):
            raise refusals[0]
        return found

    async def _each(
        self,
        function: Callable[[Any], Awaitable[Any]],
        items: Iterable[Any],
        slots: asyncio.Semaphore | None = None,
    ) -> list[Any]:
        """The result of a function for each item; the first error cancels the others."""
        limit = slots or self._questions

        async def result(item: Any) -> Any:
            async with limit:
                return await function(item)

        running = [asyncio.ensure_future(result(item)) for item in items]
        try:
            return list(await asyncio.gather(*running))
        except BaseException:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise

    def ask(
        self, question: str, url: str, *after: Any, before: Sequence[str] = (), **options: Any
    ) -> Any:
        """Calls fsspec's `find`, `glob`, `ls` or another method. A listing may outlast the
        deadline, after which no attempt begins.

        Args:
            question: the name of the method.
            url: the URL, or the path on the file system, that the method takes.
            after, before, options: other arguments: behind that path, before it, and by name.

        Raises:
            DataNotFoundError, AccessError, RemoteError: as for `versions`.
        """

        def answer(_: Attempt) -> Awaitable[Any]:
            path = self.path_of(url)
            return requests.call(self.filesystem, question, *before, path, *after, **options)

        return self.run(self._persist(answer, self.shown(url), question not in _LISTS))

    def take_counts(self) -> Counter[str]:
        """Requests, retries and bytes since the last call, of this process."""
        with self._lock:
            counts = self._counts
            self._counts = Counter()
        return counts

    def close(self) -> None:
        """Closes the connections of this process; the next call opens new ones."""
        with self._lock:
            plain = self._plain
            self._plain = None
            self._is_plain = None
        if plain is not None:
            plain.close()
        self._filesystem.close()

    # -- one piece

    @property
    def filesystem(self) -> Any:
        """The fsspec file system of this process."""
        return self._filesystem.get()

    async def _info(self, url: str, needs_size: bool = False) -> Any:
        """What the file system says of a file."""

        async def ask(_: Attempt) -> Any:
            info = await requests.info_of(self.filesystem, self.path_of(url))
            if needs_size and info.get("size") is None:
                check_encoding(info.get("headers", {}))
                raise WrongLengthError("the answer says no size")
            return info

        return await self._persist(ask, self.shown(url))

    async def _version(self, url: str, may_be_missing: bool = False) -> Version | None:
        try:
            info = await self._info(url, needs_size=True)
        except DataNotFoundError:
            if may_be_missing:
                return None
            raise
        self.knows_ranges |= bool(info.get("accepts_ranges"))
        tag = next((info[name] for name in _TAGS if info.get(name)), None)
        version = Version(int(info["size"]), None if tag is None else str(tag))
        if not info.get("is_redirected") or not version.size or tag is None:
            return version
        start = 0
        if version.size > _SAMPLE:
            start = version.size // 2
        stop = min(version.size, start + _SAMPLE)
        answer = await self._range(url, start, stop, self.shown(url))  # perhaps of another mirror
        self._samples[url] = (start, stop, _digest(answer))
        return Version(answer.size or version.size, answer.etag or answer.modified or version.tag)

    async def piece(
        self, versions: Mapping[str, Version], url: str, start: int, stop: int
    ) -> bytes | bytearray:
        """Fetches one range by one request."""
        where = f"{self.shown(url)}, bytes {start:,} to {stop:,}"
        version = versions.get(url)
        try:
            answer = await self._of_version(url, start, stop, where, version)
        except AccessError as error:
            error.is_of_server = True  # of many samples
            raise
        if version is not None and answer.size not in (None, version.size):
            raise was_replaced(
                where, f" (it has {answer.size:,} bytes, where it had {version.size:,})"
            )
        self._count(bytes_fetched=len(answer.data))
        return answer.data

    async def _of_version(
        self, url: str, start: int, stop: int, where: str, version: Version | None
    ) -> Answer:
        """A range of a version of a file (None: of any); see NOTE [ mirrors ]."""
        if version is None or version.tag is None:
            return await self._range(url, start, stop, where)
        tag = str(version.tag).removeprefix("W/")
        known = self._tags.get((url, tag), {tag})
        etag = None
        if str(version.tag).startswith('"'):  # nothing else can be asked for
            etag = ", ".join(sorted(known))
        try:
            answer = await self._range(url, start, stop, where, etag)
        except FileChangedError:
            if url not in self._samples:
                raise
            answer = await self._range(url, start, stop, where)  # which tells what is there instead
        other = answer.modified if tag.endswith(" GMT") else answer.etag
        if other is None or other.removeprefix("W/") in known:
            return answer
        if not await self._is_mirror(url, answer, version):
            raise was_replaced(where, f" (its version is {other}, and was {tag})")
        known = self._tags.setdefault((url, tag), {tag})
        if other.removeprefix("W/") not in known:  # else another piece has said so meanwhile
            known.add(other.removeprefix("W/"))
            warn(
                f"{self.shown(url)} leads to servers that give it different versions ({tag} and "
                f"{other}); a range of it is the same on both, so both are read. Use the URL of "
                "one server if the others may have other data"
            )
        return answer

    async def _is_mirror(self, url: str, answer: Answer, version: Version) -> bool:
        """True if the server that gave an answer has the same file as that at opening, under
        another tag.
        """
        if url not in self._samples or answer.size not in (None, version.size):
            return False
        start, stop, digest = self._samples[url]

        def ask(attempt: Attempt) -> Awaitable[Answer]:
            return requests.fetch(self.filesystem, answer.url, start, stop, None, attempt)

        again: Answer = await self._persist(ask, self.shown(url))
        return again.etag == answer.etag and _digest(again) == digest

    async def _range(
        self, url: str, start: int, stop: int | None, where: str, etag: str | None = None
    ) -> Answer:
        """A range (without a stop: the whole file), of a version with one of these ETags where the
        server compares them.
        """

        async def ask(attempt: Attempt) -> Answer:
            path = self.path_of(url)
            answer = await self._by_http(path, start, stop, etag, attempt)
            if answer is None:
                answer = await requests.fetch(self.filesystem, path, start, stop, etag, attempt)
            if stop is not None and len(answer.data) != stop - start:
                raise WrongLengthError(f"the answer has {len(answer.data):,} bytes")
            return answer

        answer: Answer = await self._persist(ask, where)
        return answer

    async def _by_http(
        self, path: str, start: int, stop: int | None, etag: str | None, attempt: Attempt
    ) -> Answer | None:
        """A range by plain HTTP, without fsspec; None: that does not suffice here."""
        filesystem = self.filesystem
        with self._lock:
            if self._is_plain is None:
                headers = plain_headers(filesystem)
                self._is_plain = headers is not None
                self._plain = None if headers is None else HTTPRanges(headers, MOST_URGENT)
            plain = self._plain
            if plain is None or not self._is_plain:
                return None
        url = str(filesystem.encode_url(path))
        read = functools.partial(plain.read, url, start, stop, etag, attempt)
        try:
            return await asyncio.get_running_loop().run_in_executor(plain.pool, read)
        except NotPlainError:
            self._is_plain = False
            return None

    async def _persist(self, ask: Ask, where: str, hurries: bool = True) -> Any:
        """Repeats a request until it succeeds, or retries or deadline are used up. An attempt that
        `hurries` ends at the deadline, unless bytes still arrive.
        """
        begin = time.monotonic()
        attempts = 0
        retries = self.retries
        deadline = self.patience
        if self._given_up:
            retries = 0
            deadline /= _SHORT
        longest = deadline
        if retries:
            longest = deadline / 2
        remedy = (
            f"is the server there, and not overloaded? (retries={self.retries}, "
            f"deadline={self.patience:g})"
        )
        while True:
            self._count(requests=1)
            attempt = Attempt(min(begin + deadline - time.monotonic(), longest))
            try:
                answer = await (attempt.result(ask(attempt)) if hurries else ask(attempt))
                self._has_answered = True
                self._given_up = self._denied = 0
                return answer
            except Exception as error:
                self._has_answered |= status_of(error)[0] is not None
                self._has_answered |= isinstance(error, WrongLengthError)
                try:
                    cause, wait, is_absent = judged(error, where)
                except AccessError as refusal:
                    self._denied += 1
                    refusal.is_of_server = self._denied >= _GONE
                    raise
                if hurries:
                    deadline += max(0.0, time.monotonic() - attempt.end)
                if isinstance(error, TimeoutError):
                    cause = attempt.shortfall
                if is_absent and not self._has_answered:
                    retries = min(retries, _OPENING_RETRIES)
                    remedy = "is the URL right, and does the server run?"
            attempts += 1
            if wait is None:
                wait = random.uniform(0, min(_LONGEST_WAIT, _WAIT * 2**attempts))
            if attempts > retries or wait >= begin + deadline - time.monotonic():
                self._given_up += 1
                failure = RemoteError(
                    f"{where}: {attempts} attempt{'s' * (attempts > 1)} in "
                    f"{time.monotonic() - begin:.1f} s failed, the last one because {cause}: "
                    f"{remedy}"
                )
                failure.is_of_server = self._given_up >= _GONE
                raise failure
            self._count(retries=1)
            level = logging.WARNING if attempts > 1 else logging.INFO
            said = "%s: attempt %d failed (%s); the next in %.1f s"
            _log.log(level, said, where, attempts, cause, wait)
            await asyncio.sleep(wait)

    # -- URLs

    @functools.cached_property
    def _ends(self) -> tuple[str, str]:
        return requests.url_ends(self._url, self.filesystem)

    def url_of(self, path: str) -> str:
        """The URL of a path on the server, by which it may be read as well."""
        return requests.url_of(path, self._ends)

    def shown(self, path: str) -> str:
        """A path on the server, or a URL, as messages name it: without secrets."""
        if is_url(path):
            return redact(path)
        before, after = self._ends
        return requests.url_of(redact(path), (redact(before), redact(after)))

    def path_of(self, url: str) -> str:
        """The path of a file on its server; a path stays as it is."""
        return requests.path_in(url, self.filesystem)

    def check_one_filesystem(self, urls: Sequence[str]) -> None:
        """Checks that all URLs are on one file system: one host, one archive.

        Raises:
            ConfigError: they are not.
        """
        places = set()
        for url in urls:
            first, *others = chain_of(url)
            server = requests.server_of(first, self.filesystem)
            places.add((first.partition("://")[0], repr(sorted(server.items())), *others))
        if len(places) > 1:
            shown = ", ".join(map(redact, urls[:3]))
            raise ConfigError(
                f"data_path names more than one file system, server or archive ({shown}): make "
                "one dataset of each"
            )

    # -- the loop

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def run(self, task: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop of this process's file system, and waits for it."""
        future = self.submit(task)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, task: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins to run a coroutine in the loop of this process's file system."""
        try:
            loop = requests.loop_of(self.filesystem)
            return asyncio.run_coroutine_threadsafe(task, loop)
        except BaseException:  # there is no such file system
            task.close()
            raise

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "_urgent",
            "_ahead",
            "_questions",
            "_counts",
            "_lock",
            "_plain",
            "_is_plain",
            "_tags",
        )
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def _digest(answer: Answer) -> bytes:
    return hashlib.blake2b(answer.data, digest_size=16).digest()
