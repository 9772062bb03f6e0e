"""A ring of recycled shared-memory buffers that batches are written into.

A slot of the ring is anonymous shared memory that is reused for later batches, so that no batch
costs page faults, names in shared memory, or a second copy.

NOTE [ ring life cycle ]

1. The parent alone owns slots. It takes one for each batch that it requests (`Ring.take`), and the
  number of the slot travels to the worker
with the indices (`order.BatchRequest`). There is no queue between processes, so a worker that dies
takes nothing with it.
2. The worker collates inside `Ring.arena(slot)`: `empty(...)` returns tensors in the slot, so that
  a batch is stacked directly into it.
`Arena.pack(batch)` copies tensors and arrays that are elsewhere, and returns a `Delivery`: the
number of the slot, and a pickle of the layout and everything else. A long pickle goes into the slot
too. What travels through torch's pipe stays below `PIPE_BUF` and is therefore written whole or not
at all, so a worker that is killed while it writes leaves no partial message for whose rest the
parent would wait.
3. Unpickling the `Delivery` in the parent makes the tensors over the slot. They all hold one
  `_Lease`. When the last tensor is freed, so is
the lease, and the slot is free again. A user who keeps batches keeps their slots. A user who keeps
only the labels does not: a tensor that is small, and a small part of its batch, is copied out
(`_is_light`). With pin_memory the pinned copy is made in torch's own thread, and the slot is free
as soon as that is done.
4. If no slot is free, the file grows by one. Nothing waits for a slot, so nothing can hang. Slots
  above the planned number return their
pages to the system when they are free. If a user keeps very many batches, further ones are copied
out of their slots. `Ring.stats` counts both.
5. A batch that failed comes back as a `Delivery` too, and frees its slot. If a worker dies, its
  ring is dropped with the worker pool.

With `num_workers=0` the same arena is used in the main process, and nothing is pickled.

Each process maps a slot at first use, and has the kernel make its pages at once
(`MADV_POPULATE_WRITE`) instead of one by one at the first touch. The slot that came back last is
taken next, since its bytes may still be in the processor's cache.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import mmap
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.errors import BudgetError, WorkerError
from headrace.memory.anonymous import AnonymousMemory, up
from headrace.memory.tree import is_dense, map_tensors, reduced

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

STRIDE = 1 << 33
"""Virtual bytes of a slot; only what a batch fills is ever touched."""
_GRAIN = 1 << 21  # slots are mapped in steps of 2 MiB
_KEPT = 64  # slots above the planned number at most, before batches are copied out of theirs
_INLINE = 4096  # arrays below this stay in the pickle
# bytes of a pickle that travel through the pipe: with what torch adds below 4,096, the PIPE_BUF of
# Linux
_MESSAGE = 3072
# bytes of a tensor, and how often they go into those of its batch, that is copied out of the slot
_LIGHT, _LIGHT_SHARE = 64 << 10, 8
_FEW = 32  # tensors of a batch among which those are looked for
_POPULATE_WRITE = 23  # of <asm-generic/mman-common.h>, Linux 5.14; `mmap` has no name for it

_NUMPY: dict[torch.dtype, Any] = {
    torch.from_numpy(np.empty(0, name)).dtype: np.dtype(name)
    for name in ("bool", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
}  # in the machine's byte order

_rings: weakref.WeakValueDictionary[tuple[int, int], Ring] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_current = threading.local()


def _file_limit() -> int:
    """Descriptors that this process may have open: each mapped slot takes one."""
    return 1 << 20 if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class _Lease:
    """The use of one slot: the slot is in use for as long as this object is alive."""

    __slots__ = ("__weakref__",)


class _Return(weakref.ref[_Lease]):
    """What a lease leaves at its death: a weak reference whose callback, an append to a deque, is
    atomic and takes no lock, so that it may run in any thread and in the garbage collector; and it
    runs no Python code, in which a KeyboardInterrupt would get lost.
    """

    __slots__ = ("slot",)
    slot: int


def _slot_of(free: int | _Return) -> int:
    return free if isinstance(free, int) else free.slot


class _Window(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a slot, which hold its lease, as tensors over them hold this."""

    lease: _Lease | None = None


