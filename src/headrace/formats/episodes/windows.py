"""Windows over the steps of episodes: which steps of which episode is sample i.

Windows of one length begin `stride` steps apart in each episode, perhaps before its first step, and
may end behind its last one. All follows from the lengths of the episodes by arithmetic: there is no
list of windows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.memory.anonymous import SharedArray

PADS = ("edge", "constant")


class WindowOptions(NamedTuple):
    """How windows lie in an episode.

    Attributes:
        window: steps of a window; None: a sample is a whole episode.
        stride: from the beginning of one window to that of the next.
        before: steps that the first window begins before the episode.
        after: steps that windows may end behind the episode.
        pad: what a window has there: "edge": the first or last step again; "constant": zeros.
    """

    window: int | None = None
    stride: int = 1
    before: int = 0
    after: int = 0
    pad: str = "edge"


def window_options(
    window: int | None, stride: int | None, before: int, after: int | None, pad: str
) -> WindowOptions:
    """The options, checked; see `WindowOptions`. Without `after`, each step begins a window, as far
    as the stride allows.

    Raises:
        ConfigError: one makes no sense; the message names it.
    """
    if pad not in PADS:
        raise ConfigError(f"pad must be one of {', '.join(map(repr, PADS))}, not {pad!r}")
    if window is None:
        for name, value in (("stride", stride), ("pad_before", before), ("pad_after", after)):
            if value:
                raise ConfigError(f"{name}={value!r} goes with windows: pass window= too")
        return WindowOptions(pad=pad)
    after = window - 1 if after is None else after
    for name, value in (("pad_before", before), ("pad_after", after)):
        if not 0 <= value < window:
            raise ConfigError(
                f"{name}={value} must be at least 0, and less than window={window}: a window has "
                "at least one step"
            )
    return WindowOptions(window, stride or 1, before, after, pad)


class Windows:
    """The windows of some episodes; or, without a window, the episodes themselves.

    Args:
        lengths: [episodes] steps of each.
        options: how windows lie in them.
    """

    def __init__(self, lengths: IntArray, options: WindowOptions) -> None:
        self.options: WindowOptions = options
        counts = (
            np.ones(len(lengths), np.int64)
            if options.window is None
            else self._counts(lengths, options.window)
        )
        self._lengths, self._first = (
            SharedArray(lengths),
            SharedArray(np.concatenate([[0], np.cumsum(counts)])),
        )

    def _counts(self, lengths: IntArray, window: int) -> IntArray:
        _, stride, before, after, _ = self.options
        counts: IntArray = np.maximum(0, (lengths - window + after + before) // stride + 1)
        counts[lengths == 0] = 0
        return counts

    def __len__(self) -> int:
        return int(self._first.array[-1])

    @property
    def lengths(self) -> IntArray:
        """[episodes] steps of each."""
        return self._lengths.array

    @property
    def counts(self) -> IntArray:
        """[episodes] windows of each."""
        return np.diff(self._first.array)

    def episode_of(self, indices: npt.NDArray[np.int64]) -> IntArray:
        """The number of the episode that each window lies in."""
        return np.searchsorted(self._first.array, indices, side="right") - 1

    def places(self, indices: npt.NDArray[np.int64]) -> tuple[IntArray, IntArray]:
        """The episode of each window, and the step that it begins at, which may be below 0."""
        episodes = self.episode_of(indices)
        return episodes, (
            indices - self._first.array[episodes]
        ) * self.options.stride - self.options.before

    def inside(
        self, episodes: IntArray, starts: IntArray, window: int | None
    ) -> tuple[IntArray, IntArray]:
        """The first step that is read of each window, and one past the last: at least one, but
        of an empty episode.
        """
        lengths = self.lengths[episodes]
        if window is None:
            return np.zeros(len(episodes), np.int64), lengths
        firsts = np.clip(starts, 0, np.maximum(lengths - 1, 0))
        return firsts, np.minimum(np.maximum(starts + window, firsts + 1), lengths)

    def holding(self, episode: int, first: int, end: int) -> IntArray:
        """The numbers of the windows that steps of an episode lie in, of windows that don't overlap
        and begin at the first step.
        """
        begin = int(self._first.array[episode])
        stride = self.options.stride
        return np.arange(begin + first // stride, begin + -(-end // stride))

    def masks(self, episodes: IntArray, starts: IntArray) -> npt.NDArray[np.bool_]:
        """[windows, window]: True where a step lies inside of its episode."""
        steps = starts[:, None] + np.arange(self.options.window or 0)
        inside: npt.NDArray[np.bool_] = (steps >= 0) & (steps < self.lengths[episodes][:, None])
        return inside

    def blocks(self, height: int, begins: IntArray, edges: IntArray) -> IntArray:
        """How many samples, one after the other, begin within the same so many rows.

        Args:
            height: rows.
            begins: [episodes] the row of the first step of each.
            edges: [runs + 1] where each run of rows begins, in which these are counted.
        """
        counts = -(-np.diff(edges) // height)
        firsts = np.cumsum(counts) - counts
        inside = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
        borders = np.repeat(edges[:-1], counts) + inside * height
        episodes = np.searchsorted(begins, borders, side="right") - 1
        is_before = episodes < 0  # the first chosen episode may begin later
        episodes[is_before] = 0
        begun = self._begun(episodes, borders - begins[episodes])
        begun[is_before] = 0
        sizes: IntArray = np.diff(begun, prepend=0, append=len(self))
        return sizes[sizes > 0]

    def _begun(self, episodes: IntArray, steps: IntArray) -> IntArray:
        """How many windows begin in earlier episodes, or in this one before a step; those that
        begin before its first step do so there.
        """
        before = -(-(steps + self.options.before) // self.options.stride)
        own = np.where(steps > 0, np.minimum(before, self.counts[episodes]), 0)
        return self._first.array[episodes] + own
