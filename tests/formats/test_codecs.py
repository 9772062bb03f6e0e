"""Codecs of chunks, each by itself: damage that the bytes alone show is an error."""

from __future__ import annotations

import gzip
import zlib

import google_crc32c
import numcodecs
import numpy as np
import pytest

from headrace import FormatError
from headrace.formats.arrays import codecs

DATA = np.random.default_rng(0).integers(0, 9, 1003, np.uint8).tobytes()
FLETCHER = bytes(numcodecs.Fletcher32().encode(np.frombuffer(DATA, np.uint8)))
CHECKED = {
    "fletcher32": (codecs.FLETCHER32, FLETCHER),
    "crc32c": (codecs.CRC32C, DATA + google_crc32c.value(DATA).to_bytes(4, "little")),
    "zlib": (codecs.INFLATE, zlib.compress(DATA)),
    "gzip": (codecs.GUNZIP, gzip.compress(DATA)),
}


@pytest.mark.parametrize("name", CHECKED)
def test_damaged_bytes_are_errors(name: str) -> None:
    codec, stored = CHECKED[name]
    assert bytes(codec.decode(stored, len(DATA))) == DATA
    flipped = bytearray(stored)
    flipped[500 % len(stored)] ^= 4
    # of a checksum or an end alone nothing of the data is missing
    for damaged in (bytes(flipped), stored[:-1], stored[:-4], stored[:3], b""):
        with pytest.raises((FormatError, zlib.error, codecs.isal_zlib.error)):
            codec.decode(damaged, len(DATA))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_shuffled_bytes_keep_what_is_left_over(
    itemsize: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # new memory may hold the right bytes by chance
    monkeypatch.setattr(np, "empty_like", lambda array: np.full_like(array, 255))
    count = len(DATA) // itemsize
    whole = np.frombuffer(DATA, np.uint8)[: count * itemsize].reshape(count, itemsize)
    shuffled = np.ascontiguousarray(whole.T).tobytes() + DATA[count * itemsize :]
    assert bytes(codecs.unshuffle(itemsize).decode(shuffled, len(DATA))) == DATA
