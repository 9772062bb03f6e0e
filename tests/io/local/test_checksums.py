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

RANDOM = np.random.default_rng(0).bytes(10_000)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    """A file, and the edges of what lies in it."""
    lengths = draw(st.lists(st.one_of(st.just(0), st.integers(0, 200)), max_size=40))
    head, tail = draw(st.integers(0, 100)), draw(st.integers(0, 100))
    edges = list(itertools.accumulate(lengths, initial=head))
    return RANDOM[: edges[-1] + tail], edges


def sums_of(data: bytes, edges: list[int], workers: int = 1) -> FileSums:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return sum_file(file.fileno(), np.array(edges, np.int64), workers)


def check(sums: FileSums, content: bytes, edges: list[int]) -> None:
    assert (sums.size, sums.crc) == (len(content), zlib.crc32(content))
    assert sums.crcs.tolist() == [
        zlib.crc32(content[start:stop]) for start, stop in itertools.pairwise(edges)
    ]


@given(laid_out(), st.sampled_from([7, 64, 1 << 20]), st.integers(1, 3))
def test_sums_are_those_of_zlib(laid: tuple[bytes, list[int]], piece: int, workers: int) -> None:
    content, edges = laid
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checksums, "_PIECE", piece)
        patched.setattr(checksums, "_SEGMENT", 10 * piece)
        check(sums_of(content, edges, workers), content, edges)


@given(laid_out(), st.integers(64, 500), st.lists(st.floats(0, 1), max_size=5))
def test_sums_taken_while_a_file_is_written(
    laid: tuple[bytes, list[int]], segment_size: int, shares: list[float]
) -> None:
    content, edges = laid
    numbers, settled = np.array(edges, np.int64), list[tuple[int, int]]()
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryFile() as file:
        patched.setattr(checksums, "_SEGMENT", segment_size)
        patched.setattr(checksums, "NEAR", 20)
        file.write(bytes(edges[0]) + content[edges[0] :])  # what stands before them comes last
        file.flush()
        ahead = SumsAhead(file.fileno(), numbers, lambda start, stop: settled.append((start, stop)))
        for share in sorted(shares):
            stop = int(share * len(content))
            ahead.written(stop)
            assert all(segment.stop + 20 <= stop for segment in ahead.futures)
            assert ahead.stop <= max(edges[0], stop)
        file.seek(0)
        file.write(content[: edges[0]])
        file.flush()
        check(sum_file(file.fileno(), numbers, 2, ahead=ahead), content, edges)
        check(sum_file(file.fileno(), NOTHING, ahead=ahead), content, [])
        ahead.close()
    assert settled == [(segment.start, segment.stop) for segment in ahead.futures]


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_make_one(first: bytes, second: bytes) -> None:
    both = combined(zlib.crc32(first), zlib.crc32(second), len(second))
    assert both == zlib.crc32(first + second)


@given(st.binary(min_size=4, max_size=300), st.binary(min_size=4, max_size=4), st.integers(0, 296))
def test_checksum_after_bytes_were_replaced(before: bytes, seal: bytes, offset: int) -> None:
    offset = min(offset, len(before) - 4)
    after = before[:offset] + seal + before[offset + 4 :]
    crc = replaced(sums_of(before, [0]), offset, before[offset : offset + 4], seal)
    assert crc == zlib.crc32(after)


def test_a_file_that_is_shorter_than_its_samples() -> None:
    with pytest.raises(FileChangedError):
        sums_of(b"1234", [0, 3, 9])
