"""The way of making batches of sparse rows that makes no tensor a sample (law 1: the batches are
those of single samples, bit for bit).
"""

from __future__ import annotations

import time
from typing import Any

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import BatchWay, Collating, MadeBatch
from headrace.datasets.core.ways import FastWay, SampleBySample
from headrace.datasets.sparse.batches import SlotArrays, SparseLayout, sparse_collate, to_batch
from headrace.errors import SampleError
from headrace.order.request import BatchRequest
from headrace.storage.sparse.rows import CSRRows
from headrace.storage.sparse.source import JoinedRows, SparseSource


def way_of_rows(
    dataset: BaseDataset, collating: Collating, columns: int, layout: SparseLayout
) -> BatchWay | None:
    """The way to batches of rows, where nobody transforms them and they are collated as the
    layout is; None: they are made one by one.
    """
    fits = collating.stacks if layout == "dense" else collating.calls(sparse_collate)
    return (
        RowsTogether(dataset, SampleBySample(dataset, collating), columns, layout)
        if fits and _are_bare(dataset)
        else None
    )


def _are_bare(dataset: BaseDataset) -> bool:
    return not (dataset.return_index or dataset.is_transformed)


class RowsTogether(FastWay):
    """Reads the rows of a batch together, and lays them out at once; of cached rows too."""

    name = "rows read together, and laid out at once"

    def __init__(
        self, dataset: BaseDataset, slow: SampleBySample, columns: int, layout: SparseLayout
    ) -> None:
        super().__init__(dataset, slow)
        self._columns, self._layout, self.writes_in_place = columns, layout, True
        source, mode = dataset.sample_source, dataset.mode
        is_read_here = not (mode.caches_samples or mode.prefetches_records(source))
        self._source = (
            source if is_read_here and isinstance(source, (SparseSource, JoinedRows)) else None
        )

    def _fits(self) -> bool:
        return _are_bare(self._dataset)

    def _attempt(self, request: BatchRequest, error: Exception | None) -> MadeBatch:
        dataset, reader, whole = (
            self._dataset,
            self._dataset.sample_reader,
            self._dataset.whole_indices(request),
        )
        arrays = None if self._source is None or self._layout == "dense" else SlotArrays()
        if self._source is not None:
            start = time.perf_counter()
            try:
                rows = self._source.read_rows(whole, arrays)
            except Exception as caught:
                return self.fall_back(request, caught)
            reader.count_seconds("read_seconds", start)
            reader.counts["cache_misses"] += len(whole)
            reader.counts["bytes_read"] += rows.indices.nbytes + rows.values.nbytes
        else:
            values: list[Any] = reader.values(whole.tolist(), dataset.sample_access, error)
            if any(isinstance(value, SampleError) for value in values):
                return self._slow.collated(*dataset.finish(request, values), request)
            rows = CSRRows.joined(values)
        start = time.perf_counter()
        batch = to_batch(rows, self._columns, self._layout, arrays)
        reader.count_seconds("collate_seconds", start)
        return self.with_targets(batch, request)
