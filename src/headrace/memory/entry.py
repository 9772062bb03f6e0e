"""The format of a sample in the log of a sample store.

As an entry: a header of eight integers (index, bytes of the entry, of the pickle, number of buffers, bytes of each buffer), the pickle,
and the buffers that it left out (pickle protocol 5), each at a multiple of 64 bytes.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import numpy as np

from headrace.memory.anonymous import up
from headrace.memory.rows import Layout

HEADER = 64
"""Bytes of an entry's header."""
BUFFERS = 4
"""Buffers outside of the pickle that fit into a header."""
MIXED = -1
"""In place of a signature: no array, or none that lies in one piece."""
_INLINE = 512  # buffers of less bytes stay in the pickle, but that of a single array, which is to be copied without one


def encode(index: int, value: Any) -> tuple[list[int], list[memoryview]]:
    """Header and pieces of a sample: its pickle, and the buffers outside of it."""
    buffers: list[memoryview] = []
    least = 1 if type(value) is np.ndarray else _INLINE

    def take(buffer: pickle.PickleBuffer) -> bool:
        """Takes a large buffer out of the pickle (False); leaves the others inside (True)."""
        raw = buffer.raw()
        if len(buffers) == BUFFERS or raw.nbytes < least:
            return True
        buffers.append(raw)
        return False

    head = pickle.dumps(value, protocol=5, buffer_callback=take)
    sizes = [b.nbytes for b in buffers]
    nbytes = HEADER + up(len(head)) + sum(map(up, sizes))
    return [index, nbytes, len(head), len(sizes), *sizes, *[0] * (BUFFERS - len(sizes))], [memoryview(head), *buffers]


def header_at(log: memoryview, start: int) -> list[int]:
    """The header of the entry that begins at a byte of the log."""
    header: list[int] = np.frombuffer(log, np.int64, 8, start).tolist()
    return header


def copies_at(log: memoryview, start: int, header: list[int]) -> list[bytearray]:
    """Copies of an entry's pieces."""
    at, copies = start + HEADER, []
    for nbytes in [header[2], *header[4 : 4 + header[3]]]:
        copies.append(bytearray(log[at : at + nbytes]))
        at += up(nbytes)
    return copies


def decode(pieces: list[bytearray]) -> Any:
    """The sample, over the memory of its pieces."""
    return pickle.loads(pieces[0], buffers=pieces[1:])


def signature_of(value: Any, header: list[int], pieces: list[memoryview]) -> int:
    """A positive number that all arrays of one shape and dtype have in common, and no others; MIXED for everything else."""
    if type(value) is not np.ndarray or not value.flags.c_contiguous or header[3] != 1:
        return MIXED
    identity = b"%d %d %s" % (header[1], header[4], pieces[0])
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 1 or 1


def layout_of(header: list[int], pieces: list[bytearray]) -> Layout:
    """What an entry of an array shares with all others of its signature."""
    array = decode(pieces)
    return Layout(header[1], HEADER + up(header[2]), array.nbytes, array.shape, array.dtype)
