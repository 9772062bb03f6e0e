"""Checksums of a file and of what lies in it, in one pass: those of zlib."""

from __future__ import annotations

import itertools
import tempfile
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import FileChangedError
from headrace.io.local import checksums
from headrace.io.local.checksums import NOTHING, FileSums, SumsAhead, combined, replaced, sum_file


def sums_of(data: bytes, edges: list[int], workers: int = 1) -> FileSums:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return sum_file(file.fileno(), np.array(edges, np.int64), workers)


@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
@given(st.data())
def test_sums_are_those_of_zlib(piece: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.one_of(st.just(0), st.integers(0, 200)), max_size=40))
    head, tail = data.draw(st.integers(0, 100)), data.draw(st.integers(0, 100))
    edges = [head + end for end in itertools.accumulate(lengths, initial=0)]
    content = np.random.default_rng(0).bytes(edges[-1] + tail)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checksums, "_PIECE", piece)
        patched.setattr(checksums, "_SEGMENT", 10 * piece)
        sums = sums_of(content, edges, data.draw(st.integers(1, 3)))
    assert (sums.size, sums.crc) == (len(content), zlib.crc32(content))
    assert sums.crcs.tolist() == [
        zlib.crc32(content[start:stop]) for start, stop in itertools.pairwise(edges)
    ]


@given(st.data())
def test_sums_taken_while_a_file_is_written(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.one_of(st.just(0), st.integers(0, 200)), max_size=40))
    head, tail = data.draw(st.integers(0, 100)), data.draw(st.integers(0, 100))
    edges = np.array([head + end for end in itertools.accumulate(lengths, initial=0)], np.int64)
    content, settled = (
        np.random.default_rng(0).bytes(int(edges[-1]) + tail),
        list[tuple[int, int]](),
    )
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryFile() as file:
        patched.setattr(checksums, "_SEGMENT", data.draw(st.integers(64, 500)))
        patched.setattr(checksums, "NEAR", 20)
        file.write(bytes(head) + content[head:])  # what stands before the samples is written last
        file.flush()
        ahead = SumsAhead(file.fileno(), edges, lambda start, stop: settled.append((start, stop)))
        for stop in sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5))):
            ahead.written(stop)
            assert all(
                segment.stop + 20 <= stop for segment in ahead.futures
            ) and ahead.stop <= max(head, stop)
        file.seek(0)
        file.write(content[:head])
        file.flush()
        sums = sum_file(file.fileno(), edges, 2, ahead=ahead)
        others = sum_file(file.fileno(), NOTHING, ahead=ahead)
        ahead.close()
    assert (sums.size, sums.crc) == (len(content), zlib.crc32(content)) == others[:2]
    assert sums.crcs.tolist() == [
        zlib.crc32(content[start:stop]) for start, stop in itertools.pairwise(edges)
    ]
    assert settled == [(segment.start, segment.stop) for segment in ahead.futures]


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_make_one(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(
        first + second
    )


@given(st.binary(min_size=4, max_size=300), st.binary(min_size=4, max_size=4), st.integers(0, 296))
def test_checksum_after_bytes_were_replaced(before: bytes, seal: bytes, offset: int) -> None:
    offset = min(offset, len(before) - 4)
    after = before[:offset] + seal + before[offset + 4 :]
    assert replaced(sums_of(before, [0]), offset, before[offset : offset + 4], seal) == zlib.crc32(
        after
    )


def test_a_file_that_is_shorter_than_its_samples() -> None:
    with pytest.raises(FileChangedError, match="cut short"):
        sums_of(b"1234", [0, 3, 9])
