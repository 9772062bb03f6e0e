"""Turns the errors that h5py, zarr-python and zipfile raise over damaged files into ours.

They raise what they stumbled over: KeyError, OverflowError, struct.error and so on. Here each
becomes an error that says what can't be read.
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
    """What to say where the disk, or what it is mounted by, failed; None: the error says
    something else.
    """
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
    """An error is about to be raised into another library, which may make something else of it,
    or nothing; `asking` then raises it.
    """
    _inner.error = error


@contextlib.contextmanager
def asking(library: str, what: str) -> Iterator[None]:
    """Whatever another library raises inside becomes an error that names what it was asked for;
    what was raised into it (`remember`) comes out as it was, whatever the library made of it.

    Args:
        library: its name.
        what: the file, and which part of it.

    Raises:
        FormatError: it could not read that.
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
