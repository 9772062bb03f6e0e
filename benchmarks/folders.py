"""Folders that the scripts write their files into."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def prepared(work: Path, name: str, write: Callable[[Path], None]) -> Path:
    """The folder `name` in `work`, which `write` fills where it isn't there yet: it is whole, or
    it isn't there.
    """
    folder = work / name
    if not folder.exists():
        part = Path(tempfile.mkdtemp(prefix=f"{name}.", suffix=".part", dir=work))
        try:
            write(part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def forget(path: Path) -> None:
    """What the system holds of a file in its memory: the file is as one that nobody has read."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@contextlib.contextmanager
def work_folder(given: str | None) -> Iterator[Path]:
    """The folder that was given, which stays, or a temporary one."""
    if given is not None:
        Path(given).mkdir(parents=True, exist_ok=True)
        yield Path(given).resolve()
        return
    with temporary_folder() as folder:
        yield Path(folder)


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[str]:
    """A new folder in `parent` or where temporary files go; it is removed at the end, also where
    SIGTERM ends the script.
    """
    owner = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() != owner:  # a process that was forked meanwhile: the folder isn't its own
            os._exit(128 + signal.SIGTERM)
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        with tempfile.TemporaryDirectory(
            prefix="headrace-bench-", dir=parent, ignore_cleanup_errors=True
        ) as folder:
            yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
