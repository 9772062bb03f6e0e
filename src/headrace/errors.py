"""The exceptions and warnings of headrace.

Every error says what is wrong, where, and what to do. Each is a `HeadraceError` and a subclass of the builtin that a caller would
expect. All are built from one message, so that they cross process boundaries (pickle, torch's worker wrapper) unchanged.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable


class HeadraceError(Exception):
    """The root of all errors that headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """An argument or option has a value that makes no sense; the message names it."""


class CollateError(HeadraceError, ValueError):
    """Samples that make no batch: shapes, dtypes or structures differ. The message names the samples, the place in them and the remedy.

    Its arguments are the parts of the message; an integer among them is the position of a sample in its batch.
    """

    def __str__(self) -> str:
        return self.naming("sample {}".format)

    def naming(self, name: Callable[[int], str]) -> str:
        """The message, with a name of one's own for the sample at each position."""
        return "".join(name(part) if isinstance(part, int) else str(part) for part in self.args)


class DataNotFoundError(HeadraceError, FileNotFoundError):
    """A path, or everything that was looked for under it, is missing."""


class AccessError(HeadraceError, PermissionError):
    """A file or folder is there, and this user may not read or write it."""

    is_of_server = False
    """True if the server denies more than one sample, so that it is no fault of a sample."""


class MissingNameError(HeadraceError, KeyError):
    """A dataset, array or group of that name is not in the file; the message lists the names that are."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class FormatError(HeadraceError, ValueError):
    """A file is not what it should be, or its format is unknown."""


class SampleError(HeadraceError, OSError):
    """A sample can't be read or decoded; the message names path, index and cause."""


class EmptyBatchError(SampleError):
    """None of the samples of a batch can be read, and such samples are to be left out (``on_error="skip"``)."""


class RemoteError(HeadraceError, ConnectionError):
    """A server did not give what it was asked for, however often; the message names URL, range, attempts and the last cause."""

    is_of_server = False
    """True if the server gave nothing of what it was asked for lately, so that it is no fault of a sample."""
    is_final = False
    """True if it is the server's answer, which asking again would not change."""


class FileChangedError(HeadraceError, OSError):
    """A file, local or remote, has changed since it was opened: what was read of both versions must not be mixed."""


class WriteError(HeadraceError, OSError):
    """A file can't be written; nothing stands under its name that was not there before."""


class TargetExistsError(WriteError, FileExistsError):
    """There is a file of that name already, and nobody said that it may be replaced."""


class BudgetError(HeadraceError, MemoryError):
    """Something does not fit into the memory budget; the message holds the numbers."""


class StateError(HeadraceError, ValueError):
    """A saved state does not fit this loader or dataset."""


class WorkerError(HeadraceError, RuntimeError):
    """A worker process died, or failed in a way that is not the fault of a sample."""


class HeadraceWarning(UserWarning):
    """What headrace warns of: something works, but not as the user may think."""


def warn(message: str) -> None:
    """Warns at the user's line: the first one outside of headrace that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("headrace."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, HeadraceWarning, stacklevel=level)
