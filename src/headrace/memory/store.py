"""A store of cached samples in shared memory, for all workers of a rank.

One `SampleStore` holds the samples of a dataset for all workers of a rank: a table with a position
for every index, followed by a circular log of entries, in anonymous shared memory.

NOTE [ store protocol ]

Positions in the log only grow; position p is at byte p % size of the log. The entries between
`tail` and `head` are valid.

* Writers hold the lock: a `threading.Lock` within a process, a POSIX record lock between processes
  (which the kernel releases when its holder dies, however that happens). A writer writes the entry
  behind `head`, then moves `head`, then writes the position into the table. If it is killed at any
  instruction, it leaves an entry that no table entry points to, and the next writer continues.
* To make room, a writer clears the table entry of the oldest sample, then moves `tail`, and only
  then overwrites its bytes.
* Readers take no lock. They copy the entry and then check layout and table again. If one of them
  has changed, the copy may be torn; it is dropped, and the sample counts as missing.
* While all samples so far are arrays of numbers of one shape and dtype, entries are rows: an index
  and the bytes of the array, all of one size, none of which passes the end of the log. A batch is
  copied at once then (`rows`), and checked in the same way. The first sample that is another drops
  all rows, and from then on an entry is its index, its bytes, the sizes of its pieces, and these: a
  pickle, and the buffers that it left out.
* Under memory pressure the oldest samples are evicted in the same way, and the pages outside of
  `tail` to `head` return to the system (`adjust`). The store stays below its capacity until the
  pressure ends.
* Zeros are the state of an empty store, so a shared file needs no initialisation that another
  process might see half-done.

"keep" admits until the log is full and never evicts. "lru" evicts the oldest sample that was not
read since it was written or last spared: the CLOCK approximation of LRU (Corbato 1968), "second
chance", implemented by appending a spared sample again.
"""

from __future__ import annotations

import ctypes
import functools
import math
import pickle
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from headrace.casting import as_array
from headrace.dtypes import BFLOAT16, AnyArray, ArraySpec, IntArray
from headrace.memory.anonymous import AnonymousMemory, up
from headrace.memory.processes import ProcessLock
from headrace.memory.tree import encode

MISSING: Final[Any] = type(
    "Missing", (), {"__repr__": lambda self: "MISSING", "__bool__": lambda self: False}
)()
"""What `get` returns for a sample that is not held (None may be a sample)."""

TABLE = 9
"""Bytes of the index table for each sample of the dataset, held or not."""
_UNDECIDED, _ROWS, _MIXED = range(3)  # layouts
_SPEC_AT, _TABLE_AT = 2048, 4096  # of the rows, pickled; the table
_ALIGNED = 16  # pieces of an entry, as the memory that it is copied to
# bytes that are written before pages are given back again, while the store is reduced
_GRAIN = 4 << 20
_SPARED = 32  # samples that one write may spare at most, so that its time is bounded
_SMALL = 64 << 10  # bytes of rows that NumPy copies twice before torch's calls copy them once
_WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)


class RowLayout(NamedTuple):
    """What all rows of a store have in common."""

    spec: ArraySpec
    at: int
    """Bytes of an entry before the array's own."""
    entry: int
    """Bytes from one to the next."""

    @classmethod
    def of(cls, spec: ArraySpec) -> RowLayout | None:
        """The layout of arrays of a spec. None: they can not be rows."""
        if not spec.nbytes or (spec.dtype.kind not in "biufc" and spec.dtype != BFLOAT16):
            return None
        at = 8
        if spec.nbytes >= 2048:  # which begin at a cache line
            at = 64
        return cls(spec, at, up(at + spec.nbytes, at))

    @classmethod
    def of_values(cls, values: Sequence[Any] | AnyArray) -> RowLayout | None:
        """The layout of samples that are all rows of one kind."""
        if isinstance(values, np.ndarray):
            return cls.of(ArraySpec(values.shape[1:], values.dtype))
        if any(type(value) is not np.ndarray for value in values):
            return None
        specs = {(value.shape, value.dtype) for value in values}
        if len(specs) > 1:
            return None
        return cls.of(ArraySpec(*specs.pop()))

    @property
    def dtype(self) -> np.dtype[Any]:
        """A whole entry as NumPy sees it."""
        names = ["index", "row"]
        formats: Any = ["<i8", (self.spec.dtype, self.spec.shape)]
        return np.dtype(
            {"names": names, "formats": formats, "offsets": [0, self.at], "itemsize": self.entry}
        )


