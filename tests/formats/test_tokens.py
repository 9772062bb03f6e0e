"""Documents, windows and blocks are the parts of a list that they should be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from headrace.errors import ConfigError
from headrace.formats.tokens import BlocksSource, DocumentsSource
from headrace.io.array_file import FileArrays

sizes_of_documents = st.lists(st.integers(0, 9), max_size=8)


def tokens_of(sizes: list[int], left_out: Sequence[int] = ()) -> tuple[Any, list[list[int]]]:
    """Tokens in memory, and the lists of documents that they are."""
    edges = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
    ids = (np.arange(edges[-1]) * 7919 % 60_000).astype(np.uint16)
    tokens = FileArrays(ids, [edges, np.array(left_out, np.int64)])
    return tokens, [ids[a:b].tolist() for a, b in itertools.pairwise(edges)]


def windows(document: list[int], max_length: int, stride: int) -> list[list[int]]:
    found, at = [document[:max_length]], 0
    while at + max_length < len(document):  # something is in no window yet
        at += stride
        found.append(document[at : at + max_length])
    return found


@settings(max_examples=60)
@given(sizes=sizes_of_documents, length=st.integers(1, 10), data=st.data())
def test_documents_and_windows(sizes: list[int], length: int, data: Any) -> None:
    tokens, documents = tokens_of(sizes)
    stride = data.draw(st.none() | st.integers(1, length))
    numbers = list(range(len(sizes)))
    left_out = []
    if stride is None:
        expected = [(number, documents[number][:length]) for number in numbers]
    else:
        left_out = [number for number in numbers if data.draw(st.integers(0, 3)) == 0]
        numbers = [number for number in numbers if number not in left_out]
        tokens, documents = tokens_of(sizes, left_out)
        expected = [(n, one) for n in numbers for one in windows(documents[n], length, stride)]
    source = DocumentsSource(tokens, "f", str, length, stride)
    assert len(source) == len(expected)
    chosen_at_random = st.integers(0, max(0, len(expected) - 1))
    some = data.draw(st.lists(chosen_at_random, max_size=5 * bool(expected)))
    for chosen in (list(range(len(expected))), some):
        found = [row.tolist() for row in source.read(chosen)]
        assert found == [expected[index][1] for index in chosen]
    owners = [number for number, _ in expected]
    assert source.document_of(np.arange(len(source))).tolist() == owners
    assert [source.location(n) for n in range(len(source))] == list(map(str, owners))
    assert source.lengths().tolist() == [len(part) for _, part in expected]


@settings(max_examples=60)
@given(sizes=sizes_of_documents, length=st.integers(1, 10), data=st.data())
def test_blocks(sizes: list[int], length: int, data: Any) -> None:
    tokens, documents = tokens_of(sizes)
    whole = [(token, number) for number, document in enumerate(documents) for token in document]
    if whole and len(whole) < length:
        with pytest.raises(ConfigError, match=rf"max_length={length}.*{len(whole)} tokens in all"):
            BlocksSource(tokens, "f", "texts", length)
        return
    source = BlocksSource(tokens, "f", "texts", length)
    assert len(source) == len(whole) // length
    order = data.draw(st.permutations(range(len(source))))
    ids, numbers = np.zeros((len(order), length), np.int64), np.ones((len(order), length), np.int32)
    source.read_into(order, ids, numbers)
    for row, block, index in zip(range(len(order)), source.read(order), order, strict=True):
        part = whole[index * length : (index + 1) * length]
        seen = list(dict.fromkeys(number for _, number in part))
        expected = [token for token, _ in part], [seen.index(number) for _, number in part]
        assert (block["input_ids"].tolist(), block["document_ids"].tolist()) == expected
        assert (ids[row].tolist(), numbers[row].tolist()) == expected
        assert int(source.document_of(np.array([index]))[0]) == part[0][1]
    with pytest.raises(IndexError):
        source.read_into([len(source)], ids[:1], numbers[:1])


def counted(begins: list[int], block: int) -> list[int]:
    """How many samples begin in each block of so many tokens that any begins in."""
    return [len(list(same)) for _, same in itertools.groupby(begin // block for begin in begins)]


@settings(max_examples=80)
@given(
    sizes=sizes_of_documents, length=st.integers(1, 10), block=st.integers(1, 15), data=st.data()
)
def test_blocks_of_the_storage(sizes: list[int], length: int, block: int, data: Any) -> None:
    """Of samples that begin in the same so many tokens of two bytes each; empty documents behind
    the last token belong to the last.
    """
    tokens, documents = tokens_of(sizes)
    stride = data.draw(st.integers(1, length))
    edges, count = tokens.short[0].tolist(), tokens.count
    begins = [
        edge + number * stride
        for edge, document in zip(edges, documents, strict=False)
        for number in range(len(windows(document, length, stride)))
    ]
    sources: list[tuple[Any, list[int]]] = [
        (DocumentsSource(tokens, "f", "texts", length, None), edges[:-1]),
        (DocumentsSource(tokens, "f", "texts", length, stride), begins),
    ]
    if count >= length:
        wholes = list(range(0, count - length + 1, length))
        sources.append((BlocksSource(tokens, "f", "texts", length), wholes))
    with mock.patch("headrace.formats.source.LONGEST", 2 * block):
        for source, begins in sources:
            within = [min(begin, max(0, count - 1)) for begin in begins]
            assert source.blocks().dtype == np.int64
            assert source.blocks().tolist() == counted(within, block)


def test_what_is_said_and_tells_them_apart() -> None:
    """Samples of another kind are other samples, though there may be as many."""
    tokens, _ = tokens_of([40])
    sources = [DocumentsSource(tokens, "f", str, 8, stride) for stride in (None, 7, 8)]
    sources.append(DocumentsSource(tokens, "f", str, 9, 8))
    blocks = [BlocksSource(tokens, name, str, 8) for name in "fg"]
    assert len({source.fingerprint() for source in (*sources, *blocks)}) == 6
    tokens, _ = tokens_of([3, 0, 2])
    source = BlocksSource(tokens, "f", "all texts, document {:,}".format, 3)
    assert source.location(0) == "all texts, document 0"
    assert source.describe().ways == {
        "tokens": "5 of 3 documents, as uint16, in memory, which workers share"
    }
