"""Writes files that get their names when they are complete and on the disk."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from typing import BinaryIO

ABANDONED_S = 3600
"""A temporary file that has not been written to for so long has no writer any more."""
TEMPORARY = ".part"


@contextlib.contextmanager
def written_to(path: str) -> Iterator[BinaryIO]:
    """Opens a temporary file that gets its name after it is written and synced. Only its owner may
    read it.
    """
    folder, name = os.path.split(path)
    fd, temporary = tempfile.mkstemp(TEMPORARY, f"{name}.", folder)
    try:
        with open(fd, "wb+") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def make_folder(folder: str, prefix: str) -> None:
    """Creates a folder with its parents, and removes the temporary files with that prefix whose
    writers are gone.
    """
    with contextlib.suppress(FileExistsError):
        os.makedirs(folder, 0o700)
    with os.scandir(folder) as listing:
        for item in listing:
            if item.name.startswith(prefix) and item.name.endswith(TEMPORARY):
                with contextlib.suppress(OSError):  # another user's, or gone
                    if item.stat(follow_symlinks=False).st_mtime < time.time() - ABANDONED_S:
                        os.unlink(item.path)


def user_id() -> int:
    """The user who runs this process."""
    if hasattr(os, "geteuid"):
        return os.geteuid()
    return 0


def is_ours(status: os.stat_result) -> bool:
    """True if it is a plain file of this user, which nobody else may write to."""
    private = not hasattr(os, "geteuid") or (
        status.st_uid == user_id() and not status.st_mode & 0o022
    )
    return private and stat.S_ISREG(status.st_mode)
