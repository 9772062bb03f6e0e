"""Encoded offsets come back as they were, at random and in order, whatever lies between them."""

from __future__ import annotations

import pickle

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.storage.text.line_index import (
    BLOCK,
    GROUP,
    HeldArrays,
    Places,
    PlacesEncoder,
    PlacesTable,
)


def encoded(places: npt.NDArray[np.int64], pieces: int = 1) -> HeldArrays:
    encoder = PlacesEncoder()
    made = list(encoder.encoded(np.array_split(places, pieces)))
    long = np.concatenate([np.empty(0, np.uint8), *made])
    return HeldArrays(long, [np.arange(3), np.array(encoder.edges)])


def check(places: npt.NDArray[np.int64], held: HeldArrays) -> None:
    table = Places(held, held.short[-1])
    assert held.short[-1][-1] == held.long.size
    assert np.array_equal(table.distances(len(places) - 1), np.diff(places))
    numbers = np.random.default_rng(0).permutation(len(places) - 1)[:5000]
    starts, ends = table.reach(numbers)
    assert starts.dtype == ends.dtype == np.int64
    assert np.array_equal(starts, places[numbers]) and np.array_equal(ends, places[numbers + 1])


@pytest.mark.parametrize("most", [0, 1, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, 1 << 40])
@pytest.mark.parametrize(
    "count", [2, BLOCK, BLOCK + 1, GROUP, GROUP + 1, GROUP + 2, 3 * GROUP + 77]
)
def test_distances_of_any_size(count: int, most: int) -> None:
    distances = np.random.default_rng(count).integers(0, most, count - 1, endpoint=True)
    distances[-1] = most
    check(
        np.concatenate([[7], 7 + np.cumsum(distances)]),
        encoded(np.concatenate([[7], 7 + np.cumsum(distances)])),
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3 * GROUP), st.sampled_from([1, 255, 256, 1 << 16, 1 << 33])),
        min_size=1,
    ),
    st.integers(1, 9),
)
def test_groups_of_different_widths(stretches: list[tuple[int, int]], pieces: int) -> None:
    distances = np.concatenate([np.full(count, size) for count, size in stretches])
    places = np.concatenate([[0], np.cumsum(distances)])
    check(places, encoded(places, pieces))


@pytest.mark.parametrize("pieces", [1, 2, 7, 100])
def test_the_same_bytes_in_any_pieces(pieces: int) -> None:
    """Of more places than are encoded at once."""
    places = np.cumsum(np.random.default_rng(1).integers(0, 300, 40 * GROUP))
    held, other = encoded(places), encoded(places, pieces)
    assert np.array_equal(held.long, other.long) and np.array_equal(held.short[-1], other.short[-1])
    check(places, held)


def test_bytes_a_line() -> None:
    """One for lines below 256 bytes, two below 65,536; a long one among them widens its group
    alone.
    """
    lengths = np.full(100 * GROUP, 100)
    assert encoded(np.cumsum(lengths)).long.size == 1.125 * lengths.size
    lengths[5] = 1 << 40
    assert encoded(np.cumsum(lengths)).long.size == 1.125 * lengths.size + 7 * GROUP
    assert encoded(np.cumsum(np.full(10 * GROUP, 60_000))).long.size == 2.125 * 10 * GROUP


def test_one_place_and_none() -> None:
    assert Places(encoded(np.array([5])), encoded(np.array([5])).short[-1]).distances(0).size == 0
    assert encoded(np.empty(0, np.int64)).long.size == 0


def test_a_pickled_table_holds_no_places() -> None:
    places = np.cumsum(np.full(GROUP, 3))
    table = PlacesTable(encoded(places))
    assert table.places.reach(np.array([1, 70]))[0].tolist() == [6, 213]
    copy = pickle.loads(pickle.dumps(table))
    assert copy._places is None and copy.places.reach(np.array([1, 70]))[1].tolist() == [9, 216]
    assert table.path is None and [array.tolist() for array in table.short] == [[0, 1, 2]]
