"""Shared memory without a name, for workers to map.

From a file without a name: `memfd_create` where the system has it, else a temporary file that is
unlinked at once. Nothing of it stands in /dev/shm, no limit of that folder counts, and the kernel
frees it when the last process that maps it is gone, however that process ended. `multiprocessing`
hands it to workers as a file descriptor (fork inherits it; spawn and forkserver duplicate it).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import weakref
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import AnyArray
from headrace.errors import BudgetError
from headrace.memory.processes import PerProcess


def up(nbytes: int, to: int = 64) -> int:
    """Rounds up to a multiple of `to`, by default a cache line."""
    return -(-nbytes // to) * to


def is_spawning() -> bool:
    """True while a worker process is started, so that pickling may pass file descriptors on."""
    return get_spawning_popen() is not None


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


class AnonymousMemory:
    """`nbytes` of shared memory without a name, mapped at first use in each process.

    The pages are zero and cost nothing until they are written. Picklable only while
    `multiprocessing` starts a worker.

    Thread-safe; fork-safe: a child maps the same pages.
    """

    fd: int
    nbytes: int
    _map: mmap.mmap | None = None

    def __init__(self, nbytes: int, label: str = "memory") -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create(f"headrace-{label}", os.MFD_CLOEXEC)
        else:
            self.fd, path = tempfile.mkstemp(prefix=f"headrace-{label}-")
            os.unlink(path)
        weakref.finalize(self, _close, self.fd).atexit = False
        self.grow(max(1, int(nbytes)))

    def grow(self, nbytes: int) -> None:
        """Enlarges the memory; existing mappings stay as they are."""
        try:
            os.ftruncate(self.fd, nbytes)
        except OSError as error:
            raise BudgetError(
                f"can't allocate {nbytes:,} bytes of shared memory ({error.strerror}): check the "
                "limit on file sizes (`ulimit -f`)"
            ) from error
        self.nbytes = nbytes

    @property
    def map(self) -> mmap.mmap:
        """The mapping of all bytes in this process."""
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.nbytes)
        return self._map

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        """A writable array over the bytes from `offset`."""
        flat: AnyArray = np.frombuffer(self.map, dtype, math.prod(shape), offset)
        return flat.reshape(shape)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Ensures that bytes can be written. Raises an OSError if there is no room for them."""

    def punch(self, begin: int, end: int) -> None:
        """Returns the whole pages from `begin` to `end` to the system (Linux); they are zeros
        then.
        """
        begin = up(begin, mmap.PAGESIZE)
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and hasattr(mmap, "MADV_REMOVE"):
            # a file system that knows no holes: its pages are the page cache's
            with contextlib.suppress(OSError):
                self.map.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def __reduce__(self) -> tuple[Any, ...]:
        if not is_spawning():
            raise TypeError(
                "shared memory can be pickled only while multiprocessing starts a worker process"
            )
        return _attach, (type(self), reduction.DupFd(self.fd))


def _attach(cls: type[AnonymousMemory], duplicate: Any) -> AnonymousMemory:
    memory = cls.__new__(cls)
    memory.fd = duplicate.detach()
    memory.nbytes = os.fstat(memory.fd).st_size
    weakref.finalize(memory, _close, memory.fd).atexit = False
    return memory


_INTS = 512  # that share one memory file: a page, which a limit on the size of files leaves


class _Ints(AnonymousMemory):
    """Memory for many integers, none of which is ever used twice; it ends with the last of them."""

    def __init__(self) -> None:
        super().__init__(8 * _INTS, "int")
        # `next` is atomic: no lock, which a fork could inherit
        self.places = iter(range(0, 8 * _INTS, 8))


# The memory of the next integer, under 0. A forked child must not use what its parent uses next.
_last = PerProcess(weakref.WeakValueDictionary[int, _Ints])


class SharedInt:
    """One integer that all workers of this process see change (an epoch's number: persistent
    workers never see attributes change).

    In a pickle that is not on its way to a worker, the value travels alone.
    """

    def __init__(self, value: int = 0) -> None:
        memory = _last.get().get(0)
        at = None if memory is None else next(memory.places, None)
        if memory is None or at is None:
            memory = _last.get()[0] = _Ints()
            at = next(memory.places)
        self._memory = memory
        self._at = at
        self.value = value

    @property
    def value(self) -> int:
        return int.from_bytes(self._memory.map[self._at : self._at + 8], "little", signed=True)

    @value.setter
    def value(self, value: int) -> None:
        self._memory.map[self._at : self._at + 8] = int(value).to_bytes(8, "little", signed=True)

    def __getstate__(self) -> dict[str, Any]:
        if is_spawning():
            return self.__dict__
        return {"value": self.value}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "value" in state:
            self.__init__(state["value"])  # type: ignore[misc]
        else:
            self.__dict__.update(state)


SHARED_FROM = 1 << 20
"""Bytes from which on a `SharedArray` travels as shared memory: smaller ones are not worth a
file descriptor.
"""


class SharedArray:
    """A read-only array that workers map instead of copying: for what a dataset knows of each of
    its samples.

    Fork shares its pages as they are. When `multiprocessing` starts a worker in another way, a
    large array is put into memory without a name, once; from then on this process uses that copy
    too, so that nothing is held twice. In any other pickle the values travel themselves.

    Args:
        values: an array of any shape without Python objects; it must not be written to any more.

    Attributes:
        array: the values, read-only; take it anew at each use, since it moves.
    """

    def __init__(self, values: AnyArray) -> None:
        self._memory: AnonymousMemory | None = None
        self.array: AnyArray = _read_only(values)

    def __len__(self) -> int:
        return len(self.array)

    def moved(self) -> AnyArray:
        """The values where workers map them, in this process writable: what is written there,
        they see.
        """
        if self._memory is not None:
            return self._memory.array(0, self.array.shape, self.array.dtype)
        self._memory = AnonymousMemory(self.array.nbytes, "array")
        moved = self._memory.array(0, self.array.shape, self.array.dtype)
        moved[...] = self.array
        self.array = _read_only(moved)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        if self.array.nbytes < SHARED_FROM or not is_spawning():
            return {"values": self.array}
        self.moved()
        return {"memory": self._memory, "dtype": self.array.dtype, "shape": self.array.shape}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._memory = state.get("memory")
        if self._memory is None:
            self.array = _read_only(state["values"])
        else:
            self.array = _read_only(self._memory.array(0, state["shape"], state["dtype"]))


def _read_only(values: AnyArray) -> AnyArray:
    view = values.view()
    view.flags.writeable = False
    return view


class Flags:
    """A byte for each worker, which it sets when its loop begins, and one for all, which the parent
    sets when the work is done.

    The latter takes the place of torch's event: a worker that is killed while it looks at an event
    takes the event's lock with it, and the parent, which sets it, would wait for ever. Picklable
    while `multiprocessing` starts a worker; fork-safe.
    """

    def __init__(self, workers: int) -> None:
        self._memory = AnonymousMemory(workers + 1, "flags")
        self._memory.map[0] = 0  # mapped before a fork

    def set(self) -> None:
        """The work is done."""
        self._memory.map[0] = 1

    def is_set(self) -> bool:
        """True if the work is done."""
        return self._memory.map[0] == 1

    def mark(self, worker: int) -> None:
        """The loop of a worker begins."""
        self._memory.map[worker + 1] = 1

    def has_begun(self, worker: int) -> bool:
        """True if the worker has reached its loop."""
        return self._memory.map[worker + 1] == 1
