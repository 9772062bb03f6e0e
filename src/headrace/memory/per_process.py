"""Values that each process creates for itself: at first use, again after a fork, and not part of
pickles.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing import connection, parent_process
from typing import Any, Generic, TypeVar

from headrace.errors import ConfigError

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Holds an object that processes must not share, such as an open file, a connection or a lock.
    Thread-safe.

    A forked child drops the inherited value without closing it, since it belongs to the parent. A
    pickle contains `make`, but not the value.

    Args:
        make: a callable without arguments that creates the value. It is called in the process that
            needs the value, and must be picklable if workers are spawned.
        closer: a callable that `close` calls with the value. Default: the value's own ``close()``,
            if it has one.
    """

    def __init__(self, make: Callable[[], T], closer: Callable[[T], object] | None = None) -> None:
        self._make = make
        self._closer = closer
        self._value: T | None = None
        self._lock = threading.Lock()
        renew_after_fork(self)

    def get(self) -> T:
        """Returns the value of this process, and creates it if needed."""
        value = self._value
        if value is not None:
            return value
        with self._lock:
            if self._value is None:
                self._value = self._make()
            return self._value

    @property
    def value(self) -> T | None:
        """The value of this process. None: it was not created."""
        return self._value

    def close(self) -> None:
        """Closes the value of this process. The next `get` creates another one."""
        with self._lock:
            value = self._value
            self._value = None
        if value is None:
            return
        if self._closer is not None:
            self._closer(value)
        elif hasattr(value, "close"):
            value.close()

    def after_fork(self) -> None:
        """Drops the inherited value; see `renew_after_fork`."""
        if self._value is not None:
            _inherited.append(self._value)
        self._value = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make, self._closer)


_renewed: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[Any] = []  # kept for ever: their destructors could write into the parent's files


def renew_after_fork(owner: Any) -> None:
    """Calls `owner.after_fork()` in each child that is forked while the owner is alive, before
    anything else runs there: for an object that a fork leaves in need of repair, such as a lock
    that another thread of the parent held.
    """
    _renewed.add(owner)


def keep_inherited(value: object) -> None:
    """Keeps a parent's open file in a forked child, so that no destructor ever runs there."""
    _inherited.append(value)


def _after_fork() -> None:
    for owner in list(_renewed):
        owner.after_fork()


def is_daemonic() -> bool:
    """True if multiprocessing lets this process start no others: a daemonic one, such as a
    worker of a DataLoader or of a Pool.
    """
    return multiprocessing.current_process().daemon


def check_may_start(asked: str) -> None:
    """Raises a ConfigError where this process may start no others; `asked` is the argument by
    which it was to do so.
    """
    if is_daemonic():
        raise ConfigError(
            f"{asked}: this process is daemonic, and multiprocessing lets it start no processes: "
            f"leave {asked.split('=')[0]} out, or "
            "start this process with daemon=False"
        )


def end_with_parent() -> None:
    """Ends this process when the one that made it is gone: a worker, or a process of a pool,
    whose owner was killed would wait for ever.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(
            target=_end_with, args=(parent.sentinel,), name="headrace-watchdog", daemon=True
        ).start()


def _end_with(sentinel: int) -> None:
    """Waits for the parent's end; nothing is left to be tidied up then, for all that is shared
    is anonymous.
    """
    inherited = os.getppid()
    while not connection.wait([sentinel], timeout=1.0):
        # A sibling that was forked later holds the sentinel's other end too, so look at the parent
        # itself as well.
        if os.getppid() != inherited:
            break
    os._exit(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