def _fence() -> None:
    """Keeps the loads before from passing the loads after, on every CPU."""
    lock = threading.Lock()  # which nobody else holds, nor did at a fork
    for _ in range(2):
        with lock:
            pass


def _pieces_of(value: Any) -> list[memoryview]:
    """A sample of any kind as a pickle and the buffers that it left out."""
    buffers: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes:
            buffers.append(raw)
        return not raw.nbytes

    return [memoryview(encode(value, take)), *buffers]


def _pieces_of_each(values: Sequence[Any] | AnyArray) -> list[list[memoryview]]:
    """The same for each of some samples or rows."""
    if isinstance(values, np.ndarray):
        values = [values[number, ...] for number in range(len(values))]
    return list(map(_pieces_of, values))


def _head_of(index: int, pieces: list[memoryview]) -> AnyArray:
    """The beginning of an entry: the index, bytes of the entry, and those of its pieces."""
    sizes = [piece.nbytes for piece in pieces]
    head = np.array([index, 0, len(sizes), *sizes], np.int64)
    head[1] = sum(up(nbytes, _ALIGNED) for nbytes in (head.nbytes, *sizes))
    return head


def _value_of(entry: bytearray) -> Any:
    data = memoryview(entry)
    count = int(np.frombuffer(entry, np.int64, 1, 16)[0])
    at = up(8 * (3 + count), _ALIGNED)
    pieces = []
    for nbytes in np.frombuffer(entry, np.int64, count, 24).tolist():
        pieces.append(data[at : at + nbytes])
        at += up(nbytes, _ALIGNED)
    return pickle.loads(pieces[0], buffers=pieces[1:])


class _Header(ctypes.Structure):
    """The numbers at the start of a store's memory, for all processes."""

    head: int
    tail: int
    admitted: int
    evicted: int
    full: int
    lru: int
    reduced: int  # bytes of the capacity that may not be used now
    capped: int  # bytes of the capacity that may never be used
    released: int
    clean: int  # position up to which pages were given back
    looked: int  # when a process last checked for memory pressure
    kind: int  # _UNDECIDED, _ROWS or _MIXED
    _fields_ = [(name, ctypes.c_int64) for name in __annotations__]


