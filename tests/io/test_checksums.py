"""Checksums of a file and of what lies in it, in one pass: those of zlib."""

from __future__ import annotations

import itertools
import tempfile
import zlib

import numpy as np
import pytest
from hypothesis import given, strategies as st

from headrace.errors import FileChangedError
from headrace.io import checksums
from headrace.io.checksums import FileSums, sum_file

RANDOM = np.random.default_rng(0).bytes(10_000)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    """A file, and the edges of what lies in it."""
    lengths = draw(st.lists(st.one_of(st.just(0), st.integers(0, 200)), max_size=40))
    head, tail = draw(st.integers(0, 100)), draw(st.integers(0, 100))
    edges = list(itertools.accumulate(lengths, initial=head))
    return RANDOM[: edges[-1] + tail], edges


def sums_of(data: bytes, edges: list[int]) -> FileSums:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return sum_file(file.fileno(), np.array(edges, np.int64), workers=2)


def check(sums: FileSums, content: bytes, edges: list[int]) -> None:
    assert (sums.size, sums.crc) == (len(content), zlib.crc32(content))
    assert sums.crcs.tolist() == [
        zlib.crc32(content[start:stop]) for start, stop in itertools.pairwise(edges)
    ]


@given(laid_out(), st.sampled_from([7, 64, 1 << 20]))
def test_sums_are_those_of_zlib(laid: tuple[bytes, list[int]], piece: int) -> None:
    content, edges = laid
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checksums, "_PIECE", piece)
        patched.setattr(checksums, "_SEGMENT", 3 * piece + 1)
        check(sums_of(content, edges), content, edges)


def test_a_file_that_is_shorter_than_its_samples() -> None:
    with pytest.raises(FileChangedError):
        sums_of(b"1234", [0, 3, 9])
