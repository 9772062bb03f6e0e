"""Places come back as they were, at random and in order, whatever lies between them."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings, strategies as st

from headrace.formats.text.index import places_in, split_places
from headrace.io.array_file import FileArrays


def check(distances: npt.NDArray[np.int64], pieces: int = 1) -> None:
    """In pieces as at once; any of them are found again."""
    places = np.concatenate([[7], 7 + np.cumsum(distances)])
    low: list[npt.NDArray[np.uint16]] = []
    stream = [piece for piece in np.array_split(places, pieces) if piece.size]
    carries = split_places(stream, low.append)
    table = FileArrays(np.concatenate(low), [carries])
    numbers = np.random.default_rng(0).permutation(len(distances))
    starts, ends = places_in(table, numbers)
    assert starts.dtype == ends.dtype == np.int64
    assert np.array_equal(starts, places[numbers])
    assert np.array_equal(ends, places[numbers + 1])


def test_distances_of_any_size() -> None:
    sizes = (0, 1, 255, 65_535, 65_536, 65_537, 1 << 20)
    for most, count in itertools.product(sizes, (1, 63, 4097)):
        distances = np.random.default_rng(count).integers(0, most, count, endpoint=True)
        distances[-1] = most
        check(distances)
    check(np.array([0, (1 << 32) + 5, 0, 65_536, 1]))


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.sampled_from([0, 1, 255, 256, 1 << 16, 70_000])),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 100),
)
def test_distances_in_pieces(stretches: list[tuple[int, int]], pieces: int) -> None:
    check(np.concatenate([np.full(count, size) for count, size in stretches]), pieces)
