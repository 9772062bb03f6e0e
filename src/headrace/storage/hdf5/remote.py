"""Gives h5py a remote file to read, and caches what opening it reads, so that the next start asks for nothing.

NOTE [ h5py far away ]

* h5py reads through a file object, here `FarFile`: from what is known of the file already, else in aligned pieces from the server.
* While a dataset is opened, exactly what h5py reads is recorded, and becomes the file's index: superblock, groups, headers, lists of
  chunks, the columns of packed files. A later opening finds it all there. What it needs beside it (another name) is fetched, and the
  index is kept anew, with both. Chunks that are read to compare our decoding with h5py's are no part of it; what came of it is.
* h5py calls the file object with its global lock, which whoever destroys an h5py object needs too: so may the garbage collector, in any
  thread, that of the connections included, which would then wait for the one who waits for it. So nothing is collected while a fetch is
  waited for; and one that takes long is waited for with the lock given back: h5py's call ends with a `LaterError`, and is repeated when the
  bytes are there (`patiently`).
* Errors of the server come out of h5py as they went in (`headrace.io.library_errors.remember`).
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import h5py
import numpy as np

from headrace.errors import BudgetError, FormatError, HeadraceError, MissingNameError, RemoteError
from headrace.io.array_file import Arrays
from headrace.io.index import IndexKind, found_index, is_unknown, keep_index
from headrace.io.library_errors import OF_THE_MACHINE, asking, remember
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles

PIECE, WIDEST = 64 << 10, 4 << 20
"""Bytes that are fetched at least; and at most of what nobody has asked for, where one read follows the other."""
ENDS = 128 << 10
"""Bytes at the beginning and the end of each file that are fetched before h5py asks: most of what describes a file lies there."""
TOGETHER = 64
"""Files whose ends are fetched at once."""
PATIENCE = 5.0
"""Seconds that h5py's lock is held for a fetch. It doubles each time."""
_HELD = 8 << 20  # bytes of pieces that are not recorded, for each open file

T = TypeVar("T")


