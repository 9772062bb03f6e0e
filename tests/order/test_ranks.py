"""Ranks and workers together get each sample once, and each rank as many batches as the others."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, strategies as st

from headrace.errors import ConfigError
from headrace.order import EpochOrder, RankBatches


def make_ranks(
    n: int, world_size: int, batch_size: int, shuffle: Any = True, **options: Any
) -> list[RankBatches]:
    blocks = np.diff([0, *range(7, n, 7), n]) if n else []
    how: Any = {"shuffle": shuffle, "blocks": blocks, "interleave": 5, "turns": 4}
    order = EpochOrder(n, global_batch=world_size * batch_size, **how)
    return [
        RankBatches(order, rank, world_size, batch_size, **options) for rank in range(world_size)
    ]


@example(n=26, world_size=4, batch_size=3, pad=False, drop_last=False, workers=2)
@given(
    n=st.integers(0, 120),
    world_size=st.integers(1, 9),
    batch_size=st.integers(1, 9),
    pad=st.booleans(),
    drop_last=st.booleans(),
    workers=st.integers(1, 5),
)
def test_each_sample_comes_exactly_once(
    n: int, world_size: int, batch_size: int, pad: bool, drop_last: bool, workers: int
) -> None:
    assume(pad or drop_last or n == 0 or n >= world_size)
    ranks = make_ranks(n, world_size, batch_size, pad=pad, drop_last=drop_last)
    steps, padding = len(ranks[0]), ranks[0].padding
    assert {(len(r), r.steps, r.padding, r.total_size) for r in ranks} == {
        (steps, steps, padding, ranks[0].total_size)
    }
    got: list[int] = []
    for rank in ranks:
        parts = [range(worker, steps, workers) for worker in range(workers)]
        batches = [rank.batch(step) for part in parts for step in part]
        assert all(batch.size and batch.dtype == np.int64 for batch in batches)
        indices = [index for batch in batches for index in batch.tolist()]
        assert len(indices) == rank.num_samples
        got += indices
    assert len(got) == ranks[0].total_size
    counts = np.bincount(got, minlength=n)
    if drop_last:
        assert padding == 0 and counts.max(initial=0) <= 1
        assert n - len(got) < world_size * batch_size
    else:
        expected = np.ones(n, np.int64)
        np.add.at(expected, ranks[0].order[np.arange(padding) % max(n, 1)] if n else [], 1)
        assert counts.tolist() == expected.tolist()
        assert padding == ((-n) % world_size if pad else 0)
        assert steps == -(-n // (world_size * batch_size)) or (not pad and batch_size == 1)


def test_a_batch_of_a_trillion_samples_needs_no_memory() -> None:
    tracemalloc.start()
    try:
        rank = RankBatches(EpochOrder(10**12, global_batch=8 * 64), 3, 8, 64)
        assert rank.batch(10**9).size == 64
        assert next(rank.iter_from(10**9 + 1)).size == 64
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_steps_and_batches_asked_at_once() -> None:
    for shuffle in (False, True, "block"):
        for pad in (True, False):
            rank = make_ranks(101, 4, 3, shuffle, pad=pad)[1].with_epoch(3)
            assert (rank.order.epoch, rank.rank) == (3, 1)
            assert (rank.world_size, rank.global_batch) == (4, 12)
            alone = [rank.batch(step).tolist() for step in range(len(rank))]
            first = [batch.tolist() for batch in make_ranks(101, 4, 3, shuffle, pad=pad)[1]]
            assert (alone == first) is (shuffle is False)
            for step in range(len(rank) + 1):
                assert [batch.tolist() for batch in rank.iter_from(step)] == alone[step:]
                some = rank.some(range(step, len(rank), 3))
                assert [batch.tolist() for batch in some] == alone[step::3]
            for outside in (-1, len(rank), len(rank) + 1):
                with pytest.raises(IndexError):
                    rank.batch(outside)
                with pytest.raises(IndexError):
                    rank.some([0, outside])


def test_bad_arguments() -> None:
    for arguments, value in (
        ({"batch_size": 16}, "global_batch=64"),
        ({"world_size": 0}, "world_size"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"world_size": 128, "batch_size": 1, "pad": False}, "128"),
    ):
        order = EpochOrder(
            100, global_batch=arguments.get("world_size", 64) if "pad" in arguments else 64
        )
        with pytest.raises(ConfigError, match=value):
            RankBatches(order, **{"batch_size": 64, **arguments})
