"""Lanes cover an epoch exactly, and are as long as the batches ask."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from headrace.formats.source import ENOUGH, block_length
from headrace.order import EpochOrder
from headrace.order.lanes import (
    FEWEST,
    AlignedLanes,
    BlockSequence,
    Lanes,
    interleave_for,
    lanes_for,
)

COUNTS = {
    "n": st.integers(0, 600),
    "batch": st.integers(1, 40),
    "interleave": st.integers(1, 50),
    "turns": st.integers(1, 14),
}


@given(**COUNTS)
def test_places_are_a_bijection_and_lanes_are_segments_of_it(
    n: int, batch: int, interleave: int, turns: int
) -> None:
    lanes = Lanes(n, batch, interleave, turns)
    positions = np.arange(n)
    places, numbers = lanes.place_of(positions), lanes.lane_of(positions)[0]
    assert np.array_equal(np.sort(places), positions)
    by_place = numbers[np.argsort(places)]
    assert np.all(np.diff(by_place) >= 0)  # one lane after the other, without a gap
    for lane in np.unique(numbers):
        # and each from its beginning to its end
        assert np.all(np.diff(places[numbers == lane]) == 1)


@given(**COUNTS)
def test_batches_draw_evenly_from_lanes(n: int, batch: int, interleave: int, turns: int) -> None:
    lanes = Lanes(n, batch, interleave, turns)
    for step in range(-(-n // batch)):
        numbers = lanes.lane_of(np.arange(step * batch, min((step + 1) * batch, n)))[0]
        assert set(numbers // interleave) == {step % turns}
        counts = np.bincount(numbers % interleave, minlength=interleave)
        assert counts.max() - counts.min() <= 1


def test_few_blocks_go_to_turns() -> None:
    assert ENOUGH >= FEWEST * 8
    lanes = {10**6: (32, 24), 768: (32, 24), 767: (16, 24), 384: (16, 24), 383: (8, 24)}
    lanes |= {192: (8, 24), 191: (8, 8), 64: (8, 8), 63: (8, 4), 10: (8, 1), 3: (3, 1), 0: (1, 1)}
    assert {blocks: lanes_for(blocks) for blocks in lanes} == lanes
    assert lanes_for(10**6, interleave=128) == (128, 24)
    chunks = [lanes_for(blocks, 1 << 10) for blocks in (1536, 512, 64, 30)]
    assert chunks == [(64, 24), (64, 8), (64, 1), (30, 1)]
    of_large_ones = [lanes_for(10**6, nbytes) for nbytes in (1 << 20, 8 << 20, 1 << 30)]
    assert of_large_ones == [(64, 24), (21, 12), (1, 2)]


@given(**COUNTS, size=st.integers(1, 30))
def test_aligned_lanes_are_a_bijection_of_whole_blocks(
    n: int, batch: int, interleave: int, turns: int, size: int
) -> None:
    lanes = AlignedLanes(n, batch, interleave, turns, size)
    positions = np.arange(n)
    places, numbers = lanes.place_of(positions), lanes.lane_of(positions)[0]
    assert np.array_equal(np.sort(places), positions)
    # who draws when is as it was
    assert np.array_equal(numbers, Lanes(n, batch, interleave, turns).lane_of(positions)[0])
    lead, own = lanes._own_first, (lanes._own_end - lanes._own_first) // size
    own_start = lanes._shifts[1] + lead
    tail = np.diff(lanes.first, append=n) - lanes._own_end
    owned = places < int(own.sum()) * size
    for lane in range(interleave * turns):
        mine = places[(numbers == lane) & owned]
        # whole blocks, one after the other
        assert np.array_equal(mine, own_start[lane] + np.arange(own[lane] * size))
        assert own_start[lane] % size == 0
        shared = np.count_nonzero((numbers == lane) & ~owned)
        assert shared == lead[lane] + tail[lane] < 2 * size


def test_each_segment_has_one_reader() -> None:
    """Whoever takes a sample of a segment fetches all of it."""
    for world_size in [1, 4]:
        shards, row, of_shard = 4, 27_648, 16_000_000 // 27_648
        height = block_length(shards * 16_000_000) // row
        sizes = np.tile([height] * (of_shard // height) + [of_shard % height], shards)
        n, count, batch = int(sizes.sum()), len(sizes), 64 * world_size
        interleave, turns = lanes_for(count, 0, interleave_for(500, n, count, FEWEST))
        how: Any = {"shuffle": "block", "blocks": sizes, "global_batch": batch}
        order = EpochOrder(n, interleave=interleave, turns=turns, **how)
        segments, positions = order.segments(), np.arange(n)
        assert segments is not None
        numbers = np.searchsorted(segments, order[positions], side="right") - 1
        for workers in (1, 2, 4, 8):
            readers = positions % world_size * workers + positions // batch % workers
            fetched = np.unique(np.stack([numbers, readers]), axis=1)[0]
            assert np.diff(segments)[fetched].sum() <= 1.05 * n


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
