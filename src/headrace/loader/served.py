"""What the fork server does when it imports this module: it holds back the signals that a job gets,
but not from the processes that it forks, and removes its socket when it ends.

In `multiprocessing` the process that started the server removes the socket, but not if it was
killed. The server itself ends with that process in any case.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import signal
import socket
import sys

from headrace.loader.signals import OF_THE_JOB

_COMMAND = r"from multiprocessing\.forkserver import main; main\((\d+), "


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


_server = re.match(_COMMAND, sys.orig_argv[-1])
if _server is not None:
    with socket.socket(fileno=os.dup(int(_server[1]))) as _listening:
        atexit.register(_remove, _listening.getsockname())
    signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_JOB)
    _let_through = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, OF_THE_JOB)
    os.register_at_fork(after_in_child=_let_through)
