"""What the fork server does when it imports this module: it imports the main script, outlives the
signals that a job gets, and removes its socket when it ends.

In `multiprocessing` the process that started the server removes the socket, but not if it was
killed. The server itself ends with that process in any case.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import stat
import sys
from multiprocessing import process, spawn
from typing import Any

from headrace.loader.worker.signals import outlive_signals
from headrace.loader.worker.start import MAIN_SCRIPT


def _import_main(path: str, search: list[str]) -> None:
    """Imports the main script as a worker does, which then need not. Where that fails, the
    worker tries again, and its error is told.
    """
    before = sys.path[:]
    sys.path[:] = search
    this: Any = process.current_process()
    # as in a worker: a script that starts processes as it is imported gets an error
    this._inheriting = True
    try:
        spawn.import_main_path(path)
    except BaseException:  # also what ends a script: the server must live on
        sys.path[:] = before
    finally:
        del this._inheriting


def _listened_to() -> str | None:
    """The path of the socket that this process listens to."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue  # a socket that can't be made would leave its descriptor open
            with socket.socket(fileno=os.dup(int(name))) as listening:
                if listening.family == socket.AF_UNIX and listening.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    path = listening.getsockname()
                    return path if isinstance(path, str) and os.path.isabs(path) else None
    return None


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


if (_path := _listened_to()) is not None:
    atexit.register(_remove, _path)
    outlive_signals()

if (_told := os.environ.pop(MAIN_SCRIPT, None)) is not None:
    _import_main(*json.loads(_told))
