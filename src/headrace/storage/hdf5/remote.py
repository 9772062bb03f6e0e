"""Gives h5py a remote file to read, and caches what opening it reads, so that the next start needs
no requests.

NOTE [ h5py and remote files ]

* h5py reads through a file object, here `RemoteFile`: from the known parts of the file, else in
  aligned pieces from the server.
* While a dataset is opened, exactly what h5py reads is recorded and becomes the file's index:
  superblock, groups, headers, lists of chunks, the columns of packed files. Later openings find it
  there. If they need more (another name), it is fetched, and the index is cached again with both.
  Chunks that are read to compare our decoding with h5py's are not part of it; the result of the
  comparison is.
* h5py calls the file object while it holds its global lock. Destroying an h5py object needs the
  same lock. The garbage collector may do so in any thread, including those of the connections,
  which would then deadlock with the thread that waits for them. Therefore garbage collection is off
  while a fetch is waited for. For a long fetch the lock is released: h5py's call ends with a
  `LaterError`, and is repeated when the bytes have arrived (`patiently`).
* Errors of the server pass through h5py unchanged (`headrace.io.library_errors.remember`).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import h5py
import numpy as np

from headrace.errors import BudgetError, FormatError, HeadraceError, MissingNameError, RemoteError
from headrace.io.array_file import Arrays
from headrace.io.index import IndexKind, found_index, keep_index, learn_indexed
from headrace.io.library_errors import OF_THE_MACHINE, asking, remember
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges, coalesce
from headrace.io.remote_files import RemoteFiles
from headrace.storage.hdf5.files import HDF5Files, leads_out, not_whole

PIECE, WIDEST = 64 << 10, 4 << 20
"""Bytes that are fetched at least; and at most of what nobody has asked for, where one read
follows the other.
"""
ENDS = 128 << 10
"""Bytes at the beginning and the end of each file that are fetched before h5py asks: most of
what describes a file lies there.
"""
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
    """What a function gives that reads through h5py; it is called again when bytes have come
    that took long.
    """
    while True:
        try:
            return function()
        except LaterError as later:
            wait = later.wait
        wait()


class _Known:
    """What is known of a file: what h5py has read of it, and what was fetched beside that.

    Args:
        arrays: its index, if there is one.
        is_afresh: True if it is read past everything that is cached.
    """

    def __init__(self, arrays: Arrays | None = None, is_afresh: bool = False) -> None:
        empty = np.empty(0, np.int64)
        offsets, lengths, data = (empty, empty, empty) if arrays is None else arrays[:3]
        # of the index
        self._ranges = coalesce(ByteRanges.in_file("", offsets, offsets + lengths), 0).ranges
        self._edges, self._data = np.append(0, np.cumsum(self._ranges.nbytes)), memoryview(data)  # type: ignore[arg-type]
        self._reads: dict[int, memoryview] = {}  # what was read since, by first byte
        self._pieces: OrderedDict[int, memoryview] = OrderedDict()
        self.doubts: dict[str, str | None] = (
            {} if arrays is None else json.loads(arrays[3].tobytes())
        )
        self.is_afresh = is_afresh
        self.is_new = False
        self.is_recording = False
        self.stays_open = False
        self.ends: tuple[list[int], Future[list[memoryview | None]]] | None = None
        """Where the pieces begin that are on their way since it was looked for, and these."""
        self.file: h5py.File | None = None
        """What is open for as long as it stays so."""
        self.patience = PATIENCE

    def arrays(self) -> Arrays:
        """The index: offsets and lengths, sorted, the bytes one after the other, and what speaks
        against decoding, as JSON.
        """
        edges = self._edges.tolist()
        parts = [self._data[first:last] for first, last in itertools.pairwise(edges)] + [
            *self._reads.values()
        ]
        starts = np.array([*self._ranges.start.tolist(), *self._reads], np.int64)
        requests = coalesce(
            ByteRanges.in_file("", starts, starts + np.array(list(map(len, parts)), np.int64)), 0
        )
        sizes = requests.ranges.nbytes
        places = starts[requests.order] - np.repeat(
            requests.ranges.start - np.cumsum(sizes) + sizes, np.diff(requests.edges)
        )
        data = bytearray(int(sizes.sum()))
        for number, place in zip(requests.order.tolist(), places.tolist(), strict=True):
            data[place : place + len(parts[number])] = parts[number]
        return [
            requests.ranges.start,
            sizes,
            np.frombuffer(data, np.uint8),
            np.frombuffer(json.dumps(self.doubts).encode(), np.uint8),
        ]

    def take_ends(self) -> None:
        """Waits for what is on its way, outside of h5py."""
        if self.ends is not None:
            starts, pieces = self.ends
            self.ends = None
            for start, data in zip(starts, pieces.result(), strict=True):
                self.hold(start, data or memoryview(b""))

    def forget_ends(self) -> None:
        """They are not needed any more."""
        if self.ends is not None:
            self.ends[1].cancel()
            self.ends = None

    def hold(self, start: int, data: memoryview) -> None:
        """Holds a piece for a while."""
        self._pieces[start] = data
        self._pieces.move_to_end(start)
        while sum(map(len, self._pieces.values())) > _HELD and len(self._pieces) > 1:
            self._pieces.popitem(last=False)

    def fill(self, start: int, out: memoryview) -> bool:
        """Copies bytes, if they are there; records them where that is wanted."""
        at = int(self._ranges.start.searchsorted(start, "right")) - 1
        if at >= 0 and start + len(out) <= self._ranges.stop[at]:
            place = int(self._edges[at] + start - self._ranges.start[at])
            out[:] = self._data[place : place + len(out)]
            return True
        if len(data := self._reads.get(start, b"")) >= len(out):
            out[:] = data[: len(out)]
            return True
        for first, piece in reversed(self._pieces.items()):
            if first <= start and start + len(out) <= first + len(piece):
                out[:] = piece[start - first : start - first + len(out)]
                if self.is_recording:
                    self._reads[start] = memoryview(bytes(out))
                    self.is_new = True
                return True
        return False


class RemoteFile:
    """A remote file as h5py wants it: seekable, and read in one thread at a time."""

    def __init__(self, files: RemoteFiles, url: str, known: _Known) -> None:
        self._files, self._url, self._known = files, url, known
        self._size, self._at = files.version(url).size, 0
        self._end, self._width = -1, PIECE  # of the last fetch

    def seek(self, offset: int, whence: int = 0) -> int:
        """h5py counts from the beginning or the end."""
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
        """Fills a buffer; behind the end of the file with zeros, as HDF5 does on a disk. Errors
        are remembered too, see `asking`.
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
        """Begins to fetch bytes, and waits; see NOTE [ h5py and remote files ]."""
        known, collects = self._known, gc.isenabled()
        gc.disable()
        try:
            with self._files.bypassing_cache() if known.is_afresh else contextlib.nullcontext():
                future = self._files.begin(ByteRanges.of([(self._url, first, end)]))

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


