"""Reads and writes of open files that go on until all bytes are through: one call to the system
stops at 2 GiB.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

_IOV_MAX = 1024  # buffers of one call


def read_full(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fills buffers from a byte of a file on, whatever its position; returns how many bytes
    there were: fewer only where the file ends.
    """
    done = 0
    rest = [buffer for buffer in buffers if len(buffer)]
    while rest:
        got = os.preadv(fd, rest[:_IOV_MAX], offset + done)
        if not got:
            break
        done += got
        rest = _after(rest, got)
    return done


def write_full_from(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Writes all bytes of flat buffers, one behind the other, at a place in the file."""
    done = 0
    rest = [buffer for buffer in buffers if len(buffer)]
    while rest:
        written = os.pwritev(fd, rest[:_IOV_MAX], offset + done)
        done += written
        rest = _after(rest, written)


def write_full(fd: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Writes all bytes, at a place in the file; None: at its position."""
    rest = memoryview(data)
    if rest.nbytes:
        rest = rest.cast("B")
    while rest.nbytes:
        if offset is None:
            rest = rest[os.write(fd, rest) :]
        else:
            written = os.pwrite(fd, rest, offset)
            offset += written
            rest = rest[written:]


def _after(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of buffers after their first bytes."""
    count = 0
    while count < len(buffers) and nbytes >= len(buffers[count]):
        nbytes -= len(buffers[count])
        count += 1
    rest = buffers[count:]
    if nbytes:
        rest[0] = rest[0][nbytes:]
    return rest
