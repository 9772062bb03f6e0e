"""Orders beside the plain shuffles: by weight, by class, by length, and of another number of samples than the data."""

import itertools
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.order import BalancedOrder, BucketedOrder, EpochOrder, Order, RankBatches, ResizedOrder, WeightedOrder
from headrace.order.drawn import POOL, _log, padding_fraction
from headrace.order.epoch import pass_epoch

pytestmark = pytest.mark.quick_every(2)

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
        ResizedOrder(EpochOrder(40, shuffle="block", blocks=[7] * 5 + [5], interleave=2, turns=3, **common), 100),
    ]


@pytest.mark.parametrize("number", range(len(orders())))
class TestEveryOrder:
    def test_any_position_gives_what_the_full_listing_gives(self, number: int) -> None:
        order = orders()[number]
        listed = list(order)
        assert len(listed) == len(order) == order.n
        assert [order[p] for p in range(order.n)] == listed
        backwards = orders()[number]
        assert backwards[::-1].tolist() == listed[::-1]
        assert pickle.loads(pickle.dumps(order))[:].tolist() == listed

    def test_seed_and_epoch_choose_the_order_and_are_not_added(self, number: int) -> None:
        seen = Counter(tuple(orders(seed, epoch)[number]) for seed in range(3) for epoch in range(3))
        in_order = orders()[number].shuffle is False
        if not in_order:
            assert set(seen.values()) == {1}
        assert list(orders(7, 5)[number]) == list(orders(7, 0)[number].with_epoch(5))
        assert list(orders(7, 5)[number].with_epoch(0)) == list(orders(7, 0)[number])

    def test_repeats_says_whether_an_index_may_come_again(self, number: int) -> None:
        order = orders()[number]
        assert order.repeats == (max(Counter(order).values()) > 1)

    def test_the_ranks_share_it_out(self, number: int) -> None:
        order = orders()[number]
        whole = list(RankBatches(order, 0, 1, 12))
        for world in (2, 3, 4, 6):
            ranks = [RankBatches(order, rank, world, 12 // world) for rank in range(world)]
            for step, batch in enumerate(whole):
                shares = [rank.batch(step).tolist() for rank in ranks]
                mixed = [i for row in itertools.zip_longest(*shares) for i in row if i is not None]
                assert mixed[: len(batch)] == batch.tolist()

    def test_positions_come_with_their_indices(self, number: int) -> None:
        order = orders()[number]
        for rank in range(2):
            batches = RankBatches(order, rank, 2, 6)
            for step in range(len(batches) + 1):
                for later, (indices, positions) in enumerate(batches.with_positions(step), step):
                    assert indices.tolist() == batches.batch(later).tolist() == order[positions].tolist()

    def test_parameters_are_plain(self, number: int) -> None:
        one, other = orders()[number].parameters(), orders(8)[number].parameters()
        assert {k for k in one if one[k] != other[k]} == {"seed"}
        assert all(value is None or type(value) in (bool, int, str) for value in one.values())


def test_weights_with_replacement_are_frequencies() -> None:
    weights = np.array([0, 1, 2, 3, 4, 0])
    drawn = np.bincount(WeightedOrder(weights, n=100_000, seed=1)[:], minlength=6)
    assert drawn[0] == drawn[5] == 0
    expected = 10_000 * weights[1:5]
    assert (((drawn[1:5] - expected) ** 2) / expected).sum() < 16.3  # chi-square, 3 degrees of freedom: 0.1 %


def test_weights_without_replacement_are_successive_draws() -> None:
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    found = Counter(tuple(WeightedOrder(weights, replacement=False, epoch=epoch)[:].tolist()) for epoch in range(4_000))
    statistic = 0.0
    for order in itertools.permutations(range(4)):
        likely, rest = 1.0, weights.sum()
        for index in order:
            likely *= weights[index] / rest
            rest -= weights[index]
        statistic += (found[order] - 4_000 * likely) ** 2 / (4_000 * likely)
    assert statistic < 49.7  # chi-square, 23 degrees of freedom: 0.1 %


@given(st.lists(st.sampled_from([0.0, 1e-300, 1.0, 3.5, 1e300]), min_size=1, max_size=60), st.booleans(), st.integers(0, 2**70))
def test_no_sample_of_weight_0_is_drawn(weights: list[float], replacement: bool, seed: int) -> None:
    if not any(weights):
        with pytest.raises(ConfigError, match="none of them is above 0"):
            WeightedOrder(weights, n=3, replacement=replacement) if replacement else WeightedOrder(weights, n=3)
        return
    order = WeightedOrder(weights, replacement=replacement, seed=seed)
    assert all(weights[i] > 0 for i in order)
    if not replacement:
        assert sorted(order) == np.flatnonzero(weights).tolist()


def test_a_few_of_many_without_replacement_are_the_first() -> None:
    weights = np.random.default_rng(3).random(2_000)
    whole = WeightedOrder(weights, replacement=False)[:].tolist()
    for n in (0, 1, 7, 1_999, 2_000):
        assert WeightedOrder(weights, n=n, replacement=False)[:].tolist() == whole[:n]


@pytest.mark.slow
def test_weights_may_be_more_than_2_to_the_24() -> None:
    order = WeightedOrder(np.broadcast_to(np.uint8(1), (1 << 24) + 50), n=1_000)  # torch.multinomial refuses them
    assert order[:].max() > 1 << 23 and len(set(order)) > 990


def test_the_user_may_change_the_weights_later() -> None:
    weights = np.ones(10)
    order = WeightedOrder(weights, n=50)
    before = list(order)
    weights[:9] = 0
    assert list(order) == before


def test_the_logarithm_is_one() -> None:
    x = np.concatenate([np.random.default_rng(1).random(1_000), [1.0, 2.0**-53, 0.5, np.nextafter(0.5, 0)]])
    assert np.allclose(_log(x), np.log(x), rtol=1e-15, atol=1e-17)


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


def test_balanced_without_replacement_ends_in_time() -> None:
    order = BalancedOrder(CLASSES, replacement=False)
    assert len(order) == 15 == len(set(order)) and Counter(CLASSES[order[:]].tolist()) == {0: 5, 1: 5, 2: 5}


def test_classes_may_be_strings() -> None:
    named = BalancedOrder(np.array(["b", "a", "c"])[CLASSES].tolist(), n=60)
    assert Counter(CLASSES[named[:]].tolist()) == {0: 20, 1: 20, 2: 20}


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 8), st.integers(0, 3))
def test_a_bucketed_epoch_holds_each_sample_once(lengths: list[int], global_batch: int, epoch: int) -> None:
    order = BucketedOrder(lengths, epoch=epoch, global_batch=global_batch)
    assert sorted(order) == list(range(len(lengths)))


