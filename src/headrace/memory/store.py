"""A store of cached samples in shared memory, for all workers of a rank.

One `SampleStore` holds the samples of a dataset for all workers of a rank: a table with a position
for every index, followed by a circular log of samples, in anonymous shared memory.

NOTE [ store protocol ]

Positions in the log only grow; position p is at byte p % capacity. The samples between `tail` and
`head` are valid.

* Writers hold the lock: a `threading.Lock` within a process, a POSIX record lock between processes
  (which the kernel releases when its holder dies, however that happens). A writer writes the sample
  behind `head`, then moves `head`, then writes the position into the table. If it is killed at any
  instruction, it leaves a sample that no table entry points to, and the next writer continues.
* To make room, a writer clears the table entry of the oldest sample, then moves `tail`, and only
  then overwrites its bytes.
* Readers take no lock. They copy the sample and then check `tail` and the table entry again. If
  either has moved past the sample, the copy may be torn; it is dropped, and the sample counts as
  missing.
* While all samples so far are arrays of one shape and dtype, their entries have one size and start
  at multiples of it, since no entry straddles the end of the log. A whole batch is then copied at
  once (`rows`) and checked again in the same way.

* Under memory pressure the oldest samples are evicted in the same way, and the pages outside of
  `tail` to `head` return to the system (`release`). The store stays below its capacity until the
  pressure ends.
* Zeros are the state of an empty store, so a shared file needs no initialisation that another
  process might see half-done.

"keep" admits until the log is full and never evicts. "lru" evicts the oldest sample that was not
read since it was written or last spared: the CLOCK approximation of LRU (Corbato 1968), "second
chance", implemented by appending a spared sample again.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil

from headrace.errors import ConfigError
from headrace.memory.anonymous import AnonymousMemory, up
from headrace.memory.locks import ProcessLock
from headrace.memory.per_process import PerProcess
from headrace.memory.rows import (
    HEADER,
    MIXED,
    Layout,
    Rows,
    copies_at,
    decode,
    encode,
    header_at,
    layout_of,
    signature_of,
)

MISSING: Final[Any] = type(
    "Missing", (), {"__repr__": lambda self: "MISSING", "__bool__": lambda self: False}
)()
"""What `get` returns for a sample that is not held (None may be a sample)."""

POLICIES = ("keep", "lru")
TABLE = 9
"""Bytes of the index table for each sample of the dataset, held or not."""
_ALIGN = 64
(
    HEAD,
    TAIL,
    COUNT,
    ADMITTED,
    EVICTED,
    FULL,
    _LRU,
    _REDUCED,
    _RELEASED,
    _CLEAN,
    _LOOKED,
    _CAPPED,
    LAYOUT,
) = range(13)
_CELLS_AT, _CELLS = 128, 64  # of each process its pid, hits and misses
_TABLE_AT = 4096
# bytes that are written before pages are given back again, while the store is reduced
_GRAIN = 4 << 20
_SPARED = 32  # samples that one write may spare at most, so that its time is bounded


class SampleStore:
    """Stores samples (arrays, bytes, tuples and dicts of these: anything that can be pickled) by
    index, up to a number of bytes.

    Shared by all processes that inherit it by fork or receive it when they are spawned.
    Thread-safe. A sample that is read is a copy, so writing to it changes nothing here.

    Args:
        length: number of samples of the dataset; indices are 0 to length - 1.
        capacity: bytes for the samples, including 64 bytes of overhead per sample. The index table
            takes another 9 bytes per sample.
        policy: "keep" or "lru", see above.
        max_items: maximum number of samples.
        memory: memory of the store, whose size `layout` returns: zeros, or a store of the same
            length and capacity. None: anonymous memory.
    """

    def __init__(
        self,
        length: int,
        capacity: int,
        policy: str = "keep",
        max_items: int | None = None,
        memory: AnonymousMemory | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"cache_policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        if max_items is not None and max_items < 1:
            raise ConfigError(f"max_items must be at least 1 or None, not {max_items!r}")
        self.length: int = int(length)
        self.max_items: int | None = max_items
        self.capacity: int = max(0, int(capacity)) // _ALIGN * _ALIGN
        self._memory = (
            AnonymousMemory(sum(self.layout(length, capacity)), "store")
            if memory is None
            else memory
        )
        self._open()
        if policy == "lru":
            self.use_lru()

    @staticmethod
    def layout(length: int, capacity: int) -> tuple[int, int]:
        """Bytes of the memory that a store takes: those before the log, and those of the log."""
        return -(-(_TABLE_AT + TABLE * int(length)) // 4096) * 4096, max(
            0, int(capacity)
        ) // _ALIGN * _ALIGN

    def _open(self) -> None:
        memory = self._memory
        self._log_at, _ = self.layout(self.length, self.capacity)
        self._header = memory.array(0, 16, np.int64)
        self._counters = memory.array(_CELLS_AT, 3 * _CELLS, np.int64).reshape(_CELLS, 3)
        self._table = memory.array(_TABLE_AT, self.length, np.int64)
        self._touched = memory.array(_TABLE_AT + 8 * self.length, self.length, np.uint8)
        self._log = memoryview(memory.map)[self._log_at : self._log_at + self.capacity]
        self._lock = ProcessLock(memory.fd)
        self._layouts: dict[int, Layout] = {}
        self.write_error: OSError | None = None  # of this process
        self._cell = PerProcess(functools.partial(_find_cell, self._lock, self._counters))

    # -- what is held

    def __len__(self) -> int:
        return max(0, int(self._header[COUNT]))

    def __contains__(self, index: int) -> bool:
        return bool(self._table[index])

    @property
    def policy(self) -> str:
        """ "keep" or "lru"."""
        return POLICIES[int(self._header[_LRU] != 0)]

    def use_lru(self) -> None:
        """From now on, and in all processes, what is read makes room for itself."""
        self._header[_LRU] = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the samples held."""
        return int(self._header[HEAD] - self._header[TAIL])

    @property
    def limit(self) -> int:
        """Bytes that may be held now: the capacity, or less since memory was short."""
        return int(self.capacity - self._header[_REDUCED])

    @property
    def is_full(self) -> bool:
        """True if a sample was refused for lack of room."""
        return bool(self._header[FULL])

    def stats(self) -> dict[str, int]:
        """Of all processes: samples held, their bytes, how many were admitted and evicted, bytes
        released, hits and misses.
        """
        header = self._header
        hits, misses = self._counters[:, 1:].sum(axis=0).tolist()
        return {
            "held": len(self),
            "held_bytes": self.nbytes,
            "admitted": int(header[ADMITTED]),
            "evicted": int(header[EVICTED]),
            "released_bytes": int(header[_RELEASED]),
            "hits": hits,
            "misses": misses,
        }

    def count(self, hits: int, misses: int) -> None:
        """Counts accesses of this process."""
        counter = self._counters[self._cell.get()]
        counter[1] += hits
        counter[2] += misses

    # -- reading

    def get(self, index: int) -> Any:
        """The sample (a copy), or MISSING."""
        position = int(self._table[index]) - 1
        if position < 0:
            return MISSING
        pieces = self._copied(index, position)
        if pieces is None:
            return MISSING
        if self.policy == "lru":
            self._touched[index] = 1
        return decode(pieces[1])

    def _copied(self, index: int, position: int) -> tuple[list[int], list[bytearray]] | None:
        """Header and pieces of a sample; None where it was evicted before they were copied."""
        start = position % self.capacity
        header = header_at(self._log, start)
        if not self._is_held(index, position):
            return None
        pieces = copies_at(self._log, start, header)
        return (header, pieces) if self._is_held(index, position) else None

    def rows(self, indices: npt.NDArray[np.int64]) -> Rows | None:
        """Samples as they lie here, where all of them are held, and everything in the store is
        an array of one shape and dtype.
        """
        signature = int(self._header[LAYOUT])
        if signature <= 0 or not len(indices):
            return None
        positions = self._table[indices] - 1
        first = int(positions.min())
        if first < 0:
            return None
        starts = positions % self.capacity
        layout = self._layouts.get(signature)
        if layout is None:
            copied = self._copied(int(indices[0]), int(positions[0]))
            if copied is None:
                return None
            layout = self._layouts[signature] = layout_of(*copied)
        if (starts % layout.entry).any():
            return None
        if self.policy == "lru":
            self._touched[indices] = 1

        def are_held() -> bool:
            self._fence()
            return int(self._header[TAIL]) <= first and np.array_equal(
                self._table[indices] - 1, positions
            )

        return Rows(self._log, layout, starts, are_held)

    def _fence(self) -> None:
        # two lock pairs keep the loads before from passing the loads after, on every CPU
        for _ in range(2):
            with self._lock.of_threads():
                pass

    def _is_held(self, index: int, position: int) -> bool:
        self._fence()
        return int(self._table[index]) == position + 1 and int(self._header[TAIL]) <= position

    # -- writing

    def put(self, index: int, value: Any) -> bool:
        """Hold a sample; False where there is no room for it (or another process is stopped
        while it writes).
        """
        if self.policy == "keep" and self._header[FULL]:
            return index in self
        entry, pieces = encode(index, value)
        if entry[1] > self.limit:
            return False
        with self._lock.held() as locked:
            # which another process may have lowered meanwhile
            if not locked or entry[1] > self.limit:
                return False
            if self._table[index]:
                return True  # another worker was faster
            self._note_layout(value, entry, pieces)
            try:
                return self._append(entry, pieces)
            except OSError as error:  # the disk of a shared file is full
                self._header[FULL], self.write_error = 1, error
                return False
            finally:
                self._after_writing()

    def _after_writing(self) -> None:
        if self._header[_REDUCED] and self._header[HEAD] - self._header[_CLEAN] > _GRAIN:
            self._give_pages_back()

    def _note_layout(self, value: Any, entry: list[int], pieces: list[memoryview]) -> None:
        """Before a sample can be read: notes whether all of them are still arrays of one shape
        and dtype.
        """
        known = int(self._header[LAYOUT])
        if known != MIXED:
            signature = signature_of(value, entry, pieces)
            if signature != known:
                self._header[LAYOUT] = MIXED if known else signature

    @staticmethod
    def nbytes_of(value: Any) -> int:
        """Bytes that a sample takes when it is held."""
        return encode(0, value)[0][1]

    def _append(self, entry: list[int], pieces: list[memoryview]) -> bool:
        waiting: deque[tuple[list[int], list[memoryview]]] = deque([(entry, pieces)])
        spared, newest = 0, None
        while waiting:
            entry, pieces = waiting.popleft()
            index, nbytes = entry[0], entry[1]
            while not self._has_room(nbytes):
                if self.policy == "keep":
                    self._header[FULL] = 1
                    return False
                # the spared must not push the new one out
                if newest is not None and int(self._header[TAIL]) >= newest:
                    dropped = 1 + len(waiting)
                    self._header[ADMITTED] += dropped
                    self._header[EVICTED] += dropped
                    return True
                survivor = self._evict(spare=spared < _SPARED)
                if survivor is not None:
                    waiting.append(survivor)
                    spared += 1
            position = self._write(index, nbytes, entry, pieces)
            newest = position if newest is None else newest
        return True

    def _has_room(self, nbytes: int) -> bool:
        head, tail = int(self._header[HEAD]), int(self._header[TAIL])
        if self.max_items is not None and len(self) >= self.max_items:
            return False
        return head + self._filler(head, nbytes) + nbytes - tail <= self.limit

    def _filler(self, head: int, nbytes: int) -> int:
        """Bytes to leave at the end of the log, since no sample straddles it."""
        rest = self.capacity - head % self.capacity
        return rest if rest < nbytes else 0

    def _write(self, index: int, nbytes: int, entry: list[int], pieces: list[memoryview]) -> int:
        head = int(self._header[HEAD])
        filler = self._filler(head, nbytes)
        if filler:
            self._put_filler(head, filler)
            head += filler
        start = head % self.capacity
        self._put_header(start, entry)
        at = start + HEADER
        for piece in pieces:
            self._memory.write(self._log_at + at, piece)
            at += up(piece.nbytes)
        self._header[HEAD] = head + nbytes
        self._table[index] = head + 1
        self._touched[index] = 0
        self._header[COUNT] += 1
        self._header[ADMITTED] += 1
        return head

    def _put_filler(self, head: int, nbytes: int) -> None:
        self._put_header(head % self.capacity, [-1, nbytes, 0, 0, 0, 0, 0, 0])

    def _put_header(self, start: int, header: list[int]) -> None:
        self._memory.write(self._log_at + start, np.array(header, np.int64).data)

    def _evict(self, spare: bool) -> tuple[list[int], list[memoryview]] | None:
        """Gives the oldest entry's bytes back; returns a copy of the entry where it was read
        since and is to be spared.
        """
        tail, head = int(self._header[TAIL]), int(self._header[HEAD])
        # empty, and the sample would straddle the end of the log: go on at its start
        if tail == head:
            rest = self.capacity - head % self.capacity
            self._put_filler(head, rest)
            self._header[COUNT] = 0
            self._header[HEAD] = head + rest
        start = tail % self.capacity
        entry = header_at(self._log, start)
        index, nbytes = entry[0], entry[1]
        survivor = None
        if index >= 0 and int(self._table[index]) == tail + 1:
            if spare and self._touched[index]:
                survivor = (
                    entry,
                    [memoryview(piece) for piece in copies_at(self._log, start, entry)],
                )
            # first: a writer killed here leaves the count too low, never too high
            self._header[COUNT] -= 1
            self._table[index] = 0
            self._header[ADMITTED if survivor else EVICTED] += -1 if survivor else 1
        self._header[TAIL] = tail + nbytes
        return survivor

    # -- memory pressure

    def is_time_to_look(self, period: float) -> bool:
        """True if no process has checked for memory pressure in the last `period` seconds: the
        caller is to check then.
        """
        now = time.monotonic_ns()
        if 0 <= now - int(self._header[_LOOKED]) < period * 1e9:
            return False
        self._header[_LOOKED] = now
        return True

    def release(self, nbytes: int) -> int:
        """Gives samples of so many bytes back to the system, the oldest first, and holds no more
        than the rest until `grow`.

        Returns:
            The bytes given back.
        """
        with self._lock.held() as locked:
            if not locked:
                return 0
            before = self.nbytes
            self._shrink_to(max(0, before - nbytes))
            self._header[_RELEASED] += before - self.nbytes
            return before - self.nbytes

    def cap(self, nbytes: int) -> None:
        """Holds no more than so many bytes from now on, whatever is free."""
        with self._lock.held() as locked:
            if locked:
                nbytes = min(max(0, nbytes), self.ceiling)
                self._header[_CAPPED] = self.capacity - nbytes
                if nbytes < self.limit:
                    self._shrink_to(nbytes)

    @property
    def ceiling(self) -> int:
        """Bytes that may be held at most, ever."""
        return int(self.capacity - self._header[_CAPPED])

    def _shrink_to(self, nbytes: int) -> None:
        self._header[_REDUCED] = self.capacity - nbytes
        while self.nbytes > nbytes:
            self._evict(spare=False)
        self._give_pages_back()

    def grow(self, nbytes: int) -> None:
        """Allows so many bytes beyond those that are held now, up to the ceiling."""
        with self._lock.held() as locked:
            if locked and self.nbytes + nbytes > self.limit:
                self._header[_REDUCED] = max(
                    int(self._header[_CAPPED]), self.capacity - self.nbytes - nbytes
                )
                self._header[FULL] = 0

    def _give_pages_back(self) -> None:
        """Those of the log that hold no sample."""
        head, tail = int(self._header[HEAD]), int(self._header[TAIL])
        start, length = (
            (head % self.capacity if self.capacity else 0),
            self.capacity - (head - tail),
        )
        for begin, end in (
            (start, min(start + length, self.capacity)),
            (0, start + length - self.capacity),
        ):
            if end > begin:
                self._memory.punch(self._log_at + begin, self._log_at + end)
        self._header[_CLEAN] = head

    # -- other processes

    def __getstate__(self) -> dict[str, Any]:
        names = ("length", "max_items", "capacity", "_memory")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _find_cell(lock: ProcessLock, counters: npt.NDArray[np.int64]) -> int:
    """A cell of nobody's, or of a dead process, whose counts go on; the last one where there is
    none.
    """
    with lock.held():
        for cell, pid in enumerate(counters[:, 0].tolist()):
            if not pid or not psutil.pid_exists(pid):
                counters[cell, 0] = os.getpid()
                return cell
    return _CELLS - 1
