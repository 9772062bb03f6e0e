"""The exceptions and warnings of headrace.

Every error says what is wrong, where, and what to do. Each is a `HeadraceError` and a subclass of
the matching builtin. All are created from their message alone, so that they cross process
boundaries (pickle, torch's worker wrapper) unchanged.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable


class HeadraceError(Exception):
    """Base class of all errors that headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """An argument or option has an invalid value; the message names it."""


class CollateError(HeadraceError, ValueError):
    """Samples can't be collated: their shapes, dtypes or structures differ. The message names the
    samples, the field and the remedy.

    Its arguments are the parts of the message. An integer is the position of a sample in its batch.
    """

    def __str__(self) -> str:
        return self.naming("sample {}".format)

    def naming(self, name: Callable[[int], str]) -> str:
        """Returns the message, in which `name(position)` names each sample."""
        return "".join(name(part) if isinstance(part, int) else str(part) for part in self.args)


class DataNotFoundError(HeadraceError, FileNotFoundError):
    """A path does not exist, or contains none of the expected files."""


class AccessError(HeadraceError, PermissionError):
    """A file or folder exists, but this user may not read or write it."""

    is_of_server = False
    """True if the server denies several samples, so that the cause is not this sample."""


class MissingNameError(HeadraceError, KeyError):
    """A dataset, array or group of that name is not in the file; the message lists the existing
    names.
    """

    __str__ = Exception.__str__  # KeyError would show the repr of the message


class FormatError(HeadraceError, ValueError):
    """A file is damaged, has an unexpected format, or its format is unknown."""


class SampleError(HeadraceError, OSError):
    """A sample can't be read or decoded; the message names path, index and cause."""


class EmptyBatchError(SampleError):
    """No sample of a batch can be read, and unreadable samples are skipped
    (``on_error="skip"``).
    """


class RemoteError(HeadraceError, ConnectionError):
    """A request to a server failed in all attempts; the message names URL, range, attempts and
    the last cause.
    """

    is_of_server = False
    """True if all recent requests to the server failed, so that the cause is not this sample."""
    is_final = False
    """True if the server gave a definite answer, so that a retry is pointless."""


class FileChangedError(HeadraceError, OSError):
    """A file, local or remote, changed since it was opened. Data of both versions must not be
    mixed.
    """


class WriteError(HeadraceError, OSError):
    """A file can't be written. No incomplete file is left under its name."""


class TargetExistsError(WriteError, FileExistsError):
    """A file of that name exists, and overwriting was not requested."""


class BudgetError(HeadraceError, MemoryError):
    """Something does not fit the memory budget; the message has the numbers."""


class StateError(HeadraceError, ValueError):
    """A saved state does not fit this loader or dataset."""


class WorkerError(HeadraceError, RuntimeError):
    """A worker process died, or failed for a reason other than a sample."""


class HeadraceWarning(UserWarning):
    """Warning category of headrace: something works, but possibly not as intended."""


def one_line(message: object) -> str:
    """A message, or an error's message, without line breaks."""
    return " ".join(str(message).split())


def warn(message: str) -> None:
    """Warns at the user's line: the nearest calling line outside of headrace."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("headrace."):
        level = level + 1
        frame = frame.f_back
    warnings.warn(message, HeadraceWarning, stacklevel=level)
