"""Is a file still the one that was opened?"""

from __future__ import annotations

import os

from headrace.io.files import Files
from headrace.io.local.files import changed as changed
from headrace.io.local.files import version_of


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
    """A file whose layout is known, of this machine or of a server.

    Args:
        path: of the file, or its URL.
        files: by which it is read.

    Attributes:
        size: its bytes.
        when: what changes when the file does.
    """

    def __init__(self, path: str, files: Files) -> None:
        self.path, self._files = path, files
        self._version = files.version(path)
        self.size, self.when = self._version

    def check(self, status: os.stat_result | None = None) -> None:
        """Is it still that one?

        Args:
            status: of the file as another library has it open; None: of the file that `files` has open.

        Raises:
            FileChangedError: it has been changed.
        """
        if status is None:
            self._files.check(self.path)
        elif not self._files.is_remote and version_of(status) != self._version:
            raise changed(self.path)
