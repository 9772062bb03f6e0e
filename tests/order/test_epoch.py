"""An epoch's order is a permutation that any position can be asked of, and the same for ever."""

from __future__ import annotations

import collections
import itertools
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.order import EpochOrder
from headrace.order.epoch import DEFAULT_INTERLEAVE, DEFAULT_TURNS
from headrace.order.lanes import Lanes

EVEN = st.builds(lambda size, count, last: [size] * count + [last % size + 1], st.integers(1, 40), st.integers(0, 40), st.integers(0, 39))
SIZES = st.lists(st.integers(0, 40), max_size=40) | EVEN
OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(), "epoch": st.integers(0, 9)},
    optional={"global_batch": st.integers(1, 40), "interleave": st.integers(1, 20), "turns": st.integers(1, 13), "aligned": st.booleans()},
)
SHUFFLES: list[Any] = [False, True, "block"]


def make(sizes: list[int], **options: Any) -> EpochOrder:
    return EpochOrder(sum(sizes), blocks=np.array(sizes, np.int64), **options)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@given(sizes=SIZES, options=OPTIONS)
def test_each_sample_comes_exactly_once(shuffle: Any, sizes: list[int], options: dict[str, Any]) -> None:
    order = make(sizes, shuffle=shuffle, **options)
    assert np.array_equal(np.sort(order[:]), np.arange(len(order)))


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("shuffle", SHUFFLES)
@given(sizes=SIZES.filter(lambda sizes: sum(sizes) > 0), options=OPTIONS, data=st.data())
def test_random_access_gives_what_the_full_listing_gives(
    shuffle: Any, sizes: list[int], options: dict[str, Any], data: st.DataObject
) -> None:
    order = make(sizes, shuffle=shuffle, **options)
    n = len(order)
    everything, blocks = order[:], np.repeat(np.arange(len(sizes)), sizes)
    positions = np.array(data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=10)))
    assert np.array_equal(order[positions], everything[positions])
    assert np.array_equal(order.block_of(positions), blocks[everything[positions]])
    position = int(positions[0])
    assert type(order[position]) is int
    assert order[position] == order[np.int32(position)] == everything[position]
    part = data.draw(st.slices(n))
    assert np.array_equal(order[part], everything[part])
    assert list(order) == everything.tolist()


def test_the_form_of_the_answer_is_that_of_the_question() -> None:
    order = EpochOrder(100)
    assert order[[[1, 2, 3], [4, 5, 6]]].shape == (2, 3)
    assert order[[]].dtype == np.int64 and order[[]].shape == (0,)
    assert order[3:3].shape == (0,)
    assert order[np.array(7)].shape == ()
    assert order[np.arange(5, dtype=np.uint8)].tolist() == order[:5].tolist()


@pytest.mark.parametrize("positions", [100, -101, [0, 100], [-101, 3], 2**70, [0.5], "a", [True, False]])
def test_a_position_outside_is_an_index_error(positions: Any) -> None:
    with pytest.raises(IndexError):
        EpochOrder(100)[positions]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("blocks", [None, [], [0, 0]])
def test_an_empty_order_works(shuffle: Any, blocks: Any) -> None:
    order = EpochOrder(0, shuffle=shuffle, blocks=blocks)
    assert len(order) == 0 and list(order) == [] and order[:].shape == (0,)
    with pytest.raises(IndexError):
        order[0]


