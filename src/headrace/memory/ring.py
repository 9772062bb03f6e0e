"""A ring of recycled shared-memory buffers that batches are written into.

A slot of the ring is anonymous shared memory that is reused for later batches, so that no batch
costs page faults, names in shared memory, or a second copy.

NOTE [ ring life cycle ]

1. The parent alone owns slots. It takes one for each batch that it requests (`Ring.take`), and the
   number of the slot travels to the worker with the indices (`order.BatchRequest`). There is no
   queue between processes, so a worker that dies takes nothing with it.
2. The worker collates inside `Arena(ring, slot)`: `empty(...)` returns tensors in the slot, so that
   a batch is stacked directly into it. `Arena.pack(batch)` copies tensors and arrays that are
   elsewhere, and returns a `Delivery`: a pickle of everything else, with what is small. A long
   pickle goes into the slot too. What travels through torch's pipe stays below `PIPE_BUF` and is
   therefore written whole or not at all, so a worker that is killed while it writes leaves no
   partial message for whose rest the parent would wait.
3. Unpickling the `Delivery` in the parent makes the tensors over the slot. They all hold one
   `_Lease`. When the last tensor is freed, so is the lease, and the slot is free again. A user who
   keeps batches keeps their slots. A user who keeps only the labels does not: what is small, and a
   small part of its batch, lies outside of the slot. With pin_memory the pinned copy is made in
   torch's own thread, and the slot is free as soon as that is done.
4. If no slot is free, the file grows by one. Nothing waits for a slot, so nothing can hang. Slots
   above the planned number return their pages to the system when they are free. If a user keeps
   very many batches, further ones are copied out of their slots. `Ring.stats` counts both.
5. A batch that failed comes back as a `Delivery` too, and frees its slot. If a worker dies, its
   ring is dropped with the worker pool.

With `num_workers=0` the same arena is used in the main process, and nothing is pickled.

Each process maps a slot at first use, and has the kernel make its pages at once
(`MADV_POPULATE_WRITE`) instead of one by one at the first touch. The slot that came back last is
taken next, since its bytes may still be in the processor's cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import mmap
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.errors import BudgetError, WorkerError
from headrace.memory.anonymous import AnonymousMemory, up
from headrace.memory.tree import encode, map_tensors, tensor_over

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

STRIDE = 1 << 33
"""Virtual bytes of a slot; only what a batch fills is ever touched."""
_GRAIN = 1 << 21  # slots are mapped in steps of 2 MiB
_KEPT = 64  # slots above the planned number at most, before batches are copied out of theirs
_INLINE = 4096  # arrays and tensors below this stay in the pickle
# bytes of a pickle that travel through the pipe: with what torch adds below 4,096, the PIPE_BUF of
# Linux
_MESSAGE = 3072
# bytes of an array, and how often they go into those of its batch, that is copied out of the slot
_LIGHT = 64 << 10
_LIGHT_SHARE = 8
_POPULATE_WRITE = 23  # of <asm-generic/mman-common.h>, Linux 5.14; `mmap` has no name for it

_rings: weakref.WeakValueDictionary[tuple[int, int], Ring] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_current = threading.local()


class _Lease:
    """The use of one slot: the slot is in use for as long as this object is alive."""

    __slots__ = ("__weakref__",)


class _Window(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a slot, which hold its lease, as tensors over them hold this."""

    lease: _Lease | None = None


