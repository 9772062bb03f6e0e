"""Turns the errors that h5py, zarr-python and zipfile raise over damaged files into ours.

They raise KeyError, OverflowError, struct.error and so on. Here each becomes an error that names
what can't be read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator

from headrace.errors import AccessError, BudgetError, FormatError, HeadraceError, one_line

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Numbers of errors of a disk that can't be written to."""
OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, *FULL_DISK)
"""Numbers of errors that are no fault of a file that is read."""
_OF_THE_DISK = (
    errno.EIO,
    errno.ESTALE,
    errno.ENXIO,
    errno.ENODEV,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
)


def unreadable(what: str, error: OSError) -> AccessError | None:
    """The error for a disk or mount that failed; None: `error` has another cause."""
    if error.errno not in _OF_THE_DISK:
        return None
    return AccessError(
        f"{what} can't be read: {os.strerror(error.errno)}: check the disk or the mount; the file "
        "may be intact"
    )


_NO_MEMORY = ("can't allocate memory", "not enough memory")  # of torch's RuntimeErrors


def is_of_machine(error: Exception) -> bool:
    """True if the machine ran out of memory, file descriptors or disk space: an error that is no
    fault of a file or sample.
    """
    if isinstance(error, OSError):
        return error.errno in OF_THE_MACHINE
    return isinstance(error, MemoryError) or (
        type(error) is RuntimeError and any(said in str(error) for said in _NO_MEMORY)
    )


class _Inner(threading.local):
    error: BaseException | None = None
    depth = 0

    def taken(self) -> BaseException | None:
        error = self.error
        self.error = None
        return error


_inner = _Inner()


def remember(error: BaseException) -> None:
    """Remembers an error that is about to be raised inside another library, which may replace or
    drop it; `asking` then raises it.
    """
    _inner.error = error


@contextlib.contextmanager
def asking(library: str, what: str) -> Iterator[None]:
    """A context in which another library reads: its errors become ours, and an error that was
    raised inside it (`remember`) passes as it was.

    Args:
        library: the name of the library.
        what: the file, and which part of it is read.

    Raises:
        FormatError: the library could not read that.
        BudgetError: it asked for more memory than there is.
        AccessError: the disk failed.
        OSError: the machine ran out of descriptors or disk space.
    """
    if not _inner.depth:
        _inner.taken()
    _inner.depth += 1
    try:
        yield
    except BaseException as error:
        inner = _inner.taken()
        if inner is not None and inner is not error:
            raise inner from None
        if isinstance(error, HeadraceError) or not isinstance(error, Exception):
            raise
        if isinstance(error, MemoryError):
            raise BudgetError(
                f"{what}: {library} asks for more memory than there is: the file is damaged, or "
                "too large"
            ) from error
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise
        failure = unreadable(what, error) if isinstance(error, OSError) else None
        if failure is not None:
            raise failure from error
        cause = one_line(error) or "no reason given"
        raise FormatError(
            f"{what} is damaged, or holds what {library} can't read ({type(error).__name__}: "
            f"{cause})"
        ) from error
    finally:
        _inner.depth -= 1
    inner = _inner.taken()
    if inner is not None:
        raise inner
