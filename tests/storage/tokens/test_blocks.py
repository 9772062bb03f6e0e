"""Blocks of tokens, read many at once, are those that plain loops find."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.storage.text.line_index import HeldArrays
from headrace.storage.tokens.source import ArrayTokens, BlocksSource, Tokens


def tokens_of(lengths: list[int], dtype: str) -> Tokens:
    """Tokens in memory."""
    edges = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))])
    return ArrayTokens(
        HeldArrays((np.arange(edges[-1]) * 7919 % 60_000).astype(dtype), [edges.astype(np.int64)])
    )


def plain(tokens: Tokens, length: int, index: int) -> tuple[list[int], list[int]]:
    """A block, token by token: its ids, and the numbers of its documents."""
    edges, ids, documents = tokens.short[0].tolist(), [], []
    whole = [
        number for number in range(len(edges) - 1) for _ in range(edges[number], edges[number + 1])
    ]
    for place in range(index * length, (index + 1) * length):
        ids.append(int(tokens.long[place]))
        is_next = place > index * length and whole[place] != whole[place - 1]
        documents.append((documents[-1] if documents else 0) + is_next)
    return ids, documents


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=30),
    st.integers(1, 9),
    st.sampled_from(["<u2", "<i4"]),
)
def test_any_documents(lengths: list[int], length: int, dtype: str) -> None:
    if sum(lengths) < length:
        return
    tokens = tokens_of(lengths, dtype)
    source = BlocksSource(tokens, "", "", length)
    chosen = np.random.default_rng(len(lengths)).integers(0, len(source), 7).tolist()
    wanted = [plain(tokens, length, index) for index in chosen]
    ids, documents = np.full((7, length), -1, np.int64), np.full((7, length), -1, np.int32)
    source.read_into(chosen, ids)
    source.documents_into(chosen, documents)
    assert [(a, b) for a, b in zip(ids.tolist(), documents.tolist(), strict=True)] == wanted
    single = [source.read([index])[0] for index in chosen]
    assert [(one["input_ids"].tolist(), one["document_ids"].tolist()) for one in single] == wanted


def test_a_block_outside() -> None:
    source = BlocksSource(tokens_of([10], "<u2"), "", "", 4)
    assert len(source) == 2
    with pytest.raises(IndexError):
        source.read_into([2], np.empty((1, 4), np.int64))
