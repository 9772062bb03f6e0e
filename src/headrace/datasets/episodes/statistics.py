"""Statistics of the steps of episodes, in one pass and with bounded memory.

Means and sums of squares of parts are merged as in Chan, Golub and LeVeque (1979, "Updating
formulae and a pairwise algorithm for computing sample variances"), in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import ConfigError
from headrace.storage.episodes.source import EpisodeSource
from headrace.storage.episodes.steps import EpisodeArrays

_PART = 4 << 20  # bytes that are read at once


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Statistics of the values of a key. Tensors are float64 for float64 keys, else float32.

    Attributes:
        mean, std, min, max: statistics for each element of a step; for images (steps with two or
            more axes) for each channel, their last axis. The standard deviation is that of the
            population.
        count: number of values per statistic.
    """

    mean: torch.Tensor
    std: torch.Tensor
    min: torch.Tensor
    max: torch.Tensor
    count: int


def statistics_of(
    source: EpisodeSource, key: EpisodeArrays, runs: Sequence[tuple[int, int, int]]
) -> Statistics:
    """The statistics of one key over runs of steps.

    Args:
        runs: of steps: episode, first step and end.

    Raises:
        ConfigError: its values are no real numbers, or there are no steps.
        FormatError, OSError: see `EpisodeSource.read_runs`.
    """
    if key.holds_objects or key.dtype.kind not in "biuf":
        raise ConfigError(
            f"{key.name!r} has no statistics: its values are {key.dtype}, and no real numbers: "
            "leave it out of keys"
        )
    # of images all but the channels
    axes = tuple(range(len(key.row_shape))) if len(key.row_shape) > 1 else (0,)
    count = 0
    mean: Any = 0.0
    squares: Any = 0.0  # the sum of squared distances from the mean
    least: Any = None
    most: Any = None
    for rows in _parts(source, key, runs):
        values = rows.astype(np.float64)
        size = math.prod(rows.shape[axis] for axis in axes)
        part_mean = values.mean(axes)
        values -= part_mean
        np.square(values, out=values)
        apart = part_mean - mean
        total = count + size
        mean = mean + apart * (size / total)
        squares = squares + values.sum(axes) + apart**2 * (count * size / total)
        count = total
        least = rows.min(axes) if least is None else np.minimum(least, rows.min(axes))
        most = rows.max(axes) if most is None else np.maximum(most, rows.max(axes))
    if not count:
        raise ConfigError(f"{key.name!r} has no statistics: there are no steps")
    dtype = np.float64 if key.dtype == np.float64 else np.float32
    moments = (mean, np.sqrt(squares / count), least, most)
    means, deviations, minima, maxima = (
        torch.from_numpy(np.asarray(value, dtype).copy()) for value in moments
    )
    return Statistics(means, deviations, minima, maxima, count)


def _parts(
    source: EpisodeSource, key: EpisodeArrays, runs: Sequence[tuple[int, int, int]]
) -> Iterator[npt.NDArray[Any]]:
    """The steps of all runs, [steps, ...] some at a time."""
    most = max(1, _PART // max(1, key.row_bytes))
    waiting = list[tuple[int, int, int]]()
    steps = 0
    for episode, first, end in runs:
        for begin in range(first, end, most):
            stop = min(begin + most, end)
            if steps + stop - begin > most:
                yield np.concatenate(source.read_runs(key, waiting))
                waiting = []
                steps = 0
            waiting.append((episode, begin, stop))
            steps += stop - begin
    if waiting:
        yield np.concatenate(source.read_runs(key, waiting))
