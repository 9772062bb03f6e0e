"""Reads byte ranges from a server, with retries, deadlines, limited concurrency and versions.

NOTE [ a fetch ]

* Ranges with small gaps between them are merged. Long ranges are cut, so that several connections
  share them. Each piece is one request.
* A piece is requested again after temporary errors (5xx, 408, 429, resets, time-outs, bodies of
  another length), after a random wait that grows ("full jitter": M. Brooker, "Exponential backoff
  and jitter", AWS Architecture Blog, 2015), or as long as Retry-After says. All its attempts end at
  the deadline, which is extended by the time that an attempt takes longer because bytes still
  arrive. Time is measured by the monotonic clock.
* The number of concurrent pieces is limited: see `headrace.io.remote.concurrency`.
* Files are identified with size and version (ETag). If the protocol supports it, each request names
  the expected version; otherwise the length is compared. A file that was replaced is an error;
  versions are never mixed.
* Only the bytes that were asked for are returned: Content-Range, length and version of each answer
  are compared. The first error of a fetch cancels the rest of it.
* While the server has never answered, an unknown host or a refused connection fails within a
  second, since a wrong URL is more likely than a restarting server. Each retry is logged, from the
  second on at WARNING.
* After a piece has failed, each further piece is requested only once until one succeeds, so that
  reading many pieces from a dead server does not wait for a deadline each.

NOTE [ mirrors ]

* Many servers ignore If-Match, so the ETag, or Last-Modified, of each answer is compared with that
  at opening.
* A redirection may lead to servers that give one object different tags. Of a file behind one a
  range is read at opening. At another tag this range is read again from the server that gave it: if
  the bytes and the size are the same, the tag counts as one of the file's, with a warning. Else the
  file was replaced.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from headrace.errors import AccessError, DataNotFoundError, FileChangedError, RemoteError, warn
from headrace.io.files import Version
from headrace.io.paths import redact
from headrace.io.ranges import GAP, MOST, ByteRanges, coalesce
from headrace.io.remote.concurrency import MOST as CONNECTIONS, Flow, together
from headrace.io.remote.errors import judged, status_of, was_replaced
from headrace.io.remote.fsspec_calls import (
    call,
    close_filesystem,
    fetch,
    fetch_http,
    info_of,
    is_http,
    is_path,
    loop_of,
    open_filesystem,
    path_in,
    url_ends,
    url_of,
)
from headrace.io.remote.http import Answer, HTTPRanges, NotPlainError, encoded_error, plain_headers
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote.timeouts import Attempt, in_time
from headrace.memory.per_process import PerProcess, renew_after_fork

WINDOW = 64 << 20
"""Bytes that a process fetches at once, at most."""
_WAIT = 0.1
_LONGEST_WAIT = 10.0
_GUESSED = 256 << 10  # bytes of a file whose size nobody has asked for
_SAMPLE = 64 << 10  # bytes that are compared to know a mirror
_LISTS = ("find", "glob", "ls")
_SHORT = 10  # the part of the deadline that a piece gets while the server gives nothing
_OPENING_RETRIES = 2  # of a server that has never answered, where nobody answers under its address
# pieces given up, or denied, one after the other, after which it is the server's fault and not
# theirs
_GONE = 4

_log = logging.getLogger(__name__)

T = TypeVar("T")


class _Sample(NamedTuple):
    """A range of a file at opening."""

    start: int
    stop: int
    digest: bytes


def _digest(data: bytes | bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class Remote:
    """Byte ranges of the files of one server, in any thread and process. Its coroutines belong to
    `run` and `submit`.

    Files are named by their URLs, or by their paths on the server.

    Args:
        url: of any file there.
        options: how it is reached.
    """

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self.retries = options.retries
        self.deadline = float(options.deadline)
        self._url = url
        passed = options.storage_options or {}
        self.place: str = repr(
            [
                passed.get("endpoint_url"),
                (passed.get("client_kwargs") or {}).get("endpoint_url"),
                passed.get("account_name"),
            ]
        )
        """What tells two servers apart whose URLs look alike."""
        self._filesystem: PerProcess[Any] = PerProcess(
            functools.partial(open_filesystem, url, options.storage_options), close_filesystem
        )
        self._knows_ranges = False  # as far as the server has said
        self._samples: dict[str, _Sample] = {}  # of files behind a redirection
        self._has_answered = False  # travels to workers: what has answered once may be restarting
        self._reset()

    def _reset(self) -> None:
        self._flow = Flow(WINDOW)
        self._counts: Counter[str] = Counter()
        self._given_up = 0  # pieces, since something came
        self._denied = 0  # the same, since this user may not have them
        self._plain: HTTPRanges | None = None
        self._is_plain: bool | None = None  # nobody has looked
        # of URL and tag: those of its mirrors, and its own
        self._tags: dict[tuple[str, str], set[str]] = {}
        self._has_plain_wholes = True  # until an answer is encoded, or says no length
        self._lock = threading.Lock()
        renew_after_fork(self)

    after_fork = _reset  # what is on its way, and was counted, is the parent's

    # -- what callers ask for

    async def versions(self, urls: Sequence[str]) -> list[Version]:
        """Size and tag of each file.

        Raises:
            DataNotFoundError, AccessError: there is none, or it may not be read.
            RemoteError: the server does not say.
        """
        return await self._each(self._version, urls)

    async def find_versions(self, urls: Sequence[str]) -> list[Version | None]:
        """Size and tag of files that may be missing: None then.

        Raises:
            AccessError: one may not be read, and so nobody knows whether it is there.
            RemoteError: the server does not say.
        """
        return await self._each(functools.partial(_or_none, self._version), urls)

    async def sizes(self, urls: Sequence[str]) -> list[int | None]:
        """Bytes of each file; None where the server does not say.

        Raises:
            DataNotFoundError, AccessError, RemoteError: as for `versions`.
        """
        infos: list[dict[str, Any]] = await self._each(self._info, urls)
        return [None if info.get("size") is None else int(info["size"]) for info in infos]

    async def fetch(
        self, ranges: ByteRanges, versions: Mapping[str, Version], urgent: bool = True
    ) -> list[memoryview]:
        """The bytes of each range.

        Args:
            ranges: all of which were written.
            versions: of paths, in which they are read; those of other paths are read in any.
            urgent: somebody waits for them.

        Raises:
            RemoteError: they can't be had within retries and deadline.
            FileChangedError: the file is another one than that of its version.
            DataNotFoundError, AccessError: there is no such file, or it may not be read.
        """
        requests = coalesce(ranges, GAP, MOST)
        pieces, edges = requests.ranges.split(MOST)
        columns = zip(
            pieces.file.tolist(), pieces.start.tolist(), pieces.stop.tolist(), strict=True
        )
        tasks = [
            functools.partial(self._piece, pieces.paths[file], start, stop, versions)
            for file, start, stop in columns
        ]
        data = await together(tasks, self._flow, pieces.nbytes.tolist(), urgent)
        whole = [
            memoryview(data[a] if b - a == 1 else b"".join(data[a:b]))
            for a, b in itertools.pairwise(edges.tolist())
        ]
        found = [memoryview(b"")] * ranges.size
        starts = ranges.start.tolist()
        stops = ranges.stop.tolist()
        order = requests.order.tolist()
        ends = requests.edges.tolist()
        begins = requests.ranges.start.tolist()
        for request, (first, last) in enumerate(itertools.pairwise(ends)):
            for number in order[first:last]:
                found[number] = whole[request][
                    starts[number] - begins[request] : stops[number] - begins[request]
                ]
        return found

    async def find_files(
        self, urls: Sequence[str], denied: bool = False, urgent: bool = True, small: bool = False
    ) -> list[bytes | None]:
        """The content of whole files, however long they are, that may be missing: None then.

        Args:
            urls: of the files.
            small: they are not much longer than an answer's headers, so that many may be on their
                way at the same time.
            denied: take one that may not be read for missing, as long as another one is there: who
                may not list a bucket is told so.
            urgent: somebody waits for them.

        Raises:
            RemoteError, AccessError: as for `fetch`.
        """
        refusals: list[AccessError] = []

        async def one(url: str) -> bytes | None:
            try:
                found: bytes | None = await _or_none(self._whole, url)
                return found
            except AccessError as error:
                if not denied:
                    raise
                refusals.append(error)
                return None

        found = await self._each(one, urls, 0 if small else _GUESSED, urgent)
        if refusals and all(data is None for data in found):
            raise refusals[0]
        return found

    async def _each(
        self,
        function: Callable[[str], Awaitable[Any]],
        urls: Sequence[str],
        nbytes: int = 0,
        urgent: bool = True,
    ) -> list[Any]:
        return await together(
            [functools.partial(function, url) for url in urls],
            self._flow,
            [nbytes] * len(urls),
            urgent,
        )

    def ask(self, question: str, url: str, **options: Any) -> Any:
        """What fsspec's `find`, `glob`, `ls`, `info` or `isdir` gives. A list of very many takes
        its time: an attempt at one ends when the file system gives it up, and none begins after the
        deadline.

        Args:
            question: the name of the method.
            url: of what is asked for, or its path on the file system.

        Raises:
            DataNotFoundError, AccessError, RemoteError: as for `versions`.
        """

        def answer(_: Attempt) -> Awaitable[Any]:
            return call(self.filesystem, question, self._path(url), **options)

        async def one(url: str) -> Any:
            return await self._persist(
                answer, self.shown(url), lambda _: True, hurries=question not in _LISTS
            )

        return self.run(self._each(one, [url]))[0]

    def take_counts(self) -> Counter[str]:
        """Requests, retries and bytes since the last call, of this process."""
        with self._lock:
            counts = self._counts
            self._counts = Counter()
        return counts

    def close(self) -> None:
        """Ends this process's connections; the next call opens new ones."""
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
        """fsspec's, of this process."""
        return self._filesystem.get()

    async def _info(
        self, url: str, is_right: Callable[[Any], bool] = lambda _: True
    ) -> dict[str, Any]:
        info: dict[str, Any] = await self._persist(
            lambda _: info_of(self.filesystem, self._path(url)), self.shown(url), is_right
        )
        return info

    async def _version(self, url: str) -> Version:
        info = await self._info(
            url, lambda info: info.get("size") is not None or "encoding" in info
        )
        if "encoding" in info:
            judged(encoded_error(info["encoding"]), self.shown(url))
        self._knows_ranges |= bool(info.get("accepts_ranges"))
        tag = next(
            (
                info[name]
                for name in (
                    "ETag",
                    "etag",
                    "md5Hash",
                    "LastModified",
                    "Last-Modified",
                    "mtime",
                    "created",
                )
                if info.get(name)
            ),
            None,
        )
        version = Version(int(info["size"]), None if tag is None else str(tag))
        if not info.get("is_redirected") or not version.size or tag is None:
            return version
        start = 0
        if version.size > _SAMPLE:
            start = version.size // 2
        stop = min(version.size, start + _SAMPLE)
        # perhaps of another mirror
        answer = await self._range(url, start, stop, self.shown(url), None)
        self._samples[url] = _Sample(start, stop, _digest(answer.data))
        return Version(answer.size or version.size, answer.etag or answer.modified or version.tag)

    async def check_ranges(self, url: str, size: int) -> None:
        """Asks for the last byte of a file, where its server did not say that it knows byte ranges.

        Raises:
            RemoteError: it sends whole files.
        """
        if not self._knows_ranges and size > 1 and is_http(self.filesystem):
            await self._range(url, size - 1, size, self.shown(url), None)

    async def _whole(self, url: str) -> bytes:
        fs = self.filesystem
        path = self._path(url)

        async def ask(attempt: Attempt) -> bytes:
            plain = self._plain_http() if self._has_plain_wholes else None
            if plain is not None:
                read = functools.partial(plain.read, str(fs.encode_url(path)), 0, None, None)
                try:
                    answer = await asyncio.get_running_loop().run_in_executor(
                        plain.pool, read, attempt
                    )
                    return bytes(answer.data)
                except NotPlainError:
                    self._has_plain_wholes = False
            content: bytes = await call(fs, "cat_file", path)
            return content

        data: bytes = await self._persist(ask, self.shown(url), lambda _: True)
        self._count(bytes_fetched=len(data))
        return data

    async def _piece(
        self, url: str, start: int, stop: int, versions: Mapping[str, Version]
    ) -> bytes | bytearray:
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
        """A range, in a version, see NOTE [ mirrors ]."""
        if version is None or not isinstance(version.tag, str):
            return await self._range(url, start, stop, where, None)
        tag = version.tag.removeprefix("W/")
        known = self._tags.get((url, tag), {tag})
        # nothing else can be asked for
        if_match = ", ".join(sorted(known)) if version.tag.startswith('"') else None
        try:
            answer = await self._range(url, start, stop, where, if_match)
        except FileChangedError:
            if url not in self._samples:
                raise
            # which tells what is there instead
            answer = await self._range(url, start, stop, where, None)
        other = answer.tag(tag)
        if other is None or other in known:
            return answer
        if not await self._is_mirror(url, other, answer, version):
            raise was_replaced(where, f" (its version is {other}, and was {tag})")
        self._tags[url, tag] = {*known, other}
        warn(
            f"{self.shown(url)} leads to servers that give it different versions ({tag} and "
            f"{other}); a range of it is the same "
            "on both, so both are read. Use the URL of one server if the others may have other data"
        )
        return answer

    async def _is_mirror(self, url: str, other: str, answer: Answer, version: Version) -> bool:
        """True if the server that gave an answer has the same file as that at opening, under
        another tag.
        """
        sample = self._samples.get(url)
        if sample is None or answer.size not in (None, version.size):
            return False

        def ask(attempt: Attempt) -> Awaitable[Answer]:
            return fetch_http(self.filesystem, answer.url, sample.start, sample.stop, None, attempt)

        again: Answer = await self._persist(ask, self.shown(url), lambda _: True)
        return again.etag == answer.etag and _digest(again.data) == sample.digest

    async def _range(self, url: str, start: int, stop: int, where: str, etag: str | None) -> Answer:
        """A range, of a version with one of these ETags where servers look at them."""
        fs = self.filesystem
        path = self._path(url)

        async def ask(attempt: Attempt) -> Answer:
            plain = self._plain_http()
            if plain is not None:
                read = functools.partial(plain.read, str(fs.encode_url(path)), start, stop, etag)
                try:
                    return await asyncio.get_running_loop().run_in_executor(
                        plain.pool, read, attempt
                    )
                except NotPlainError:
                    self._is_plain = False
            return await fetch(fs, path, start, stop, etag, attempt)

        answer: Answer = await self._persist(
            ask, where, lambda answer: len(answer.data) == stop - start
        )
        return answer

    def _plain_http(self) -> HTTPRanges | None:
        """The way past fsspec, where that is all that is needed."""
        with self._lock:
            if self._is_plain is None:
                headers = plain_headers(self.filesystem)
                self._is_plain = headers is not None
                self._plain = None if headers is None else HTTPRanges(headers, CONNECTIONS)
            if self._is_plain:
                return self._plain
            return None

    async def _persist(
        self,
        ask: Callable[[Attempt], Awaitable[Any]],
        where: str,
        is_right: Callable[[Any], bool],
        hurries: bool = True,
    ) -> Any:
        """Asks until the answer is right, or retries or deadline are through; of the deadline an
        attempt knows only if it `hurries`, and it may go on while bytes come.
        """
        begin = time.monotonic()
        attempts = 0
        cause = ""
        retries, deadline = (
            (0, self.deadline / _SHORT) if self._given_up else (self.retries, self.deadline)
        )
        patience = deadline
        if retries:
            patience = deadline / 2
        remedy = (
            f"is the server there, and not overloaded? (retries={self.retries}, "
            f"deadline={self.deadline:g})"
        )
        while True:
            left = begin + deadline - time.monotonic()
            wait: float | None = None
            self._count(requests=1)
            try:
                attempt = Attempt(min(left, patience))
                answer = await (in_time(ask(attempt), attempt) if hurries else ask(attempt))
                self._has_answered = True
                if is_right(answer):
                    self._given_up = self._denied = 0
                    return answer
                cause = "the answer says no size"
                if isinstance(answer, Answer):
                    cause = f"the answer has {len(answer.data):,} bytes"
            except Exception as error:
                self._has_answered |= status_of(error)[0] is not None
                try:
                    cause, wait, is_absent = judged(error, where)
                except AccessError as refusal:
                    self._denied += 1
                    refusal.is_of_server = self._denied >= _GONE
                    raise
                if hurries:
                    deadline += attempt.overtime
                if isinstance(error, TimeoutError):
                    cause = attempt.shortfall
                if is_absent and not self._has_answered:
                    retries = min(retries, _OPENING_RETRIES)
                    remedy = "is the URL right, and does the server run?"
            attempts += 1
            left = begin + deadline - time.monotonic()
            if wait is None:
                wait = random.uniform(0, min(_LONGEST_WAIT, _WAIT * 2**attempts))
            if attempts > retries or wait >= left:
                seconds = time.monotonic() - begin
                self._given_up += 1
                failure = RemoteError(
                    f"{where}: {attempts} attempt{'s' * (attempts > 1)} in {seconds:.1f} s "
                    f"failed, the last one because {cause}: {remedy}"
                )
                failure.is_of_server = self._given_up >= _GONE
                raise failure
            self._count(retries=1)
            _log.log(
                logging.WARNING if attempts > 1 else logging.INFO,
                "%s: attempt %d failed (%s); the next in %.1f s",
                where,
                attempts,
                cause,
                wait,
            )
            await asyncio.sleep(wait)

    # -- the loop

    @functools.cached_property
    def _ends(self) -> tuple[str, str]:
        return url_ends(self._url, self.filesystem)

    def url_of(self, path: str) -> str:
        """The URL of a path on the server."""
        return url_of(path, self._ends)

    def shown(self, url: str) -> str:
        """A URL, or a path on the server, as messages name it."""
        if is_path(url):
            return url_of(redact(url), (redact(self._ends[0]), redact(self._ends[1])))
        return redact(url)

    def _path(self, url: str) -> str:
        return path_in(url, self.filesystem)

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
            return asyncio.run_coroutine_threadsafe(task, loop_of(self.filesystem))
        except BaseException:  # there is no such file system
            task.close()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {
            k: v
            for k, v in self.__dict__.items()
            if k not in ("_flow", "_counts", "_lock", "_plain", "_is_plain", "_tags")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


async def _or_none(function: Callable[[str], Awaitable[T]], url: str) -> T | None:
    try:
        return await function(url)
    except DataNotFoundError:
        return None
