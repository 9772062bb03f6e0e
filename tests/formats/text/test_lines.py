"""Lines begin where Python's own reader has them, however the text is cut."""

from __future__ import annotations

import itertools

import numpy as np

from headrace.formats.text import lines
from headrace.formats.text.lines import is_blank


def test_blank_lines_hold_nothing_but_their_end() -> None:
    given = {b"\n": 1, b"\r\n": 1, b"\r": 1, b"": 1, b"\n\r": 1, b"a": 0, b" \n": 0, b"abc\n": 0}
    sizes = np.array(list(map(len, given)))
    assert is_blank(sizes, list(given).__getitem__).tolist() == list(given.values())


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
