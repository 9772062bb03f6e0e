"""Places come back as they were, at random and in order, whatever lies between them; and lines
begin where Python's own reader has them, however the text is cut.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings, strategies as st

from headrace.formats.text.index import PlacesWriter, _Buffer, places_in
from headrace.io.array_file import FileArrays
from headrace.io.local_files import LocalFiles


def check(distances: npt.NDArray[np.int64], pieces: int = 1) -> None:
    """In pieces as at once; any of them are found again."""
    places = np.concatenate([[7], 7 + np.cumsum(distances)])
    writer = PlacesWriter()
    made = [writer.low(piece) for piece in np.array_split(places, pieces) if piece.size]
    table = FileArrays(np.concatenate(made), [np.concatenate(writer.carries)])
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


def feeds(path: Path) -> list[int]:
    size = path.stat().st_size
    piece = _Buffer(1000).read(LocalFiles(), str(path), 0, size)
    assert piece.data.tobytes() == path.read_bytes()
    return piece.feeds.tolist()


def test_line_feeds_found_by_words_are_those_found_by_bytes(tmp_path: Path) -> None:
    for size, share in itertools.product((1, 7, 8, 9, 64, 1000), (0.01, 0.5, 1.0)):
        for number in range(20):
            is_feed = np.random.default_rng(number).random(size) < share
            path = tmp_path / f"{size} {share} {number}"
            path.write_bytes(np.where(is_feed, 10, 200).astype(np.uint8).tobytes())
            assert feeds(path) == (np.flatnonzero(is_feed) + 1).tolist()