class Ring:
    """A number of recycled batch buffers; see NOTE [ ring life cycle ].

    `take` and `lease` belong to the process that made the ring. An `Arena` works in any process
    that inherited it or received it. A lease may die in any thread and in the garbage collector.

    Args:
        slots: planned number of batches at a time. More slots are made when they are needed, and
            freed afterwards.
    """

    def __init__(self, slots: int) -> None:
        self.planned: int = max(1, int(slots))
        self.key: tuple[int, int] = (os.getpid(), next(_numbers))
        self._memory = AnonymousMemory(self.planned * STRIDE, "ring")
        # slots as keys, so that C code alone puts one back: see `lease`
        self._free: dict[int, object] = dict.fromkeys(range(self.planned))
        # by slot: a weak reference that dies first calls nobody
        self._leases: dict[int, weakref.ref[_Lease]] = {}
        self._idle: list[int] = []  # grown once, and without pages now
        self.total: int = self.planned
        self.copied: int = 0
        # each mapped slot takes a file descriptor and a mapping of the process
        self._most_extra = _KEPT
        if resource is not None:
            self._most_extra = min(_KEPT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._maps: dict[int, mmap.mmap] = {}
        _rings[self.key] = self

    # -- the parent's side

    def take(self) -> int:
        """The number of a free slot."""
        while len(self._free) > self.planned:
            extra, *_ = list(self._free)  # a list at once: a lease may die in any thread
            del self._free[extra]
            self._maps.pop(extra, None)
            # the whole slot: a batch that failed was never mapped here
            if hasattr(mmap, "MADV_REMOVE"):
                with (
                    contextlib.suppress(OSError),
                    mmap.mmap(self._memory.fd, STRIDE, offset=extra * STRIDE) as whole,
                ):
                    whole.madvise(mmap.MADV_REMOVE)
            self._idle.append(extra)
        with contextlib.suppress(KeyError):
            return self._free.popitem()[0]
        if self._idle:
            return self._idle.pop()
        self.total += 1
        self._memory.grow(self.total * STRIDE)
        return self.total - 1

    @property
    def is_crowded(self) -> bool:
        """True if the user keeps so many batches that further ones had better lie in memory of
        their own.
        """
        return self.in_use > self.planned + self._most_extra

    @property
    def in_use(self) -> int:
        """Slots on their way or held by the user."""
        return self.total - len(self._free) - len(self._idle)

    def stats(self) -> dict[str, int]:
        """Slots; how many of them are in use, and how many were added; batches that were copied out
        of theirs; bytes that this process has mapped, the most that the slots hold.
        """
        return {
            "ring_slots": self.total,
            "ring_in_use": self.in_use,
            "ring_grown": self.total - self.planned,
            "ring_copied": self.copied,
            "ring_bytes": sum(map(len, list(self._maps.values()))),
        }

    # -- both sides

    def map(self, slot: int, nbytes: int) -> mmap.mmap:
        """At least the first `nbytes` of a slot, mapped into this process."""
        mapped = self._maps.get(slot)
        if mapped is None or len(mapped) < nbytes:
            if nbytes > STRIDE:
                raise BudgetError(
                    f"a batch of {nbytes:,} bytes is above the limit of {STRIDE:,}: use a smaller "
                    "batch_size"
                )
            length = up(max(nbytes, 1), _GRAIN)
            mapped = self._maps[slot] = mmap.mmap(self._memory.fd, length, offset=slot * STRIDE)
            if hasattr(mapped, "madvise"):
                # an older kernel: pages come as they are touched
                with contextlib.suppress(OSError):
                    mapped.madvise(_POPULATE_WRITE, 0, up(max(nbytes, 1), mmap.PAGESIZE))
        return mapped

    def lease(self, slot: int) -> _Lease:
        """An object at whose death the slot is free again.

        It may die in any thread and in the garbage collector: what is called then is atomic, takes
        no lock, and runs no Python code, in which a KeyboardInterrupt would get lost.
        """
        lease = _Lease()
        self._leases[slot] = weakref.ref(lease, functools.partial(self._free.__setitem__, slot))
        return lease

    def window(self, slot: int, start: int, nbytes: int, lease: _Lease | None) -> _Window:
        """Bytes of a slot. They keep `lease` alive, and so do their views."""
        # An array an area: a tensor straight over the mmap would not keep it from being unmapped.
        mapped = self.map(slot, start + nbytes)
        window: _Window = np.ndarray.__new__(_Window, nbytes, np.uint8, mapped, start)
        window.lease = lease
        return window

    def __getstate__(self) -> dict[str, Any]:
        return {"planned": self.planned, "key": self.key, "_memory": self._memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._maps = {}


class Arena:
    """One slot while a batch is written into it. `leased` (in the parent): tensors keep the slot in
    use as long as they live; small ones lie outside of it.
    """

    def __init__(self, ring: Ring, slot: int, leased: bool = False) -> None:
        self._ring = ring
        self._slot = slot
        self.nbytes: int = 0
        """Bytes that are taken."""
        self._lease: _Lease | None = None
        self.least: int = _INLINE
        """Bytes of a tensor from which on it lies in the slot."""
        if leased:
            self._lease = ring.lease(slot)
            self.least = _LIGHT
            if ring.is_crowded:  # all lies outside, and the slot is free as soon as this is gone
                ring.copied += 1
                self.least = sys.maxsize

    def abandon(self) -> None:
        """Gives the slot back without a batch, as soon as nothing that was made in it is left."""
        self._lease = None

    def __enter__(self) -> Arena:
        _current.arena = self
        return self

    def __exit__(self, *_: object) -> None:
        _current.arena = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of undefined content inside the slot; a small one outside."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < self.least:
            self.nbytes += nbytes
            return torch.empty(shape, dtype=dtype, device="cpu")
        return tensor_over(self._room(nbytes)[1], dtype, shape)

    def _room(self, nbytes: int) -> tuple[int, _Window]:
        offset = up(self.nbytes)
        self.nbytes = offset + nbytes
        return offset, self._ring.window(self._slot, offset, nbytes, self._lease)

    def lies_at(self, data: memoryview) -> int | None:
        """The offset of bytes in the slot. None: they are elsewhere."""
        if data.readonly:
            return None
        offset = _address_of(data) - _address_of(self._ring.map(self._slot, 1))
        if offset >= 0 and offset + data.nbytes <= self.nbytes:
            return offset
        return None

    def _put(self, data: memoryview | bytes) -> int:
        offset, window = self._room(len(data))
        window.data[:] = data
        return offset

    def pack(self, batch: Any, report: dict[str, Any]) -> Delivery:
        """Returns what the parent needs to rebuild `batch` over the slot.

        Dense CPU tensors and NumPy arrays anywhere in it travel in the slot, bit for bit, where
        they are not small; the rest is pickled by value.
        """
        areas: list[tuple[int, int]] = []
        sizes: list[int] = []

        def take(buffer: pickle.PickleBuffer) -> bool:
            data = buffer.raw()
            sizes.append(data.nbytes)
            if data.nbytes < _INLINE:
                return True
            offset = self.lies_at(data)
            if offset is None:
                offset = self._put(data)
            areas.append((offset, data.nbytes))
            return False

        pickled = encode(batch, take)
        message = pickle.dumps((areas, pickled, report, sum(sizes)), protocol=5)
        if len(message) <= _MESSAGE:
            return Delivery(self._ring.key, self._slot, message)
        return Delivery(self._ring.key, self._slot, (self._put(message), len(message)))


def _address_of(memory: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to collate into: in the current slot if there is one, else a fresh one."""
    arena: Arena | None = getattr(_current, "arena", None)
    if arena is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return arena.empty(shape, dtype)


@contextlib.contextmanager
def outside_slot() -> Iterator[None]:
    """Context for making samples: what their code collates is not part of the batch."""
    arena: Arena | None = getattr(_current, "arena", None)
    _current.arena = None
    try:
        yield
    finally:
        _current.arena = arena


_Message = bytes | tuple[int, int]  # a pickle, or where in the slot it lies and its bytes


@dataclass(slots=True, eq=False)
class Delivery:
    """A batch in a slot, as it travels to the parent. Unpickling one there gives a `Delivered`."""

    key: tuple[int, int]
    slot: int
    message: _Message

    def __reduce__(self) -> tuple[Any, ...]:
        return _deliver, (self.key, self.slot, self.message)


def _deliver(key: tuple[int, int], slot: int, message: _Message) -> Delivered:
    ring = _rings.get(key)
    if ring is None:
        raise WorkerError("a batch arrived for a loader that is closed already")
    lease = ring.lease(slot)
    if not isinstance(message, bytes):
        message = ring.window(slot, *message, None).tobytes()
    areas, pickled, report, nbytes = pickle.loads(message)
    is_crowded = ring.is_crowded
    ring.copied += is_crowded
    buffers: list[Any] = []
    for offset, size in areas:
        window = ring.window(slot, offset, size, lease)
        if is_crowded or (size <= _LIGHT and size * _LIGHT_SHARE <= nbytes):
            buffers.append(bytearray(window.data))
        else:
            buffers.append(window.data)
    return Delivered(pickle.loads(pickled, buffers=buffers), report, nbytes)


@dataclass(slots=True, eq=False)
class Delivered:
    """A batch in the parent, and the worker's report on it."""

    batch: Any
    report: dict[str, Any]
    nbytes: int = 0

    def pin_memory(self, device: str | None = None) -> Delivered:
        """The same with a pinned copy of the batch (torch calls this in its pin thread); the
        slot is free at once.
        """
        return Delivered(map_tensors(self.batch, torch.Tensor.pin_memory), self.report, self.nbytes)
