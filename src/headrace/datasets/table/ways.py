"""A way of making batches of tables: column by column, without making samples."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.casting import as_array, cast_into, known_dtype
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import BatchWay, Collating, MadeBatch
from headrace.datasets.core.ways import FastWay, SampleBySample, empty_rows, is_bare
from headrace.dtypes import ArraySpec
from headrace.order.request import BatchRequest
from headrace.storage.table.source import Out, TableSource

Specs = Mapping[str, ArraySpec | None]


def way_of_columns(
    dataset: BaseDataset, collating: Collating, stored: Specs, specs: Specs, lists: frozenset[str]
) -> BatchWay | None:
    """The way to stacked batches of dicts, where nothing is held; None: samples are made one by
    one.

    Args:
        dataset: of a table.
        collating: the collate function.
        stored: shape and dtype of the values of each column, if they are alike.
        specs: those that they are cast to.
        lists: names of columns whose values become lists.
    """
    source, mode = dataset.sample_source, dataset.mode
    if not (
        isinstance(source, TableSource)
        and not source.is_one
        and collating.stacks
        and is_bare(dataset)
    ):
        return None
    if (
        mode.caches_samples
        or mode.prefetches_records(source)
        or not all(name in lists or _is_known(spec) for name, spec in specs.items())
    ):
        return None
    return ColumnsTogether(dataset, SampleBySample(dataset, collating), source, stored, specs)


def _is_known(spec: ArraySpec | None) -> bool:
    return spec is not None and 0 not in spec.shape and known_dtype(spec.dtype) is not None


class ColumnsTogether(FastWay):
    """Reads the values of each column into the batch; those that are cast are read beside it
    first.
    """

    name = "column by column, straight from storage"

    def __init__(
        self,
        dataset: BaseDataset,
        slow: SampleBySample,
        source: TableSource,
        stored: Specs,
        specs: Specs,
    ) -> None:
        super().__init__(dataset, slow)
        self._source, self._specs, self.writes_in_place = source, dict(specs), True
        self._cast = {
            name: spec for name, spec in stored.items() if spec is not None and spec != specs[name]
        }

    def _attempt(self, request: BatchRequest, error: Exception | None) -> MadeBatch:
        dataset, start, count = self._dataset, time.perf_counter(), len(request)
        batch: dict[str, Any] = {
            name: [None] * count if spec is None else empty_rows(count, spec)
            for name, spec in self._specs.items()
        }
        outs: dict[str, Out] = {
            name: out if isinstance(out, list) else as_array(out) for name, out in batch.items()
        }
        beside: dict[str, Any] = {
            name: np.empty((count, *spec.shape), spec.dtype) for name, spec in self._cast.items()
        }
        try:
            self._source.read_columns(dataset.whole_indices(request), {**outs, **beside})
            for name, values in beside.items():
                cast_into(values, as_array(batch[name]))
        except Exception as caught:
            return self.fall_back(request, caught)
        reader = dataset.sample_reader
        reader.count_seconds("read_seconds", start)
        reader.counts["cache_misses"] += count
        reader.counts["bytes_read"] += sum(_size(out) for out in (outs | beside).values())
        return self.with_targets(batch, request)


def _size(out: Out) -> int:
    return sum(map(len, filter(None, out))) if isinstance(out, list) else out.nbytes
