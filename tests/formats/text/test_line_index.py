"""Encoded offsets come back as they were, at random and in order, whatever lies between them."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings, strategies as st

from headrace.formats.text.line_index import BLOCK, GROUP, HeldArrays, Places, PlacesEncoder


def encoded(places: npt.NDArray[np.int64], pieces: int = 1) -> HeldArrays:
    encoder = PlacesEncoder()
    made = list(encoder.encoded(np.array_split(places, pieces)))
    long = np.concatenate([np.empty(0, np.uint8), *made])
    return HeldArrays(long, [np.arange(3), np.array(encoder.edges)])


def check(distances: npt.NDArray[np.int64], pieces: int = 1) -> HeldArrays:
    """In pieces as at once; any of them are found again."""
    places = np.concatenate([[7], 7 + np.cumsum(distances)])
    held, at_once = encoded(places, pieces), encoded(places)
    assert np.array_equal(held.long, at_once.long)
    assert np.array_equal(held.short[-1], at_once.short[-1])
    assert held.short[-1][-1] == held.long.size
    table = Places(held)
    assert np.array_equal(table.distances(len(distances)), distances)
    numbers = np.random.default_rng(0).permutation(len(distances))[:5000]
    starts, ends = table.reach(numbers)
    assert starts.dtype == ends.dtype == np.int64
    assert np.array_equal(starts, places[numbers])
    assert np.array_equal(ends, places[numbers + 1])
    return held


def test_distances_of_any_size() -> None:
    sizes = (0, 1, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, 1 << 40)
    counts = (1, BLOCK - 1, BLOCK, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 76)
    for most, count in itertools.product(sizes, counts):
        distances = np.random.default_rng(count).integers(0, most, count, endpoint=True)
        distances[-1] = most
        check(distances)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 3 * GROUP), st.sampled_from([1, 255, 256, 1 << 16, 1 << 33])),
        min_size=1,
    ),
    st.integers(1, 100),
)
def test_groups_of_different_widths(stretches: list[tuple[int, int]], pieces: int) -> None:
    check(np.concatenate([np.full(count, size) for count, size in stretches]), pieces)
