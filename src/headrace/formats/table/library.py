"""Imports pyarrow when it is first needed, and gives it bytes that were read already.

Its threads are not used, and it opens no file: what is read, where and when is `headrace.io`'s
business, and workers may be forked.
"""

from __future__ import annotations

import bisect
import functools
import io
import mmap
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import ConfigError, FormatError

Fetch = Callable[[int, int], memoryview]
"""First byte and end of a range -> its bytes."""


@functools.cache
def pyarrow() -> Any:
    """The package pyarrow, with its modules for Parquet and for Arrow files.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet and Arrow files need the package pyarrow: pip install 'headrace[arrow]'"
        ) from error
    return pyarrow


def nothing_else(start: int, stop: int) -> memoryview:
    """A `Fetch` for a file that is held as a whole."""
    raise FormatError(f"it ends at byte {start:,}, within a message of {stop - start:,} bytes")


def zeros(start: int, stop: int) -> memoryview:
    """A `Fetch` whose bytes are all zero: memory that takes no room, as nobody writes to it."""
    if hasattr(mmap, "PROT_READ"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return memoryview(mmap.mmap(-1, stop - start, flags=flags, prot=mmap.PROT_READ))
    return memoryview(mmap.mmap(-1, stop - start))


class HeldBytes(io.RawIOBase):
    """A file, of which some ranges are held: what libraries read that take an open file.

    Args:
        size: of the file.
        held: first byte of each range, and its bytes; ranges don't overlap.
        fetch: reads any other range.
    """

    mode = "rb"

    def __init__(self, size: int, held: Sequence[tuple[int, memoryview]], fetch: Fetch) -> None:
        self._size = size
        self._fetch = fetch
        self._at = 0
        ranges = sorted(held, key=lambda one: one[0])
        self._starts = [start for start, _ in ranges]
        self._views = [view for _, view in ranges]

    def read(self, size: int | None = -1, /) -> Any:
        """The next so many bytes, without a copy; all that are left, if `size` is negative or
        None.
        """
        start = self._at
        stop = self._size
        if size is not None and size >= 0:
            stop = min(start + size, stop)
        if stop <= start:
            return b""
        self._at = stop
        number = bisect.bisect_right(self._starts, start) - 1
        if number >= 0 and stop <= self._starts[number] + len(self._views[number]):
            first = self._starts[number]
            return self._views[number][start - first : stop - first]
        return self._fetch(start, stop)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def opened(parts: Sequence[memoryview], more: int = 0, fetch: Fetch = nothing_else) -> Any:
    """What pyarrow takes for a file: some bytes, one after the other, and `more` that are
    fetched.
    """
    held = []
    size = 0
    for part in parts:
        held.append((size, part))
        size += len(part)
    return pyarrow().PythonFile(HeldBytes(size + more, held, fetch), mode="r")
