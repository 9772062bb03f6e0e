"""How does a source read from files that are far away as it does from those of a disk?

`RemoteFiles` stands where `WorkerFiles` stands for local files: `headrace.storage.stretches` reads from either. A URL stands where a path
does.

NOTE [ life of the bytes ahead ]

* Whoever knows the order says which bytes come next (`ahead`), in pieces that are fetched each by itself, in threads.
* What has come waits until it was read once, and is then forgotten: stretches of chunks and rows are read once in an epoch. What is left
  over, since another process reads the rest, or the user went away, goes when there is no more room, the oldest first.
* A read takes what is on its way already, and waits for it; everything else it fetches itself, in one go.
* An error stays with its piece: the next read of it raises it, and forgets the piece, so that the one after fetches anew.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.errors import FormatError
from headrace.memory.budget import parse_size
from headrace.memory.machine import cache_folder
from headrace.storage.blocks import CachedRemote
from headrace.storage.disk_cache import DiskCache
from headrace.storage.paths import redact
from headrace.storage.ranges import GAP, Range, Version
from headrace.storage.remote import Remote

THREADS = 16
"""Pieces ahead that a process fetches at once."""
INDEX = ".index"
"""What is appended to a URL, for what is needed to open it (see `headrace.storage.index`)."""

Span = tuple[str, int, int]
"""Path, first byte, end."""


@dataclass(frozen=True)
class RemoteOptions:
    """How files that are far away are reached, and kept.

    Attributes:
        storage_options: to fsspec.
        retries, deadline: see `Remote`.
        cache_dir: for what is kept on this machine; None: headrace's part of the user's cache folder.
        disk_cache_size: bytes (or "20GB") of what was fetched that are kept there; None: none.
    """

    storage_options: dict[str, Any] | None = None
    retries: int | None = None
    deadline: float | None = None
    cache_dir: str | os.PathLike[str] | None = None
    disk_cache_size: int | str | None = None

    def disk_cache(self) -> DiskCache | None:
        """The disk cache, if there is to be one.

        Raises:
            ConfigError: a size that makes no sense, or a system without it.
        """
        if self.disk_cache_size is None:
            return None
        return DiskCache(str(cache_folder(self.cache_dir)), parse_size(self.disk_cache_size, "disk_cache_size"))


class RemoteFiles:
    """The files of one server. Thread-safe; a pickle takes along how to reach them and which versions they have.

    Args:
        url: of any of them.
        options: how they are reached.

    Raises:
        ConfigError: an option makes no sense, or the protocol is unknown.
    """

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self.options = options
        if options.cache_dir is None:  # the user's cache folder is made too; where it can't be, what is to be kept there says so
            with contextlib.suppress(OSError):
                os.makedirs(cache_folder(None).parent, exist_ok=True)
        remote = Remote(url, options.storage_options, retries=options.retries, deadline=options.deadline)
        self._bytes = CachedRemote(remote, options.disk_cache())
        self._versions: dict[str, Version] = {}
        self._nbytes = 0  # of all these files
        self._beside: dict[str, bytes] = {}
        self._ahead = _Ahead(self._fetch)
        self._afresh = _Afresh()

    # -- which files

    @property
    def filesystem(self) -> Any:
        """fsspec's, of this process: for what is no range of a file, such as listings."""
        return self._bytes.remote.filesystem

    @property
    def place(self) -> str:
        """What tells two servers apart whose URLs look alike."""
        return self._bytes.remote.place

    def learn(self, urls: Sequence[str], beside: bool = False) -> list[Version]:
        """Sizes and versions of files, which all reads are of from now on, asked for at once.

        Args:
            urls: of the files.
            beside: look for what lies beside them under the same name with ``.index`` too.

        Raises:
            DataNotFoundError, AccessError, RemoteError: see `Remote.versions`.
        """
        new = [url for url in dict.fromkeys(urls) if url not in self._versions]
        found = self._bytes.remote.look(new, [with_index(url) for url in new] if beside else [])
        for url, version in zip(new, found[: len(new)], strict=True):
            assert version is not None
            self._versions[url] = version
            self._nbytes += version.size
        indices = [
            Range(with_index(url), 0, version.size, version)
            for url, version in zip(new, found[len(new) :], strict=False)
            if version is not None
        ]
        for one, data in zip(indices, self._bytes.read(indices), strict=True):
            self._beside[one.path] = data
        return [self._versions[url] for url in urls]

    def version(self, url: str) -> Version:
        """Size and version of a file, as it was when it was first asked for.

        Raises:
            DataNotFoundError, AccessError, RemoteError: see `Remote.versions`.
        """
        return self._versions.get(url) or self.learn([url])[0]

    def beside(self, url: str) -> bytes | None:
        """What lay beside a file as its index when `learn` looked; None: nothing. It is handed out once."""
        return self._beside.pop(with_index(url), None)

    # -- reading

    def read(self, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of each span.

        Raises:
            FormatError: a file ends before one of them does.
            RemoteError, ReplacedError, DataNotFoundError, AccessError: see `Remote.read`.
        """
        if self._afresh.is_on:
            return self._fetch(spans, afresh=True)
        found = self._ahead.take(spans)
        missing = [number for number, data in enumerate(found) if data is None]
        for number, data in zip(missing, self._fetch([spans[number] for number in missing]), strict=True):
            found[number] = data
        return [data for data in found if data is not None]

    @contextlib.contextmanager
    def afresh(self) -> Iterator[None]:
        """Inside, this thread reads from the server itself, and replaces what is kept: what was read before had a wrong checksum."""
        self._afresh.is_on = True
        try:
            yield
        finally:
            self._afresh.is_on = False

    def _fetch(self, spans: Sequence[Span], afresh: bool = False) -> list[memoryview]:
        ranges = []
        for path, start, stop in spans:
            version = self.version(path)
            if stop > version.size:
                raise FormatError(f"{redact(path)} ends before byte {stop:,}: the file is cut short")
            ranges.append(Range(path, start, stop, version))
        cache = self._bytes.cache
        all_fits = cache is None or self._nbytes <= cache.limit
        return [memoryview(data) for data in self._bytes.read(ranges, afresh, all_fits)] if ranges else []

    # -- ahead

    def ahead(self, pieces: Sequence[Sequence[Span]], first: bool = False) -> None:
        """These come next: they are fetched, each piece by itself, unless they are on their way already.

        Args:
            pieces: the spans of each.
            first: somebody waits for them: what is asked for after them is not fetched before they have come.
        """
        self._ahead.begin(pieces, first)

    def drop_ahead(self) -> None:
        """What was fetched ahead won't be read: it is forgotten, and what has not begun is not fetched."""
        self._ahead.drop()

    def hold_ahead(self, nbytes: int) -> None:
        """So many bytes of what was fetched ahead, and has not been read, may be held."""
        self._ahead.resize(nbytes)

    @property
    def bytes_ahead(self) -> int:
        """Of which nothing has been read yet."""
        return self._ahead.untouched

    def take_counts(self) -> Counter[str]:
        """What was counted in this process since the last call."""
        return self._bytes.take_counts()

    def explain(self) -> str:
        """In words: what is kept where."""
        cache = self._bytes.cache
        return "read by ranges" if cache is None else f"read by ranges; {cache.explain()}"

    def close(self) -> None:
        """Ends this process's connections and threads; both come again when they are needed."""
        self._ahead.close()
        self._bytes.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "bytes": self._bytes, "versions": self._versions, "held": self._ahead.room}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.options, self._bytes, self._versions, self._beside = state["options"], state["bytes"], state["versions"], {}
        self._nbytes = sum(version.size for version in self._versions.values())
        self._ahead, self._afresh = _Ahead(self._fetch, state["held"]), _Afresh()


