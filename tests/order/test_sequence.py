"""The sequence of blocks of an epoch: each block in one piece."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from headrace.order.sequence import BlockSequence


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 900), max_size=20),
    seed=st.integers(),
    epoch=st.integers(0, 5),
)
def test_what_a_cut_parts_lies_in_two_segments_of_the_storage(
    sizes: list[int], cuts: list[int], seed: int, epoch: int
) -> None:
    edges = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    sequence = BlockSequence(edges, seed, epoch, np.array(cuts, np.int64))
    places = np.arange(edges[-1])
    indices = sequence.index_at(places)
    blocks = np.repeat(np.arange(len(sizes)), sizes)[indices]
    segments = sequence.segments()
    assert np.array_equal(np.sort(indices), places)
    # each lies within a block
    assert np.array_equal(np.intersect1d(segments, edges), np.unique(edges))
    numbers = np.searchsorted(segments, indices, side="right") - 1
    # places where another segment begins: a segment comes as a whole
    ends = np.flatnonzero(np.diff(numbers)) + 1
    assert len(ends) + 1 == len(segments) - 1 or not places.size
    inside = [cut for cut in set(cuts) if 0 < cut < edges[-1]]
    assert set(ends) == set(inside) | set(np.flatnonzero(np.diff(blocks)) + 1)