class SampleStore:
    """Stores samples (arrays, bytes, tuples and dicts of these: anything that can be pickled) by
    index, up to a number of bytes.

    Shared by all processes that inherit it by fork or receive it when they are spawned.
    Thread-safe. A sample that is read is a copy, so writing to it changes nothing here.

    Args:
        length: number of samples of the dataset; indices are 0 to length - 1.
        capacity: bytes for the samples, including their overhead. The index table takes another 9
            bytes per sample.
        policy: "keep" or "lru", see above.
        max_items: maximum number of samples.
        memory: memory of the store, which says its capacity: zeros, or a store of the same length.
            None: anonymous memory.
    """

    def __init__(
        self,
        length: int,
        capacity: int,
        policy: str = "keep",
        max_items: int | None = None,
        memory: AnonymousMemory | None = None,
    ) -> None:
        self.length: int = int(length)
        self.max_items: int | None = max_items
        self._log_at = log_at(length)
        memory = memory or AnonymousMemory(self._log_at + max(0, int(capacity)), "store")
        self._memory = memory
        self.capacity: int = memory.nbytes - self._log_at
        self.header: _Header = _Header.from_buffer(memory.map)
        self._table = memory.array(_TABLE_AT, (self.length,), np.int64)
        self._touched = memory.array(_TABLE_AT + 8 * self.length, (self.length,), np.uint8)
        self._log = memoryview(memory.map)[self._log_at :]
        self._lock = ProcessLock(memory.fd)
        self._layout: RowLayout | None = None  # of the rows, once it is decided
        self._entries: AnyArray = np.empty(0)  # the log, as NumPy sees it then
        self._rows: AnyArray = np.empty(0)  # in it, read-only
        self.write_error: OSError | None = None  # of this process
        if policy == "lru":
            self.use_lru()

    # -- what is held

    def __len__(self) -> int:
        return max(0, self.header.admitted - self.header.evicted)

    def __contains__(self, index: int) -> bool:
        return bool(self._table[index])

    def missing(self, indices: Sequence[int]) -> list[int]:
        """The indices that are not held."""
        wanted = np.asarray(indices, np.int64)
        missing: list[int] = wanted[self._table[wanted] == 0].tolist()
        return missing

    def use_lru(self) -> None:
        """Switches to policy "lru", in all processes."""
        self.header.lru = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the samples held."""
        return self.header.head - self.header.tail

    @property
    def limit(self) -> int:
        """Bytes that may be held now: the capacity, or less since memory was short."""
        return self.capacity - self.header.reduced

    @property
    def is_mixed(self) -> bool:
        """True if the samples are not all arrays of numbers of one shape and dtype."""
        return self.header.kind == _MIXED

    def stats(self) -> dict[str, int]:
        """Of all processes: samples held, their bytes, how many were admitted and evicted, bytes
        released.
        """
        return {
            "held": len(self),
            "held_bytes": self.nbytes,
            "admitted": self.header.admitted,
            "evicted": self.header.evicted,
            "released_bytes": self.header.released,
        }

    @staticmethod
    def nbytes_of(value: Any) -> int:
        """Bytes that a sample takes when it is held."""
        layout = RowLayout.of_values([value])
        if layout is not None:
            return layout.entry
        return int(_head_of(0, _pieces_of(value))[1])

    # -- the log

    @property
    def layout(self) -> RowLayout | None:
        """The layout of the rows; None where entries are general, or none was written yet."""
        if self.header.kind != _ROWS:
            return None
        if self._layout is None:
            data = self._memory.map[_SPEC_AT:_TABLE_AT]
            layout = RowLayout.of(ArraySpec(*pickle.loads(data)))
            assert layout is not None
            count = self.capacity // layout.entry
            self._entries = self._memory.array(self._log_at, (count,), layout.dtype)
            self._rows = self._entries["row"]
            self._rows.flags.writeable = False
            self._layout = layout
        return self._layout

    @functools.cached_property
    def _wide_rows(self) -> torch.Tensor:
        """The rows as a table of as few elements as their bytes can be."""
        layout = self._layout  # that of rows which were looked up, also when none are left now
        assert layout is not None
        spec, at, entry = layout
        dtype = next(d for d in _WIDE if math.gcd(spec.nbytes, at) % d.itemsize == 0)
        width = dtype.itemsize
        shape = (len(self._rows), spec.nbytes // width)
        whole = torch.frombuffer(self._log, dtype=dtype, count=shape[0] * entry // width)
        return whole.as_strided(shape, (entry // width, 1), at // width)

    @property
    def _size(self) -> int:
        """Bytes of the log that are used: rows never pass its end."""
        layout = self.layout
        if layout is None:
            return self.capacity
        return self.capacity // layout.entry * layout.entry

    def _copied(self, position: int, nbytes: int) -> bytearray:
        """Bytes of the log from a position on."""
        size = self._size
        start = position % size
        entry = bytearray(self._log[start : min(size, start + nbytes)])
        if len(entry) < nbytes:
            entry += self._log[: nbytes - len(entry)]
        return entry

    def _head_at(self, position: int) -> tuple[int, int]:
        """Index and bytes of an entry."""
        index, nbytes = np.frombuffer(self._copied(position, 16), np.int64).tolist()
        if self.layout is not None:
            nbytes = self.layout.entry
        return index, nbytes

    # -- reading

    def get(self, index: int) -> Any:
        """The sample (a copy), or MISSING."""
        layout = self.layout
        position = int(self._table[index]) - 1
        if position < 0:
            return MISSING
        if layout is None:
            _, nbytes = self._head_at(position)
            if not self._is_held(index, position, layout):
                return MISSING
        else:
            nbytes = layout.entry
        entry = self._copied(position, nbytes)
        if not self._is_held(index, position, layout):
            return MISSING
        if self.header.lru:
            self._touched[index] = 1
        if layout is None:
            return _value_of(entry)
        return np.ndarray(layout.spec.shape, layout.spec.dtype, entry, layout.at)

    def _is_held(self, index: int, position: int, layout: RowLayout | None) -> bool:
        _fence()
        return int(self._table[index]) == position + 1 and self.is_mixed is (layout is None)

    def rows(self, indices: IntArray) -> HeldRows | None:
        """The rows of samples, without a copy. None: not all are held, or they are no rows."""
        layout = self.layout
        if layout is None or not len(indices):
            return None
        found = self._table[indices]
        if np.count_nonzero(found) < len(found):
            return None
        if self.header.lru:
            self._touched[indices] = 1
        return HeldRows(self, layout, indices, found)

    # -- writing

    def put(self, index: int, value: Any) -> bool:
        """Holds a sample; False where there is no room for it (or another process is stopped
        while it writes).
        """
        return self.put_many([index], [value])

    def put_many(self, indices: Sequence[int], values: Sequence[Any] | AnyArray) -> bool:
        """Holds samples, which may be the rows of an array; False where there is no room for all of
        them.
        """
        if self.header.full and not self.header.lru:
            return all(index in self for index in indices)
        layout = RowLayout.of_values(values)
        pieces: list[list[memoryview]] = []
        if layout is None:  # outside of the lock, since a pickle may run anybody's code
            pieces = _pieces_of_each(values)
        with self._lock.held() as locked:
            if not locked:
                return False
            try:
                layout = self._decide(layout)
                missing = np.flatnonzero(self._table[list(indices)] == 0).tolist()
                if layout is None:
                    pieces = pieces or _pieces_of_each(values)
                    return all(self._append(indices[n], pieces[n]) for n in missing)
                if len(missing) < len(indices):  # of the others another worker was faster
                    indices = [indices[n] for n in missing]
                    values = [values[n] for n in missing]
                return self._append_rows(indices, values, layout)
            except OSError as error:  # the disk of a shared file is full
                self.header.full = 1
                self.write_error = error
                return False
            finally:
                if self.header.reduced and self.header.head - self.header.clean > _GRAIN:
                    self._give_pages_back()

    def _decide(self, layout: RowLayout | None) -> RowLayout | None:
        """The layout in which to write samples of this one. None: as general entries."""
        if self.header.kind == _UNDECIDED and layout is not None:
            spec = pickle.dumps(tuple(layout.spec))
            self._memory.map[_SPEC_AT : _SPEC_AT + len(spec)] = spec
            self.header.kind = _ROWS
        known = self.layout
        if known is not None and known == layout:
            return layout
        if known is not None:
            # a writer killed on the way leaves the number too low, never too high
            self.header.evicted = self.header.admitted
            self._table[:] = 0
            self.header.tail = self.header.head
        self.header.kind = _MIXED
        return None

    def _append_rows(
        self, indices: Sequence[int], values: Sequence[Any] | AnyArray, layout: RowLayout
    ) -> bool:
        """Writes rows, as many at once as fit before the end of the log."""
        entries = self._entries
        done = 0
        while done < len(indices):
            if not self._makes_room(layout.entry):
                return False
            head = self.header.head
            start = head // layout.entry % len(entries)
            count = min(len(indices) - done, len(entries) - start)
            count = min(count, (self.limit - self.nbytes) // layout.entry)
            if self.max_items is not None:
                count = min(count, self.max_items - len(self))
            places = entries[start : start + count]
            self._memory.allocate(self._log_at + start * layout.entry, places.nbytes)
            places["index"] = indices[done : done + count]
            some = values[done : done + count]
            if isinstance(some, np.ndarray):
                places["row"] = some
            else:
                np.stack(some, out=places["row"])
            self.header.head = head + places.nbytes
            self._table[places["index"]] = head + layout.entry * np.arange(count) + 1
            self._touched[places["index"]] = 0
            self.header.admitted += count
            done += count
        return True

    def _append(self, index: int, pieces: list[memoryview]) -> bool:
        head = _head_of(index, pieces)
        nbytes = int(head[1])
        if not self._makes_room(nbytes):
            return False
        self._write(index, nbytes, [head.data.cast("B"), *pieces])
        return True

    def _makes_room(self, nbytes: int) -> bool:
        """True if there is room for an entry, or samples were evicted for it."""
        if nbytes > min(self.limit, self._size):
            return False
        most = math.inf if self.max_items is None else self.max_items
        spared = 0
        while len(self) >= most or self.nbytes + nbytes > self.limit:
            if not self.header.lru:
                self.header.full = 1
                return False
            spared += self._evict(spared < _SPARED)
        return True

    def _write(self, index: int, nbytes: int, pieces: Sequence[memoryview]) -> None:
        """Writes an entry, whose pieces are aligned."""
        size = self._size
        head = self.header.head
        at = head
        for piece in pieces:
            start = at % size
            rest = size - start  # until the end of the log
            for begin, part in ((start, piece[:rest]), (0, piece[rest:])):
                self._memory.allocate(self._log_at + begin, len(part))
                self._log[begin : begin + len(part)] = part
            at += up(len(piece), _ALIGNED)
        self.header.head = head + nbytes
        self._table[index] = head + 1
        self._touched[index] = 0
        self.header.admitted += 1

    def _evict(self, spare: bool) -> bool:
        """Evicts the oldest entry. True if it is spared, since it was read meanwhile: it is written
        again, as the newest one.
        """
        tail = self.header.tail
        if tail == self.header.head:  # a writer was killed who had counted what is not there
            self.header.evicted = self.header.admitted
            return False
        index, nbytes = self._head_at(tail)
        is_held = int(self._table[index]) == tail + 1
        is_spared = is_held and spare and bool(self._touched[index])
        copy = bytearray()
        if is_spared:
            copy = self._copied(tail, nbytes)
        if is_held:
            # first: a writer killed here leaves the number too low, never too high
            self.header.evicted += 1
            self._table[index] = 0
        self.header.tail = tail + nbytes
        if is_spared:
            self._write(index, nbytes, [memoryview(copy)])
            self.header.admitted -= 1
            self.header.evicted -= 1
        return is_spared

    # -- memory pressure

    def is_time_to_look(self, period: float) -> bool:
        """True if no process has checked for memory pressure in the last `period` seconds: the
        caller is to check then.
        """
        now = time.monotonic_ns()
        if 0 <= now - self.header.looked < period * 1e9:
            return False
        self.header.looked = now
        return True

    def adjust(self, excess: int) -> int:
        """Evicts the oldest samples, of `excess` bytes, and limits the store to the rest. Below 0:
        allows it so many bytes more than are held now, up to the ceiling.

        Returns:
            The number of bytes evicted.
        """
        with self._lock.held() as locked:
            if not locked:
                return 0
            before = self.nbytes
            if excess > 0 or before - excess > self.limit:
                self._limit_to(before - excess)
            self.header.released += before - self.nbytes
            return before - self.nbytes

    def cap(self, nbytes: int) -> None:
        """Limits the store to `nbytes` for good."""
        with self._lock.held() as locked:
            if locked:
                self.header.capped = max(self.header.capped, self.capacity - max(0, nbytes))
                self._limit_to(self.limit)

    @property
    def ceiling(self) -> int:
        """Bytes that may be held at most, ever."""
        return self.capacity - self.header.capped

    def _limit_to(self, nbytes: int) -> None:
        """Sets the limit, evicts what is above it, and returns the pages to the system."""
        self.header.reduced = max(self.header.capped, self.capacity - max(0, nbytes))
        self.header.full = 0
        while self.nbytes > self.limit:
            self._evict(spare=False)
        self._give_pages_back()

    def _give_pages_back(self) -> None:
        """Returns the pages of the log that hold no sample to the system."""
        size = self._size
        head = self.header.head
        if size:
            begin = head % size
            end = begin + size - self.nbytes
            self._memory.punch(self._log_at + begin, self._log_at + min(end, size))
            self._memory.punch(self._log_at, self._log_at + end - size)
        self.header.clean = head

    # -- other processes

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleStore, (self.length, 0, "keep", self.max_items, self._memory)


def log_at(length: int) -> int:
    """Bytes of a store's memory before its log."""
    return up(_TABLE_AT + TABLE * int(length), 4096)