def test_batches_of_like_length() -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 8 * POOL * 3 + 5)
    order = BucketedOrder(lengths, global_batch=8)
    full = len(lengths) // 8 * 8
    for at in range(0, full, 8 * POOL):  # in each pool the batches share out its samples by length
        pool = [lengths[order[start : start + 8]] for start in range(at, min(at + 8 * POOL, full), 8)]
        ranges = sorted((int(batch.min()), int(batch.max())) for batch in pool)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
        assert ranges != [(int(batch.min()), int(batch.max())) for batch in pool]
    batches = lengths[order[:full]].reshape(-1, 8)
    plain = lengths[order.shuffled(np.arange(full))].reshape(-1, 8)
    assert padding_fraction(batches) < 0.1 * padding_fraction(plain)
    assert {frozenset(order[s : s + 8].tolist()) for s in range(0, full, 8)}.isdisjoint(
        frozenset(order.with_epoch(1)[s : s + 8].tolist()) for s in range(0, full, 8)
    )


def test_how_much_is_padding() -> None:
    assert padding_fraction(np.array([[2, 4], [5, 5]])) == 1 - 16 / 18
    assert padding_fraction(np.zeros((0, 4), np.int64)) == padding_fraction(np.zeros((2, 4), np.int64)) == 0


def test_an_epoch_of_another_length() -> None:
    inner = EpochOrder(10, seed=1, epoch=4)
    assert ResizedOrder(inner, 4)[:].tolist() == inner[:4].tolist()
    longer = ResizedOrder(inner, 25)[:].tolist()
    assert longer[:10] == list(inner) and longer[10:20] == list(inner.with_epoch(pass_epoch(4, 1)))
    assert longer[20:] == inner.with_epoch(pass_epoch(4, 2))[:5].tolist()
    assert len(ResizedOrder(EpochOrder(0), 5)) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightedOrder([1, -1]), "sample 1 has -1"),
        (lambda: WeightedOrder([1, float("nan"), float("inf")]), "sample 1 has nan .*2 are wrong"),
        (lambda: WeightedOrder([[1, 2]]), r"shape \[1, 2\]"),
        (lambda: WeightedOrder(["x"]), "one number a sample"),
        (lambda: WeightedOrder([0, 0]), "none of them is above 0"),
        (lambda: WeightedOrder([1e308] * 10), "beyond the range"),
        (lambda: WeightedOrder([1, 0, 1], n=3, replacement=False), "2 of 3 samples have a weight above 0"),
        (lambda: WeightedOrder([1], n=-1), "n must be an integer of at least 0"),
        (lambda: BalancedOrder([0, 0, 1], n=3, replacement=False), "smallest of 2 classes has 1 samples"),
        (lambda: BalancedOrder([0.5, 1.0]), "integers or strings"),
        (lambda: BalancedOrder([[0], [1]]), r"shape \[2, 1\]"),
        (lambda: BalancedOrder([None, "a", 3]), "got NoneType, int, str"),
        (lambda: BalancedOrder([[0], [1, 2]]), "one class a sample"),
        (lambda: BalancedOrder([], n=3), "there are no samples"),
        (lambda: BucketedOrder([1.5]), "one integer a sample, got float64"),
        (lambda: BucketedOrder([[1]]), r"shape \[1, 1\]"),
        (lambda: BucketedOrder([[1], [1, 2]]), "one length a sample"),
        (lambda: BucketedOrder([3, -2]), "sample 1 is -2"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


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
