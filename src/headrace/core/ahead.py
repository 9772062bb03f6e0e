"""Streaming: samples are read ahead of the reader, in order, and only the prefetched window is
held.

The order of an epoch is known, so each worker knows which batches will be requested from it, and in
which blocks their samples are.

* Local records are read by threads, a few batches ahead, while earlier batches are decoded.
* Remote bytes are requested until `window` bytes are in flight, however many batches that is: with
  a block shuffle whole segments, each once; otherwise what each batch takes. See NOTE [ life of
  prefetched bytes ] in `headrace.io.remote.prefetch`.
* The first batch of a block shuffle has few samples of each of its segments. Those are fetched
  alone, and the segments when a later batch takes samples of them, because the training waits for
  the first batch and has time for the following ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import parent_process
from typing import Any

import numpy as np

from headrace.core.values import Coming, Records
from headrace.dtypes import IntArray
from headrace.formats.source import Locatable, Source, is_prefetched
from headrace.io.ranges import ByteRanges
from headrace.memory.budget import size_of
from headrace.memory.processes import renew_after_fork

THREADS = 4
WINDOW = 64 << 20
"""Bytes that a process prefetches at most, where the budget allows."""
LOCATED = 16
"""Batches that are computed together, and located together where that takes requests."""
LITTLE = 128 << 10
"""Bytes of a segment, at most, that the first batch fetches whole."""
AHEAD = 2
"""Batches, beside the next one, whose records are prefetched."""


class Ahead(Records):
    """Records, those of the next batches read ahead.

    Args:
        source: the storage source.
        window: maximum bytes to prefetch. One batch is always prefetched, whatever its size.
    """

    def __init__(self, source: Source, window: int = WINDOW) -> None:
        super().__init__(source)
        self.window = window
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Begins anew: threads don't survive a fork."""
        self._pending: OrderedDict[tuple[int, ...], Future[list[Any]]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._record_nbytes = 0.0  # mean of the last batch
        self._scan: _Scan | None = None

    @property
    def is_direct(self) -> bool:  # type: ignore[override]
        return not self.window or is_prefetched(self.source)

    def announce(self, coming: Coming) -> None:
        source = self.source
        if is_prefetched(source):
            if self._scan is None or not self._scan.continues_with(coming):
                source.files.drop_prefetched()
                self._scan = _Scan(coming, source)
            self._scan.fetch(coming, self.window)
        elif source.thread_safe:
            batches = coming.batches(coming.steps[: AHEAD + 1])
            self.read_ahead([coming.whole(batch).tolist() for batch in batches])

    def read_ahead(self, batches: Sequence[Sequence[int]]) -> None:
        """Begins to read the records of batches that come next, in threads."""
        keys = [tuple(batch) for batch in batches]
        for stale in self._pending.keys() - set(keys):  # an epoch that was left early
            self._pending.pop(stale).cancel()
        for key in keys:
            ahead = sum(map(len, self._pending)) + len(key)
            fits = self._record_nbytes and ahead * self._record_nbytes <= self.window
            if self._pending and not fits:
                break  # before the first batch is there, nobody knows how much another one takes
            if key not in self._pending:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(THREADS, "headrace-read-ahead")
                self._pending[key] = self._pool.submit(self.source.read, key)

    def read_records(self, indices: Sequence[int]) -> list[Any]:
        future = self._pending.pop(tuple(indices), None)
        records = self.source.read(indices) if future is None else future.result()
        if records and self._pool is not None:
            self._record_nbytes = sum(map(size_of, records)) / len(records)
        return records

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self.after_fork()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.window)


class _Scan:
    """Requests the bytes of an epoch's batches ahead of the reader."""

    def __init__(self, coming: Coming, source: Locatable) -> None:
        self._coming = coming
        self._source = source
        self._first = coming.steps.start  # steps
        self._next = coming.steps.start
        self._edges = None if coming.segments is None else coming.segments()
        self._begun: set[int] = set()  # segments
        self._batches: dict[int, IntArray] = {}  # those that come next, by step

    def continues_with(self, coming: Coming) -> bool:
        """True if these are the same batches, without some at the start."""
        is_aligned = (self._next - coming.steps.start) % coming.steps.step == 0
        return (
            coming.key == self._coming.key
            and self._coming.steps.start <= coming.steps.start <= self._next
            and is_aligned
        )

    def fetch(self, coming: Coming, window: int) -> None:
        """Requests the bytes of the next batches until `window` bytes are in flight; those of the
        first one in any case.

        A worker that has not made its first batch requests that one alone: the others would wait
        for it, and locating them delays the threads that fetch.
        """
        self._coming = coming
        reader = coming.steps.start
        # a worker is asked for its next batch as soon as it has made one
        is_alone = reader == self._first and parent_process() is not None
        while self._next < coming.steps.stop:
            is_urgent = self._next == reader  # nothing of it was fetched before
            is_full = is_alone or self._source.files.bytes_prefetched >= window
            if self._next > reader and is_full:
                break
            self._source.files.prefetch(self._pieces(self._batch()), is_urgent)
            self._next += coming.steps.step

    def _batch(self) -> IntArray:
        """The next batch. Several are computed together, and located if that takes requests."""
        if self._next not in self._batches:
            steps = self._coming.steps
            count = LOCATED if self._batches or self._source.locating_needs_io else 1
            steps = range(self._next, steps.stop, steps.step)[:count]
            self._batches = dict(zip(steps, self._coming.batches(steps), strict=True))
            if self._source.locating_needs_io:
                self._located(np.concatenate(list(self._batches.values())))
        return self._batches[self._next]

    def _pieces(self, indices: IntArray) -> list[ByteRanges]:
        """The byte ranges to fetch for a batch: whole segments, or those of its samples alone."""
        if self._edges is None:
            return [self._located(indices)]
        numbers = np.searchsorted(self._edges, indices, side="right") - 1
        segments = [each for each in dict.fromkeys(numbers.tolist()) if each not in self._begun]
        pieces = []
        for segment in segments:
            edges = self._edges[segment : segment + 2].tolist()
            pieces.append(self._located(np.arange(*edges, dtype=np.int64)))
        # whole files say no bytes: of them no part is left for later
        if self._next == self._first and any(piece.nbytes.sum() > LITTLE for piece in pieces):
            return [self._located(indices)]
        self._begun.update(segments)
        return pieces

    def _located(self, indices: IntArray) -> ByteRanges:
        return self._source.byte_ranges(self._coming.whole(indices))
