"""Windows over episodes, compared with a plain loop."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.storage.episodes.windows import WindowOptions, Windows, window_options

LENGTHS = st.lists(st.integers(1, 12), min_size=0, max_size=6)


def expected(lengths: list[int], options: WindowOptions) -> list[tuple[int, int]]:
    """Episode and first step of each window."""
    window, stride, before, after, _ = options
    assert window is not None
    return [
        (episode, start)
        for episode, length in enumerate(lengths)
        for start in range(-before, length - window + after + 1, stride)
    ]


@st.composite
def options(draw: Any) -> WindowOptions:
    window = draw(st.integers(1, 6))
    return WindowOptions(
        window,
        draw(st.integers(1, 5)),
        draw(st.integers(0, window - 1)),
        draw(st.integers(0, window - 1)),
    )


@given(LENGTHS, options())
def test_places_are_those_of_a_loop(lengths: list[int], how: WindowOptions) -> None:
    windows = Windows(np.array(lengths, np.int64), how)
    found = expected(lengths, how)
    assert len(windows) == len(found)
    episodes, starts = windows.places(np.arange(len(windows)))
    assert list(zip(episodes.tolist(), starts.tolist(), strict=True)) == found
    firsts, ends = windows.inside(episodes, starts, how.window)
    for (episode, start), first, end, mask in zip(
        found, firsts.tolist(), ends.tolist(), windows.masks(episodes, starts), strict=True
    ):
        steps = [
            step for step in range(start, start + (how.window or 0)) if 0 <= step < lengths[episode]
        ]
        assert steps and (first, end) == (steps[0], steps[-1] + 1)
        assert mask.tolist() == [
            0 <= step < lengths[episode] for step in range(start, start + (how.window or 0))
        ]


@given(LENGTHS, options(), st.integers(1, 9))
def test_blocks_hold_windows_that_begin_together(
    lengths: list[int], how: WindowOptions, height: int
) -> None:
    windows = Windows(np.array(lengths, np.int64), how)
    sizes = windows.blocks(height)
    assert sizes is not None and sizes.sum() == len(windows) and (sizes > 0).all()
    bands = [(episode, max(0, start) // height) for episode, start in expected(lengths, how)]
    assert sizes.tolist() == [len(list(same)) for _, same in itertools.groupby(bands)]


@given(LENGTHS, options(), st.data())
def test_covered_steps_come_once(lengths: list[int], how: WindowOptions, data: Any) -> None:
    windows = Windows(np.array(lengths, np.int64), how)
    chosen = data.draw(st.lists(st.integers(0, len(windows) - 1))) if len(windows) else []
    found = [
        (episode, step)
        for episode, first, end in windows.covered(np.array(chosen, np.int64))
        for step in range(first, end)
    ]
    places = [expected(lengths, how)[index] for index in chosen]
    steps = {
        (e, step)
        for e, start in places
        for step in range(start, start + (how.window or 0))
        if 0 <= step < lengths[e]
    }
    assert len(found) == len(set(found)) and set(found) == steps


def test_whole_episodes() -> None:
    windows = Windows(np.array([3, 5]), WindowOptions())
    assert len(windows) == 2 and windows.blocks(4) is None
    assert windows.covered(np.array([1, 0, 1])) == [(0, 0, 3), (1, 0, 5)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 2, 0, None, "edge"), "stride=2 goes with windows: pass window= too"),
        ((None, None, 1, None, "edge"), "pad_before=1 goes with windows"),
        ((4, 1, 4, None, "edge"), "pad_before=4 must be at least 0, and less than window=4"),
        ((4, 1, 0, 9, "edge"), "pad_after=9 must be at least 0, and less than window=4"),
        ((4, 1, 0, None, "mirror"), "pad must be one of 'edge', 'constant', not 'mirror'"),
    ],
)
def test_options_that_make_no_sense(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        window_options(*arguments)
