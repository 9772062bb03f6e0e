"""Streaming: bytes move ahead of the reader, in order; the read-ahead window is all that is held.

The order of an epoch is known, so each worker knows which batches it will be asked for, and in which blocks their samples lie.

* Local records are read by threads while the batches before them are decoded, a few batches ahead.
* Remote bytes are fetched until `window` of them are on their way, however many batches that is: of a block shuffle whole
  stretches of it, each once, else what each batch takes. See NOTE [ life of the bytes ahead ] in `headrace.io.remote_files`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.io.ranges import ByteRanges
from headrace.memory.budget import size_of
from headrace.memory.per_process import renew_after_fork
from headrace.modes.mode import Coming, Mode, Read
from headrace.storage.source import Locatable, Source, is_prefetched

THREADS = 4
WINDOW = 64 << 20
"""Bytes that a process reads ahead at most, where the budget allows."""
ASKED = 16
"""Batches that are computed together, and for which is asked together where their samples lie, if that must be asked for."""
AHEAD = 2
"""Batches, beside the next one, whose records are read ahead."""


class Streaming(Mode):
    """Reads what comes next ahead.

    Args:
        window: bytes that may be read ahead. One batch is always read ahead, however large.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self._reset()

    def _reset(self) -> None:
        self._pending: OrderedDict[tuple[int, ...], Future[list[Any]]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._record_bytes = 0.0  # of a record, by the last batches
        self._scan: _Scan | None = None
        renew_after_fork(self)

    after_fork = _reset  # threads don't survive a fork

    def reads_records_ahead(self, source: Source) -> bool:
        return self.window > 0 and not is_prefetched(source)

    def expect(self, coming: Coming, source: Source, whole: Callable[[IntArray], IntArray]) -> None:
        if is_prefetched(source):
            if self._scan is None or not self._scan.goes_on(coming):
                source.files.drop_prefetched()
                self._scan = _Scan(coming, source, whole)
            self._scan.fetch(coming, self.window)
        elif source.thread_safe:
            self.read_ahead([whole(batch).tolist() for batch in coming.some(coming.steps[: AHEAD + 1])], source.read)

    def read_ahead(self, batches: Sequence[Sequence[int]], read: Read) -> None:
        """Begins to read the records of batches that come next, in threads."""
        keys = [tuple(batch) for batch in batches]
        for stale in self._pending.keys() - set(keys):  # an epoch that was left early
            self._pending.pop(stale).cancel()
        for key in keys:
            ahead = sum(map(len, self._pending)) + len(key)
            if self._pending and (not self._record_bytes or ahead * self._record_bytes > self.window):
                break  # before the first batch is there, nobody knows how much another one takes
            if key not in self._pending:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(THREADS, "headrace-read-ahead")
                self._pending[key] = self._pool.submit(read, key)

    def read(self, indices: Sequence[int], read: Read) -> list[Any]:
        future = self._pending.pop(tuple(indices), None)
        records = read(indices) if future is None else future.result()
        if records and self._pool is not None:
            mean = sum(map(size_of, records)) / len(records)
            self._record_bytes = mean if not self._record_bytes else 0.8 * self._record_bytes + 0.2 * mean
        return records

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._reset()

    def stats(self) -> dict[str, int]:
        return {"ahead": len(self._pending)}

    def __getstate__(self) -> dict[str, Any]:
        return {"window": self.window}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.window: int = state["window"]
        self._reset()


class _Scan:
    """Goes through the batches of an epoch ahead of the reader, and has their bytes fetched."""

    def __init__(self, coming: Coming, source: Locatable, whole: Callable[[IntArray], IntArray]) -> None:
        self._key, self._source, self._files, self._whole = coming.key, source, source.files, whole
        self._at, self._last = coming.steps.start, coming.steps.start
        self._edges = None if coming.stretches is None else coming.stretches()
        self._begun: set[int] = set()  # stretches
        self._some: dict[int, IntArray] = {}  # the batches that come next, by step

    def goes_on(self, coming: Coming) -> bool:
        """Are these the rest of the batches that it has gone through?"""
        return coming.key == self._key and self._last <= coming.steps.start <= self._at

    def fetch(self, coming: Coming, window: int) -> None:
        """Has fetched what comes, the next batch in any case, until so many bytes are on their way."""
        self._last = coming.steps.start
        while self._at < coming.steps.stop and (self._at <= self._last or self._files.bytes_prefetched < window):
            is_first = self._at == self._last  # nothing of it was asked for before
            indices = self._batch(coming)
            if self._edges is None:
                self._files.prefetch([self._source.byte_ranges(self._whole(indices))], is_first)
            else:
                self._files.prefetch([self._stretch(stretch, self._edges) for stretch in self._new(indices, self._edges)], is_first)
            self._at += coming.steps.step

    def _batch(self, coming: Coming) -> IntArray:
        """The batch that it has come to. Some are computed together, and asked for where they lie if that must be asked."""
        if self._at not in self._some:
            steps = range(self._at, coming.steps.stop, coming.steps.step)[: ASKED if self._some or self._source.locating_needs_io else 1]
            self._some = dict(zip(steps, coming.some(steps), strict=True))
            if self._source.locating_needs_io:
                self._source.byte_ranges(self._whole(np.concatenate(list(self._some.values()))))
        return self._some[self._at]

    def _new(self, indices: IntArray, edges: IntArray) -> list[int]:
        stretches = dict.fromkeys((np.searchsorted(edges, indices, side="right") - 1).tolist())
        new = [stretch for stretch in stretches if stretch not in self._begun]
        self._begun.update(new)
        return new

    def _stretch(self, stretch: int, edges: IntArray) -> ByteRanges:
        return self._source.byte_ranges(self._whole(np.arange(edges[stretch], edges[stretch + 1], dtype=np.int64)))
