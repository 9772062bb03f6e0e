"""How does a source read from files that are far away as it does from those of a disk?

`RemoteFiles` stands where `WorkerFiles` stands for local files: `headrace.storage.stretches` reads from either. A URL stands where a path
does.

NOTE [ life of the bytes ahead ]

* Whoever knows the order says which bytes come next (`ahead`), in pieces that are fetched each by itself, in threads.
* What has come waits until it was read once, and is then forgotten: stretches of chunks and rows are read once in an epoch. What is left
  over, since another process reads the rest, or the user went away, goes when there is no more room, the oldest first.
* A read takes what is on its way already, and waits for it; everything else it fetches itself, in one go.
* An error stays with its piece: the next read of it raises it, and forgets the piece, so that the one after fetches anew.

Whole files (`WHOLE`) are read as they are at that moment: nobody has asked for their versions.
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

from headrace.errors import FormatError, ReplacedError
from headrace.memory.budget import parse_size
from headrace.memory.machine import cache_folder
from headrace.storage.blocks import CachedRemote
from headrace.storage.disk_cache import DiskCache
from headrace.storage.paths import redact
from headrace.storage.ranges import GAP, Range, Version
from headrace.storage.remote import Remote

THREADS = 16
"""Pieces ahead that a process fetches at once."""
_GUESSED = 256 << 10  # bytes of a file whose size nobody has asked for
INDEX = ".index"
"""What is appended to a URL, for what is needed to open it (see `headrace.storage.index`)."""

WHOLE = -1
"""The end of a span that is a whole file, of whatever size, which may be missing."""

Span = tuple[str, int, int]
"""Path, first byte, end (or WHOLE)."""


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
        self._relying: set[str] = set()  # files of this machine
        self._expected: dict[str, int] = {}  # sizes that an index says
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

    @property
    def patience(self) -> float:
        """Seconds after which a request is given up."""
        return self._bytes.remote.deadline

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
            self._note(url, version)
        indices = [
            Range(with_index(url), 0, version.size, version)
            for url, version in zip(new, found[len(new) :], strict=False)
            if version is not None
        ]
        for one, data in zip(indices, self._bytes.read(indices) if indices else [], strict=True):
            self._beside[one.path] = data
        return [self._versions[url] for url in urls]

    def seek(self, urls: Sequence[str], afresh: bool = False) -> list[Version | None]:
        """The same of files that may be missing: None then.

        Args:
            urls: of the files.
            afresh: ask also for those that are known.

        Raises:
            AccessError, RemoteError: see `Remote.seek`.
        """
        new = [url for url in dict.fromkeys(urls) if afresh or url not in self._versions]
        for url, version in zip(new, self._bytes.remote.seek(new) if new else [], strict=True):
            self._note(url, version)
        return [self._versions.get(url) for url in urls]

    def assume(self, url: str, version: Version, relying: str) -> None:
        """All reads of a file are of this version, which was noted in a file of this machine; that is removed when it holds no more."""
        if url not in self._versions:
            self._note(url, version)
        self._relying.add(relying)

    def expect(self, url: str, size: int) -> None:
        """An index says this of a file whose version is not known yet; when it is, and there is another size, that is an error."""
        if url not in self._versions:
            self._expected[url] = size

    def _note(self, url: str, version: Version | None) -> None:
        expected = self._expected.get(url)
        if expected is not None and version is not None and version.size != expected:
            raise ReplacedError(
                f"{redact(url)} has {version.size:,} bytes, and {expected:,} by the index that was written of it: it has been replaced: "
                "write the index again (headrace.write_index)"
            )
        before = self._versions.pop(url, None)
        self._nbytes -= 0 if before is None else before.size
        if version is not None:
            self._versions[url] = version
            self._nbytes += version.size

    def version(self, url: str) -> Version:
        """Size and version of a file, as it was when it was first asked for.

        Raises:
            DataNotFoundError, AccessError, RemoteError: see `Remote.versions`.
        """
        return self._versions.get(url) or self.learn([url])[0]

    def beside(self, url: str) -> bytes | None:
        """What lay beside a file as its index when `learn` looked; None: nothing. It is handed out once."""
        return self._beside.pop(with_index(url), None)

    def is_folder(self, url: str) -> bool:
        """See `Remote.is_folder`."""
        return self._bytes.remote.is_folder(url)

    # -- reading

    def read(self, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of each span.

        Raises:
            FormatError: a file ends before one of them does.
            RemoteError, ReplacedError, DataNotFoundError, AccessError: see `Remote.read`.
        """
        return [data for data in self.find(spans) if data is not None]

    def find(self, spans: Sequence[Span]) -> list[memoryview | None]:
        """As `read`; None for a WHOLE file that is missing."""
        if self._afresh.is_on:
            return self._fetch(spans, afresh=True)
        taken = self._ahead.take(spans)
        found = iter(self._fetch([span for span, ahead in zip(spans, taken, strict=True) if ahead is None]))
        return [next(found) if ahead is None else ahead[0] for ahead in taken]

    def find_metadata(self, urls: Sequence[str]) -> list[bytes | None]:
        """The content of small files, past the disk cache; None for those that are missing, or may not be read while others may.

        Raises:
            AccessError, RemoteError: see `Remote.find_files`.
        """
        return self._bytes.remote.find_files(urls, denied=True)

    @contextlib.contextmanager
    def afresh(self) -> Iterator[None]:
        """Inside, this thread reads from the server itself, and replaces what is kept: what was read before had a wrong checksum."""
        self._afresh.is_on = True
        try:
            yield
        finally:
            self._afresh.is_on = False

    def _fetch(self, spans: Sequence[Span], afresh: bool = False) -> list[memoryview | None]:
        wholes, ranges = [path for path, _, stop in spans if stop == WHOLE], list[Range]()
        unknown = [path for path, _, stop in spans if stop != WHOLE and path not in self._versions]
        if unknown:
            self.learn(unknown)
        for path, start, stop in spans:
            if stop == WHOLE:
                continue
            version = self._versions[path]
            if stop > version.size:
                raise FormatError(f"{redact(path)} ends before byte {stop:,}: the file is cut short")
            ranges.append(Range(path, start, stop, version))
        cache = self._bytes.cache
        all_fits = cache is None or self._nbytes <= cache.limit
        try:
            parts = iter(self._bytes.read(ranges, afresh, all_fits) if ranges else [])
            files = iter(self._bytes.find_files(wholes, afresh) if wholes else [])
        except ReplacedError:
            for kept in self._relying:
                with contextlib.suppress(OSError):
                    os.unlink(kept)
            raise
        found = (next(files if stop == WHOLE else parts) for _, _, stop in spans)
        return [None if data is None else memoryview(data) for data in found]

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
        return {
            "options": self.options,
            "bytes": self._bytes,
            "versions": self._versions,
            "relying": self._relying,
            "expected": self._expected,
            "held": self._ahead.room,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.options, self._bytes, self._versions, self._beside = state["options"], state["bytes"], state["versions"], {}
        self._nbytes = sum(version.size for version in self._versions.values())
        self._relying, self._expected = state["relying"], state["expected"]
        self._ahead, self._afresh = _Ahead(self._fetch, state["held"]), _Afresh()


class _Afresh(threading.local):
    is_on = False


@dataclass(slots=True)
class _Extent:
    """Bytes of a file that are on their way, or have come."""

    start: int
    stop: int
    nbytes: int
    """Of a whole file, whose size nobody knows yet: as those before had."""
    data: Future[list[memoryview | None]]
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

    def __init__(self, fetch: Callable[[Sequence[Span]], list[memoryview | None]], room: int = 0) -> None:
        self._fetch, self.room = fetch, room
        self._whole_nbytes = float(_GUESSED)  # of a whole file, by those that came
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._starts: dict[str, list[int]] = {}  # by path, sorted
        self._extents: OrderedDict[tuple[str, int], _Extent] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self.untouched = self._touched = 0
        self._first = 0  # pieces that are needed first and have not come
        self._later: list[tuple[Future[list[memoryview | None]], list[Span]]] = []
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
                future: Future[list[memoryview | None]] = Future()
                for number, (path, start, stop, left) in enumerate(new):
                    self._forget(path, start)
                    nbytes = int(self._whole_nbytes) + 1 if stop == WHOLE else stop - start
                    self._extents[path, start] = _Extent(start, stop, nbytes, future, number, nbytes if stop == WHOLE else left)
                    bisect.insort(self._starts.setdefault(path, []), start)
                    self.untouched += nbytes
                wanted = [(path, start, stop) for path, start, stop, _ in new]
                if first:
                    self._first += 1
                    self._submit(future, wanted, first)
                elif self._first:
                    self._later.append((future, wanted))
                else:
                    self._submit(future, wanted, first)

    def _submit(self, future: Future[list[memoryview | None]], wanted: list[Span], first: bool) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "headrace-ahead")
        self._pool.submit(self._work, future, wanted, first)

    def _work(self, future: Future[list[memoryview | None]], wanted: list[Span], first: bool) -> None:
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

    def take(self, spans: Sequence[Span]) -> list[tuple[memoryview | None] | None]:
        """The bytes of spans (None: a whole file that is missing), of those that are on their way; waits for them.

        Raises:
            Exception: what fetching them has raised.
        """
        self._own()
        found: list[tuple[memoryview | None] | None] = [None] * len(spans)
        if not self._extents:
            return found
        taken: list[tuple[int, _Extent]] = []
        with self._lock:
            for number, (path, start, stop) in enumerate(spans):
                extent = self._find(path, start, stop) if start < stop or stop == WHOLE else None
                if extent is None:
                    continue
                taken.append((number, extent))
                extent.left -= extent.nbytes if stop == WHOLE else stop - start
                if not extent.is_touched:
                    extent.is_touched = True
                    self.untouched -= extent.nbytes
                    self._touched += extent.nbytes
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
            if stop != WHOLE and data is not None:
                data = data[start - extent.start : stop - extent.start]
            elif data is not None:
                self._whole_nbytes = 0.9 * self._whole_nbytes + 0.1 * len(data)
            found[number] = (data,)
        return found

    def _find(self, path: str, start: int, stop: int) -> _Extent | None:
        starts = self._starts.get(path)
        at = bisect.bisect_right(starts, start) - 1 if starts else -1
        if at < 0 or starts is None:
            return None
        extent = self._extents[path, starts[at]]
        if WHOLE in (stop, extent.stop):
            return extent if stop == extent.stop else None
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
            self._touched -= extent.nbytes
        else:
            self.untouched -= extent.nbytes

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
        if self._touched <= self.room:
            return
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
    """Spans that lie close to one another as one: path, first byte, end, bytes that were asked for; whole files by themselves."""
    found: list[tuple[str, int, int, int]] = []
    for path, start, stop in sorted(set(spans)):
        if stop == WHOLE:
            found.append((path, 0, WHOLE, 0))
            continue
        if start >= stop:
            continue
        if found and found[-1][0] == path and found[-1][2] != WHOLE and start <= found[-1][2] + GAP:
            _, first, end, nbytes = found[-1]
            found[-1] = (path, first, max(end, stop), nbytes + max(0, stop - max(start, end)))
        else:
            found.append((path, start, stop, stop - start))
    return found


def below(url: str, name: str) -> str:
    """The URL of what lies below another one: before the query, if there is one."""
    first, chained, rest = url.partition("::")
    if chained and "://" not in first:  # of simplecache::s3://bucket/folder the second is the file's
        return first + chained + below(rest, name)
    path, question, query = first.partition("?")
    return f"{path.rstrip('/') if path.rstrip('/')[-1:] != ':' else path}/{name}{question}{query}{chained}{rest}" if name else url


def with_index(url: str) -> str:
    """The URL of what lies beside a file as its index: before the query, if there is one."""
    first, chained, rest = url.partition("::")
    if chained and "://" not in first:  # of simplecache::s3://bucket/key the second is the file's
        return first + chained + with_index(rest)
    path, question, query = first.partition("?")
    return f"{path}{INDEX}{question}{query}{chained}{rest}"
