"""Where does memory that several processes share come from?

From a file without a name: `memfd_create` where the system has it, else a temporary file that is unlinked at once. Nothing of it
stands in /dev/shm, no limit of that folder counts, and the kernel frees it when the last process that maps it is gone, however
that process ended. `multiprocessing` hands it to workers as a file descriptor (fork inherits it; spawn and forkserver duplicate it).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import BudgetError


def is_spawning() -> bool:
    """Is a worker process being started right now, so that pickling may pass file descriptors on?"""
    return get_spawning_popen() is not None


def _nameless_file(label: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"headrace-{label}", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=f"headrace-{label}-")
    os.unlink(path)
    return fd


class AnonymousMemory:
    """`nbytes` of shared memory without a name, mapped at first use in each process.

    The pages are zero and cost nothing until they are written. Picklable only while `multiprocessing` starts a worker.

    Thread-safe; fork-safe: a child maps the same pages.
    """

    def __init__(self, nbytes: int, label: str = "memory") -> None:
        self.nbytes = max(1, int(nbytes))
        self._adopt(_nameless_file(label))
        self.grow(self.nbytes)

    def _adopt(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        weakref.finalize(self, _close, fd).atexit = False

    def grow(self, nbytes: int) -> None:
        """Makes the memory larger; what is mapped already stays as it is."""
        try:
            os.ftruncate(self.fd, nbytes)
        except OSError as error:
            raise BudgetError(
                f"no shared memory of {nbytes:,} bytes can be had ({error.strerror}): is the size of files limited (`ulimit -f`)?"
            ) from error
        self.nbytes = nbytes

    @property
    def map(self) -> mmap.mmap:
        """The mapping of all bytes in this process."""
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.nbytes)
        return self._map

    def array(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A writable [count] array of `dtype` over the bytes from `offset`."""
        return np.frombuffer(self.map, dtype=dtype, count=count, offset=offset)

    def __reduce__(self) -> tuple[Any, ...]:
        if not is_spawning():
            raise TypeError("shared memory can be pickled only while multiprocessing starts a worker process")
        return _attach, (reduction.DupFd(self.fd), self.nbytes)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def _attach(duplicate: Any, nbytes: int) -> AnonymousMemory:
    memory = AnonymousMemory.__new__(AnonymousMemory)
    memory.nbytes = nbytes
    memory._adopt(duplicate.detach())
    return memory


class SharedInt:
    """One integer that all workers of this process see change (an epoch's number: persistent workers never see attributes change).

    In a pickle that is not on its way to a worker, the value travels alone.
    """

    def __init__(self, value: int = 0) -> None:
        self._memory = AnonymousMemory(8, "int")
        self.value = value

    @property
    def value(self) -> int:
        return int.from_bytes(self._memory.map[:8], "little", signed=True)

    @value.setter
    def value(self, value: int) -> None:
        self._memory.map[:8] = int(value).to_bytes(8, "little", signed=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"_memory": self._memory} if is_spawning() else {"value": self.value}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_memory" in state:
            self._memory = state["_memory"]
        else:
            self.__init__(state["value"])  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInt:
        return SharedInt(self.value)
