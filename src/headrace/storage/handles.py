"""Which process has which file open?

Handles of h5py, zarr and fsspec must not be shared by processes. A `WorkerHandle` opens at first use in each process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WorkerHandle(Generic[T]):
    """An open file or connection that each process opens for itself when it first needs it.

    Keyed by process id: a forked child forgets the inherited handle without closing it, for it is the parent's. A pickle takes
    along how to open, and not what is open. Thread-safe.

    Args:
        opener: called without arguments in the process that needs the handle; picklable where workers are spawned.
        closer: called with the handle when it is closed; by default its own ``close()`` if it has one.
    """

    def __init__(self, opener: Callable[[], T], closer: Callable[[T], object] | None = None) -> None:
        self._opener, self._closer = opener, closer
        self._forget()

    def _forget(self) -> None:
        self._handle: T | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()  # last: another thread that finds it goes on with the new lock

    def get(self) -> T:
        """The handle of this process, opened now if it was not."""
        if self._pid != os.getpid():
            _inherited.append(self._handle)  # kept: its destructor could write into the parent's file
            self._forget()
        with self._lock:
            if self._handle is None:
                self._handle = self._opener()
            return self._handle

    def close(self) -> None:
        """Close this process's handle; the next `get` opens again."""
        if self._pid != os.getpid():
            return
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            close = self._closer or (lambda h: getattr(h, "close", lambda: None)())
            close(handle)

    def __getstate__(self) -> dict[str, Any]:
        return {"opener": self._opener, "closer": self._closer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["opener"], state["closer"])  # type: ignore[misc]


_inherited: list[Any] = []
