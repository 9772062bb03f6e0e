"""What becomes of the errors that h5py, zarr-python and zipfile raise over damaged files?

They raise what they stumbled over: KeyError, OverflowError, struct.error and so on. Here each becomes an error that says what can't be
read.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from headrace.errors import BudgetError, FormatError, HeadraceError

OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Numbers of errors that are no fault of a file."""


@contextlib.contextmanager
def asking(library: str, what: str) -> Iterator[None]:
    """Whatever another library raises inside becomes an error that names what it was asked for.

    Args:
        library: its name.
        what: the file, and which part of it.

    Raises:
        FormatError: it could not read that.
        BudgetError: it asked for more memory than there is.
        OSError: the machine ran out of descriptors.
    """
    try:
        yield
    except HeadraceError:
        raise
    except MemoryError as error:
        raise BudgetError(f"{what}: {library} asks for more memory than there is: the file is damaged, or too large") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise
        cause = " ".join(str(error).split()) or "no reason given"
        raise FormatError(f"{what} is damaged, or holds what {library} can't read ({type(error).__name__}: {cause})") from error