class HeldRows:
    """Cached samples of one shape, by their positions in a store's log. After reading, `are_held`
    tells whether they were cached all the time.
    """

    def __init__(
        self, store: SampleStore, layout: RowLayout, indices: IntArray, found: AnyArray
    ) -> None:
        self._store = store
        self._indices = indices
        self._found = found  # in the table
        self._rows = store._rows
        self._numbers: IntArray = (found - 1) // layout.entry % len(self._rows)
        self.spec: ArraySpec = layout.spec

    def __len__(self) -> int:
        return len(self._numbers)

    def are_held(self) -> bool:
        """True if no sample was evicted since these rows were looked up."""
        store = self._store
        _fence()
        # as bytes: `all` takes 15 times as long for few rows
        is_same = store._table[self._indices].tobytes() == self._found.tobytes()
        return is_same and store.header.kind == _ROWS

    def __getitem__(self, number: int) -> AnyArray:
        """A sample as it lies in the store, read-only; as an array, of whatever shape."""
        sample: AnyArray = self._rows[self._numbers[number], ...]
        return sample

    def copy_to(self, out: torch.Tensor) -> None:
        """Copies all of them into a contiguous [samples, ...] tensor of their dtype; large ones in
        torch's own threads.
        """
        if out.nbytes <= _SMALL:
            as_array(out)[...] = self._rows[self._numbers]
            return
        table = self._store._wide_rows
        flat = out.view(len(self), -1)
        if out.dtype != table.dtype:
            flat = flat.view(table.dtype)
        torch.index_select(table, 0, torch.from_numpy(self._numbers), out=flat)
