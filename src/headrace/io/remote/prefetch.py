"""What becomes of bytes that are fetched before somebody asks for them?

NOTE [ life of the bytes ahead ]

* Whoever knows the order says which bytes come next (`ahead`), in pieces that are fetched each by itself, in threads.
* What has come waits until it was read once, and is then forgotten: stretches of chunks and rows are read once in an epoch. What is left
  over, since another process reads the rest, or the user went away, goes when there is no more room, the oldest first.
* A read takes what is on its way already, and waits for it; everything else it fetches itself, in one go.
* An error stays with its piece: the next read of it raises it, and forgets the piece, so that the one after fetches anew.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from headrace.io.ranges import GAP
from headrace.memory.per_process import renew_after_fork

THREADS = 16
"""Pieces ahead that a process fetches at once."""
_GUESSED = 256 << 10  # bytes of a file whose size nobody has asked for
WHOLE = -1
"""The end of a span that is a whole file, of whatever size, which may be missing."""

Span = tuple[str, int, int]
"""Path, first byte, end (or WHOLE)."""


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


class Ahead:
    """What was fetched ahead of its reader.

    Args:
        fetch: reads spans.
        room: bytes that are held, at most, beside those that nobody has touched.
    """

    def __init__(self, fetch: Callable[[Sequence[Span]], list[memoryview | None]], room: int = 0) -> None:
        self._fetch = fetch
        self.room: int = room
        self.untouched: int = 0
        self._whole_nbytes = float(_GUESSED)  # of a whole file, by those that came
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._starts: dict[str, list[int]] = {}  # by path, sorted
        self._extents: OrderedDict[tuple[str, int], _Extent] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self.untouched = self._touched = 0
        self._first = 0  # pieces that are needed first and have not come
        self._later: list[tuple[Future[list[memoryview | None]], list[Span]]] = []
        self._is_open = True
        renew_after_fork(self)

    after_fork = _reset  # threads don't survive a fork, and what they would have brought neither

    def begin(self, pieces: Sequence[Sequence[Span]], first: bool) -> None:
        """Has pieces fetched; those that are not needed first when those that are have come, so that these have the line for themselves."""
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
        with self._lock:
            for extent in self._extents.values():
                extent.data.cancel()
            self._extents.clear()
            self._starts.clear()
            self._later.clear()
            self.untouched = self._touched = 0

    def resize(self, nbytes: int) -> None:
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
        if self._pool is not None:
            with self._lock:
                self._is_open = False
            self.drop()
            self._pool.shutdown(wait=True)  # what is on its way ends by its deadline
        self._reset()


def _merged(spans: Sequence[Span]) -> list[tuple[str, int, int, int]]:
    """Spans that lie close to one another as one: path, first byte, end, bytes that were asked for (where spans overlap each is read by
    itself, and they count as often); whole files by themselves."""
    found: list[tuple[str, int, int, int]] = []
    for path, start, stop in sorted(set(spans)):
        if stop == WHOLE:
            found.append((path, 0, WHOLE, 0))
            continue
        if start >= stop:
            continue
        if found and found[-1][0] == path and found[-1][2] != WHOLE and start <= found[-1][2] + GAP:
            _, first, end, nbytes = found[-1]
            found[-1] = (path, first, max(end, stop), nbytes + stop - start)
        else:
            found.append((path, start, stop, stop - start))
    return found
