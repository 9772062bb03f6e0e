"""Gives h5py a remote file to read, and caches what opening it reads, so that the next start needs
neither requests nor h5py.

NOTE [ h5py and remote files ]

* h5py reads through a file object, here `RemoteFile`: from the known pages of the file, else in
  aligned pieces from the server.
* While a dataset is opened, the pages that h5py reads are recorded (superblock, groups, headers,
  lists of chunks), and so is what they say: shapes, layouts of arrays that are read directly,
  columns such as targets. All of it becomes the file's index. Later openings find it there, and
  h5py need not open the file, which takes a millisecond. If they need more (another name), it is
  fetched, and the index is cached again with both.
* h5py calls the file object while it holds its global lock. Destroying an h5py object needs the
  same lock. The garbage collector may do so in any thread, including those of the connections,
  which would then deadlock with the thread that waits for them. Therefore garbage collection is off
  while a fetch is waited for.
* Errors of the server pass through h5py unchanged (`headrace.io.library_errors.remember`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import h5py
import numpy as np

from headrace.dtypes import AnyArray
from headrace.errors import BudgetError, FormatError, HeadraceError, MissingNameError
from headrace.formats.hdf5.files import not_whole, without_gc
from headrace.io.array_file import Arrays
from headrace.io.files import HeldBytes
from headrace.io.index import IndexKind, found_index, keep_index, learn_indexed
from headrace.io.library_errors import OF_THE_MACHINE, asking, remember
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles

PAGE = 4 << 10
PIECE = 64 << 10
WIDEST = 4 << 20
"""Bytes that are fetched at least; and at most ahead of h5py, where one read follows the other."""
ENDS = 128 << 10
"""Bytes at the beginning and the end of each file that are fetched before h5py asks: most of
what describes a file lies there.
"""
TOGETHER = 64
"""Files whose ends are fetched at once."""
_THREADS = 16
_HELD = 8 << 20  # bytes of pages that are not recorded, for each open file

T = TypeVar("T")


class Known:
    """What is known of a remote file: its index, and the pages that were fetched last.

    Args:
        files, url: of the file.
        arrays: the index, if there is one.

    Attributes:
        facts: JSON values and arrays of numbers that were read, by kind and name.
        is_new: something is known that is not in the index.
    """

    def __init__(self, files: RemoteFiles, url: str, arrays: Arrays | None = None) -> None:
        self.url = url
        self.size: int = files.version(url).size
        self.is_new: bool = arrays is None
        self.is_recording = False
        self.facts: dict[str, Any] = {}
        self._files = files
        self._file: h5py.File | None = None
        self._indexed: dict[int, bytes | memoryview] = {}
        self._fetched: OrderedDict[int, memoryview] = OrderedDict()
        if arrays is not None:
            numbers, data, facts = arrays
            view = memoryview(data)  # type: ignore[arg-type]
            for at, number in enumerate(numbers.tolist()):
                self._indexed[number] = view[at * PAGE : (at + 1) * PAGE]
            self.facts = json.loads(facts.tobytes(), object_hook=_array_in)

    def arrays(self) -> Arrays:
        """The index: the numbers of pages, sorted; their bytes; the facts."""
        numbers = sorted(self._indexed)
        pages = b"".join([self._indexed[number] for number in numbers])
        facts = json.dumps(self.facts, default=_as_json).encode()
        return [
            np.array(numbers, np.int64),
            np.frombuffer(pages, np.uint8),
            np.frombuffer(facts, np.uint8),
        ]

    def note(self, key: str, value: Any) -> None:
        """Adds to `facts`."""
        self.facts[key] = value
        self.is_new = True

    def fact(self, key: str, find: Callable[[], T]) -> T:
        """What `find` gives, or gave when the index was made."""
        if key not in self.facts:
            self.note(key, find())
        value: T = self.facts[key]
        return value

    def column(self, name: str, read: Callable[[], AnyArray]) -> AnyArray:
        """A whole array, which `read` gives or gave. Of numbers the pages need not be recorded."""
        key = f"column {name}"
        column: AnyArray | None = self.facts.get(key)
        if column is None:
            before = self._indexed.copy()
            column = read()
            if is_plain(column.dtype):
                self._indexed = before
                self.note(key, column)
        return column

    def opened(self) -> h5py.File:
        """The file, which h5py opens now, if it hasn't yet."""
        if self._file is None:
            with asking("h5py", redact(self.url)):
                try:
                    self._file = h5py.File(RemoteFile(self._files, self), "r")
                except OSError as error:
                    if isinstance(error, HeadraceError) or error.errno in OF_THE_MACHINE:
                        raise
                    raise not_whole(self.url, error) from error
        return self._file

    def close(self) -> None:
        """Closes the file, if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def hold(self, start: int, data: memoryview | None) -> None:
        """Holds the pages of a piece, which begins with one, for a while."""
        piece = data or memoryview(b"")
        for at in range(0, len(piece), PAGE):
            self._fetched[(start + at) // PAGE] = piece[at : at + PAGE]
        most = max(_HELD, len(piece)) // PAGE + 1
        while len(self._fetched) > most:
            self._fetched.popitem(last=False)

    def fill(self, start: int, out: memoryview) -> bool:
        """Copies bytes, and records their pages; returns False if these are not known."""
        numbers = range(start // PAGE, -(-(start + len(out)) // PAGE))
        pages: list[bytes | memoryview] = []
        for number in numbers:
            page = self._indexed.get(number) or self._fetched.get(number)
            if page is None:
                return False
            pages.append(page)
        first = start - numbers.start * PAGE
        out[:] = memoryview(b"".join(pages))[first : first + len(out)]
        if self.is_recording:
            for number, page in zip(numbers, pages, strict=True):
                if number not in self._indexed:
                    self._indexed[number] = bytes(page)
                    self.is_new = True
        return True


def is_plain(dtype: np.dtype[Any]) -> bool:
    """True if ``dtype.str`` says all of a dtype."""
    return dtype.kind in "biufc" and dtype.metadata is None


def _as_json(array: AnyArray) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": array.shape, "base64": data}


def _array_in(said: dict[str, Any]) -> Any:
    """The array that `_as_json` was given; other JSON objects as they are."""
    if "base64" not in said:
        return said
    return np.frombuffer(base64.b64decode(said["base64"]), said["dtype"]).reshape(said["shape"])


class RemoteFile(HeldBytes):
    """A remote file as a seekable file object for h5py, which reads it in one thread at a time."""

    def __init__(self, files: RemoteFiles, known: Known) -> None:
        super().__init__(known.size, (), lambda start, stop: memoryview(b""))
        self._files = files
        self._known = known
        self._end = -1  # of the last fetch
        self._width = PIECE

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer; behind the end of the file with zeros, as HDF5 does on a disk. Errors
        are remembered too, see `asking`.
        """
        out = memoryview(buffer)
        try:
            inside = max(0, min(len(out), self._known.size - self._at))
            if inside and not self._known.fill(self._at, out[:inside]):
                self._fetch_pieces(self._at, self._at + inside)
                self._known.fill(self._at, out[:inside])
            out[inside:] = bytes(len(out) - inside)
        except BaseException as error:
            remember(error)
            raise
        self._at += len(out)
        return len(out)

    def _fetch_pieces(self, start: int, stop: int) -> None:
        """Fetches pieces that hold some bytes; see NOTE [ h5py and remote files ]."""
        known = self._known
        first = start // PIECE * PIECE
        follows = first <= self._end <= stop
        self._width = min(WIDEST, 2 * self._width) if follows else PIECE
        self._end = min(known.size, max(-(-stop // PIECE) * PIECE, first + self._width))
        with without_gc():
            known.hold(first, self._files.read(ByteRanges.of([(known.url, first, self._end)]))[0])


class _Here(threading.local):
    opening: Known | None = None
    """Of the file that this thread is opening."""


_here = _Here()


def known_of(files: RemoteFiles, kind: IndexKind, urls: Sequence[str]) -> list[Known]:
    """What is known of files: their indices, or their ends, which are fetched together."""
    every: list[Known] = []
    ends: list[tuple[Known, int, int]] = []
    for url in urls:
        known = Known(files, url, found_index(files, url, kind))
        every.append(known)
        if known.is_new:
            size = known.size
            first = min(ENDS, size)
            ends += [(known, 0, first), (known, max(first, (size - ENDS) // PAGE * PAGE), size)]
    ranges = ByteRanges.of((known.url, start, stop) for known, start, stop in ends)
    for (known, start, _), piece in zip(ends, files.read(ranges) if ends else (), strict=True):
        known.hold(start, piece)
    return every


def open_remote(files: RemoteFiles, kind: IndexKind, url: str) -> h5py.File:
    """A remote file, opened for reading; see `headrace.formats.hdf5.files.open_file`."""
    return known_of(files, kind, [url])[0].opened()


@contextlib.contextmanager
def reading_remote(files: RemoteFiles, kind: IndexKind, url: str) -> Iterator[Known]:
    """What is known of a remote file, which is closed at the end; of one that this thread is
    opening when it has been opened. See `headrace.formats.hdf5.files.reading`.
    """
    known = _here.opening
    if known is not None and known.url == url:
        with asking("h5py", redact(url)):
            yield known
        return
    with contextlib.closing(known_of(files, kind, [url])[0]) as known, asking("h5py", redact(url)):
        yield known


def read_each(
    files: RemoteFiles,
    kind: IndexKind,
    urls: Sequence[str],
    function: Callable[[str], T],
    in_threads: bool,
) -> list[T]:
    """Calls a function for each file. What it reads through h5py is cached as the file's index.

    Args:
        files, kind: of their server, and of the index.
        urls: of the files; the first one decides what is read of the others.
        function: called with a URL.
        in_threads: True if several threads may call it.
    """
    learn_indexed(files, urls, kind)
    results: list[T] = []
    with ThreadPoolExecutor(_THREADS if in_threads else 1, "headrace-open") as pool:
        for start in range(0, len(urls), TOGETHER):
            each = known_of(files, kind, urls[start : start + TOGETHER])
            if not results:
                results.append(_read(files, kind, each.pop(0), function))
            while each and not each[0].is_new:  # of those nothing is fetched: threads only wait
                results.append(_read(files, kind, each.pop(0), function))
            tasks = [pool.submit(_read, files, kind, known, function) for known in each]
            try:
                results += [task.result() for task in tasks]
            finally:
                for task in tasks:
                    task.cancel()
    return results


def _read(files: RemoteFiles, kind: IndexKind, known: Known, function: Callable[[str], T]) -> T:
    began = time.monotonic()
    try:
        result = recorded(known, function)
    except (FormatError, MissingNameError, BudgetError):
        # what was read before may have been damaged on its way, or here
        known = Known(files, known.url)
        with files.bypassing_cache():
            result = recorded(known, function)
    if known.is_new:
        keep_index(files, known.url, kind, known.arrays(), time.monotonic() - began)
    return result


def recorded(known: Known, function: Callable[[str], T]) -> T:
    """Calls a function that opens a file, and records what it reads."""
    known.is_recording = True
    _here.opening = known
    try:
        return function(known.url)
    finally:
        _here.opening = None
        known.close()
