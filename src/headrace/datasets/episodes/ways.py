"""Reads windows straight into their batch (law 1: the batches are those of single samples, bit for
bit).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.casting import cast_into, known_dtype
from headrace.core.batch import Collating
from headrace.core.batcher import ColumnReader
from headrace.core.dataset import BaseDataset
from headrace.dtypes import ArraySpec
from headrace.storage.episodes.source import MASK, EpisodeSource


def reader_of_windows(
    dataset: BaseDataset, collating: Collating, dtypes: Mapping[str, np.dtype[Any]]
) -> ColumnReader | None:
    """What makes batches of windows of numbers, where they are stacked and not held. None: samples
    are made one by one.

    Args:
        dataset: of windows.
        collating: the collate function.
        dtypes: by key, what numbers are cast to.
    """
    source = dataset.sample_source
    if not isinstance(source, EpisodeSource) or source.static or source.holds_objects:
        return None
    window = source.windows.options.window
    if window is None or not collating.stacks or not dataset.value_source.is_direct:
        return None
    if dataset.targets is not None:
        return None
    columns: dict[str, ArraySpec | None] = {}
    for key in source.keys:
        dtype = dtypes.get(key.name, key.dtype.newbyteorder("="))
        columns[key.name] = ArraySpec((key.window or 0, *key.row_shape), dtype)
        if known_dtype(dtype) is None:
            return None
    columns[MASK] = ArraySpec((window,), np.dtype(bool))

    def read(indices: npt.NDArray[np.int64], outs: dict[str, Any]) -> int:
        source.read_windows(indices, outs, cast_into)
        return sum(outs[key.name].size * key.dtype.itemsize for key in source.keys)

    return ColumnReader("windows straight from storage", dataset, columns, read)
