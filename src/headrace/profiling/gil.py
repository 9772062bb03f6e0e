"""Measures which share of its time a piece of code holds the interpreter's lock."""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections.abc import Callable

_TICK = 0.0005  # seconds that the other thread sleeps between two requests for the lock
# a wake-up that is later than this has waited for the lock: without it, it is late by a tenth of
# that
_HELD = 0.002
_LOOKS = 12


def gil_fraction(function: Callable[[], object], seconds: float = 0.6) -> float | None:
    """The share of a function's time in which no other thread can run Python.

    Another thread sleeps for half a millisecond and looks when it wakes up: it needs the lock for
    that. Code that holds the lock lets it in after `sys.getswitchinterval()` (5 ms) at the
    earliest, or when it calls what lets go of the lock. How late the same thread is beside a
    function that surely lets go of it, is taken off.

    Args:
        function: called again and again, in this thread.
        seconds: that it takes; a call that takes longer is waited for.

    Returns:
        0 to 1; None: too few looks to tell.
    """
    beside = _lateness(_lets_go(), seconds / 4)
    held = _lateness(function, seconds)
    if len(beside) < _LOOKS or not held:
        return None
    usual = statistics.median(beside)
    late = [one for one in held if one > max(_HELD, 4 * usual)]
    whole = sum(held) + _TICK * len(held)
    return min(1.0, sum(late) / whole)


def _lateness(function: Callable[[], object], seconds: float) -> list[float]:
    """How many seconds too late each wake-up of another thread is, while a function runs in this
    one.
    """
    late: list[float] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            asked = time.perf_counter()
            time.sleep(_TICK)
            late.append(time.perf_counter() - asked - _TICK)

    thread = threading.Thread(target=look, name="headrace-gil", daemon=True)
    thread.start()
    until = time.perf_counter() + seconds
    try:
        while time.perf_counter() < until:
            function()
    finally:
        ended.set()
        thread.join()
    return late


def _lets_go() -> Callable[[], object]:
    """A function that computes without the lock."""
    data = bytes(4 << 20)
    return lambda: hashlib.blake2b(data).digest()
