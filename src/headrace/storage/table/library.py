"""Imports pyarrow when it is first needed, and gives it bytes that were read already.

Its threads are not used, and it opens no file: what is read, where and when is `headrace.io`'s
business, and workers may be forked.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import ConfigError, FormatError


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


def read_batch(parts: Sequence[memoryview], schema: Any, names: Sequence[str]) -> Any:
    """A record batch of pyarrow's, whose columns lie in `parts` where they are not compressed.

    Args:
        parts: of a stream, one after the other: the messages with the schema and all dictionaries,
            and the record batch.
        schema: of the stream.
        names: of the columns that are wanted.

    Raises:
        Exception: whatever pyarrow makes of a damaged one.
    """
    ipc, held, size = pyarrow().ipc, list[tuple[int, memoryview]](), 0
    for part in parts:
        held.append((size, part))
        size += len(part)
    file = pyarrow().PythonFile(HeldBytes(size, held, _nothing_else), mode="r")
    numbers = [schema.get_field_index(name) for name in names]
    options = ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
    return ipc.open_stream(file, options=options).read_next_batch()


def _nothing_else(start: int, stop: int) -> memoryview:
    raise FormatError("it ends before its last message does")


class HeldBytes:
    """A file, of which some ranges are held: what libraries read that take an open file. Other
    ranges are fetched when they are read.

    Args:
        size: of the file.
        held: first byte of each range, and its bytes; ranges don't overlap.
        fetch: first byte and end of any other range -> its bytes.
    """

    closed = False
    mode = "rb"

    def __init__(
        self,
        size: int,
        held: Sequence[tuple[int, memoryview]],
        fetch: Callable[[int, int], memoryview],
    ) -> None:
        self._size, self._fetch, self._at = size, fetch, 0
        ranges = sorted(held, key=lambda one: one[0])
        self._starts, self._views = [start for start, _ in ranges], [view for _, view in ranges]

    def read(self, count: int | None = -1) -> memoryview | bytes:
        """The next so many bytes, without a copy; all that are left, if `count` is negative or
        None.
        """
        start = self._at
        stop = self._size if count is None or count < 0 else min(start + count, self._size)
        if stop <= start:
            return b""
        self._at = stop
        number = bisect.bisect_right(self._starts, start) - 1
        if number >= 0 and stop <= self._starts[number] + len(self._views[number]):
            return self._views[number][start - self._starts[number] : stop - self._starts[number]]
        return self._fetch(start, stop)

    def seek(self, offset: int, whence: int = 0) -> int:
        """As that of files."""
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        """The next byte."""
        return self._at

    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def writable(self) -> bool:
        """False."""
        return False

    def close(self) -> None:
        """Nothing is open."""

    def flush(self) -> None:
        """Nothing is written."""
