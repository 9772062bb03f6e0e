"""Is a file still the one that was opened?"""

from __future__ import annotations

import os

from headrace.errors import FileChangedError
from headrace.io.paths import redact
from headrace.io.remote_files import RemoteFiles
from headrace.io.stretches import Files


class Stamp:
    """Size and time of a file whose layout is known: one that is changed under a reader would be read wrongly, so it isn't.

    Args:
        path: of the file.
        status: of the file, if it is open already.
    """

    def __init__(self, path: str, status: os.stat_result | None = None) -> None:
        self.path = path
        status = os.stat(path) if status is None else status
        self.size: int = status.st_size
        self.mtime: int = status.st_mtime_ns

    def is_of(self, status: os.stat_result) -> bool:
        """True if a file of that status is still that one."""
        return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime)

    def check(self, fd: int) -> None:
        """Is the open file still that one?

        Raises:
            FileChangedError: it has been changed.
        """
        if not self.is_of(os.fstat(fd)):
            raise changed(self.path)


class KnownFile:
    """A file whose layout is known, of this machine or far away.

    Args:
        path: of the file, or its URL.
        files: by which it is read.
        status: of a local file, if it is open already.

    Attributes:
        size: its bytes.
        when: what changes when the file does.
    """

    def __init__(self, path: str, files: Files, status: os.stat_result | None = None) -> None:
        self.path, self._files = path, files
        self._stamp: Stamp | None = None
        self.size: int
        self.when: int | str | None
        if isinstance(files, RemoteFiles):
            version = files.version(path)
            self.size, self.when = version.size, version.tag
        else:
            self._stamp = Stamp(path, status)
            self.size, self.when = self._stamp.size, self._stamp.mtime

    def check(self, status: os.stat_result | None = None) -> None:
        """Is it still that one? Far away nothing is asked: each read is of that version, or an error.

        Args:
            status: of the file as another library has it open; None: of the file that `files` has open.

        Raises:
            FileChangedError: it has been changed.
        """
        if self._stamp is None or isinstance(self._files, RemoteFiles):
            return
        if status is None:
            with self._files.reading(self.path) as fd:
                status = os.fstat(fd)
        if not self._stamp.is_of(status):
            raise changed(self.path)


def changed(path: str) -> FileChangedError:
    """What to say of a file that is another one than when it was opened."""
    return FileChangedError(f"{redact(path)} has been changed since it was opened: open the dataset again")
