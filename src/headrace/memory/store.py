"""Which samples are held, and where?

One `SampleStore` holds the samples of a dataset for all workers of a rank: a table with a position for every index, and a circular
log of samples behind it, in anonymous shared memory.

NOTE [ store protocol ]

Positions in the log only ever grow; position p lies at byte p % capacity. The samples between `tail` and `head` are held.

* Writers hold the lock: a `threading.Lock` within a process, a POSIX record lock between processes (the kernel releases it when its
  holder dies, however). A writer writes the sample behind `head`, then moves `head`, then puts the position into the table. Killed
  at any instruction it leaves a sample that no table entry points to, and the next writer goes on.
* To make room a writer clears the table entry of the oldest sample, then moves `tail`, and only then are its bytes written over.
* Readers take no lock. They copy the sample, and then look at `tail` and at the table entry again: if either moved past the
  sample, the copy may be torn, it is dropped, and the sample counts as missing.

"keep" admits until the log is full and never evicts. "lru" evicts the oldest sample that was not read since it was written or
last spared: the CLOCK approximation of LRU (Corbato 1968), "second chance", done by appending a spared sample anew.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from headrace.errors import ConfigError
from headrace.memory.anonymous import AnonymousMemory

try:
    import fcntl
except ImportError:  # Windows: a store is a process's own there
    fcntl = None  # type: ignore[assignment]

MISSING: Final[Any] = type("Missing", (), {"__repr__": lambda self: "MISSING", "__bool__": lambda self: False})()
"""What `get` returns for a sample that is not held (None may be a sample)."""

POLICIES = ("keep", "lru")
TABLE = 9
"""Bytes of the index table for each sample of the dataset, held or not."""
_ALIGN = 64
_ENTRY = 64  # bytes of an entry's header: 8 int64
_BUFFERS = 4  # buffers outside of the pickle that fit into an entry's header
_HEAD, _TAIL, _COUNT, _ADMITTED, _EVICTED, _FULL = range(6)
_SPARED = 32  # samples that one write may spare at most, so that its time is bounded
_PATIENCE = 0.5  # seconds that a writer waits for the lock of another process before it does without


def _up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


class SampleStore:
    """Holds samples (arrays, bytes, tuples and dicts of them: what pickle takes) by index, up to a number of bytes.

    Shared by all processes that inherit it by fork or receive it when they are spawned. Thread-safe. A sample that was read is a
    copy: writing into it changes nothing here.

    Args:
        length: number of samples of the dataset; indices are 0 to length - 1.
        capacity: bytes for the samples, the store's own 64 bytes a sample included. The index table takes 9 bytes a sample more.
        policy: "keep" or "lru", see above.
        max_items: hold at most that many samples.
    """

    def __init__(self, length: int, capacity: int, policy: str = "keep", max_items: int | None = None) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"cache_policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        if max_items is not None and max_items < 1:
            raise ConfigError(f"max_items must be at least 1 or None, not {max_items!r}")
        self.length, self.policy, self.max_items = int(length), policy, max_items
        self.capacity = max(0, int(capacity)) // _ALIGN * _ALIGN
        self._table_at = 4096
        self._touched_at = self._table_at + 8 * self.length
        self._log_at = -(-(self._touched_at + self.length) // 4096) * 4096
        self._memory = AnonymousMemory(self._log_at + self.capacity, "store")
        self._open()

    def _open(self) -> None:
        memory = self._memory
        self._header = memory.array(0, 16, np.int64)
        self._table = memory.array(self._table_at, self.length, np.int64)
        self._touched = memory.array(self._touched_at, self.length, np.uint8)
        self._log = memoryview(memory.map)[self._log_at : self._log_at + self.capacity]
        self._thread_locks = {os.getpid(): threading.Lock()}

    # -- what is held

    def __len__(self) -> int:
        return max(0, int(self._header[_COUNT]))

    def __contains__(self, index: int) -> bool:
        return bool(self._table[index])

    @property
    def nbytes(self) -> int:
        """Bytes of the samples held."""
        return int(self._header[_HEAD] - self._header[_TAIL])

    @property
    def is_full(self) -> bool:
        """Was a sample refused for want of room?"""
        return bool(self._header[_FULL])

    def stats(self) -> dict[str, int]:
        """Samples held, their bytes, and how many were admitted and evicted by all processes."""
        header = self._header
        return {
            "held": len(self),
            "held_bytes": self.nbytes,
            "admitted": int(header[_ADMITTED]),
            "evicted": int(header[_EVICTED]),
        }

    # -- reading

    def get(self, index: int) -> Any:
        """The sample (a copy), or MISSING."""
        position = int(self._table[index]) - 1
        if position < 0:
            return MISSING
        start = position % self.capacity
        entry = np.frombuffer(self._log, np.int64, 8, start).tolist()
        if not self._is_held(index, position):
            return MISSING
        at = start + _ENTRY
        head = bytes(self._log[at : at + entry[2]])
        at += _up(entry[2])
        buffers = []
        for nbytes in entry[4 : 4 + entry[3]]:
            buffers.append(bytearray(self._log[at : at + nbytes]))
            at += _up(nbytes)
        if not self._is_held(index, position):
            return MISSING
        if self.policy == "lru":
            self._touched[index] = 1
        return pickle.loads(head, buffers=buffers)

    def _is_held(self, index: int, position: int) -> bool:
        for _ in range(2):  # two lock pairs keep the loads before from passing the loads after, on every CPU
            with self._own_lock():
                pass
        return int(self._table[index]) == position + 1 and int(self._header[_TAIL]) <= position

    # -- writing

    def put(self, index: int, value: Any) -> bool:
        """Hold a sample; False where there is no room for it (or another process is stopped while it writes)."""
        if self.policy == "keep" and self._header[_FULL]:
            return index in self
        entry, pieces = self._entry_of(index, value)
        if entry[1] > self.capacity:
            return False
        with self._locked() as locked:
            if not locked:
                return False
            if self._table[index]:
                return True  # another worker was faster
            return self._append(entry, pieces)

    @classmethod
    def nbytes_of(cls, value: Any) -> int:
        """Bytes that a sample takes when it is held."""
        return cls._entry_of(0, value)[0][1]

    @classmethod
    def _entry_of(cls, index: int, value: Any) -> tuple[list[int], list[memoryview]]:
        """Header and pieces of a sample: its pickle, and the buffers outside of it."""
        pieces: list[memoryview] = []
        head = pickle.dumps(value, protocol=5, buffer_callback=lambda b: cls._take(b, pieces))
        sizes = [p.nbytes for p in pieces]
        nbytes = _ENTRY + _up(len(head)) + sum(map(_up, sizes))
        entry = [index, nbytes, len(head), len(sizes), *sizes, *[0] * (_BUFFERS - len(sizes))]
        return entry, [memoryview(head), *pieces]

    @staticmethod
    def _take(buffer: pickle.PickleBuffer, pieces: list[memoryview]) -> bool:
        """Takes a large buffer out of the pickle (False); leaves the others inside (True)."""
        raw = buffer.raw()
        if len(pieces) == _BUFFERS or raw.nbytes < 512:
            return True
        pieces.append(raw)
        return False

    def _append(self, entry: list[int], pieces: list[memoryview]) -> bool:
        waiting: deque[tuple[list[int], list[memoryview]]] = deque([(entry, pieces)])
        spared, newest = 0, None
        while waiting:
            entry, pieces = waiting.popleft()
            index, nbytes = entry[0], entry[1]
            while not self._has_room(nbytes):
                if self.policy == "keep":
                    self._header[_FULL] = 1
                    return False
                if newest is not None and int(self._header[_TAIL]) >= newest:  # the spared must not push the new one out
                    dropped = 1 + len(waiting)
                    self._header[_ADMITTED] += dropped
                    self._header[_EVICTED] += dropped
                    return True
                survivor = self._evict(spare=spared < _SPARED)
                if survivor is not None:
                    waiting.append(survivor)
                    spared += 1
            position = self._write(index, nbytes, entry, pieces)
            newest = position if newest is None else newest
        return True

    def _has_room(self, nbytes: int) -> bool:
        head, tail = int(self._header[_HEAD]), int(self._header[_TAIL])
        if self.max_items is not None and len(self) >= self.max_items:
            return False
        return head + self._filler(head, nbytes) + nbytes - tail <= self.capacity

    def _filler(self, head: int, nbytes: int) -> int:
        """Bytes to leave at the end of the log, since no sample straddles it."""
        rest = self.capacity - head % self.capacity
        return rest if rest < nbytes else 0

    def _write(self, index: int, nbytes: int, entry: list[int], pieces: list[memoryview]) -> int:
        head = int(self._header[_HEAD])
        filler = self._filler(head, nbytes)
        if filler:
            self._put_filler(head, filler)
            head += filler
        start = head % self.capacity
        self._put_entry(start, entry)
        at = start + _ENTRY
        for piece in pieces:
            self._log[at : at + piece.nbytes] = piece
            at += _up(piece.nbytes)
        self._header[_HEAD] = head + nbytes
        self._table[index] = head + 1
        self._touched[index] = 0
        self._header[_COUNT] += 1
        self._header[_ADMITTED] += 1
        return head

    def _put_filler(self, head: int, nbytes: int) -> None:
        self._put_entry(head % self.capacity, [-1, nbytes, 0, 0, 0, 0, 0, 0])

    def _put_entry(self, start: int, entry: list[int]) -> None:
        np.frombuffer(self._log, np.int64, 8, start)[:] = entry

    def _evict(self, spare: bool) -> tuple[list[int], list[memoryview]] | None:
        """Gives the oldest entry's bytes back; returns a copy of the entry where it was read since and is to be spared."""
        tail, head = int(self._header[_TAIL]), int(self._header[_HEAD])
        if tail == head:  # empty, and the sample would straddle the end of the log: go on at its start
            rest = self.capacity - head % self.capacity
            self._put_filler(head, rest)
            self._header[_COUNT] = 0
            self._header[_HEAD] = head + rest
        start = tail % self.capacity
        entry = np.frombuffer(self._log, np.int64, 8, start).tolist()
        index, nbytes = entry[0], entry[1]
        survivor = None
        if index >= 0 and int(self._table[index]) == tail + 1:
            if spare and self._touched[index]:
                survivor = entry, self._pieces(start, entry)
            self._header[_COUNT] -= 1  # first: a writer killed here leaves the count too low, never too high
            self._table[index] = 0
            self._header[_ADMITTED if survivor else _EVICTED] += -1 if survivor else 1
        self._header[_TAIL] = tail + nbytes
        return survivor

    def _pieces(self, start: int, entry: list[int]) -> list[memoryview]:
        at = start + _ENTRY
        pieces = []
        for nbytes in [entry[2], *entry[4 : 4 + entry[3]]]:
            pieces.append(memoryview(bytes(self._log[at : at + nbytes])))
            at += _up(nbytes)
        return pieces

    # -- the lock, and other processes

    def _own_lock(self) -> threading.Lock:
        pid = os.getpid()  # a thread of the parent may have held the parent's lock at the moment of the fork
        lock = self._thread_locks.get(pid)
        return self._thread_locks.setdefault(pid, threading.Lock()) if lock is None else lock

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        with self._own_lock():
            if fcntl is None:
                yield True
                return
            deadline = time.monotonic() + _PATIENCE
            while True:
                try:
                    fcntl.lockf(self._memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                    break
                except OSError:
                    if time.monotonic() > deadline:  # its holder is stopped (a dead one holds no lock)
                        yield False
                        return
                    time.sleep(0.0002)
            try:
                yield True
            finally:
                fcntl.lockf(self._memory.fd, fcntl.LOCK_UN, 1)

    def __getstate__(self) -> dict[str, Any]:
        names = ("length", "policy", "max_items", "capacity", "_table_at", "_touched_at", "_log_at", "_memory")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
