"""Forked children, and threads that hold a lock while they are forked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_child(check: Callable[[], bool]) -> bool:
    """Run `check` in a forked child and say whether it returned True."""
    child = os.fork()
    if child == 0:
        correct = False
        signal.alarm(60)  # a child that hangs is a failure, not a wait
        try:
            correct = check()
        finally:
            os._exit(0 if correct else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextmanager
def held_by_a_thread(lock: Any) -> Iterator[None]:
    """Another thread holds the lock meanwhile."""
    taken, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert taken.wait(30)
        yield
    finally:
        leave.set()
        thread.join()
