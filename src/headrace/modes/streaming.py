"""Streaming: bytes move ahead of the reader, in order; the read-ahead window is all that is held.

The order of an epoch is known, so each worker knows which batches it will be asked for. Threads read their records while the
batches before them are decoded.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headrace.modes.mode import Mode, Read

THREADS = 4
WINDOW = 64 << 20
"""Bytes of records that a process reads ahead at most, where the budget allows."""


def size_of(record: Any) -> int:
    """Bytes of a record, as far as it says."""
    if isinstance(record, (tuple, list, dict)):
        return sum(map(size_of, record.values() if isinstance(record, dict) else record))
    return int(getattr(record, "nbytes", 0)) or (len(record) if isinstance(record, Sized) else 64)


class Streaming(Mode):
    """Reads the batches that come next in threads.

    Args:
        window: bytes that may be read ahead. One batch is always read ahead, however large.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self._reset()

    def _reset(self) -> None:
        self._pending: OrderedDict[tuple[int, ...], Future[list[Any]]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._record_bytes = 0.0  # of a record, by the last batches

    def expect(self, batches: Iterable[Sequence[int]], read: Read) -> None:
        self._own()
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
        self._own()
        future = self._pending.pop(tuple(indices), None)
        records = read(indices) if future is None else future.result()
        if records:
            mean = sum(map(size_of, records)) / len(records)
            self._record_bytes = mean if not self._record_bytes else 0.8 * self._record_bytes + 0.2 * mean
        return records

    def _own(self) -> None:
        if self._pid != os.getpid():  # threads don't survive a fork
            self._reset()

    def close(self) -> None:
        if self._pool is not None and self._pid == os.getpid():
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._reset()

    def stats(self) -> dict[str, int]:
        return {"ahead": len(self._pending)}

    def __getstate__(self) -> dict[str, Any]:
        return {"window": self.window}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.window = state["window"]
        self._reset()
