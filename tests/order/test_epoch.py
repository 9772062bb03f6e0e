"""An epoch's order is a permutation that any position can be asked of, and the same for ever."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from headrace.errors import ConfigError
from headrace.order import EpochOrder
from headrace.order.lanes import Lanes

EVEN = st.builds(
    lambda size, count, last: [size] * count + [last % size + 1],
    st.integers(1, 40),
    st.integers(0, 40),
    st.integers(0, 39),
)
SIZES = st.lists(st.integers(0, 40), max_size=40) | EVEN
OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(), "epoch": st.integers(0, 9)},
    optional={
        "global_batch": st.integers(1, 40),
        "interleave": st.integers(1, 20),
        "turns": st.integers(1, 13),
        "aligned": st.booleans(),
    },
)
SHUFFLES: list[Any] = [False, True, "block"]


def make(sizes: list[int], **options: Any) -> EpochOrder:
    return EpochOrder(sum(sizes), blocks=np.array(sizes, np.int64), **options)


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("shuffle", SHUFFLES)
@given(sizes=SIZES.filter(lambda sizes: sum(sizes) > 0), options=OPTIONS, data=st.data())
def test_random_access_gives_what_the_full_listing_gives(
    shuffle: Any, sizes: list[int], options: dict[str, Any], data: st.DataObject
) -> None:
    order = make(sizes, shuffle=shuffle, **options)
    n = len(order)
    everything = order[:]
    positions = np.array(data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=10)))
    assert np.array_equal(order[positions], everything[positions])
    position = int(positions[0])
    assert type(order[position]) is int
    assert order[position] == order[np.int32(position)] == everything[position]
    part = data.draw(st.slices(n))
    assert np.array_equal(order[part], everything[part])
    assert list(order) == everything.tolist()
    assert np.array_equal(np.sort(everything), np.arange(n))


@pytest.mark.parametrize("shuffle", [True, "block"])
def test_seed_and_epoch_choose_the_order_and_are_not_added(shuffle: Any) -> None:
    def listing(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(make([10] * 50, shuffle=shuffle, seed=seed, epoch=epoch)[:])

    keys = [(seed, epoch) for seed in (-1, 0, 1, 2, 2**80) for epoch in range(4)]
    assert len({listing(*key) for key in keys}) == len(keys)


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=60), options=OPTIONS)
def test_few_blocks_are_cut(sizes: list[int], options: dict[str, Any]) -> None:
    order = make(sizes, shuffle="block", **options)
    positions = np.arange(len(order))
    shape = (order.n, order.global_batch, order.interleave, order.turns)
    lanes, _ = Lanes(*shape).lane_of(positions)
    blocks = np.repeat(np.arange(len(sizes)), sizes)[order[positions]]
    visits = set(zip(blocks.tolist(), lanes.tolist(), strict=True))
    assert len(visits) - len(sizes) <= order.interleave * order.turns - 1


def test_a_batch_of_positions_keeps_its_shape() -> None:
    order = EpochOrder(100)
    assert order[[[1, 2, 3], [4, 5, 6]]].shape == (2, 3)
    for outside in (100, -101, [0, 100], 2**70, [0.5], "a", [True, False]):
        with pytest.raises(IndexError):
            order[outside]  # type: ignore[index]
    assert (
        order[[]].dtype == np.int64 and order[3:3].shape == (0,) and order[np.array(7)].shape == ()
    )
    for shuffle in SHUFFLES:
        for blocks in (None, [], [0, 0]):
            assert EpochOrder(0, shuffle=shuffle, blocks=blocks)[:].shape == (0,)
    one, full = EpochOrder(1_000, shuffle="block"), EpochOrder(1_000)
    assert np.array_equal(one[:], full[:]) and one.segments() is full.segments() is None


def test_with_epoch_gives_what_the_constructor_gives() -> None:
    for shuffle in SHUFFLES:
        sizes = [7, 0, 30, 5] * 9
        options = {"shuffle": shuffle, "seed": 5, "global_batch": 8, "interleave": 3, "turns": 4}
        order = make(sizes, epoch=1, **options)
        before = order[:]
        other = order.with_epoch(2)
        assert np.array_equal(other[:], make(sizes, epoch=2, **options)[:])
        assert np.array_equal(order[:], before)
        assert np.array_equal(pickle.loads(pickle.dumps(other))[:], other[:])
        assert repr(other).startswith(f"EpochOrder(n=378, shuffle={shuffle!r}, seed=5")
        assert repr(other).endswith("epoch=2)")
        assert order.parameters() == other.parameters() == make(sizes, **options).parameters()
        assert order.parameters() != make(sizes[::-1], **{**options, "seed": 6}).parameters()
        for wrong in (1.5, True, "1", None):
            with pytest.raises(ConfigError, match="epoch must be an integer"):
                order.with_epoch(wrong)  # type: ignore[arg-type]


def test_bad_arguments() -> None:
    rows = [("n", -1), ("n", 2.0), ("seed", None), ("epoch", "1"), ("shuffle", "blocks")]
    rows += [("shuffle", 1), ("global_batch", 0), ("interleave", 0), ("turns", 0)]
    rows += [("blocks", sizes) for sizes in ([5, 4], [11, -1], [[10]], [10.0])]
    for name, value in rows:
        with pytest.raises(ConfigError, match=name):
            EpochOrder(**{"n": 10, name: value})


SEEDED: dict[str, Any] = {"seed": 3, "epoch": 2}
BLOCKS: dict[str, Any] = {"n": 100_000, "shuffle": "block", "blocks": [100] * 1_000}
UNEVEN: dict[str, Any] = {"n": 300, "shuffle": "block", "blocks": [7, 0, 93, 50, 50, 100]}
UNEVEN |= {"seed": 1, "epoch": 4, "global_batch": 10}
GOLDEN: list[tuple[dict[str, Any], list[int]]] = [
    ({"n": 100, "shuffle": False}, [0, 1, 2, 3, 4, 5, 6, 7]),
    ({"n": 2, **SEEDED}, [0, 1]),
    ({"n": 5, **SEEDED}, [2, 4, 1, 0, 3]),
    ({"n": 16, **SEEDED}, [11, 4, 6, 8, 7, 14, 1, 10]),
    ({"n": 1000, **SEEDED}, [595, 249, 353, 716, 110, 392, 929, 763]),
    ({"n": 1048577, **SEEDED}, [487490, 558851, 869835, 219371, 186453, 235055, 249652, 105318]),
    (
        {"n": 10**12, **SEEDED},
        [874743477429, 353393483928, 88701507448, 980486402448, 815266101379],
    ),
    ({"n": 1000}, [960, 557, 978, 41, 888, 112, 439, 304]),
    ({"n": 1000, "seed": -(2**80), "epoch": 1}, [352, 878, 567, 4, 711, 409, 196, 181]),
    ({"n": 10, "shuffle": "block", "blocks": [3, 3, 4]}, [6, 8, 9, 7, 0, 1, 2, 4, 3, 5]),
    ({**UNEVEN, "interleave": 4, "turns": 3}, [90, 29, 8, 13, 95, 83, 92, 40, 26, 60, 150, 185]),
    (BLOCKS, [17155, 36231, 10964, 65298, 11845, 65668, 97898, 68344]),
    (
        {**BLOCKS, "epoch": 1, "global_batch": 8, "interleave": 16, "turns": 1},
        [41249, 53404, 49527, 59202, 62937, 75745],
    ),
]


def test_orders_are_the_same_for_ever() -> None:
    for arguments, first in GOLDEN:
        assert EpochOrder(**arguments)[: len(first)].tolist() == first