class RemoteHDF5(HDF5Files):
    """The HDF5 files of one server. A pickle takes along how to reach them; what is known of
    them is found anew.
    """

    files: RemoteFiles

    def __init__(self, files: RemoteFiles, kind: IndexKind) -> None:
        super().__init__(files)
        self._kind = kind
        self._known: dict[str, _Known] = {}  # of files that are being opened
        self._kept: list[Future[None]] = []  # indices that are on their way to the disk

    def learn(self, paths: Sequence[str], unless: Callable[[], bool] = lambda: False) -> None:
        learn_indexed(self.files, paths, self._kind, unless)

    def read_each(self, paths: Sequence[str], function: Callable[[str], T]) -> list[T]:
        self.learn(paths)
        results: list[T] = []
        # the disk takes its time, and other files are read meanwhile
        with ThreadPoolExecutor(1, "headrace-keep-index") as keeper:
            for start in range(0, len(paths), TOGETHER):
                urls = paths[start : start + TOGETHER]
                try:
                    self._look(urls)
                    results += [self._read(url, function, keeper) for url in urls]
                finally:
                    for known in self._known.values():
                        known.forget_ends()
                    self._known.clear()
        kept, self._kept = self._kept, []
        for one in kept:
            one.result()
        return results

    def _look(self, urls: Sequence[str]) -> None:
        """Finds their indices, or begins to fetch their ends, all at once."""
        for url in dict.fromkeys(urls):
            arrays, size = found_index(self.files, url, self._kind), self.files.version(url).size
            self._known[url] = known = _Known(arrays)
            if arrays is None:
                first = min(ENDS, size)
                ends = [(url, 0, first), (url, max(first, size - ENDS), size)]
                known.ends = [0, ends[1][1]], self.files.begin(ByteRanges.of(ends))

    def _read(self, url: str, function: Callable[[str], T], keeper: ThreadPoolExecutor) -> T:
        began = time.monotonic()
        if url not in self._known:  # it is named twice
            self._look([url])
        self._known[url].take_ends()
        try:
            result = self._recorded(url, function)
        except (FormatError, MissingNameError, BudgetError):
            # what was read before may have been damaged on its way, or here
            self._known[url] = _Known(is_afresh=True)
            with self.files.bypassing_cache():
                result = self._recorded(url, function)
        known = self._known.pop(url)
        if known.is_new:
            self._kept.append(
                keeper.submit(
                    keep_index,
                    self.files,
                    url,
                    self._kind,
                    known.arrays(),
                    time.monotonic() - began,
                )
            )
        return result

    def _recorded(self, url: str, function: Callable[[str], T]) -> T:
        """What a function gives; it opens the file once, however often it asks for it."""
        known = self._known[url]

        def call() -> T:
            try:
                return function(url)
            finally:
                file, known.file = known.file, None
                if file is not None:
                    file.close()

        known.is_recording = known.stays_open = True
        try:
            return patiently(call)
        finally:
            known.stays_open = False

    def arrays_of(self, url: str, function: Callable[[str], object]) -> Arrays:
        """The index of a file: what a function reads of it through h5py."""
        known = self._known[url] = _Known()
        try:
            self._recorded(url, function)
            return known.arrays()
        finally:
            del self._known[url]

    def open(self, path: str) -> h5py.File:
        """As there, and a `LaterError` where it takes long: see `patiently`."""
        if path not in self._known:
            self._look([path])
        known = self._known[path]
        known.take_ends()
        with asking("h5py", redact(path)):
            try:
                file = h5py.File(RemoteFile(self.files, path, known), "r")
            except OSError as error:
                if isinstance(error, HeadraceError) or error.errno in OF_THE_MACHINE:
                    raise
                raise not_whole(path, error) from error
        # after a LaterError it is known still: what has come by then would have to come again
        if not known.stays_open:
            del self._known[path]
        return file

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[h5py.File]:
        known = self._known.get(path)
        with contextlib.ExitStack() as stack:
            if known is None or not known.stays_open:
                file = stack.enter_context(self.open(path))
            else:
                file = known.file = known.file or self.open(path)
            with asking("h5py", redact(path)):
                yield file

    def dataset(self, file: h5py.File, name: str, path: str) -> h5py.Dataset:
        if (out := leads_out(file, name)) is not None:  # perhaps to a file of this machine
            part, link, _ = out
            raise other_file(
                f"{redact(path)}: the link {part!r} on the way to {name!r} leads into "
                f"{redact(link.filename)!r}"
            )
        return super().dataset(file, name, path)

    def is_indexed(self, path: str) -> bool:
        return path not in self._known or not self._known[path].is_new

    def doubt(self, path: str, name: str, find: Callable[[], str | None]) -> str | None:
        known = self._known.get(path)
        if known is None:
            return find()
        if name not in known.doubts:
            was, known.is_recording = known.is_recording, False
            try:
                known.doubts[name] = find()
            finally:
                known.is_recording = was
            known.is_new = True
        return known.doubts[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}, "_kept": []}


def other_file(what: str) -> FormatError:
    """The error of a remote file that leads to another file."""
    return FormatError(
        f"{what}: far away other files are not followed: open that file itself, or a copy of all "
        "of them on this machine"
    )
