"""Lines begin where Python's own reader has them, however the text is cut."""

from __future__ import annotations

import io
import itertools
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.storage.text import lines
from headrace.storage.text.lines import LineScanner, is_blank, line_starts, strip_end

newlines = st.sampled_from([None, "\n", "\r", "\r\n"])
texts = st.text(st.sampled_from('ab\r\n"'), max_size=30).map(str.encode)


def python_lines(text: bytes, newline: Any) -> list[bytes]:
    """With their ends, as `open(newline=...)` splits them."""
    opened = io.TextIOWrapper(io.BytesIO(text), "latin-1", newline=newline or "")
    return [line.encode("latin-1") for line in opened]


def scanned(text: bytes, size: int, newline: Any, quote: int | None = None) -> list[int]:
    scanner, found = LineScanner(newline, quote), []
    for start in range(0, len(text), size):
        found += scanner.feed(np.frombuffer(text[start : start + size], np.uint8)).tolist()
    return found + scanner.finish().tolist()


@settings(max_examples=200)
@given(text=texts, size=st.integers(1, 31), newline=newlines)
@example(text=b"\r", size=1, newline=None)
@example(text=b"\r\n", size=1, newline=None)
@example(text=b"a\r\n\r\r\n\n", size=2, newline=None)
def test_ends_of_lines_in_any_pieces(text: bytes, size: int, newline: Any) -> None:
    found = scanned(text, size, newline)
    if text and (not found or found[-1] < len(text)):  # a last line without an end
        found.append(len(text))
    assert found == np.cumsum([len(line) for line in python_lines(text, newline)]).tolist()
    # between quotes no line ends
    ends = [end for end in scanned(text, 31, newline) if text[:end].count(b'"') % 2 == 0]
    assert scanned(text, size, newline, 34) == ends


@settings(max_examples=120)
@given(texts, newlines, st.integers(0, 30), st.integers(0, 30), st.integers(1, 8))
def test_a_part_of_a_file(
    tmp_path_factory: Any, text: bytes, newline: Any, begin: int, length: int, piece: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "part-of-a-file.txt"
    path.write_bytes(text)
    begin = min(begin, len(text))
    end = min(begin + length, len(text))
    seen: list[bytes] = []

    def watch(some: Any) -> None:
        seen.append(some.tobytes())

    with open(path, "rb") as file, mock.patch.object(lines, "PIECE", piece):
        parts = list(line_starts(file.fileno(), begin, end, newline, watch=watch))
    found = np.concatenate(parts).tolist()
    expected = python_lines(text[begin:end], newline)
    assert found == np.cumsum([begin, *map(len, expected)]).tolist()
    assert b"".join(seen) == text[begin:end]
    for line, (start, stop) in zip(expected, itertools.pairwise(found), strict=True):
        plain = line.removesuffix(newline.encode()) if newline else line.rstrip(b"\r\n")
        assert strip_end(text[start:stop], newline) == plain


def test_blank_lines_hold_nothing_but_their_end() -> None:
    given = {b"\n": 1, b"\r\n": 1, b"\r": 1, b"": 1, b"\n\r": 1, b"a": 0, b" \n": 0, b"abc\n": 0}
    sizes = np.array(list(map(len, given)))
    assert is_blank(sizes, list(given).__getitem__).tolist() == list(given.values())


def test_pieces_that_threads_read_ahead_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PIECE", 64)
    content = np.random.default_rng(3).choice(np.frombuffer(b"abc\n\r", np.uint8), 10_000).tobytes()
    (tmp_path / "text").write_bytes(content)
    fd = os.open(tmp_path / "text", os.O_RDONLY)
    try:
        # each is copied before the next comes
        found = [bytes(piece.data) for piece in lines.file_pieces(fd, 5, 9_990)]
        assert b"".join(found) == content[5:9_990]
        assert len(found) == 157
        left = lines.file_pieces(fd, 0, len(content))
        next(left)
        left.close()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("headrace-lines")]
        for read in (lines.file_pieces(fd, 0, 20_000), line_starts(fd, 0, 10_001)):
            with pytest.raises(EOFError, match="ends at byte 10,000"):
                list(read)
    finally:
        os.close(fd)


def test_line_feeds_found_by_words_are_those_found_by_bytes() -> None:
    for size, share in itertools.product((1, 7, 8, 9, 64, 1000), (0.01, 0.5, 1.0)):
        for number in range(20):
            is_feed = np.random.default_rng(number).random(size) < share
            data = np.where(is_feed, 10, 200).astype(np.uint8)
            assert np.array_equal(lines.looked_at(data).feeds, np.flatnonzero(is_feed) + 1)
    for pair in itertools.combinations(range(8), 2):  # two in one word, at any two places
        data = np.zeros(16, np.uint8)
        data[np.array(pair) + 8] = 10
        assert lines.looked_at(data).feeds.tolist() == [pair[0] + 9, pair[1] + 9]
