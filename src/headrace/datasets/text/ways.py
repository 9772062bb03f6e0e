"""Ways of making batches of texts that make no tensor a sample (law 1: the batches are those of
single samples, bit for bit).

Blocks have one length, and are read into their batch. Of other texts the ids of all samples are
laid one behind the other, and padded at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import BatchWay, Collating, MadeBatch
from headrace.datasets.core.ways import FastWay, SampleBySample
from headrace.datasets.text.marked import ids_of, label_rows, labels_of, unmark
from headrace.memory.ring import empty
from headrace.order.request import BatchRequest
from headrace.storage.text.source import LinesSource
from headrace.storage.tokens.best_fit import BestFitSource
from headrace.storage.tokens.source import BlocksSource
from headrace.tokenizer import CharTokenizer


def way_of_ids(
    dataset: BaseDataset,
    collating: Collating,
    tokenizer: Any,
    max_length: int | None,
    is_marked: bool = False,
) -> BatchWay | None:
    """The way to padded batches, where samples are ids and nothing else; None: samples are made one
    by one.

    Args:
        dataset: whose values are ids.
        collating: the collate function.
        tokenizer, max_length: how its texts become ids.
        is_marked: True if the ids have marks, see `headrace.datasets.text.marked`.
    """
    if collating.join is None or not _are_ids(dataset):
        return None
    slow = SampleBySample(dataset, collating)
    joined, source, mode = JoinedIds(dataset, slow, is_marked), dataset.sample_source, dataset.mode
    is_lazy = not (mode.caches_samples or mode.prefetches_records(source))
    if (
        is_lazy
        and not is_marked
        and isinstance(source, LinesSource)
        and not source.has_records
        and not source.files.is_remote
        and type(tokenizer) is CharTokenizer
    ):
        return JoinedLines(dataset, slow, joined, source, tokenizer, max_length)
    return joined


def way_of_blocks(
    dataset: BaseDataset, collating: Collating, is_marked: bool = False
) -> BatchWay | None:
    """The way to batches of blocks, or of rows of documents, where they are stacked and not
    held; None: they are made one by one.
    """
    source = dataset.sample_source
    if not collating.stacks or not _are_bare(dataset) or dataset.mode.caches_samples:
        return None
    slow = SampleBySample(dataset, collating)
    if isinstance(source, BestFitSource):
        return RowsFromStorage(dataset, slow, source, is_marked)
    return (
        BlocksFromStorage(dataset, slow, source, is_marked)
        if isinstance(source, BlocksSource)
        else None
    )


def _are_bare(dataset: BaseDataset) -> bool:
    return not (dataset.return_index or dataset.is_transformed)


def _are_ids(dataset: BaseDataset) -> bool:
    return _are_bare(dataset) and dataset.targets is None


class JoinedIds(FastWay):
    """Reads and tokenises the texts of a batch together, and pads all at once."""

    name = "tokenised together, and padded at once"

    def __init__(self, dataset: BaseDataset, slow: SampleBySample, is_marked: bool) -> None:
        super().__init__(dataset, slow)
        self._is_marked = is_marked

    def _fits(self) -> bool:
        return _are_ids(self._dataset)

    def _attempt(self, request: BatchRequest, error: Exception | None) -> MadeBatch:
        dataset, collating = self._dataset, self._slow.collating
        values = dataset.sample_reader.values(
            dataset.whole_indices(request).tolist(), dataset.sample_access, error
        )
        if all(type(value) is np.ndarray for value in values):
            assert collating.join is not None
            start = time.perf_counter()
            ids, lengths = (
                np.concatenate(values),
                np.fromiter(map(len, values), np.int64, len(values)),
            )
            batch = (
                collating.join(ids_of(ids), lengths, labels_of(ids))
                if self._is_marked
                else collating.join(ids, lengths)
            )
            dataset.sample_reader.count_seconds("collate_seconds", start)
            if batch is not None:
                return MadeBatch(batch, len(request))
        return self._slow.collated(*dataset.finish(request, values), request)


class JoinedLines(FastWay):
    """Reads lines one behind the other, and maps their bytes to ids at once, where characters
    are tokens and nothing is held.
    """

    name = "lines straight from storage, and padded at once"

    def __init__(
        self,
        dataset: BaseDataset,
        slow: SampleBySample,
        rest: BatchWay,
        source: LinesSource,
        tokenizer: CharTokenizer,
        max_length: int | None,
    ) -> None:
        super().__init__(dataset, slow, rest)
        self._source, self._tokenizer, self._max_length = source, tokenizer, max_length

    def _fits(self) -> bool:
        return _are_ids(self._dataset)

    def _attempt(self, request: BatchRequest, error: Exception | None) -> MadeBatch:
        source, collating, start = self._source, self._slow.collating, time.perf_counter()
        whole = self._dataset.whole_indices(request)
        try:
            joined, sizes = source.read_joined(whole)
            read = time.perf_counter()
            ids, lengths = self._tokenizer.encode_bytes(
                joined, sizes, *source.codec, self._max_length
            )
        except Exception as caught:
            return self.fall_back(request, caught)
        decoded = time.perf_counter()
        assert collating.join is not None
        batch = collating.join(ids, lengths)
        if batch is None:  # the collator must see the samples
            return self._rest.make(request)
        counts: Any = self._dataset.sample_reader.counts
        counts["cache_misses"] += len(whole)
        counts["read_seconds"] += read - start
        counts["decode_seconds"] += decoded - read
        counts["collate_seconds"] += time.perf_counter() - decoded
        counts["bytes_read"] += len(joined)
        return MadeBatch(batch, len(request))


class BlocksFromStorage(FastWay):
    """Reads blocks of tokens into their rows of the batch."""

    name = "blocks straight from storage"

    def __init__(
        self, dataset: BaseDataset, slow: SampleBySample, source: Any, is_marked: bool
    ) -> None:
        super().__init__(dataset, slow)
        self._source, self._is_marked, self.writes_in_place = source, is_marked, True

    def _fits(self) -> bool:
        return _are_bare(self._dataset)

    def _attempt(self, request: BatchRequest, error: Exception | None) -> MadeBatch:
        source, reader, shape = (
            self._source,
            self._dataset.sample_reader,
            (len(request), self._source.length),
        )
        start, indices = time.perf_counter(), self._dataset.whole_indices(request).tolist()
        batch = {name: empty(shape, dtype) for name, dtype in self._columns().items()}
        try:
            self._read(indices, {name: column.numpy() for name, column in batch.items()})
        except Exception as caught:
            return self.fall_back(request, caught)
        reader.count_seconds("read_seconds", start)
        reader.counts["cache_misses"] += len(request)
        reader.counts["bytes_read"] += batch["input_ids"].numel() * source.dtype.itemsize
        return MadeBatch(batch, len(request))

    def _columns(self) -> dict[str, torch.dtype]:
        """What a batch has, and the dtype of each."""
        return {
            "input_ids": torch.int64,
            **({"labels": torch.int64} if self._is_marked else {}),
            "document_ids": torch.int32,
        }

    def _read(self, indices: Sequence[int], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self._source.read_into(indices, columns["input_ids"])
        self._source.documents_into(indices, columns["document_ids"])
        if self._is_marked:
            unmark(columns["input_ids"], columns["labels"])


class RowsFromStorage(BlocksFromStorage):
    """Reads whole documents into the rows of the batch."""

    name = "rows of documents straight from storage"

    def _columns(self) -> dict[str, torch.dtype]:
        return {
            "input_ids": torch.int64,
            "labels": torch.int64,
            "document_ids": torch.int32,
            "position_ids": torch.int64,
        }

    def _read(self, indices: Sequence[int], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self._source.read_columns(indices, columns)
        label_rows(
            columns["input_ids"],
            columns["position_ids"],
            columns["document_ids"],
            columns["labels"],
            self._is_marked,
        )