class Ring:
    """A number of recycled batch buffers; see NOTE [ ring life cycle ].

    `take` and `give` belong to the process that made the ring. `arena` works in any process that
    inherited it or received it. `give` may be called from any thread and from the garbage
    collector.

    Args:
        slots: planned number of batches at a time. More slots are made when they are needed, and
            freed afterwards.
    """

    def __init__(self, slots: int) -> None:
        self.planned: int = max(1, int(slots))
        self.key: tuple[int, int] = (os.getpid(), next(_numbers))
        self._memory = AnonymousMemory(self.planned * STRIDE, "ring")
        self._free: deque[int | _Return] = deque(range(self.planned))
        # by slot: a weak reference that dies first calls nobody
        self._returns: dict[int, _Return] = {}
        self._idle: deque[int | _Return] = deque()  # grown once, and without pages now
        self.total: int = self.planned
        self.grown: int = 0
        self.copied: int = 0
        self._most_extra = min(_KEPT, _file_limit() // 8)
        self._maps: dict[int, mmap.mmap] = {}
        _rings[self.key] = self

    # -- the parent's side

    def take(self) -> int:
        """The number of a free slot."""
        while len(self._free) > self.planned:
            self._release_pages(_slot_of(self._free.popleft()))
        for pool in (self._free, self._idle):
            with contextlib.suppress(IndexError):
                return _slot_of(pool.pop())
        self.grown += 1
        self.total += 1
        self._memory.grow(self.total * STRIDE)
        return self.total - 1

    def give(self, slot: int) -> None:
        """The slot is free (an append to a deque: atomic, no lock)."""
        self._free.append(slot)

    @property
    def is_crowded(self) -> bool:
        """True if the user keeps so many batches that further ones had better lie in memory of
        their own.

        Each mapped slot takes a file descriptor and a mapping of the process, and the system limits
        both.
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
            "ring_grown": self.grown,
            "ring_copied": self.copied,
            "ring_bytes": sum(map(len, list(self._maps.values()))),
        }

    def _release_pages(self, slot: int) -> None:
        self._maps.pop(slot, None)
        # the whole slot: a batch that failed was never mapped here
        if hasattr(mmap, "MADV_REMOVE"):
            with (
                contextlib.suppress(OSError),
                mmap.mmap(self._memory.fd, STRIDE, offset=slot * STRIDE) as whole,
            ):
                whole.madvise(mmap.MADV_REMOVE)
        self._idle.append(slot)

    # -- both sides

    def arena(self, slot: int) -> Arena:
        """A context in which `empty` gives tensors inside the slot."""
        return Arena(self, slot)

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
        """An object at whose death the slot is free again."""
        lease = _Lease()
        self._returns[slot] = given_back = _Return(lease, self._free.append)
        given_back.slot = slot
        return lease

    def tensor(
        self,
        slot: int,
        start: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        lease: _Lease | None,
    ) -> torch.Tensor:
        """A contiguous tensor over a slot, from an offset on, with one element at least. It
        keeps `lease` alive, and so do its views.
        """
        known = _NUMPY.get(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if known is None:
            return self.tensor(slot, start, (nbytes,), torch.uint8, lease).view(dtype).view(shape)
        # An array an area: a tensor straight over the mmap would not keep it from being unmapped.
        window: _Window = np.ndarray.__new__(
            _Window, shape, known, self.map(slot, start + nbytes), start
        )
        window.lease = lease
        return torch.from_numpy(window)

    def __getstate__(self) -> dict[str, Any]:
        return {"planned": self.planned, "key": self.key, "_memory": self._memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._maps = {}


class Arena:
    """One slot while a batch is written into it. `leased` (in the parent): tensors hold the slot
    for as long as they live.
    """

    def __init__(self, ring: Ring, slot: int, leased: bool = False) -> None:
        self.ring: Ring = ring
        self.slot: int = slot
        self._end = 0
        self._lease = ring.lease(slot) if leased else None
        # address, offset in the slot, bytes, and what keeps them alive
        self._areas: list[tuple[int, int, int, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the slot that are taken."""
        return self._end

    def lightened(self, batch: Any) -> Any:
        """The batch, in the parent: where it is a plain tuple, list or dict, its light tensors
        are copied out of the slot.
        """
        if self._lease is None or type(batch) not in (tuple, list, dict):
            return batch
        values = list(batch.values()) if type(batch) is dict else list(batch)
        made = {
            id(value): value.clone()
            for value in values
            if type(value) is torch.Tensor and self._lifts(value)
        }
        if not made:
            return batch
        values = [made.get(id(value), value) for value in values]
        return dict(zip(batch, values, strict=True)) if type(batch) is dict else type(batch)(values)

    def _lifts(self, tensor: torch.Tensor) -> bool:
        """True if it is light, and in the slot as it was made there, no view of another one."""
        # others may have no nbytes
        is_light = tensor.layout is torch.strided and _is_light(tensor.nbytes, self._end)
        return is_light and any(tensor is made for *_, made in self._areas)

    def abandon(self) -> None:
        """No batch comes of it: the slot is free again, or as soon as nothing that was made in
        it is left.
        """
        self._lease = None
        self._areas.clear()

    def __enter__(self) -> Arena:
        _current.arena = self
        return self

    def __exit__(self, *_: object) -> None:
        _current.arena = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of undefined content inside the slot."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        offset, self._end = self._end, self._end + up(nbytes)
        made = self.ring.tensor(self.slot, offset, shape, dtype, self._lease)
        self._areas.append((made.data_ptr(), offset, nbytes, made))
        return made

    def _room(self, nbytes: int) -> tuple[int, torch.Tensor]:
        offset, self._end = self._end, self._end + up(nbytes)
        return offset, self.ring.tensor(self.slot, offset, (nbytes,), torch.uint8, self._lease)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Where in the slot some bytes of this process lie; None: elsewhere."""
        for start, offset, size, _ in self._areas:
            if start <= address and address + nbytes <= start + size:
                return offset + address - start
        return None

    def pack(self, batch: Any, report: dict[str, Any]) -> Delivery:
        """What the parent needs to build `batch` again over the slot.

        Dense CPU tensors and NumPy arrays anywhere in it travel in the slot, bit for bit; the rest
        is pickled by value.
        """
        stream = io.BytesIO()
        packer = _Packer(stream, self)
        packer.dump(batch)
        pickled = pickle.dumps(
            (packer.layout, packer.buffers, stream.getvalue(), report), protocol=5
        )
        message: _Message = pickled
        if len(pickled) > _MESSAGE:
            offset, target = self._room(len(pickled))
            target.numpy().data[:] = pickled
            message = offset, len(pickled)
        return Delivery(self.ring.key, self.slot, message)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to collate into: inside the current slot where there is one, else a fresh one."""
    arena: Arena | None = getattr(_current, "arena", None)
    return (
        torch.empty(shape, dtype=dtype, device="cpu")
        if arena is None
        else arena.empty(shape, dtype)
    )


_Message = bytes | tuple[int, int]  # a pickle, or where in the slot it lies and its bytes
# offset, bytes, dtype, shape, strides
_Area = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]


