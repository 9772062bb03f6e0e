"""Signals that go to all processes of a job: Ctrl-C, and what SLURM, Kubernetes and their like send
before they end it.

The program decides what they mean: it may save its state first, and needs its workers for that. So
workers, and the fork server, do nothing when such a signal comes. They end with their parent, or
when it says so.
"""

from __future__ import annotations

import signal
import sys

_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
OF_THE_JOB = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""The signals that are the program's, not a worker's."""


def leave_to_parent() -> None:
    """Has this process do nothing when one of the signals comes, and lets those through that were
    held back while it was forked.

    They get a handler: ignored signals would be ignored by programs that this process starts, too.
    """
    # a forked process has its parent's, whose event loop would take each signal for one of its own
    signal.set_wakeup_fd(-1)
    for number in OF_THE_JOB:
        signal.signal(number, lambda *_: None)
    if sys.platform != "win32":
        for number in OF_THE_JOB:
            # libraries in C may not expect a system call that is interrupted
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_JOB)
