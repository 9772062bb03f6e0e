"""The keyed permutation is a bijection at every size, and shuffles."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings, strategies as st

from headrace.order.permutation import KEY_COUNT, derive_keys, mix, permute, permute_within

SIZES = sorted({1, 2, 3} | {4**k + d for k in range(1, 11) for d in (-1, 0, 1)})


def keys_of(*parts: object) -> np.ndarray:
    return derive_keys("test", *parts, count=KEY_COUNT)


def test_a_position_gets_the_same_index_alone_and_among_many() -> None:
    n, keys = 100_003, keys_of(1)  # more than one block of positions
    everything = permute(np.arange(n), n, keys)
    chosen = np.array([0, 1, 32_767, 32_768, 65_536, n - 1])
    assert np.array_equal(permute(chosen, n, keys), everything[chosen])
    assert permute(chosen[1:2], n, keys) == everything[1]


def test_all_orders_of_a_tiny_range_are_equally_likely() -> None:
    for n in [2, 3, 4]:
        draws, orders = 20_000, math.factorial(n)
        keys = np.repeat(np.stack([keys_of(seed) for seed in range(draws)], axis=1), n, axis=1)
        indices = permute_within(np.tile(np.arange(n), draws), np.full(draws * n, n), keys)
        counts = np.unique(indices.reshape(draws, n), axis=0, return_counts=True)[1]
        assert len(counts) == orders
        expected = draws / orders
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < orders - 1 + 5 * math.sqrt(2 * (orders - 1))


@given(data=st.data(), seed=st.integers(0, 2**40))
@settings(max_examples=50)
def test_permute_within_agrees_with_permute(data: st.DataObject, seed: int) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(1, 3_000), max_size=30)), np.int64)
    positions = np.array([data.draw(st.integers(0, int(size) - 1)) for size in sizes], np.int64)
    columns = [keys_of(seed, number) for number in range(len(sizes))]
    keys = np.stack(columns, axis=1) if columns else np.empty((KEY_COUNT, 0), np.uint32)
    expected = [
        int(permute(positions[i : i + 1], int(n), columns[i])[0]) for i, n in enumerate(sizes)
    ]
    assert permute_within(positions, sizes, keys).tolist() == expected


def test_keys_and_mix_are_the_same_for_ever() -> None:
    assert derive_keys("order", 42, 0, count=3).tolist() == [1492409428, 2434552294, 1957788267]
    # the finaliser of MurmurHash3 as published: fmix32(1), fmix32(2)
    assert mix(np.array([1, 2], np.uint32), np.uint32(0)).tolist() == [0x514E28B7, 0x30F4C306]


def test_it_is_a_bijection_around_powers_of_four() -> None:
    for n in SIZES:
        indices = permute(np.arange(n), n, keys_of(n))
        assert np.array_equal(np.sort(indices), np.arange(n))


@given(n=st.integers(1, 2**62), seed=st.integers(), data=st.data())
def test_it_is_a_bijection_of_huge_ranges(n: int, seed: int, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=50))
    positions = np.array(drawn, np.int64)
    keys = keys_of(seed)
    indices = permute(positions, n, keys)
    assert indices.dtype == np.int64 and len(set(indices.tolist())) == len(positions)
    assert all(0 <= index < n for index in indices.tolist())