class LaterError(RemoteError):
    """What h5py asked for is on its way, and takes long; never seen by users."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__("the bytes are on their way")
        self.wait = wait


def patiently(function: Callable[[], T]) -> T:
    """What a function gives that reads through h5py; it is called again when bytes have come that took long."""
    while True:
        try:
            return function()
        except LaterError as later:
            wait = later.wait
        wait()


class Extents:
    """Stretches of one file that are held."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._parts: list[memoryview] = []

    def fill(self, start: int, out: memoryview) -> bool:
        """Copies the bytes from `start` on, if all of them are held."""
        at, done = bisect.bisect_right(self._starts, start) - 1, 0
        while done < len(out):
            if not 0 <= at < len(self._starts):
                return False
            part, skipped = self._parts[at], start + done - self._starts[at]
            if not 0 <= skipped < len(part):
                return False
            some = part[skipped : skipped + len(out) - done]
            out[done : done + len(some)] = some
            done, at = done + len(some), at + 1
        return True

    def add(self, start: int, data: memoryview) -> None:
        """Holds a copy of bytes, as far as they are not held already."""
        at, stop = bisect.bisect_right(self._starts, start), start + len(data)
        if at:
            start = max(start, self._starts[at - 1] + len(self._parts[at - 1]))
        while start < stop:
            end = min(stop, self._starts[at]) if at < len(self._starts) else stop
            if start < end:
                self._starts.insert(at, start)
                self._parts.insert(at, memoryview(bytes(data[len(data) - (stop - start) : len(data) - (stop - end)])))
                at += 1
            if end == stop:
                break
            start, at = self._starts[at] + len(self._parts[at]), at + 1

    def arrays(self) -> Arrays:
        """Offsets, lengths, and the bytes one after the other."""
        lengths = np.array([len(part) for part in self._parts], np.int64)
        return [np.array(self._starts, np.int64), lengths, np.frombuffer(b"".join(self._parts), np.uint8)]

    @classmethod
    def of(cls, offsets: Any, lengths: Any, data: Any) -> Extents:
        """From what `arrays` gave."""
        made, whole = cls(), memoryview(data)
        made._starts = offsets.tolist()
        ends = np.cumsum(lengths).tolist()
        made._parts = [whole[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
        return made


class _Known:
    """What is known of a file.

    Args:
        arrays: its index, if there is one.
        is_afresh: is it read past everything that is kept?
    """

    def __init__(self, arrays: Arrays | None = None, is_afresh: bool = False) -> None:
        self.extents: Extents = Extents() if arrays is None else Extents.of(*arrays[:3])
        self.doubts: dict[str, str | None] = {} if arrays is None else json.loads(arrays[3].tobytes())
        self.is_afresh: bool = is_afresh
        self.is_new: bool = False
        self.is_recording = False
        self.pieces: OrderedDict[int, memoryview] = OrderedDict()
        self.patience = PATIENCE

    def arrays(self) -> Arrays:
        return [*self.extents.arrays(), np.frombuffer(json.dumps(self.doubts).encode(), np.uint8)]

    def hold(self, start: int, data: memoryview) -> None:
        """Holds a piece for a while."""
        self.pieces[start] = data
        self.pieces.move_to_end(start)
        while sum(map(len, self.pieces.values())) > _HELD and len(self.pieces) > 1:
            self.pieces.popitem(last=False)

    def fill(self, start: int, out: memoryview) -> bool:
        """Copies bytes, if they are there; records them where that is wanted."""
        if self.extents.fill(start, out):
            return True
        for first, data in reversed(self.pieces.items()):
            if first <= start and start + len(out) <= first + len(data):
                out[:] = data[start - first : start - first + len(out)]
                if self.is_recording:
                    self.extents.add(start, out)
                    self.is_new = True
                return True
        return False


class FarFile:
    """A file that is far away as h5py wants it: seekable, and read in one thread at a time.

    Args:
        files: its server's.
        url: of the file.
        known: of it.
    """

    def __init__(self, files: RemoteFiles, url: str, known: _Known) -> None:
        self._files, self._url, self._known = files, url, known
        self._size, self._at = files.version(url).size, 0
        self._end, self._width = -1, PIECE  # of the last fetch

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves the position; h5py counts from the beginning or the end."""
        self._at = offset + (self._size if whence == 2 else 0)
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Bytes from the position on."""
        stop = self._size if size < 0 else min(self._size, self._at + size)
        buffer = bytearray(max(0, stop - self._at))
        self.readinto(buffer)
        return bytes(buffer)

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer; behind the end of the file with zeros, as HDF5 does on a disk.

        Raises:
            LaterError, RemoteError, FileChangedError, DataNotFoundError, AccessError: they are remembered too, see `asking`.
        """
        out = memoryview(buffer)
        try:
            inside = max(0, min(len(out), self._size - self._at))
            if inside:
                self._fill(self._at, out[:inside])
            out[inside:] = bytes(len(out) - inside)
        except BaseException as error:
            remember(error)
            raise
        self._at += len(out)
        return len(out)

    def flush(self) -> None:
        """Nothing is written."""

    def _fill(self, start: int, out: memoryview) -> None:
        if self._known.fill(start, out):
            return
        stop, first = start + len(out), start // PIECE * PIECE
        self._width = min(WIDEST, 2 * self._width) if first <= self._end <= stop else PIECE
        self._end = min(self._size, max(-(-stop // PIECE) * PIECE, first + self._width))
        self._fetch(first, self._end)
        if not self._known.fill(start, out):
            raise FormatError(f"{redact(self._url)}: bytes {start:,} to {stop:,} did not come")

    def _fetch(self, first: int, end: int) -> None:
        """Begins to fetch bytes, and waits; see NOTE [ h5py far away ]."""
        wanted, known = ByteRanges.of([(self._url, first, end)]), self._known
        collects = gc.isenabled()
        gc.disable()
        try:
            with self._files.bypassing_cache() if known.is_afresh else contextlib.nullcontext():
                future = self._files.begin(wanted)

            def take(patience: float | None = None) -> None:
                known.hold(first, future.result(patience)[0] or memoryview(b""))

            take(known.patience)
        except TimeoutError as error:
            if future.done() and future.exception() is error:
                raise
            known.patience *= 2
            raise LaterError(take) from None
        finally:
            if collects:
                gc.enable()


class FarHDF5:
    """The HDF5 files of one server. A pickle takes along how to reach them; what is known of them is found anew.

    Args:
        files: of the server.
        kind: of their indices.
    """

    def __init__(self, files: RemoteFiles, kind: IndexKind) -> None:
        self.files: RemoteFiles = files
        self._kind = kind
        self._known: dict[str, _Known] = {}  # of files that are being opened
        self._read_now: dict[str, h5py.File | None] = {}  # of these, those that `read_each` or `arrays_of` is about, once they are open

    def read_each(self, urls: Sequence[str], function: Callable[[str], T]) -> list[T]:
        """What a function makes of each file; what it reads of them through h5py is kept as their index.

        Raises:
            Exception: what the function raises.
        """
        self.files.learn(urls, beside=lambda url: is_unknown(self.files, url, self._kind))
        found: list[T] = []
        for start in range(0, len(urls), TOGETHER):
            some = urls[start : start + TOGETHER]
            try:
                self._look(some)
                found += [self._read(url, function) for url in some]
            finally:
                self._known.clear()
        return found

    def _look(self, urls: Sequence[str]) -> None:
        """Finds their indices, or fetches their ends, all at once."""
        spans: list[tuple[str, int, int]] = []
        for url in dict.fromkeys(urls):
            arrays, size = found_index(self.files, url, self._kind), self.files.version(url).size
            self._known[url] = _Known(arrays)
            if arrays is None:
                first = min(ENDS, size)
                spans += [(url, 0, first), (url, max(first, size - ENDS), size)]
        for (url, start, _), data in zip(spans, self.files.read(ByteRanges.of(spans)), strict=True):
            self._known[url].hold(start, data or memoryview(b""))

    def _read(self, url: str, function: Callable[[str], T]) -> T:
        began = time.monotonic()
        if url not in self._known:  # it is named twice
            self._look([url])
        try:
            found, known = self._recorded(url, function)
        except (FormatError, MissingNameError, BudgetError):
            self._known[url] = _Known(is_afresh=True)  # what was read before may have been damaged on its way, or here
            with self.files.bypassing_cache():
                found, known = self._recorded(url, function)
        if known.is_new:
            keep_index(self.files, url, self._kind, known.arrays(), time.monotonic() - began)
        del self._known[url]
        return found

    def _recorded(self, url: str, function: Callable[[str], T]) -> tuple[T, _Known]:
        known = self._known[url]
        known.is_recording = True
        try:
            return patiently(functools.partial(self._in_one_file, url, function)), known
        finally:
            del self._read_now[url]

    def _in_one_file(self, url: str, function: Callable[[str], T]) -> T:
        """What a function gives; it opens the file once, however often it asks for it."""
        self._read_now[url] = None
        try:
            return function(url)
        finally:
            file, self._read_now[url] = self._read_now[url], None
            if file is not None:
                file.close()

    def arrays_of(self, url: str, function: Callable[[str], object]) -> Arrays:
        """The index of a file: what a function reads of it through h5py."""
        self._known[url] = _Known()
        try:
            return self._recorded(url, function)[1].arrays()
        finally:
            del self._known[url]

    def open(self, url: str) -> h5py.File:
        """A file, open for reading.

        Raises:
            FormatError: no HDF5 file, or not a whole one.
            RemoteError, FileChangedError, DataNotFoundError, AccessError: see `RemoteFiles.read`.
            LaterError: see `patiently`.
        """
        if url not in self._known:
            self._look([url])
        known = self._known[url]
        with asking("h5py", redact(url)):
            try:
                file = h5py.File(FarFile(self.files, url, known), "r")
            except OSError as error:
                if isinstance(error, HeadraceError) or error.errno in OF_THE_MACHINE:
                    raise
                cause = " ".join(str(error).split())
                raise FormatError(f"{redact(url)} is no HDF5 file, or not a whole one: {cause}") from error
        if url not in self._read_now:  # after a LaterError it stays: what has come by then would have to come again
            del self._known[url]
        return file

    @contextlib.contextmanager
    def reading(self, url: str) -> Iterator[h5py.File]:
        """The same for as long as the context lasts; see `open`."""
        if url not in self._read_now:
            with self.open(url) as file:
                yield file
            return
        file = self._read_now[url]
        if file is None:
            file = self._read_now[url] = self.open(url)
        yield file

    def is_found(self, url: str) -> bool:
        """Did all that h5py has read of a file so far stand in its index?"""
        return url not in self._known or not self._known[url].is_new

    def doubt(self, url: str, name: str, find: Callable[[], str | None]) -> str | None:
        """What speaks against decoding a dataset here, as its index says; else as is found out, by chunks that are no part of the index."""
        known = self._known.get(url)
        if known is None:
            return find()
        if name not in known.doubts:
            with _unrecorded(known):
                known.doubts[name] = find()
            known.is_new = True
        return known.doubts[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}, "_read_now": {}}


@contextlib.contextmanager
def _unrecorded(known: _Known) -> Iterator[None]:
    was, known.is_recording = known.is_recording, False
    try:
        yield
    finally:
        known.is_recording = was
