"""Orders by weight, by class, by length, and of another number of samples than the data."""

import itertools
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from headrace.errors import ConfigError
from headrace.order import (
    BalancedOrder,
    BucketedOrder,
    EpochOrder,
    Order,
    RankBatches,
    ResizedOrder,
    WeightedOrder,
)
from headrace.order.drawn import POOL
from headrace.order.epoch import pass_epoch

GOLDEN = {
    "weighted": [744, 958, 436, 623, 999, 807, 658, 593, 968, 736, 100, 789],
    "far": [568, 741, 789, 509, 739, 826],
    "without": [847, 644, 660, 655, 247, 100, 591, 791, 934, 706, 641, 976],
    "bucketed": [598, 672, 820, 561, 850, 73, 258, 221, 999, 407, 666, 629],
    "balanced": [36, 50, 57, 40, 69, 53, 1, 56, 54, 60, 52, 29],
}
CLASSES = np.repeat([0, 1, 2], [50, 5, 20])


def orders(seed: int = 7, epoch: int = 0) -> list[Order]:
    common: dict[str, Any] = {"seed": seed, "epoch": epoch, "global_batch": 12}
    return [
        BucketedOrder(np.arange(500) % 37, **common),
        BucketedOrder(np.arange(1_600) % 37, **common),
        WeightedOrder(np.arange(40), n=100, **common),
        WeightedOrder(np.arange(40), replacement=False, **common),
        WeightedOrder(np.arange(40), n=13, replacement=False, **common),
        BalancedOrder(CLASSES, **common),
        BalancedOrder(CLASSES, replacement=False, **common),
        ResizedOrder(EpochOrder(40, **common), 13),
        ResizedOrder(EpochOrder(40, **common), 100),
        ResizedOrder(EpochOrder(40, shuffle=False, **common), 100),
        ResizedOrder(
            EpochOrder(40, shuffle="block", blocks=[7] * 5 + [5], interleave=2, turns=3, **common),
            100,
        ),
    ]


def test_weights_with_replacement_are_frequencies() -> None:
    weights = np.array([0, 1, 2, 3, 4, 0])
    drawn = np.bincount(WeightedOrder(weights, n=100_000, seed=1)[:], minlength=6)
    assert drawn[0] == drawn[5] == 0
    expected = 10_000 * weights[1:5]
    # chi-square, 3 degrees of freedom: 0.1 %
    assert (((drawn[1:5] - expected) ** 2) / expected).sum() < 16.3


def test_weights_without_replacement_are_successive_draws() -> None:
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    found = Counter(
        tuple(WeightedOrder(weights, replacement=False, epoch=epoch)[:].tolist())
        for epoch in range(2_000)
    )
    statistic = 0.0
    for order in itertools.permutations(range(4)):
        likely, rest = 1.0, weights.sum()
        for index in order:
            likely *= weights[index] / rest
            rest -= weights[index]
        statistic += (found[order] - 2_000 * likely) ** 2 / (2_000 * likely)
    assert statistic < 49.7  # chi-square, 23 degrees of freedom: 0.1 %


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1.0, 3.5, 1e300]), min_size=1, max_size=60),
    st.booleans(),
    st.integers(0, 2**70),
)
def test_no_sample_of_weight_0_is_drawn(weights: list[float], replacement: bool, seed: int) -> None:
    if not any(weights):
        with pytest.raises(ConfigError):
            WeightedOrder(weights, n=3)
        return
    order = WeightedOrder(weights, replacement=replacement, seed=seed)
    assert all(weights[i] > 0 for i in order)
    if not replacement:
        assert sorted(order) == np.flatnonzero(weights).tolist()


def test_all_classes_come_equally_often() -> None:
    order = BalancedOrder(CLASSES, n=300, seed=3)
    classes = CLASSES[order[:]]
    for start in range(0, 300, 3):
        assert sorted(classes[start : start + 3]) == [0, 1, 2]
    assert len({tuple(classes[start : start + 3]) for start in range(0, 300, 3)}) == 6
    counts = np.bincount(order[:], minlength=75)
    assert (counts[:50] == 2).all() and (counts[50:55] == 20).all() and (counts[55:] == 5).all()
    small = [i for i in order if 50 <= i < 55]
    passes = {tuple(small[start : start + 5]) for start in range(0, 100, 5)}
    assert all(sorted(one) == list(range(50, 55)) for one in passes) and len(passes) > 10


def test_an_epoch_of_another_length() -> None:
    inner = EpochOrder(10, seed=1, epoch=4)
    assert ResizedOrder(inner, 4)[:].tolist() == inner[:4].tolist()
    longer = ResizedOrder(inner, 25)[:].tolist()
    assert longer[:10] == list(inner) and longer[10:20] == list(inner.with_epoch(pass_epoch(4, 1)))
    assert longer[20:] == inner.with_epoch(pass_epoch(4, 2))[:5].tolist()
    assert len(ResizedOrder(EpochOrder(0), 5)) == 0


