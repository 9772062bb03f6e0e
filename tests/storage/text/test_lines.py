"""Lines begin where Python's own reader has them, however the text is cut."""

from __future__ import annotations

import io
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.storage.text import lines
from headrace.storage.text.lines import LineScanner, is_blank, line_starts, strip_end

NEWLINES: list[Any] = [None, "\n", "\r", "\r\n"]
texts = st.text(st.sampled_from('ab\r\n"'), max_size=30).map(str.encode)


def python_lines(text: bytes, newline: Any) -> list[bytes]:
    """With their ends, as `open(newline=...)` splits them."""
    opened = io.TextIOWrapper(
        io.BytesIO(text), "latin-1", newline="" if newline is None else newline
    )
    return [line.encode("latin-1") for line in opened]


def scanned(text: bytes, size: int, newline: Any, quote: int | None = None) -> list[int]:
    scanner, found = LineScanner(newline, quote), []
    for start in range(0, len(text), size):
        found += scanner.feed(np.frombuffer(text[start : start + size], np.uint8)).tolist()
    return found + scanner.finish().tolist()


@pytest.mark.parametrize("newline", NEWLINES)
@settings(max_examples=60, deadline=None)
@given(text=texts, size=st.integers(1, 31))
@example(text=b"\r", size=1)
@example(text=b"\r\n", size=1)
@example(text=b"a\r\n\r\r\n\n", size=2)
def test_ends_of_lines_in_any_pieces(newline: Any, text: bytes, size: int) -> None:
    ends = np.cumsum([len(line) for line in python_lines(text, newline)]).tolist()
    found = scanned(text, size, newline)
    if not found or found[-1] < len(text):  # a last line without an end
        found += [len(text)] if text else []
    assert found == ends


@pytest.mark.parametrize("newline", NEWLINES)
@settings(max_examples=60, deadline=None)
@given(text=texts, size=st.integers(1, 31))
def test_between_quotes_no_line_ends(newline: Any, text: bytes, size: int) -> None:
    assert scanned(text, size, newline, 34) == [
        end for end in scanned(text, 31, newline) if text[:end].count(b'"') % 2 == 0
    ]


@pytest.mark.parametrize("newline", NEWLINES)
@settings(max_examples=40, deadline=None)
@given(text=texts, begin=st.integers(0, 30), length=st.integers(0, 30), piece=st.integers(1, 8))
def test_a_part_of_a_file(
    newline: Any, text: bytes, begin: int, length: int, piece: int, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "part-of-a-file.txt"
    path.write_bytes(text)
    begin = min(begin, len(text))
    end = min(begin + length, len(text))
    seen, before = [], lines.PIECE
    lines.PIECE = piece
    try:
        with open(path, "rb") as file:
            watch = lambda some: seen.append(some.tobytes())  # noqa: E731
            found = np.concatenate(
                list(line_starts(file.fileno(), begin, end, newline, watch=watch))
            ).tolist()
    finally:
        lines.PIECE = before
    expected = python_lines(text[begin:end], newline)
    assert found == np.cumsum([begin, *map(len, expected)]).tolist()
    assert b"".join(seen) == text[begin:end]
    assert [strip_end(text[a:b], newline) for a, b in itertools.pairwise(found)] == [
        line.removesuffix(newline.encode()) if newline else line.rstrip(b"\r\n")
        for line in expected
    ]


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n")
    fd = os.open(tmp_path / "a.txt", os.O_RDONLY)
    try:
        with pytest.raises(EOFError, match="ends at byte 8 and not at 9"):
            list(line_starts(fd, 0, 9))
    finally:
        os.close(fd)


def test_blank_lines_hold_nothing_but_their_end() -> None:
    given = [b"\n", b"\r\n", b"\r", b"", b"a", b" \n", b"a\n", b"abc\n", b"\n\r"]
    assert is_blank(np.array(list(map(len, given))), given.__getitem__).tolist() == [True] * 4 + [
        False
    ] * 4 + [True]


def test_pieces_that_threads_read_ahead_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PIECE", 64)
    content = np.random.default_rng(3).choice(np.frombuffer(b"abc\n\r", np.uint8), 10_000).tobytes()
    (tmp_path / "text").write_bytes(content)
    with open(tmp_path / "text", "rb") as file:
        # each is copied before the next comes
        found = [bytes(piece.data) for piece in lines.file_pieces(file.fileno(), 5, 9_990)]
        assert b"".join(found) == content[5:9_990] and len(found) == 157
        left = lines.file_pieces(file.fileno(), 0, len(content))
        next(left)
        left.close()
        assert not [
            thread for thread in threading.enumerate() if thread.name.startswith("headrace-lines")
        ]
        with pytest.raises(EOFError, match="ends at byte 10,000"):
            list(lines.file_pieces(file.fileno(), 0, 20_000))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1000])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_line_feeds_found_by_words_are_those_found_by_bytes(size: int, share: float) -> None:
    for number in range(20):
        data = np.where(np.random.default_rng(number).random(size) < share, 10, 200).astype(
            np.uint8
        )
        assert np.array_equal(lines.looked_at(data).feeds, np.flatnonzero(data == 10) + 1)
    for pair in itertools.combinations(range(8), 2):  # two in one word, at any two places
        data = np.zeros(16, np.uint8)
        data[np.array(pair) + 8] = 10
        assert lines.looked_at(data).feeds.tolist() == [pair[0] + 9, pair[1] + 9]
