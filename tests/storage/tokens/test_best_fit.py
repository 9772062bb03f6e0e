"""Rows of whole documents: each document once, none cut, as full as plain best fit decreasing
makes them.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from headrace.errors import ConfigError
from headrace.storage.tokens.best_fit import PADDING, BestFitSource, best_fit
from tests.storage.tokens.test_source import tokens_of


def plain_rooms(sizes: list[int], length: int) -> list[int]:
    """The room that plain best fit decreasing leaves in each bin, item by item."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, at) for at, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(length - size)
    return sorted(rooms)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), max_size=80), st.integers(0, 30))
def test_best_fit_equals_a_plain_loop(sizes: list[int], more: int) -> None:
    length = max([1, *sizes]) + more
    taken = np.bincount(best_fit(np.array(sizes, np.int64), length), np.array(sizes, float))
    assert sorted((length - taken).astype(int).tolist()) == plain_rooms(sizes, length)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(1, 15))
def test_each_document_once_and_whole(sizes: list[int], length: int) -> None:
    tokens, whole = tokens_of([0, *sizes, 1])
    source = BestFitSource(tokens, "", "", length, padding=-9)
    seen = list[int]()
    for index, row in enumerate(source.read(range(len(source)))):
        numbers = source.documents_of([index])[0].tolist()
        assert numbers == sorted(numbers)
        assert source.document_of(np.array([index])).tolist() == numbers[:1]
        parts = [whole[number][:length] for number in numbers]
        ids = [token for part in parts for token in part]
        documents = [place for place, part in enumerate(parts) for _ in part]
        positions = [position for part in parts for position in range(len(part))]
        rest = length - len(ids)
        assert source.lengths()[index] == len(ids)
        assert row["input_ids"].tolist() == ids + [-9] * rest
        assert row["document_ids"].tolist() == documents + [PADDING] * rest
        assert row["position_ids"].tolist() == positions + list(range(rest))
        seen += numbers
    assert sorted(seen) == [number for number, document in enumerate(whole) if document]
    assert source.blocks().sum() == len(source)
    assert source.filled == source.lengths().sum()


def test_rows_keep_to_windows_and_are_full() -> None:
    random = np.random.default_rng(5)
    sizes = np.clip(random.lognormal(4.5, 0.9, 20_000), 1, 1024).astype(int).tolist()
    source = BestFitSource(tokens_of(sizes)[0], "", "", 1024)
    assert source.filled == sum(sizes)
    assert source.filled > 0.99 * len(source) * 1024
    assert source.cut_nbytes == 0  # blocks are those windows
    firsts, start = source.tokens.short[0], 0
    assert len(source.blocks()) == -(-sum(sizes) // (1 << 17))
    for rows in source.blocks().tolist():
        documents = source.documents_of(range(start, start + rows))[0]
        assert len(np.unique(firsts[documents] >> 17)) == 1
        start += rows
    begins = firsts[source.document_of(np.arange(len(source)))]
    assert (np.diff(begins) > 0).all()


def test_left_out_documents_are_in_no_row() -> None:
    tokens, _ = tokens_of([3, 4, 0, 5])
    source = BestFitSource(tokens, "", "", 8, left_out=np.array([1]))
    assert len(source) == 1
    assert source.documents_of([0])[0].tolist() == [0, 3]
    with pytest.raises(ConfigError, match="no document is left"):
        BestFitSource(tokens, "", "", 8, left_out=np.arange(4))
    assert len(BestFitSource(tokens_of([0])[0], "", "", 8)) == 0
