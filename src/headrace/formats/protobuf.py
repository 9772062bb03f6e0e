"""The wire format of Protocol Buffers: messages in memory, and fields of messages in files.

Source: the encoding of Protocol Buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.index import Headers

_PIECE = 1 << 20
"""Bytes of numbers that are decoded at once."""
_LONGEST = 10
"""Bytes of a number."""
Bounds = tuple[int, int]
"""The first byte of a value in a file, and its end."""


def number_at(data: memoryview, at: int) -> tuple[int, int]:
    """Decodes a varint: its value, and its end."""
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 10 bytes")


def fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """The fields of a message: their numbers and values (bytes or an integer)."""
    at = 0
    while at < len(data):
        key, at = number_at(data, at)
        kind = key & 7
        if kind == 0:
            value: Any
            value, at = number_at(data, at)
        elif kind in (1, 2, 5):
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, at = number_at(data, at)
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise ValueError(f"a field of {size:,} bytes is cut short")
        else:
            raise ValueError(f"a field of the wire type {kind}")
        yield key >> 3, value


def integers(data: memoryview) -> IntArray:
    """Decodes varints, one after the other."""
    parts = [np.zeros(0, np.int64)]
    start = 0
    while start < len(data):
        stop = min(start + _PIECE, len(data))
        longest = min(stop + 10, len(data))
        while stop < longest and data[stop - 1] >= 0x80:
            stop += 1
        parts.append(_piece(data[start:stop]))
        start = stop
    return np.concatenate(parts)


def _piece(data: memoryview) -> IntArray:
    """Decodes varints, all at once, which takes 40 times their bytes of memory."""
    flat = np.frombuffer(data, np.uint8)
    is_last = flat < 0x80
    if not is_last[-1]:
        raise ValueError("a number is cut short")
    starts = np.flatnonzero(np.concatenate([[True], is_last[:-1]]))
    places = np.arange(len(flat)) - np.repeat(starts, np.diff(starts, append=len(flat)))
    if places.max() > 9:
        raise ValueError("a number of more than 10 bytes")
    parts = (flat & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(parts, starts).view(np.int64)


def bounds_in(headers: Headers, message: Bounds) -> Iterator[tuple[int, Bounds]]:
    """The numbers of the fields of a message in a file that have a length, and where their values
    lie.

    Raises:
        FormatError: it is damaged, or has other fields.
    """
    at, stop = message
    while at < stop:
        head = memoryview(headers.read_at(at, min(at + 2 * _LONGEST, stop)))
        try:
            key, start = number_at(head, 0)
            nbytes, start = number_at(head, start)
        except (ValueError, IndexError):
            key = nbytes = start = 0
        if key & 7 != 2 or at + start + nbytes > stop:
            raise FormatError(f"no field of a tf.train.Example begins at byte {at:,}")
        yield key >> 3, (at + start, at + start + nbytes)
        at += start + nbytes
