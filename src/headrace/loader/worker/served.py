"""Removes the socket of the fork server that imports this, when it ends.

`multiprocessing` has the process that started the server remove it, which does not where it was killed. The server itself ends with that
process in any case.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket

import headrace.collate
import headrace.datasets
import headrace.loader  # noqa: F401  # once, for all workers that are forked from here


def _listened_to() -> str | None:
    """The path of the socket that this process listens to."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as listening:
            if listening.family == socket.AF_UNIX and listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                path = listening.getsockname()
                return path if isinstance(path, str) and os.path.isabs(path) else None
    return None


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


if (_path := _listened_to()) is not None:
    atexit.register(_remove, _path)
