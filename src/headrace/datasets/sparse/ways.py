"""Makes batches of sparse rows without a tensor a sample (law 1: the batches are those of single
samples, bit for bit).
"""

from __future__ import annotations

import time
from typing import Any

from headrace.core.batch import BatchReader, Collating, MadeBatch, with_targets
from headrace.core.dataset import BaseDataset
from headrace.datasets.sparse.batches import SlotArrays, SparseLayout, sparse_collate, to_batch
from headrace.errors import SampleError
from headrace.order.request import BatchRequest
from headrace.storage.sparse.rows import CSRRows
from headrace.storage.sparse.source import JoinedRows, SparseSource


class RowsTogether(BatchReader):
    """Reads the rows of a batch together, and lays them out at once; of cached rows too.

    Args:
        dataset: whose rows they are.
        collating: the collate function.
        columns: of a row.
        layout: of a batch.
    """

    name = "rows read together, and laid out at once"

    def __init__(
        self, dataset: BaseDataset, collating: Collating, columns: int, layout: SparseLayout
    ) -> None:
        self._dataset = dataset
        self._collating = collating
        self._columns = columns
        self._layout = layout
        source = dataset.sample_source
        self._source: SparseSource | JoinedRows | None = None
        if dataset.value_source.is_direct and isinstance(source, (SparseSource, JoinedRows)):
            self._source = source

    def read(self, request: BatchRequest) -> MadeBatch:
        dataset = self._dataset
        reader = dataset.sample_reader
        arrays: SlotArrays | None = None
        if self._source is not None:
            if self._layout != "dense":
                arrays = SlotArrays()
            with reader.reading_together(len(request)) as counts:
                rows = self._source.read_rows(dataset.whole_indices(request), arrays)
                counts["bytes_read"] += rows.indices.nbytes + rows.values.nbytes
        else:
            indices = dataset.checked_indices(request).tolist()
            values: list[Any] = dataset.value_source.read(indices, dataset.access())
            if any(isinstance(value, SampleError) for value in values):
                samples, made_of = dataset.finish(request, values)
                return self._collating.batch_of(dataset, samples, made_of, request)
            rows = CSRRows.joined(values)
        start = time.perf_counter()
        batch = to_batch(rows, self._columns, self._layout, arrays)
        reader.count_seconds("collate_seconds", start)
        return with_targets(dataset, batch, request)


def reader_of_rows(
    dataset: BaseDataset, collating: Collating, columns: int, layout: SparseLayout
) -> BatchReader | None:
    """What makes batches of rows, where they are collated as the layout is. None: samples are made
    one by one.
    """
    fits = collating.stacks if layout == "dense" else collating.calls(sparse_collate)
    return RowsTogether(dataset, collating, columns, layout) if fits else None