@contextlib.contextmanager
def outside_slot() -> Iterator[None]:
    """While samples are made: what code of theirs collates is no part of the batch."""
    arena: Arena | None = getattr(_current, "arena", None)
    _current.arena = None
    try:
        yield
    finally:
        _current.arena = arena


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, arena: Arena) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._take_buffer)
        self._arena = arena
        # id -> (place, the tensor, kept alive: ids come again)
        self._seen: dict[int, tuple[int, torch.Tensor]] = {}
        self.layout: list[_Area] = []
        self.buffers: list[tuple[int, int]] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not is_dense(obj):
            return None
        if id(obj) not in self._seen:
            self._seen[id(obj)] = len(self.layout), obj
            self.layout.append(self._area_of(obj))
        return self._seen[id(obj)][0]

    def reducer_override(self, obj: Any) -> Any:
        return reduced(obj)

    def _area_of(self, tensor: torch.Tensor) -> _Area:
        nbytes, shape = tensor.numel() * tensor.element_size(), tuple(tensor.shape)
        if nbytes == 0:
            return 0, 0, tensor.dtype, shape, ()
        as_it_lies = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        inside = self._arena.offset_of(tensor.data_ptr(), nbytes) if as_it_lies else None
        if inside is not None:
            return inside, nbytes, tensor.dtype, shape, ()
        # A dense layout such as channels_last is kept; what overlaps or has holes becomes
        # contiguous.
        strides = () if tensor.is_contiguous() else tuple(torch.empty_like(tensor).stride())
        offset, raw = self._arena._room(nbytes)
        _shaped(raw, tensor.dtype, shape, strides).copy_(tensor.resolve_conj().resolve_neg())
        return offset, nbytes, tensor.dtype, shape, strides

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _INLINE:
            return True
        offset, target = self._arena._room(raw.nbytes)
        target.numpy().data[:] = raw.cast("B")
        self.buffers.append((offset, raw.nbytes))
        return False


def _is_light(nbytes: int, of: int) -> bool:
    return nbytes <= _LIGHT and nbytes * _LIGHT_SHARE <= of


def _shaped(
    raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    typed = raw.view(dtype)
    return typed.as_strided(shape, strides) if strides else typed.view(shape)


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, rest: bytes, buffers: list[torch.Tensor], tensors: list[torch.Tensor]
    ) -> None:
        super().__init__(io.BytesIO(rest), buffers=[raw.numpy().data for raw in buffers])
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[pid]
        return tensor


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
        offset, nbytes = message
        message = ring.tensor(slot, offset, (nbytes,), torch.uint8, None).numpy().tobytes()
    layout, buffers, rest, report = pickle.loads(message)
    total = sum(area_of[1] for area_of in layout)
    is_crowded = ring.is_crowded
    ring.copied += is_crowded

    def area(offset: int, nbytes: int) -> torch.Tensor:
        raw = ring.tensor(slot, offset, (nbytes,), torch.uint8, lease)
        return raw.clone() if is_crowded else raw

    def tensor(
        offset: int,
        nbytes: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> torch.Tensor:
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if strides or is_crowded:
            return _shaped(area(offset, nbytes), dtype, shape, strides)
        made = ring.tensor(slot, offset, shape, dtype, lease)
        return made.clone() if _is_light(nbytes, total) and is_apart(offset, nbytes) else made

    # and no other tensor of the batch sees the same bytes
    def is_apart(offset: int, nbytes: int) -> bool:
        return (
            len(layout) <= _FEW
            and sum(start < offset + nbytes and offset < start + size for start, size, *_ in layout)
            == 1
        )

    tensors = [tensor(*area_of) for area_of in layout]
    batch = _Unpacker(rest, [area(*area_of) for area_of in buffers], tensors).load()
    return Delivered(batch, report, total + sum(size for _, size in buffers))


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
