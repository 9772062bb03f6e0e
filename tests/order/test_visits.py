"""The number of processes that go through each block is the one that real batches show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.order import EpochOrder, RankBatches, WeightedOrder
from headrace.order.lanes import AlignedLanes, Lanes
from headrace.order.visits import Visits, count_visits


def batches_of(sizes: list[int], world: int, batch: int, **options: Any) -> RankBatches:
    ranks = {name: options.pop(name) for name in ("drop_last", "pad") if name in options}
    order = EpochOrder(sum(sizes), blocks=sizes, global_batch=batch * world, **options)
    return RankBatches(order, 0, world, batch, **ranks)


def by_hand(batches: RankBatches, workers: int, sizes: list[int]) -> Visits:
    """Goes through all batches of all ranks; padding is told from the rest by its position."""
    order, world = batches.order, batches.world_size
    laned = order.shuffle == "block"
    lanes = Lanes(
        order.n, order.global_batch, order.interleave if laned else 1, order.turns if laned else 1
    )
    block_of = np.repeat(np.arange(len(sizes)), sizes)
    place_of_index = {int(order[p]): p for p in range(order.n)}
    seen, padding = set(), set()
    for rank in range(world):
        mine = RankBatches(order, rank, world, batches.batch_size, batches.drop_last, batches.pad)
        left = set(range(rank, order.n, world))
        for step in range(mine.steps):
            for index in mine.batch(step).tolist():
                position, process = place_of_index[index], (rank, step % max(1, workers))
                if position in left:
                    left.remove(position)
                    seen.add(
                        (int(lanes.lane_of(np.array([position]))[0]), int(block_of[index]), process)
                    )
                else:
                    padding.add((int(block_of[index]), rank))
    segments = {(lane, block) for lane, block, _ in seen}
    return Visits(len({block for _, block in segments}), len(segments), len(seen), len(padding))


SIZES = st.lists(st.integers(0, 25), min_size=1, max_size=12)


ORDERS = st.fixed_dictionaries(
    {"interleave": st.integers(1, 9), "turns": st.integers(1, 6), "seed": st.integers(0, 5)}
)
ENDS = [{"pad": True}, {"pad": False}, {"drop_last": True, "pad": False}]


@settings(max_examples=40)
@given(
    sizes=SIZES,
    world=st.integers(1, 6),
    workers=st.integers(0, 5),
    batch=st.integers(1, 12),
    options=ORDERS,
    shuffle=st.sampled_from([False, "block"]),
    ends=st.sampled_from(ENDS),
)
@example([5] * 8 + [2], 4, 3, 2, {"interleave": 3, "turns": 2, "seed": 1}, "block", ENDS[1])
def test_the_count_is_that_of_real_batches(
    sizes: list[int],
    world: int,
    workers: int,
    batch: int,
    options: dict[str, Any],
    shuffle: Any,
    ends: dict[str, Any],
) -> None:
    if ends == ENDS[1] and sum(sizes) < world:
        return
    batches = batches_of(sizes, world, batch, shuffle=shuffle, **options, **ends)
    assert count_visits(batches, workers, sizes) == by_hand(batches, workers, sizes)


def test_a_billion_samples_are_counted_by_their_blocks() -> None:
    sizes = [1_000_000] * 1000
    batches = batches_of(sizes, 8, 64, shuffle="block", interleave=64, turns=12)
    found = count_visits(batches, 5, sizes)
    assert found.blocks == 1000 and found.processes == 5


def test_a_full_shuffle_is_refused() -> None:
    for batches in (
        batches_of([4, 4], 1, 2, shuffle=True),
        RankBatches(WeightedOrder([1.0] * 8, global_batch=2), batch_size=2),
    ):
        with pytest.raises(ValueError):
            count_visits(batches, 1, [4, 4])


@settings(max_examples=40)
@given(
    blocks=st.integers(1, 40),
    size=st.integers(1, 12),
    missing=st.integers(0, 11),
    world=st.integers(1, 4),
    workers=st.integers(0, 6),
    batch=st.integers(1, 12),
    options=ORDERS,
)
def test_aligned_lanes_are_counted_as_real_batches(
    blocks: int,
    size: int,
    missing: int,
    world: int,
    workers: int,
    batch: int,
    options: dict[str, Any],
) -> None:
    sizes, interleave = [size] * (blocks - 1) + [size - missing % size], options["interleave"]
    if sum(sizes) < world:
        return
    how = {**options, "shuffle": "block", "aligned": True}
    batches = batches_of(sizes, world, batch, drop_last=False, pad=False, **how)
    order = batches.order
    assert isinstance(order, EpochOrder)
    lanes = order.lanes
    assert isinstance(lanes, AlignedLanes)
    positions, processes = np.arange(order.n), max(1, workers)
    lane, within = lanes._split(positions)
    ends = lanes.lead[lane] + lanes.own[lane] * size
    # lead, own blocks, tail
    part = np.where(within < lanes.lead[lane], 1, np.where(within < ends, 0, 2))
    stretch = np.where(part > 0, lane // interleave * 3 + part, 0)
    process = positions % world * processes + positions // (batch * world) % processes
    read = np.unique(np.stack([order.block_of(positions), stretch, process]), axis=1)
    found = count_visits(batches, workers, sizes)
    assert (found.blocks, found.segments) == (blocks, np.unique(read[:2], axis=1).shape[1])
    if options["turns"] % processes == 0 and interleave % world == 0:
        assert found.readings == read.shape[1]
    assert read.shape[1] <= found.readings <= found.segments * world * processes
