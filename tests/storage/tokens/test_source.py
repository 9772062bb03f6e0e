"""Documents, windows and blocks are the parts of a list that they should be."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.storage.text.line_index import HeldArrays
from headrace.storage.tokens.source import ArrayTokens, BlocksSource, DocumentsSource

sizes_of_documents = st.lists(st.integers(0, 9), max_size=8)


def made_of(sizes: list[int]) -> tuple[Any, list[list[int]]]:
    edges = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
    tokens = ArrayTokens(HeldArrays((np.arange(edges[-1]) + 100).astype(np.uint16), [edges]))
    return tokens, [tokens.long[a:b].tolist() for a, b in itertools.pairwise(edges)]


def lists(source: Any, indices: Any = None) -> list[list[int]]:
    return [row.tolist() for row in source.read(range(len(source)) if indices is None else indices)]


@settings(max_examples=80, deadline=None)
@given(sizes=sizes_of_documents, max_length=st.none() | st.integers(1, 10), data=st.data())
def test_documents(sizes: list[int], max_length: int | None, data: Any) -> None:
    tokens, documents = made_of(sizes)
    source = DocumentsSource(tokens, "f", "texts", max_length, None)
    expected = [document[:max_length] for document in documents]
    assert len(source) == len(expected) and lists(source) == expected
    assert source.lengths().tolist() == list(map(len, expected))
    assert source.document_of(np.arange(len(source))).tolist() == list(range(len(documents)))
    if expected:
        some = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=5))
        assert lists(source, some) == [expected[n] for n in some]


def windows(document: list[int], max_length: int, stride: int) -> list[list[int]]:
    found, at = [document[:max_length]], 0
    while at + max_length < len(document):  # something is in no window yet
        at += stride
        found.append(document[at : at + max_length])
    return found


@settings(max_examples=120, deadline=None)
@given(sizes=sizes_of_documents, max_length=st.integers(1, 10), data=st.data())
def test_windows(sizes: list[int], max_length: int, data: Any) -> None:
    stride = data.draw(st.integers(1, max_length))
    left_out = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1)))) if sizes else []
    tokens, documents = made_of(sizes)
    source = DocumentsSource(tokens, "f", str, max_length, stride, np.array(left_out, np.int64))
    expected = [
        (number, window)
        for number, document in enumerate(documents)
        if number not in left_out
        for window in windows(document, max_length, stride)
    ]
    assert len(source) == len(expected) and lists(source) == [window for _, window in expected]
    assert source.document_of(np.arange(len(source))).tolist() == [number for number, _ in expected]
    assert [source.location(n) for n in range(len(source))] == [
        str(number) for number, _ in expected
    ]
    assert source.lengths().tolist() == [len(window) for _, window in expected]
    # nothing of a document is lost
    for document, number in zip(documents, range(len(documents)), strict=True):
        seen = {token for owner, window in expected if owner == number for token in window}
        assert seen == (set() if number in left_out else set(document))


@settings(max_examples=120, deadline=None)
@given(sizes=sizes_of_documents, length=st.integers(1, 10), data=st.data())
def test_blocks(sizes: list[int], length: int, data: Any) -> None:
    tokens, documents = made_of(sizes)
    whole = [(token, number) for number, document in enumerate(documents) for token in document]
    if whole and len(whole) < length:
        with pytest.raises(ConfigError, match=rf"max_length={length}.*{len(whole)} in all"):
            BlocksSource(tokens, "f", "texts", length)
        return
    source = BlocksSource(tokens, "f", "texts", length)
    assert len(source) == len(whole) // length
    order = data.draw(st.permutations(range(len(source))))
    blocks = source.read(order)
    ids, numbers = np.zeros((len(order), length), np.int64), np.ones((len(order), length), np.int32)
    source.read_into(order, ids)
    source.documents_into(order, numbers)
    for place, index in enumerate(order):
        part = whole[index * length : (index + 1) * length]
        assert (
            blocks[place]["input_ids"].tolist()
            == [token for token, _ in part]
            == ids[place].tolist()
        )
        seen = list(dict.fromkeys(number for _, number in part))
        assert (
            blocks[place]["document_ids"].tolist()
            == [seen.index(number) for _, number in part]
            == numbers[place].tolist()
        )
        assert int(source.document_of(np.array([index]))[0]) == part[0][1]


def counted(begins: list[int], block: int) -> list[int]:
    """How many samples begin in each block of so many tokens that any begins in."""
    return [len(list(same)) for _, same in itertools.groupby(begin // block for begin in begins)]


@settings(max_examples=150, deadline=None)
@given(
    sizes=sizes_of_documents, length=st.integers(1, 10), block=st.integers(1, 15), data=st.data()
)
def test_blocks_of_the_storage(sizes: list[int], length: int, block: int, data: Any) -> None:
    """Of samples that begin in the same so many tokens of two bytes each; empty documents behind
    the last token belong to the last.
    """
    tokens, documents = made_of(sizes)
    stride = data.draw(st.integers(1, length))
    left_out = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1)))) if sizes else []
    edges, count = tokens.short[0].tolist(), len(tokens.long)
    sources: list[tuple[Any, list[int]]] = [
        (DocumentsSource(tokens, "f", "texts", length, None), edges[:-1])
    ]
    source = DocumentsSource(tokens, "f", "texts", length, stride, np.array(left_out, np.int64))
    numbers = [number for number in range(len(sizes)) if number not in left_out]
    sources.append(
        (
            source,
            [
                edges[n] + k * stride
                for n in numbers
                for k in range(len(windows(documents[n], length, stride)))
            ],
        )
    )
    if count >= length:
        sources.append(
            (BlocksSource(tokens, "f", "texts", length), list(range(0, count - length + 1, length)))
        )
    with mock.patch("headrace.storage.blocks.LONGEST", 2 * block):
        for source, begins in sources:
            found = source.blocks()
            assert found.dtype == np.int64 and found.tolist() == counted(
                [min(begin, max(0, count - 1)) for begin in begins], block
            )


def test_what_tells_them_apart() -> None:
    """Samples of another kind are other samples, though there may be as many."""
    tokens, _ = made_of([40])
    sources: list[Any] = [
        DocumentsSource(tokens, "f", "texts", 8, stride) for stride in (None, 7, 8)
    ]
    sources += [
        DocumentsSource(tokens, "f", "texts", 9, 8),
        BlocksSource(tokens, "f", "texts", 8),
        BlocksSource(tokens, "g", "texts", 8),
    ]
    assert len({source.fingerprint() for source in sources}) == len(sources)


def test_nothing() -> None:
    tokens, _ = made_of([])
    assert (
        len(BlocksSource(tokens, "f", "texts", 4)) == 0
        and len(DocumentsSource(tokens, "f", "texts", 4, 2)) == 0
    )


def test_what_is_said() -> None:
    tokens, _ = made_of([3, 0, 2])
    source = BlocksSource(tokens, "f", "all texts", 3)
    assert source.location(0) == "all texts, document 0"
    assert source.how() == {"tokens": "5 of 3 documents, as uint16, in memory, which workers share"}
