"""Who makes a kept file, where several processes find out at once that it is missing, and it takes long to make?

One of them, while the others wait: as long as the file that it writes grows. It holds a lock of the kernel's, on one byte of a file in
that folder; a process that is killed holds none. Who waits in vain (for a process that is stopped, say) makes the file too: of two that
are equal the later one stays.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Iterator

from headrace.io.array_file import TEMPORARY, user_id

try:
    import fcntl
except ImportError:  # Windows: there each process makes the file
    fcntl = None  # type: ignore[assignment]

_POLL_S = 0.02


@contextlib.contextmanager
def alone(path: str, patience: float) -> Iterator[None]:
    """Inside, no other process of this user makes the kept file of that path, unless it has waited in vain. Look for it once more first.

    Between the threads of one process nobody waits.

    Args:
        path: of the file.
        patience: seconds that the maker's file may stay as it is, until it is waited for in vain.
    """
    fd = None
    with contextlib.suppress(OSError):  # without leave to write nothing is kept
        folder = os.path.dirname(path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        fd = None if fcntl is None else os.open(os.path.join(folder, f"headrace-making-{user_id()}.lock"), flags, 0o600)
    try:
        if fd is not None:
            _wait(fd, path, patience)
        yield
    finally:
        if fd is not None:
            os.close(fd)


def _wait(fd: int, path: str, patience: float) -> None:
    place = int.from_bytes(hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=4).digest(), "big") >> 1
    written, end = -1, time.monotonic() + patience
    while time.monotonic() < end:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return  # a file system without locks
        now = _written(path)
        if now != written:
            written, end = now, time.monotonic() + patience
        time.sleep(_POLL_S)


def _written(path: str) -> int:
    """Bytes of the temporary files that are written for it."""
    folder, name = os.path.split(path)
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as listing:
        for item in listing:
            if item.name.startswith(f"{name}.") and item.name.endswith(TEMPORARY):
                total += item.stat(follow_symlinks=False).st_size
    return total