@pytest.mark.parametrize("shuffle", [True, "block"])
def test_seed_and_epoch_choose_the_order_and_are_not_added(shuffle: Any) -> None:
    def listing(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(make([10] * 50, shuffle=shuffle, seed=seed, epoch=epoch)[:])

    keys = [(seed, epoch) for seed in (-1, 0, 1, 2, 2**80) for epoch in range(4)]
    assert len({listing(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_with_epoch_gives_what_the_constructor_gives(shuffle: Any) -> None:
    sizes, options = [7, 0, 30, 5] * 9, {"shuffle": shuffle, "seed": 5, "global_batch": 8, "interleave": 3, "turns": 4}
    order = make(sizes, epoch=1, **options)
    before = order[:]
    other = order.with_epoch(2)
    assert np.array_equal(other[:], make(sizes, epoch=2, **options)[:])
    assert (order.epoch, other.epoch) == (1, 2)
    assert np.array_equal(order[:], before)
    assert np.array_equal(pickle.loads(pickle.dumps(other))[:], other[:])


def test_without_blocks_a_block_shuffle_is_a_full_one() -> None:
    block, full = EpochOrder(1_000, shuffle="block"), EpochOrder(1_000)
    assert np.array_equal(block[:], full[:])
    assert np.array_equal(block.block_of([1, 2]), block[[1, 2]])


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=60), options=OPTIONS)
def test_few_blocks_are_cut(sizes: list[int], options: dict[str, Any]) -> None:
    order = make(sizes, shuffle="block", **options)
    positions = np.arange(len(order))
    lanes = Lanes(order.n, order.global_batch, order.interleave, order.turns).lane_of(positions)
    visits = set(zip(order.block_of(positions).tolist(), lanes.tolist(), strict=True))
    assert len(visits) - len(sizes) <= order.interleave * order.turns - 1


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("world_size", [1, 4])
def test_workers_and_ranks_read_blocks_of_their_own(workers: int, world_size: int) -> None:
    blocks, interleave, turns, batch = 3_000, 16, 12, 64
    order = make([128] * blocks, shuffle="block", seed=1, global_batch=batch, interleave=interleave, turns=turns)
    positions = np.arange(len(order))
    readers = positions // batch % workers * world_size + positions % world_size
    reads = set(zip(order.block_of(positions).tolist(), readers.tolist(), strict=True))
    assert len(reads) - blocks <= interleave * turns - 1


def test_a_batch_of_a_block_shuffle_is_mixed() -> None:
    order = make([100] * 1_000, shuffle="block", global_batch=64, interleave=64)
    first = order.block_of(slice(0, 64))
    assert len(set(first.tolist())) > 50
    assert np.count_nonzero(np.diff(order[: 64 * 12 * 64 : 64 * 12]) == 1) < 5  # inside a block the samples are permuted


def test_a_full_shuffle_of_a_trillion_needs_no_memory() -> None:
    tracemalloc.start()
    try:
        EpochOrder(10**12).with_epoch(3)[10**11 : 10**11 + 64]
        collections.deque(itertools.islice(EpochOrder(10**12), 20_000), maxlen=0)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", [1, 64, 65, 320, 321, 20_000])
def test_an_iteration_over_many_parts_is_complete(n: int) -> None:
    order = EpochOrder(n, seed=3)
    assert list(order) == order[:].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": -1}, "n must be an integer of at least 0"),
        ({"n": 2.0}, "n must be an integer of at least 0, not 2.0"),
        ({"seed": None}, "seed must be an integer"),
        ({"epoch": "1"}, "epoch must be an integer"),
        ({"shuffle": "blocks"}, 'shuffle must be False, True or "block"'),
        ({"shuffle": 1}, "shuffle must be"),
        ({"global_batch": 0}, "global_batch must be an integer of at least 1"),
        ({"interleave": 0}, "interleave must be an integer of at least 1"),
        ({"turns": 0}, "turns must be an integer of at least 1"),
        ({"blocks": [5, 4]}, "n = 10, but the 2 sizes sum up to 9"),
        ({"blocks": [11, -1]}, "0 and more, got -1"),
        ({"blocks": [[10]]}, "blocks must be a list"),
        ({"blocks": [10.0]}, "blocks must be a list"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EpochOrder(**{"n": 10, **arguments})


def test_order_attributes_and_parameters() -> None:
    order = EpochOrder(10, blocks=[4, 6], shuffle="block", seed=np.int64(3))
    assert (order.n, order.shuffle, order.seed, order.epoch, order.global_batch) == (10, "block", 3, 0, 64)
    assert (order.interleave, order.turns) == (DEFAULT_INTERLEAVE, DEFAULT_TURNS) == (64, 12)
    assert "EpochOrder(10, shuffle='block', seed=3" in repr(order)
    same, other = (EpochOrder(10, blocks=np.array(b, "i4"), shuffle="block", seed=3) for b in ([4, 6], [6, 4]))
    assert same.parameters() == order.parameters() != other.parameters()
    full = EpochOrder(10, blocks=[4, 6], interleave=3)
    assert full.parameters() == EpochOrder(10).parameters()


GOLDEN: list[tuple[dict[str, Any], list[int]]] = [
    ({"n": 5, "shuffle": False}, [0, 1, 2, 3, 4]),
    ({"n": 100, "shuffle": False}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]),
    ({"n": 2, "shuffle": True, "seed": 3, "epoch": 2}, [0, 1]),
    ({"n": 5, "shuffle": True, "seed": 3, "epoch": 2}, [2, 4, 1, 0, 3]),
    ({"n": 16, "shuffle": True, "seed": 3, "epoch": 2}, [11, 4, 6, 8, 7, 14, 1, 10, 0, 5, 12, 2, 15, 3, 9, 13]),
    ({"n": 100, "shuffle": True, "seed": 3, "epoch": 2}, [4, 24, 5, 50, 3, 56, 80, 65, 33, 0, 72, 44, 91, 31, 63, 16]),
    (
        {"n": 1000, "shuffle": True, "seed": 3, "epoch": 2},
        [595, 249, 353, 716, 110, 392, 929, 763, 499, 41, 817, 916, 569, 383, 155, 377],
    ),
    (
        {"n": 1048577, "shuffle": True, "seed": 3, "epoch": 2},
        [
            487490,
            558851,
            869835,
            219371,
            186453,
            235055,
            249652,
            105318,
            317201,
            765532,
            386667,
            610496,
            63069,
            364618,
            620686,
            189632,
        ],
    ),
    (
        {"n": 1000000000, "shuffle": True, "seed": 3, "epoch": 2},
        [
            732009170,
            616688967,
            797440627,
            553448067,
            161005724,
            414679983,
            636630663,
            787530345,
            81565343,
            809504570,
            858303708,
            401517355,
            880913603,
            226378138,
            948881571,
            506401194,
        ],
    ),
    (
        {"n": 1000000000000, "shuffle": True, "seed": 3, "epoch": 2},
        [
            874743477429,
            353393483928,
            88701507448,
            980486402448,
            815266101379,
            719943277729,
            15680600677,
            712644065464,
            690353792904,
            462719689785,
            338599034639,
            219786342040,
            239278009108,
            521166485498,
            97467709607,
            403568311530,
        ],
    ),
    ({"n": 1000}, [960, 557, 978, 41, 888, 112, 439, 304, 458, 231, 139, 251, 461, 224, 469, 295]),
    ({"n": 1000, "seed": -(2**80), "epoch": 1}, [352, 878, 567, 4, 711, 409, 196, 181, 675, 985, 488, 952, 89, 569, 713, 601]),
    ({"n": 10, "shuffle": "block", "blocks": [3, 3, 4]}, [6, 8, 9, 7, 0, 1, 2, 4, 3, 5]),
    (
        {
            "n": 300,
            "shuffle": "block",
            "blocks": [7, 0, 93, 50, 50, 100],
            "seed": 1,
            "epoch": 4,
            "global_batch": 10,
            "interleave": 4,
            "turns": 3,
        },
        [90, 29, 8, 13, 95, 83, 92, 40, 26, 60, 150, 185, 126, 144, 195, 152],
    ),
    (
        {"n": 100000, "shuffle": "block", "blocks": [100] * 1_000},
        [17155, 36231, 10964, 65298, 11845, 65668, 97898, 68344, 78684, 5784, 45855, 75891, 48977, 48011, 688, 47680],
    ),
    (
        {"n": 100000, "shuffle": "block", "blocks": [100] * 1_000, "epoch": 1, "global_batch": 8, "interleave": 16, "turns": 1},
        [41249, 53404, 49527, 59202, 62937, 75745, 51473, 11339, 41241, 53425, 49504, 59245, 62955, 75706, 51424, 11347],
    ),
]


def test_segments_are_those_that_batches_come_from() -> None:
    sizes = [50] * 40
    order = EpochOrder(2000, shuffle="block", blocks=sizes, global_batch=10, interleave=4, turns=3)
    segments = order.segments()
    assert segments is not None and segments[0] == 0 and segments[-1] == 2000 and len(segments) - 1 <= 40 + 12 - 1
    numbers = np.searchsorted(segments, order[:], side="right") - 1
    open_at_once = [len(set(numbers[:p]) & set(numbers[p:])) for p in range(0, 2000, 10)]
    assert max(open_at_once) <= 12  # each is begun and ended before its lane begins the next one
    assert EpochOrder(2000, shuffle=True, blocks=sizes).segments() is None
    assert EpochOrder(2000, shuffle="block").segments() is None


@pytest.mark.parametrize(("arguments", "first"), GOLDEN)
def test_orders_are_the_same_for_ever(arguments: dict[str, Any], first: list[int]) -> None:
    assert EpochOrder(**arguments)[:16].tolist() == first
