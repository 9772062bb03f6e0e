"""Windows over episodes, compared with a plain loop."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.episodes.windows import WindowOptions, Windows

LENGTHS = st.lists(st.integers(1, 12), min_size=0, max_size=6)


def expected(lengths: list[int], options: WindowOptions) -> list[tuple[int, int, int]]:
    """Episode, first step and end of each window."""
    window, stride, before, after, _ = options
    assert window is not None
    return [
        (episode, start, start + window)
        for episode, length in enumerate(lengths)
        for start in range(-before, length - window + after + 1, stride)
    ]


@st.composite
def options(draw: Any) -> WindowOptions:
    window = draw(st.integers(1, 6))
    padding = st.integers(0, window - 1)
    return WindowOptions(window, draw(st.integers(1, 5)), draw(padding), draw(padding))


@given(LENGTHS, options(), st.integers(1, 9), st.data())
def test_windows_are_those_of_a_loop(
    lengths: list[int], how: WindowOptions, height: int, data: Any
) -> None:
    windows, places = Windows(np.array(lengths, np.int64), how), expected(lengths, how)
    assert len(windows) == len(places)
    episodes, starts = windows.places(np.arange(len(windows)))
    assert list(zip(episodes, starts, strict=True)) == [place[:2] for place in places]
    firsts, ends = windows.inside(episodes, starts, how.window)
    masks = windows.masks(episodes, starts)
    for (episode, start, stop), first, end, mask in zip(places, firsts, ends, masks, strict=True):
        steps = np.arange(start, stop)
        is_inside = (steps >= 0) & (steps < lengths[episode])
        assert mask.tolist() == is_inside.tolist()
        assert steps[is_inside].tolist() == list(range(first, end)) != []
    # blocks hold windows that begin together
    sizes = windows.blocks(height)
    assert sizes is not None
    bands = [(episode, max(0, start) // height) for episode, start, _ in places]
    assert sizes.tolist() == [len(list(band)) for _, band in itertools.groupby(bands)]
    # steps of a batch come once
    chosen = data.draw(st.lists(st.sampled_from(range(len(places))))) if places else []
    covered = []
    for episode, first, end in windows.covered(np.array(chosen, np.int64)):
        covered += [(episode, step) for step in range(first, end)]
    steps_of_batch = set()
    for index in chosen:
        episode, start, stop = places[index]
        for step in range(max(0, start), min(stop, lengths[episode])):
            steps_of_batch.add((episode, step))
    assert len(covered) == len(set(covered)) and set(covered) == steps_of_batch


def test_whole_episodes() -> None:
    windows = Windows(np.array([3, 5]), WindowOptions())
    assert len(windows) == 2 and windows.blocks(4) is None
    assert windows.covered(np.array([1, 0, 1])) == [(0, 0, 3), (1, 0, 5)]
