"""The version of a local file that is read by other means than `LocalFiles`."""

from __future__ import annotations

import os

from headrace.io.local.files import changed as changed


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
