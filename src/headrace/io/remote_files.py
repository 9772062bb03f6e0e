"""How does a source read from files that are far away as it does from those of a disk?

`RemoteFiles` stands where `WorkerFiles` stands for local files: `headrace.io.stretches` reads from either. A URL stands where a path
does. What comes next is fetched ahead: `headrace.io.remote.prefetch`.

Whole files (`WHOLE`) are read as they are at that moment: nobody has asked for their versions.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.errors import AccessError, FileChangedError, FormatError
from headrace.io.cache.blocks import CachedRemote
from headrace.io.cache.disk_cache import disk_cache_of
from headrace.io.paths import cache_folder, redact
from headrace.io.ranges import Range, Version
from headrace.io.remote.client import Remote
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote.prefetch import WHOLE as WHOLE
from headrace.io.remote.prefetch import Ahead
from headrace.io.remote.prefetch import Span as Span

INDEX = ".index"
"""What is appended to a URL, for what is needed to open it (see `headrace.io.index`)."""


class RemoteFiles:
    """The files of one server. Thread-safe; a pickle takes along how to reach them and which versions they have.

    Args:
        url: of any of them.
        options: how they are reached.

    Raises:
        ConfigError: an option makes no sense, or the protocol is unknown.
    """

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self.options: RemoteOptions = options
        if options.cache_dir is None:  # the user's cache folder is made too; where it can't be, what is to be kept there says so
            with contextlib.suppress(OSError):
                os.makedirs(cache_folder(None).parent, exist_ok=True)
        remote = Remote(url, options.storage_options, retries=options.retries, deadline=options.deadline)
        self._bytes = CachedRemote(remote, disk_cache_of(options.disk_cache_size, options.cache_dir))
        self._versions: dict[str, Version] = {}
        self._nbytes = 0  # of all these files
        self._beside: dict[str, bytes] = {}
        self._relying: set[str] = set()  # files of this machine
        self._expected: dict[str, int] = {}  # sizes that an index says
        self._ahead = Ahead(self._fetch)
        self._afresh = _Afresh()
        self.has_warned = False
        """Was it said already that an index can't be kept?"""

    # -- which files

    @property
    def filesystem(self) -> Any:
        """fsspec's, of this process."""
        return self._bytes.remote.filesystem

    def ask(self, question: str, url: str, **options: Any) -> Any:
        """What is there, and not what is in it: see `Remote.ask`."""
        return self._bytes.remote.ask(question, url, **options)

    @property
    def place(self) -> str:
        """What tells two servers apart whose URLs look alike."""
        return self._bytes.remote.place

    @property
    def patience(self) -> float:
        """Seconds after which a request is given up."""
        return self._bytes.remote.deadline

    def learn(self, urls: Sequence[str], beside: Callable[[str], bool] | None = None) -> list[Version]:
        """Sizes and versions of files, which all reads are of from now on, asked for at once.

        Args:
            urls: of the files.
            beside: says of each, when its version is known, whether what lies beside it under the same name with ``.index`` is fetched too.

        Raises:
            DataNotFoundError, AccessError, RemoteError: see `Remote.versions`.
        """
        new = [url for url in dict.fromkeys(urls) if url not in self._versions]
        for url, version in zip(new, self._bytes.remote.versions(new) if new else [], strict=True):
            self._note(url, version)
        wanted = [with_index(url) for url in new if beside is not None and beside(url)]
        with contextlib.suppress(AccessError):  # who may not list a bucket is told that what is missing is not for him
            for path, data in zip(wanted, self._bytes.remote.find_files(wanted, denied=True) if wanted else [], strict=True):
                if data is not None:
                    self._beside[path] = data
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
            raise FileChangedError(
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
            RemoteError, FileChangedError, DataNotFoundError, AccessError: see `Remote.read`.
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
        except FileChangedError:
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
        self._ahead, self._afresh = Ahead(self._fetch, state["held"]), _Afresh()


class _Afresh(threading.local):
    is_on = False


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
