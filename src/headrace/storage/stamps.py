"""Is a file still the one that was opened?"""

from __future__ import annotations

import os

from headrace.errors import AccessError
from headrace.storage.paths import redact
from headrace.storage.remote_files import RemoteFiles
from headrace.storage.stretches import Files


class Stamp:
    """Size and time of a file whose layout is known: one that is changed under a reader would be read wrongly, so it isn't.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        status = os.stat(path)
        self.size, self.mtime = status.st_size, status.st_mtime_ns

    def check(self, fd: int) -> None:
        """Is the open file still that one?

        Raises:
            AccessError: it has been changed.
        """
        status = os.fstat(fd)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime):
            raise AccessError(f"{redact(self.path)} has been changed since it was opened: open the dataset again")


class KnownFile:
    """A file whose layout is known, of this machine or far away.

    Args:
        path: of the file, or its URL.
        files: by which it is read.

    Attributes:
        size: its bytes.
        when: what changes when the file does.
    """

    def __init__(self, path: str, files: Files) -> None:
        self.path, self._files = path, files
        self._stamp: Stamp | None = None
        self.size: int
        self.when: int | str | None
        if isinstance(files, RemoteFiles):
            version = files.version(path)
            self.size, self.when = version.size, version.tag
        else:
            self._stamp = Stamp(path)
            self.size, self.when = self._stamp.size, self._stamp.mtime

    def check(self) -> None:
        """Is it still that one? Far away nothing is asked: each read is of that version, or an error.

        Raises:
            AccessError: it has been changed.
        """
        if self._stamp is not None and not isinstance(self._files, RemoteFiles):
            with self._files.reading(self.path) as fd:
                self._stamp.check(fd)
