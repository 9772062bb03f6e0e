"""Rows of whole documents: each document once, none cut, as full as plain best fit decreasing
makes them.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.storage.tokens.best_fit import PADDING, BestFitSource, best_fit
from tests.storage.tokens.test_blocks import tokens_of


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


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=80), st.integers(0, 30))
def test_best_fit_equals_a_plain_loop(sizes: list[int], more: int) -> None:
    length = max([1, *sizes]) + more
    bins = best_fit(np.array(sizes, np.int64), length)
    count = int(bins.max(initial=-1)) + 1
    taken = np.bincount(bins, weights=np.array(sizes), minlength=count) if sizes else np.zeros(0)
    assert sorted((length - taken).astype(int).tolist()) == plain_rooms(sizes, length)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=60),
    st.integers(1, 15),
    st.sampled_from(["<u2", "<i4"]),
)
def test_each_document_once_and_whole(lengths: list[int], length: int, dtype: str) -> None:
    if not sum(lengths):
        return
    tokens = tokens_of(lengths, dtype)
    source = BestFitSource(tokens, "", "", length, padding=-9)
    edges, seen = tokens.short[0].tolist(), []
    for index, row in enumerate(source.read(range(len(source)))):
        ids, documents, positions = (
            row[name].tolist() for name in ("input_ids", "document_ids", "position_ids")
        )
        assert len(ids) == len(documents) == len(positions) == length
        numbers, at = source.documents_of([index])[0].tolist(), 0
        assert (
            numbers == sorted(numbers)
            and source.document_of(np.array([index])).tolist() == numbers[:1]
        )
        for place, number in enumerate(numbers):
            size = min(edges[number + 1] - edges[number], length)
            assert ids[at : at + size] == tokens.long[edges[number] : edges[number] + size].tolist()
            assert documents[at : at + size] == [place] * size and positions[
                at : at + size
            ] == list(range(size))
            at += size
        assert (
            at == source.lengths()[index]
            and set(ids[at:]) <= {-9}
            and set(documents[at:]) <= {PADDING}
        )
        assert positions[at:] == list(range(length - at))
        seen += numbers
    assert sorted(seen) == [number for number, size in enumerate(lengths) if size]
    assert source.blocks().sum() == len(source) and source.filled == source.lengths().sum()


def test_rows_keep_to_windows_and_are_full() -> None:
    random = np.random.default_rng(5)
    lengths = np.clip(random.lognormal(4.5, 0.9, 20_000), 1, 1024).astype(int).tolist()
    source = BestFitSource(tokens_of(lengths, "<u2"), "", "", 1024)
    assert source.filled == sum(lengths) and source.filled > 0.99 * len(source) * 1024
    firsts, start = source.tokens.short[0], 0
    assert len(source.blocks()) == -(-sum(lengths) // (1 << 17))
    for rows in source.blocks().tolist():
        documents = source.documents_of(range(start, start + rows))[0]
        assert len(np.unique(firsts[documents] >> 17)) == 1
        start += rows
    begins = firsts[source.document_of(np.arange(len(source)))]
    assert (np.diff(begins) > 0).all()


def test_left_out_documents_are_in_no_row() -> None:
    tokens = tokens_of([3, 4, 0, 5], "<i4")
    source = BestFitSource(tokens, "", "", 8, left_out=np.array([1]))
    assert len(source) == 1 and source.documents_of([0])[0].tolist() == [0, 3]
    with pytest.raises(ConfigError, match="no document is left"):
        BestFitSource(tokens, "", "", 8, left_out=np.arange(4))
    assert len(BestFitSource(tokens_of([0], "<i4"), "", "", 8)) == 0
