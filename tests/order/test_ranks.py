"""Ranks and workers together get each sample once, and each rank as many batches as the others."""

from __future__ import annotations

import collections
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.order import EpochOrder, RankBatches

pytestmark = pytest.mark.quick_every(6)

GLOBAL_BATCH = 12
DIVISORS = [1, 2, 3, 4, 6, 12]


def make_ranks(n: int, world_size: int, batch_size: int, shuffle: Any = True, **options: Any) -> list[RankBatches]:
    blocks = np.diff([0, *range(7, n, 7), n]) if n else []
    order = EpochOrder(n, shuffle=shuffle, blocks=blocks, global_batch=world_size * batch_size, interleave=5, turns=4)
    return [RankBatches(order, rank, world_size, batch_size, **options) for rank in range(world_size)]


def interleaved(ranks: list[RankBatches], step: int) -> list[int]:
    """The batches of all ranks in the order of their positions."""
    batches = [rank.batch(step).tolist() for rank in ranks]
    return [batch[i] for i in range(max(map(len, batches))) for batch in batches if i < len(batch)]


@pytest.mark.parametrize("shuffle", [False, True, "block"])
@pytest.mark.parametrize("world_size", DIVISORS)
@given(n=st.integers(0, 150), drop_last=st.booleans())
@settings(max_examples=25)
def test_the_union_of_the_ranks_is_the_batch_of_one_rank(world_size: int, shuffle: Any, n: int, drop_last: bool) -> None:
    (one,) = make_ranks(n, 1, GLOBAL_BATCH, shuffle, drop_last=drop_last)
    ranks = make_ranks(n, world_size, GLOBAL_BATCH // world_size, shuffle, drop_last=drop_last)
    assert {len(rank) for rank in ranks} == {len(one)}
    first = one.order[np.arange(GLOBAL_BATCH) % n].tolist() if n else []
    for step in range(len(one)):
        expected, got = one.batch(step).tolist(), interleaved(ranks, step)
        padding = ranks[0].padding if step == len(one) - 1 else 0
        assert got == expected + first[:padding]


@given(
    n=st.integers(0, 120),
    world_size=st.integers(1, 9),
    batch_size=st.integers(1, 9),
    pad=st.booleans(),
    drop_last=st.booleans(),
    workers=st.integers(1, 5),
)
def test_each_sample_comes_exactly_once(n: int, world_size: int, batch_size: int, pad: bool, drop_last: bool, workers: int) -> None:
    assume(pad or drop_last or n == 0 or n >= world_size)
    ranks = make_ranks(n, world_size, batch_size, pad=pad, drop_last=drop_last)
    steps, padding = len(ranks[0]), ranks[0].padding
    assert {(len(r), r.steps, r.padding, r.total_size) for r in ranks} == {(steps, steps, padding, ranks[0].total_size)}
    got: list[int] = []
    for rank in ranks:
        batches = [rank.batch(step) for worker in range(workers) for step in range(worker, steps, workers)]
        assert all(batch.size and batch.dtype == np.int64 for batch in batches)
        indices = [index for batch in batches for index in batch.tolist()]
        assert len(indices) == rank.num_samples
        got += indices
    assert len(got) == ranks[0].total_size
    counts = np.bincount(got, minlength=n)
    if drop_last:
        assert padding == 0 and counts.max(initial=0) <= 1 and n - len(got) < world_size * batch_size
    else:
        expected = np.ones(n, np.int64)
        np.add.at(expected, ranks[0].order[np.arange(padding) % max(n, 1)] if n else [], 1)
        assert counts.tolist() == expected.tolist()
        assert padding == ((-n) % world_size if pad else 0)
        assert steps == -(-n // (world_size * batch_size)) or (not pad and batch_size == 1)


@given(n=st.integers(1, 200), world_size=st.integers(1, 6), batch_size=st.integers(1, 8), data=st.data())
def test_batches_are_full_but_for_the_last_two(n: int, world_size: int, batch_size: int, data: st.DataObject) -> None:
    pad = n < world_size or data.draw(st.booleans())
    for rank in make_ranks(n, world_size, batch_size, pad=pad):
        sizes = [batch.size for batch in rank]
        assert set(sizes[: -1 if pad else -2]) <= {batch_size}
        assert max(sizes) <= max(batch_size, 2)


def test_the_table_of_the_module_is_right() -> None:
    ranks = make_ranks(10, 2, 2, shuffle=False)
    assert [[r.batch(s).tolist() for r in ranks] for s in range(3)] == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8], [9]]]
    assert len(make_ranks(10, 2, 2, drop_last=True)[0]) == 2
    padded, exact = (make_ranks(9, 2, 2, shuffle=False, pad=pad) for pad in (True, False))
    assert [[r.batch(s).tolist() for r in padded] for s in (1, 2)] == [[[4, 6], [5, 7]], [[8], [0]]]
    assert [[r.batch(s).tolist() for r in exact] for s in (1, 2)] == [[[4], [5]], [[6, 8], [7]]]