def test_orders_are_the_same_for_ever() -> None:
    common: dict[str, Any] = {"seed": 3, "epoch": 2}
    found = {
        "weighted": WeightedOrder(np.arange(1_000), **common)[:12].tolist(),
        "far": WeightedOrder(np.arange(1_000), n=2**61, **common)[2**60 : 2**60 + 6].tolist(),
        "without": WeightedOrder(np.arange(1_000), replacement=False, **common)[:12].tolist(),
        "balanced": BalancedOrder(CLASSES, **common)[:12].tolist(),
        "bucketed": BucketedOrder(np.arange(1_000) % 37, global_batch=4, **common)[:12].tolist(),
    }
    assert found == GOLDEN


def test_laws_of_every_order() -> None:
    for number in range(len(orders())):
        order = orders()[number]
        listed = list(order)
        assert len(listed) == len(order) == order.n
        assert [order[p] for p in range(order.n)] == listed == orders()[number][::-1].tolist()[::-1]
        assert pickle.loads(pickle.dumps(order))[:].tolist() == listed
        assert order.repeats == (max(Counter(listed).values()) > 1)
        seen = Counter(
            tuple(orders(seed, epoch)[number]) for seed in range(3) for epoch in range(3)
        )
        assert set(seen.values()) == {9 if order.shuffle is False else 1}
        assert list(orders(7, 5)[number]) == list(order.with_epoch(5))
        batches = RankBatches(order, 1, 2, 6)
        for step in (0, 1, len(batches) - 1, len(batches)):
            for request in batches.requests(order.epoch, step):
                assert batches.batch(request.step).tolist() == request
                if request.draws is not None:
                    assert request == order[request.draws].tolist()
                assert (request.draws is not None) == order.repeats
        one, other = order.parameters(), orders(8)[number].parameters()
        assert {k for k in one if one[k] != other[k]} == {"seed"}


def padding_of(lengths: Any) -> float:
    """How much of batches of 8 is padding, if each is padded to its longest sample."""
    batches = lengths.reshape(-1, 8)
    return 1 - float(batches.sum() / (8 * batches.max(axis=1).sum()))


def test_batches_of_like_length() -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 8 * POOL * 3 + 5)
    order = BucketedOrder(lengths, global_batch=8)
    assert sorted(order) == list(range(len(lengths)))
    full = len(lengths) // 8 * 8
    for at in range(0, full, 8 * POOL):  # in each pool the batches share out its samples by length
        pool = [
            lengths[order[start : start + 8]] for start in range(at, min(at + 8 * POOL, full), 8)
        ]
        ranges = [(int(batch.min()), int(batch.max())) for batch in pool]
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(sorted(ranges)))
        assert ranges != sorted(ranges)
    plain = EpochOrder(len(lengths), global_batch=8)
    assert padding_of(lengths[order[:full]]) < 0.1 * padding_of(lengths[plain[:full]])


def test_balanced_orders_end_in_time_and_take_strings() -> None:
    once = BalancedOrder(CLASSES, replacement=False)
    assert len(set(once)) == len(once) == 15
    assert Counter(CLASSES[once[:]].tolist()) == {0: 5, 1: 5, 2: 5}
    named = BalancedOrder(np.array(["b", "a", "c"])[CLASSES].tolist(), n=60)
    assert Counter(CLASSES[named[:]].tolist()) == {0: 20, 1: 20, 2: 20}


def test_bad_arguments() -> None:
    for order, values, options, named in (
        (WeightedOrder, [1, -1], {}, "sample 1 has -1"),
        (WeightedOrder, [1, float("nan"), float("inf")], {}, "sample 1 has nan"),
        (WeightedOrder, [1e308] * 10, {}, None),
        (WeightedOrder, [1, 0, 1], {"n": 3, "replacement": False}, "at most 2 of the 3"),
        (BalancedOrder, [0, 0, 1], {"n": 3, "replacement": False}, "at most 2 of the 3"),
        (WeightedOrder, ["x"], {}, None),
        (BalancedOrder, [0.5], {}, None),
        (BalancedOrder, [], {"n": 3}, None),
        (WeightedOrder, [[0], [1]], {}, r"\[2, 1\]"),
        (BucketedOrder, [1.5], {}, "float64"),
        (BalancedOrder, [None, "a", 3], {}, "not supported between .* pass weights= instead"),
        (BalancedOrder, [[0], [1, 2]], {}, None),
        (BucketedOrder, [3, -2], {}, "sample 1 is -2"),
    ):
        with pytest.raises(ConfigError, match=named):
            order(values, **options)
