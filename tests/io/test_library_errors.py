"""Errors of other libraries become headrace's, and those of the machine stay what they are."""

from __future__ import annotations

import errno
import struct

import pytest

from headrace.errors import BudgetError, DataNotFoundError, FormatError
from headrace.io.library_errors import asking


def test_whatever_a_library_raises_names_the_file() -> None:
    for error in (
        KeyError("a"),
        struct.error("b"),
        OverflowError(),
        RecursionError("c\n  d"),
        OSError(errno.EINVAL, "e"),
        UnicodeDecodeError("x", b"", 0, 1, "f"),
    ):
        with pytest.raises(FormatError) as caught, asking("h5py", "a.h5: 'x'"):
            raise error
        said = str(caught.value)
        assert said.startswith("a.h5: 'x' ")
        assert type(error).__name__ in said
        assert "\n" not in said
        assert not said.endswith(": )")
        assert caught.value.__cause__ is error


def test_what_is_no_fault_of_the_file_stays() -> None:
    for error in (
        OSError(errno.EMFILE, "too many"),
        OSError(errno.EDQUOT, "quota"),
        DataNotFoundError("none"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)) as caught, asking("h5py", "a.h5"):
            raise error
        assert caught.value is error
    with pytest.raises(BudgetError, match=r"a\.h5"), asking("h5py", "a.h5"):
        raise MemoryError
