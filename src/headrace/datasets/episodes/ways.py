"""Windows read straight into their batch (law 1: the batches are those of single samples, bit
for bit).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headrace.casting import as_array, cast_into, known_dtype
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import BatchWay, Collating, MadeBatch
from headrace.datasets.core.ways import FastWay, SampleBySample, is_bare
from headrace.memory.ring import empty
from headrace.order.request import BatchRequest
from headrace.storage.episodes.source import MASK, EpisodeSource


def way_of_windows(
    dataset: BaseDataset, collating: Collating, dtypes: Mapping[str, np.dtype[Any]]
) -> BatchWay | None:
    """The way to batches of windows of numbers, where they are stacked and not held; None: they are
    made one by one.

    Args:
        dataset: of windows.
        collating: the collate function.
        dtypes: by key, what numbers are cast to.
    """
    source, mode = dataset.sample_source, dataset.mode
    if (
        not isinstance(source, EpisodeSource)
        or source.windows.options.window is None
        or source.static
        or source.holds_objects
    ):
        return None
    if (
        not collating.stacks
        or not is_bare(dataset)
        or mode.caches_samples
        or mode.prefetches_records(source)
    ):
        return None
    made = {
        key.name: known_dtype(dtypes.get(key.name, key.dtype.newbyteorder("=")))
        for key in source.keys
    }
    known = {name: dtype for name, dtype in made.items() if dtype is not None}
    return (
        WindowsFromStorage(dataset, SampleBySample(dataset, collating), source, known)
        if len(known) == len(made)
        else None
    )


class WindowsFromStorage(FastWay):
    """Reads the windows of all keys into their tensors of the batch; keys that are cast are read
    beside it first.
    """

    name = "windows straight from storage"

    def __init__(
        self,
        dataset: BaseDataset,
        slow: SampleBySample,
        source: EpisodeSource,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__(dataset, slow)
        self._source, self._dtypes, self.writes_in_place = source, dtypes, True

    def _attempt(self, request: BatchRequest, error: Exception | None) -> MadeBatch:
        source, reader, start = self._source, self._dataset.sample_reader, time.perf_counter()
        batch = {
            key.name: empty((len(request), key.window or 0, *key.row_shape), self._dtypes[key.name])
            for key in source.keys
        }
        batch[MASK] = empty((len(request), source.windows.options.window or 0), torch.bool)
        try:
            source.read_windows(
                self._dataset.whole_indices(request),
                {name: as_array(tensor) for name, tensor in batch.items()},
                cast_into,
            )
        except Exception as caught:
            return self.fall_back(request, caught)
        reader.count_seconds("read_seconds", start)
        reader.counts["cache_misses"] += len(request)
        reader.counts["bytes_read"] += sum(
            batch[key.name].numel() * key.dtype.itemsize for key in source.keys
        )
        return MadeBatch(batch, len(request))
