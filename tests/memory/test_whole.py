"""Reads and writes go on until all bytes are through."""

from __future__ import annotations

import os
import tempfile

import pytest
from hypothesis import given, strategies as st

from headrace.memory.processes import read_full, write_full_from


@given(st.lists(st.binary(max_size=9), max_size=20), st.integers(0, 20), st.integers(1, 7))
def test_buffers_are_written_whole(buffers: list[bytes], offset: int, most: int) -> None:
    """The system may take fewer bytes than it was given, to the middle of a buffer."""
    pwritev, data = os.pwritev, b"".join(buffers)

    def some(fd: int, parts: list[memoryview], at: int) -> int:
        return pwritev(fd, [memoryview(b"".join(parts))[:most]], at)

    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryFile() as file:
        patched.setattr(os, "pwritev", some)
        write_full_from(file.fileno(), [memoryview(buffer) for buffer in buffers], offset)
        assert file.read() == (bytes(offset) + data if data else b"")
        read = [bytearray(len(buffer)) for buffer in buffers]
        views = [memoryview(buffer) for buffer in read]
        assert read_full(file.fileno(), views, offset) == len(data)
        assert read == buffers


def test_more_buffers_than_one_call_takes() -> None:
    with tempfile.TemporaryFile() as file:
        write_full_from(file.fileno(), [memoryview(b"%4d" % number) for number in range(5000)], 0)
        assert file.read() == b"".join(b"%4d" % number for number in range(5000))
