"""Gives h5py a remote file to read, and caches what opening it reads, so that the next start needs
no requests.

NOTE [ h5py and remote files ]

* h5py reads through a file object, here `RemoteFile`: from the known pages of the file, else in
  aligned pieces from the server.
* While a dataset is opened, the pages that h5py reads are recorded and become the file's index:
  superblock, groups, headers, lists of chunks, the columns of packed files. Later openings find it
  there. If they need more (another name), it is fetched, and the index is cached again with both.
* h5py calls the file object while it holds its global lock. Destroying an h5py object needs the
  same lock. The garbage collector may do so in any thread, including those of the connections,
  which would then deadlock with the thread that waits for them. Therefore garbage collection is off
  while a fetch is waited for.
* Errors of the server pass through h5py unchanged (`headrace.io.library_errors.remember`).
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import h5py
import numpy as np

from headrace.errors import BudgetError, FormatError, HeadraceError, MissingNameError
from headrace.formats.hdf5.files import HDF5Files, not_whole, without_gc
from headrace.io.array_file import Arrays
from headrace.io.index import IndexKind, found_index, keep_index, learn_indexed
from headrace.io.library_errors import OF_THE_MACHINE, asking, remember
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles

PAGE = 4 << 10
PIECE = 64 << 10
WIDEST = 4 << 20
"""Bytes that are fetched at least; and at most of what nobody has asked for, where one read
follows the other.
"""
ENDS = 128 << 10
"""Bytes at the beginning and the end of each file that are fetched before h5py asks: most of
what describes a file lies there.
"""
TOGETHER = 64
"""Files whose ends are fetched at once."""
_THREADS = 16
_HELD = 8 << 20  # bytes of pages that are not recorded, for each open file

T = TypeVar("T")


class _Known:
    """The pages of a file that are known: those of its index, and those that were fetched last.

    Args:
        size: of the file.
        arrays: the index, if there is one.
        is_afresh: True if the file is read past everything that is cached.
    """

    def __init__(self, size: int, arrays: Arrays | None = None, is_afresh: bool = False) -> None:
        self.size = size
        self.is_afresh = is_afresh
        self.is_new = arrays is None
        self.is_recording = False
        self.file: h5py.File | None = None
        self._indexed: dict[int, bytes | memoryview] = {}
        self._fetched: OrderedDict[int, memoryview] = OrderedDict()
        if arrays is not None:
            numbers, data = arrays
            view = memoryview(data)  # type: ignore[arg-type]
            for at, number in enumerate(numbers.tolist()):
                self._indexed[number] = view[at * PAGE : (at + 1) * PAGE]

    def arrays(self) -> Arrays:
        """The index: the numbers of pages, sorted, and their bytes."""
        numbers = sorted(self._indexed)
        return [
            np.array(numbers, np.int64),
            np.frombuffer(b"".join([self._indexed[number] for number in numbers]), np.uint8),
        ]

    def hold(self, start: int, data: memoryview | None) -> None:
        """Holds the pages of a piece, which begins with one, for a while."""
        piece = data or memoryview(b"")
        for at in range(0, len(piece), PAGE):
            self._fetched[(start + at) // PAGE] = piece[at : at + PAGE]
        most = max(_HELD, len(piece)) // PAGE + 1
        while len(self._fetched) > most:
            self._fetched.popitem(last=False)

    def fill(self, start: int, out: memoryview) -> bool:
        """Copies bytes, if they are there; records their pages where that is wanted."""
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


class RemoteFile(io.RawIOBase):
    """A remote file as h5py wants it: seekable, and read in one thread at a time."""

    def __init__(self, files: RemoteFiles, url: str, known: _Known) -> None:
        self._files = files
        self._url = url
        self._known = known
        self._at = 0
        self._end = -1  # of the last fetch
        self._width = PIECE

    def seek(self, offset: int, whence: int = 0) -> int:
        """h5py counts from the beginning or the end."""
        self._at = offset
        if whence == 2:
            self._at += self._known.size
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer; behind the end of the file with zeros, as HDF5 does on a disk. Errors
        are remembered too, see `asking`.
        """
        out = memoryview(buffer)
        try:
            inside = max(0, min(len(out), self._known.size - self._at))
            if inside and not self._known.fill(self._at, out[:inside]):
                self._fetch(self._at, self._at + inside)
                self._known.fill(self._at, out[:inside])
            out[inside:] = bytes(len(out) - inside)
        except BaseException as error:
            remember(error)
            raise
        self._at += len(out)
        return len(out)

    def _fetch(self, start: int, stop: int) -> None:
        """Fetches pieces that hold some bytes; see NOTE [ h5py and remote files ]."""
        known = self._known
        first = start // PIECE * PIECE
        follows = first <= self._end <= stop
        self._width = min(WIDEST, 2 * self._width) if follows else PIECE
        self._end = min(known.size, max(-(-stop // PIECE) * PIECE, first + self._width))
        with without_gc(), contextlib.ExitStack() as stack:
            if known.is_afresh:
                stack.enter_context(self._files.bypassing_cache())
            known.hold(first, self._files.read(ByteRanges.of([(self._url, first, self._end)]))[0])


class RemoteHDF5(HDF5Files):
    """The HDF5 files of one server. A pickle takes along how to reach them; what is known of
    them is found anew.
    """

    files: RemoteFiles

    def __init__(self, files: RemoteFiles, kind: IndexKind) -> None:
        super().__init__(files)
        self._kind = kind
        self._here = threading.local()  # the file that a thread is opening, and what is known of it

    def learn(self, paths: Sequence[str]) -> None:
        learn_indexed(self.files, paths, self._kind)

    def read_each(
        self, paths: Sequence[str], function: Callable[[str], T], in_threads: bool = False
    ) -> list[T]:
        self.learn(paths)
        results: list[T] = []
        # the first file decides what is read of the others
        with ThreadPoolExecutor(_THREADS if in_threads else 1, "headrace-open") as pool:
            for start in range(0, len(paths), TOGETHER):
                urls = paths[start : start + TOGETHER]
                each = zip(urls, self._look(urls), strict=True)
                if not results:
                    results.append(self._read(*next(each), function))
                tasks = [pool.submit(self._read, url, known, function) for url, known in each]
                try:
                    results += [task.result() for task in tasks]
                finally:
                    for task in tasks:
                        task.cancel()
        return results

    def _look(self, urls: Sequence[str]) -> list[_Known]:
        """What is known of some files: their indices, or else their ends, which are fetched
        together.
        """
        every: list[_Known] = []
        new: list[_Known] = []
        ends: list[tuple[str, int, int]] = []
        for url in urls:
            size = self.files.version(url).size
            known = _Known(size, found_index(self.files, url, self._kind))
            every.append(known)
            if known.is_new:
                first = min(ENDS, size)
                last = max(first, (size - ENDS) // PAGE * PAGE)
                new += [known, known]
                ends += [(url, 0, first), (url, last, size)]
        pieces = self.files.read(ByteRanges.of(ends)) if ends else []
        for known, (_, start, _), piece in zip(new, ends, pieces, strict=True):
            known.hold(start, piece)
        return every

    def _read(self, url: str, known: _Known, function: Callable[[str], T]) -> T:
        began = time.monotonic()
        try:
            result = self._recorded(url, known, function)
        except (FormatError, MissingNameError, BudgetError):
            # what was read before may have been damaged on its way, or here
            known = _Known(known.size, is_afresh=True)
            with self.files.bypassing_cache():
                result = self._recorded(url, known, function)
        if known.is_new:
            took = time.monotonic() - began
            keep_index(self.files, url, self._kind, known.arrays(), took)
        return result

    def _recorded(self, url: str, known: _Known, function: Callable[[str], T]) -> T:
        """What a function gives; it opens the file once, however often it asks for it."""
        known.is_recording = True
        self._here.opened = url, known
        try:
            return function(url)
        finally:
            self._here.opened = None
            if known.file is not None:
                known.file.close()
                known.file = None

    def arrays_of(self, url: str, function: Callable[[str], object]) -> Arrays:
        """The index of a file: what a function reads of it through h5py."""
        known = _Known(self.files.version(url).size)
        self._recorded(url, known, function)
        return known.arrays()

    def _opening(self, path: str) -> _Known | None:
        """What is known of a file that this thread is opening; None: it is another one."""
        url, known = getattr(self._here, "opened", None) or ("", None)
        return known if url == path else None

    def open(self, path: str) -> h5py.File:
        known = self._opening(path) or self._look([path])[0]
        with asking("h5py", redact(path)):
            try:
                return h5py.File(RemoteFile(self.files, path, known), "r")
            except OSError as error:
                if isinstance(error, HeadraceError) or error.errno in OF_THE_MACHINE:
                    raise
                raise not_whole(path, error) from error

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[h5py.File]:
        known = self._opening(path)
        if known is None:
            with super().reading(path) as file:
                yield file
            return
        known.file = known.file or self.open(path)
        with asking("h5py", redact(path)):
            yield known.file

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteHDF5, (self.files, self._kind)
