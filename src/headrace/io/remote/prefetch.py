"""Fetches byte ranges before they are read.

NOTE [ life of prefetched bytes ]

* The part of the program that knows the order announces the next ranges, in pieces that are fetched
  independently, each as a coroutine of the server's loop.
* Fetched bytes are kept until they were read once, and then dropped: chunks and rows are read once
  per epoch. Bytes that are never read, since another process reads the rest or the iteration was
  abandoned, are dropped when space is needed, oldest first.
* A read takes pieces that are in flight, and waits for them. It fetches everything else itself, in
  one go.
* An error stays with its piece. The next read of it raises the error and drops the piece, so that
  the read after that fetches again.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from headrace.io.ranges import GAP, WHOLE, ByteRanges, coalesce
from headrace.memory.per_process import renew_after_fork

_GUESSED = 256 << 10  # bytes of a file whose size nobody has asked for

Fetched = Future[list[memoryview | None]]


@dataclass(slots=True)
class _Extent:
    """Bytes of a file that are on their way, or have come."""

    stop: int
    nbytes: int
    """Of a whole file, whose size nobody knows yet: as those before had."""
    data: Fetched
    number: int
    """Of its place in what is fetched together."""
    left: int
    """Bytes that nobody has read yet."""
    is_touched: bool = False


class Prefetcher:
    """What was fetched ahead of its reader.

    Args:
        fetch: begins to fetch ranges, which somebody waits for or not.
        room: bytes that are held, at most, beside those that nobody has touched.
    """

    def __init__(self, fetch: Callable[[ByteRanges, bool], Fetched], room: int = 0) -> None:
        self._fetch = fetch
        self.room: int = room
        self._whole_nbytes = float(_GUESSED)  # of a whole file, by those that came
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._starts: dict[str, list[int]] = {}  # by path, sorted
        self._extents: OrderedDict[tuple[str, int], _Extent] = OrderedDict()
        self.untouched: int = 0
        self._touched = 0
        renew_after_fork(self)

    after_fork = _reset  # requests don't survive a fork

    def begin(self, pieces: Sequence[ByteRanges], urgent: bool) -> None:
        """Has pieces fetched, as far as they are not on their way already."""
        with self._lock:
            for piece in pieces:
                wanted, left = _joined(piece)
                new = [
                    number for number, one in enumerate(wanted.each()) if self._find(*one) is None
                ]
                if not new:
                    continue
                wanted = wanted.take(np.array(new))
                data = self._fetch(wanted, urgent)
                for number, (path, start, stop) in enumerate(wanted.each()):
                    self._forget(path, start)
                    nbytes = int(self._whole_nbytes) + 1 if stop == WHOLE else stop - start
                    self._extents[path, start] = _Extent(
                        stop, nbytes, data, number, nbytes if stop == WHOLE else left[new[number]]
                    )
                    bisect.insort(self._starts.setdefault(path, []), start)
                    self.untouched += nbytes

    def take(self, ranges: ByteRanges) -> list[tuple[memoryview | None] | None]:
        """The bytes of ranges (None: a whole file that is missing), of those that are on their way;
        waits for them.

        Raises:
            Exception: what fetching them has raised.
        """
        found: list[tuple[memoryview | None] | None] = [None] * ranges.size
        if not self._extents:
            return found
        taken: list[tuple[int, str, int, int, _Extent, int]] = []
        with self._lock:
            for number, (path, start, stop) in enumerate(ranges.each()):
                key = (
                    self._find(path, start, stop)
                    if start < stop or (start, stop) == (0, WHOLE)
                    else None
                )
                if key is None:
                    continue
                extent = self._extents[path, key]
                taken.append((number, path, start, stop, extent, key))
                extent.left -= extent.nbytes if stop == WHOLE else stop - start
                if not extent.is_touched:
                    extent.is_touched = True
                    self.untouched -= extent.nbytes
                    self._touched += extent.nbytes
                    self._extents.move_to_end((path, key))
                if extent.left <= 0:
                    self._forget(path, key)
            self._make_room()
        for number, path, start, stop, extent, key in taken:
            try:
                data = extent.data.result()[extent.number]  # it ends: by its deadline
            except BaseException:
                with self._lock:
                    self._forget(path, key)
                raise
            if stop != WHOLE and data is not None:
                data = data[start - key : stop - key]
            elif data is not None:
                self._whole_nbytes = 0.9 * self._whole_nbytes + 0.1 * len(data)
            found[number] = (data,)
        return found

    def _find(self, path: str, start: int, stop: int) -> int | None:
        """Where the extent begins that a range lies in."""
        starts = self._starts.get(path)
        at = -1
        if starts:
            at = bisect.bisect_right(starts, start) - 1
        if at < 0 or starts is None:
            return None
        end = self._extents[path, starts[at]].stop
        if stop == end or (stop <= end and stop != WHOLE):
            return starts[at]
        return None

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


def _joined(piece: ByteRanges) -> tuple[ByteRanges, list[int]]:
    """What is fetched of a piece, and the bytes that will be read of each: where ranges overlap
    each is read by itself, and counts; the same range is read once.
    """
    piece = piece.take(np.lexsort((piece.stop, piece.start, piece.file)))
    is_new = np.ones(piece.size, bool)
    is_new[1:] = (
        (np.diff(piece.file) != 0) | (np.diff(piece.start) != 0) | (np.diff(piece.stop) != 0)
    )
    piece = piece.take(is_new)
    requests = coalesce(piece, GAP)
    nbytes = (
        np.add.reduceat(piece.nbytes[requests.order], requests.edges[:-1])
        if requests.ranges.size
        else np.empty(0, np.int64)
    )
    wholes = piece.take(piece.is_whole)
    return ByteRanges.joined([requests.ranges, wholes]), [*nbytes.tolist(), *[0] * wholes.size]
