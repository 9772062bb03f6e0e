"""Is a file still the one that was opened?"""

from __future__ import annotations

import os

from headrace.errors import AccessError
from headrace.storage.paths import redact


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
