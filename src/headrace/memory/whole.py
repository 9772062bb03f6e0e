"""Reads and writes of open files that go on until all bytes are through: one call to the system
stops at 2 GiB.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def read_full(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fills buffers from a byte of a file on, whatever its position; returns how many bytes
    there were: fewer only where the file ends.
    """
    done, rest = 0, [buffer for buffer in buffers if len(buffer)]
    while rest:
        got = os.preadv(fd, rest[:1024], offset + done)  # IOV_MAX
        if not got:
            break
        done += got
        while rest and got >= len(rest[0]):
            got -= len(rest[0])
            rest = rest[1:]
        if got:
            rest = [rest[0][got:], *rest[1:]]
    return done


def write_full_from(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Writes all bytes of flat buffers, one behind the other, at a place in the file."""
    done, rest = 0, [buffer for buffer in buffers if len(buffer)]
    while rest:
        written = os.pwritev(fd, rest[:1024], offset + done)  # IOV_MAX
        done += written
        count = 0
        while count < len(rest) and written >= len(rest[count]):
            written -= len(rest[count])
            count += 1
        rest = rest[count:]
        if written:
            rest[0] = rest[0][written:]


def write_full(fd: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Writes all bytes, at a place in the file; None: at its position."""
    view, done = memoryview(data), 0
    view = view.cast("B") if view.nbytes else view
    while done < view.nbytes:
        done += (
            os.write(fd, view[done:])
            if offset is None
            else os.pwrite(fd, view[done:], offset + done)
        )