def test_fewer_samples_than_ranks_are_padded_over_and_over() -> None:
    ranks = make_ranks(2, 5, 3, shuffle=False)
    assert [rank.batch(0).tolist() for rank in ranks] == [[0], [1], [0], [1], [0]]
    assert ranks[0].padding == 3


def test_without_padding_a_batch_size_of_one_takes_the_tail_in() -> None:
    ranks = make_ranks(10, 4, 1, shuffle=False, pad=False)
    assert [[r.batch(s).tolist() for r in ranks] for s in range(len(ranks[0]))] == [
        [[0], [1], [2], [3]],
        [[4, 8], [5, 9], [6], [7]],
    ]


def test_without_padding_too_few_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="use pad=True"):
        make_ranks(3, 4, 2, pad=False)
    assert len(make_ranks(3, 4, 2, pad=False, drop_last=True)[0]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("pad", [True, False])
@given(n=st.integers(6, 300), world_size=st.integers(1, 5), batch_size=st.integers(1, 7), data=st.data())
def test_an_iteration_can_begin_at_any_step(pad: bool, n: int, world_size: int, batch_size: int, data: st.DataObject) -> None:
    rank = make_ranks(n, world_size, batch_size, pad=pad)[-1]
    step = data.draw(st.integers(0, len(rank)))
    rest = [batch.tolist() for batch in rank.iter_from(step)]
    assert rest == [rank.batch(s).tolist() for s in range(step, len(rank))]
    others = make_ranks(n, world_size, batch_size, pad=pad)
    seen = {index for r in others for s in range(step) for index in r.batch(s).tolist()}
    assert rank.samples_before(step) == len(seen)


@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_some_batches_together_are_what_they_are_one_by_one(shuffle: Any) -> None:
    order = EpochOrder(101, shuffle=shuffle, blocks=[11] * 9 + [2], global_batch=6, interleave=2, turns=2)
    batches = RankBatches(order, 1, 2, 3)
    steps = range(1, len(batches), 3)
    assert [found.tolist() for found in batches.some(steps)] == [batches.batch(step).tolist() for step in steps]
    assert batches.some([]) == []
    with pytest.raises(IndexError):
        batches.some([0, len(batches)])


def test_an_iteration_over_many_parts_is_complete() -> None:
    rank = RankBatches(EpochOrder(50_001, global_batch=64 * 2), 1, 2, 64)
    assert [batch.tolist() for batch in rank] == [rank.batch(step).tolist() for step in range(len(rank))]


def test_iteration_computes_one_batch_then_a_part_ahead() -> None:
    asked: list[int] = []

    class Order(EpochOrder):
        def __getitem__(self, positions: Any) -> Any:
            asked.append(np.size(positions))
            return super().__getitem__(positions)

    batches = iter(RankBatches(Order(100_000, global_batch=2), batch_size=2))
    next(batches)
    assert asked == [2]
    collections.deque(batches, maxlen=0)
    assert asked[1:4] == [8, 32, 128] and max(asked) == 4_096 and sum(asked) == 100_000


def test_with_epoch_keeps_everything_else() -> None:
    ranks = [rank.with_epoch(3) for rank in make_ranks(100, 4, 3)]
    order = make_ranks(100, 4, 3)[0].order.with_epoch(3)
    assert interleaved(ranks, 2) == order[24:36].tolist()
    assert ranks[0].order.epoch == 3
    assert (ranks[1].rank, ranks[1].world_size, ranks[1].global_batch) == (1, 4, 12)


@pytest.mark.parametrize("step", [-1, 9, 10])
def test_a_step_outside_is_an_index_error(step: int) -> None:
    rank = make_ranks(100, 4, 3)[0]
    assert len(rank) == 9
    with pytest.raises(IndexError, match="9 steps"):
        rank.batch(step)
    if step != 9:
        with pytest.raises(IndexError, match="9 steps"):
            rank.iter_from(step)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 16}, "global_batch=64, but batch_size=16 times world_size=1 is 16"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"world_size": 0}, "world_size must be an integer of at least 1"),
        ({"rank": 2, "world_size": 2}, "rank=2 with world_size=2"),
        ({"rank": -1}, "rank must be an integer of at least 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RankBatches(EpochOrder(100), **{"batch_size": 64, **arguments})


def test_it_is_a_batch_sampler_for_a_plain_dataloader() -> None:
    ranks = make_ranks(33, 4, 2, shuffle="block", pad=False)
    loaders = [torch.utils.data.DataLoader(range(33), batch_sampler=rank) for rank in ranks]  # type: ignore[arg-type,var-annotated]
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    assert {len(b) for b in batches} == {len(loader) for loader in loaders} == {5}
    assert sorted(index for b in batches for batch in b for index in batch) == list(range(33))


def test_a_batch_of_a_trillion_samples_needs_no_memory() -> None:
    tracemalloc.start()
    try:
        rank = RankBatches(EpochOrder(10**12, global_batch=8 * 64), 3, 8, 64)
        assert rank.batch(10**9).size == 64
        assert next(rank.iter_from(10**9 + 1)).size == 64
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_its_repr_says_what_it_is() -> None:
    assert "rank=1, world_size=2, batch_size=32, drop_last=False, pad=True" in repr(make_ranks(100, 2, 32)[1])
