"""Signals that go to all processes of a job: Ctrl-C, and what SLURM, Kubernetes and their like send
before they end it.

The program decides what they mean: it may save its state first, and needs its workers for that. So
workers, and the fork server, do nothing when such a signal comes. They end with their parent, or
when it says so.
"""

from __future__ import annotations

import os
import signal
from multiprocessing import resource_tracker
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
OF_THE_JOB = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""The signals that are the program's, not a worker's."""


def leave_to_parent(numbers: tuple[signal.Signals, ...] = OF_THE_JOB) -> None:
    """Has this process do nothing when one of the signals comes, and lets those through that were
    held back while it was forked.

    They get a handler: ignored signals would be ignored by programs that this process starts, too.
    """
    # a forked process has its parent's, whose event loop would take each signal for one of its own
    signal.set_wakeup_fd(-1)
    for number in numbers:
        signal.signal(number, _nothing)
        if hasattr(signal, "siginterrupt"):
            # libraries in C may not expect a system call that is interrupted
            signal.siginterrupt(number, False)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def outlive_signals() -> None:
    """Has a fork server do nothing when one of the signals comes, but not the processes that are
    forked from it.
    """
    # which `multiprocessing` sees to
    numbers = [number for number in OF_THE_JOB if number != signal.SIGINT]
    before = {number: signal.signal(number, _nothing) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


def start_tracker() -> None:
    """Starts the process that `multiprocessing` has beside a fork server, if it does not run, so
    that it outlives the signals too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_JOB)
    try:
        # which sees to SIGINT and SIGTERM, and hands on what else is blocked
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing(number: int, frame: FrameType | None) -> None:
    return