class _Afresh(threading.local):
    is_on = False


@dataclass(slots=True)
class _Extent:
    """Bytes of a file that are on their way, or have come."""

    start: int
    stop: int
    data: Future[list[memoryview]]
    number: int
    """Of its place in what is fetched together."""
    left: int
    """Bytes that nobody has read yet."""
    is_touched: bool = False


class _Ahead:
    """What was fetched ahead; see NOTE [ life of the bytes ahead ].

    Args:
        fetch: reads spans.
        room: bytes that are held, at most, beside those that nobody has touched.
    """

    def __init__(self, fetch: Callable[[Sequence[Span]], list[memoryview]], room: int = 0) -> None:
        self._fetch, self.room = fetch, room
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._starts: dict[str, list[int]] = {}  # by path, sorted
        self._extents: OrderedDict[tuple[str, int], _Extent] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self.untouched = self._touched = 0
        self._first = 0  # pieces that are needed first and have not come
        self._later: list[tuple[Future[list[memoryview]], list[Span]]] = []
        self._is_open = True

    def _own(self) -> None:
        if self._pid != os.getpid():  # threads don't survive a fork, and what they would have brought neither
            self._reset()

    def begin(self, pieces: Sequence[Sequence[Span]], first: bool) -> None:
        """Has pieces fetched; those that are not needed first when those that are have come, so that these have the line for themselves."""
        self._own()
        with self._lock:
            for piece in pieces:
                new = [span for span in _merged(piece) if self._find(*span[:3]) is None]
                if not new:
                    continue
                future: Future[list[memoryview]] = Future()
                for number, (path, start, stop, nbytes) in enumerate(new):
                    self._forget(path, start)
                    self._extents[path, start] = _Extent(start, stop, future, number, nbytes)
                    bisect.insort(self._starts.setdefault(path, []), start)
                    self.untouched += stop - start
                wanted = [(path, start, stop) for path, start, stop, _ in new]
                if first:
                    self._first += 1
                    self._submit(future, wanted, first)
                elif self._first:
                    self._later.append((future, wanted))
                else:
                    self._submit(future, wanted, first)

    def _submit(self, future: Future[list[memoryview]], wanted: list[Span], first: bool) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "headrace-ahead")
        self._pool.submit(self._work, future, wanted, first)

    def _work(self, future: Future[list[memoryview]], wanted: list[Span], first: bool) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(self._fetch(wanted))
        except BaseException as error:
            future.set_exception(error)
        finally:
            if first:
                self._one_has_come()

    def _one_has_come(self) -> None:
        with self._lock:
            self._first -= 1
            later, self._later = (self._later, []) if not self._first else ([], self._later)
            if self._is_open:
                for future, wanted in later:
                    self._submit(future, wanted, False)

    def take(self, spans: Sequence[Span]) -> list[memoryview | None]:
        """The bytes of spans, of those that are on their way; waits for them.

        Raises:
            Exception: what fetching them has raised.
        """
        self._own()
        found: list[memoryview | None] = [None] * len(spans)
        if not self._extents:
            return found
        taken: list[tuple[int, _Extent]] = []
        with self._lock:
            for number, (path, start, stop) in enumerate(spans):
                extent = self._find(path, start, stop) if start < stop else None
                if extent is None:
                    continue
                taken.append((number, extent))
                extent.left -= stop - start
                if not extent.is_touched:
                    extent.is_touched = True
                    self.untouched -= extent.stop - extent.start
                    self._touched += extent.stop - extent.start
                    self._extents.move_to_end((path, extent.start))
                if extent.left <= 0:
                    self._forget(path, extent.start)
            self._make_room()
        for number, extent in taken:
            path, start, stop = spans[number]
            try:
                data = extent.data.result()[extent.number]  # it ends: by its deadline
            except BaseException:
                with self._lock:
                    self._forget(path, extent.start)
                raise
            found[number] = data[start - extent.start : stop - extent.start]
        return found

    def _find(self, path: str, start: int, stop: int) -> _Extent | None:
        starts = self._starts.get(path)
        at = bisect.bisect_right(starts, start) - 1 if starts else -1
        if at < 0 or starts is None:
            return None
        extent = self._extents[path, starts[at]]
        return extent if stop <= extent.stop else None

    def _forget(self, path: str, start: int) -> None:
        extent = self._extents.pop((path, start), None)
        if extent is None:
            return
        starts = self._starts[path]
        starts.pop(bisect.bisect_left(starts, start))
        if not starts:
            del self._starts[path]
        if extent.is_touched:
            self._touched -= extent.stop - extent.start
        else:
            self.untouched -= extent.stop - extent.start

    def drop(self) -> None:
        """Forgets it all: it won't be read."""
        self._own()
        with self._lock:
            for extent in self._extents.values():
                extent.data.cancel()
            self._extents.clear()
            self._starts.clear()
            self._later.clear()
            self.untouched = self._touched = 0

    def resize(self, nbytes: int) -> None:
        self._own()
        with self._lock:
            self.room = nbytes
            self._make_room()

    def _make_room(self) -> None:
        for path, start in list(self._extents):
            if self._touched <= self.room:
                break
            if self._extents[path, start].is_touched:
                self._forget(path, start)

    def close(self) -> None:
        if self._pool is not None and self._pid == os.getpid():
            with self._lock:
                self._is_open = False
            self.drop()
            self._pool.shutdown(wait=True)  # what is on its way ends by its deadline
        self._reset()


def _merged(spans: Sequence[Span]) -> list[tuple[str, int, int, int]]:
    """Spans that lie close to one another as one: path, first byte, end, bytes that were asked for."""
    found: list[tuple[str, int, int, int]] = []
    for path, start, stop in sorted(set(spans)):
        if start >= stop:
            continue
        if found and found[-1][0] == path and start <= found[-1][2] + GAP:
            _, first, end, nbytes = found[-1]
            found[-1] = (path, first, max(end, stop), nbytes + max(0, stop - max(start, end)))
        else:
            found.append((path, start, stop, stop - start))
    return found


def with_index(url: str) -> str:
    """The URL of what lies beside a file as its index: before the query, if there is one."""
    first, chained, rest = url.partition("::")
    if chained and "://" not in first:  # of simplecache::s3://bucket/key the second is the file's
        return first + chained + with_index(rest)
    path, question, query = first.partition("?")
    return f"{path}{INDEX}{question}{query}{chained}{rest}"
