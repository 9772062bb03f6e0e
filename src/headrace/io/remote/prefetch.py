"""Fetches byte ranges before they are read.

NOTE [ life of prefetched bytes ]

* Whoever knows the order announces the next ranges, in pieces that are fetched independently, each
  as a coroutine of the server's loop.
* A read takes ranges that were announced, and waits for them. It fetches everything else itself, in
  one go. What was read is dropped: chunks and rows are read once per epoch.
* Of a piece of several files, each file is read by itself, and counts as a piece.
* A piece of which only a part was read takes memory. Where these take too much, since another
  process reads the rest or the iteration was abandoned, the oldest are dropped.
* An error stays with its piece. The next read of it raises the error and drops the piece, so that
  the read after that fetches again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from headrace.io.ranges import GAP, WHOLE, ByteRanges, coalesce
from headrace.memory.processes import renew_after_fork

_GUESSED = 256 << 10  # bytes of a file whose size nobody has asked for

Fetched = Future[list[memoryview | None]]
_Key = tuple[str, int, int]  # path, first byte and end


class _Piece:
    """Ranges of one file that are fetched together."""

    def __init__(self, data: Fetched, numbers: dict[_Key, int], nbytes: int) -> None:
        self.data = data  # also of other files
        self.numbers = numbers  # of those that nobody has read yet
        self.nbytes = nbytes


class Prefetcher:
    """Fetches ranges before they are read.

    Args:
        fetch: begins to fetch ranges, urgent ones or not.
        room: bytes of partly read pieces that are kept.
    """

    def __init__(self, fetch: Callable[[ByteRanges, bool], Fetched], room: int = 0) -> None:
        self._fetch = fetch
        self.room: int = room
        self._whole_nbytes = float(_GUESSED)  # of a whole file, by those that came
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pieces: dict[_Key, _Piece] = {}
        self._touched: dict[_Piece, None] = {}  # by the time of the first read
        self._touched_nbytes = 0
        self.untouched: int = 0
        """Bytes of pieces of which nothing was read."""
        renew_after_fork(self)

    after_fork = _reset  # requests don't survive a fork

    def begin(self, pieces: Sequence[ByteRanges], urgent: bool) -> None:
        """Begins to fetch the ranges that are not being fetched yet."""
        with self._lock:
            for piece in pieces:
                keys = [
                    (path, start, stop)
                    for path, start, stop in dict.fromkeys(piece.each())
                    if start < stop or (start, stop) == (0, WHOLE)
                ]
                keys = [key for key in keys if key not in self._pieces]
                if not keys:
                    continue
                wanted = ByteRanges.of(keys)
                requests = coalesce(wanted, GAP).ranges
                wholes = wanted.file[wanted.is_whole]
                files = len(wanted.paths)
                nbytes = np.bincount(requests.file, requests.nbytes, files)
                nbytes = nbytes + self._whole_nbytes * np.bincount(wholes, minlength=files)
                data = self._fetch(wanted, urgent)
                made = [_Piece(data, {}, int(of_file)) for of_file in nbytes]
                for number, (key, file) in enumerate(zip(keys, wanted.file.tolist(), strict=True)):
                    made[file].numbers[key] = number
                    self._pieces[key] = made[file]
                self.untouched += sum(piece.nbytes for piece in made)

    def take(self, ranges: ByteRanges) -> list[tuple[memoryview | None] | None]:
        """The bytes of those ranges that were announced (None in the tuple: a missing file), when
        they have arrived; None for all others.

        Raises:
            Exception: the error of fetching one.
        """
        found: list[tuple[memoryview | None] | None] = [None] * ranges.size
        if not self._pieces:
            return found
        taken: list[tuple[int, _Piece, int]] = []
        with self._lock:
            for at, key in enumerate(ranges.each()):
                piece = self._pieces.pop(key, None)
                if piece is None:
                    continue
                taken.append((at, piece, piece.numbers.pop(key)))
                if piece not in self._touched:
                    self._touched[piece] = None
                    self._touched_nbytes += piece.nbytes
                    self.untouched -= piece.nbytes
                if not piece.numbers:
                    self._forget(piece)
            self._make_room()
        for at, piece, number in taken:
            try:
                data = piece.data.result()[number]  # it ends: by its deadline
            except BaseException:
                with self._lock:
                    self._forget(piece)
                raise
            if data is not None and ranges.stop[at] == WHOLE:
                self._whole_nbytes = 0.9 * self._whole_nbytes + 0.1 * len(data)
            found[at] = (data,)
        return found

    def _forget(self, piece: _Piece) -> None:
        if piece in self._touched:
            del self._touched[piece]
            self._touched_nbytes -= piece.nbytes
        for key in piece.numbers:
            self._pieces.pop(key, None)
        piece.numbers.clear()

    def drop(self) -> None:
        """Drops everything: it won't be read."""
        with self._lock:
            for piece in set(self._pieces.values()):
                piece.data.cancel()
                piece.numbers.clear()
            self._pieces.clear()
            self._touched.clear()
            self._touched_nbytes = 0
            self.untouched = 0

    def resize(self, nbytes: int) -> None:
        with self._lock:
            self.room = nbytes
            self._make_room()

    def _make_room(self) -> None:
        while self._touched_nbytes > self.room:
            self._forget(next(iter(self._touched)))
