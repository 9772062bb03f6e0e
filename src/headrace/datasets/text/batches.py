"""Makes batches of texts without a tensor a sample (law 1: the batches are those of single samples,
bit for bit).

Blocks have one length, and are read into their batch. Of other texts the ids of all samples are
laid one behind the other, and padded at once.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.batcher import BatchReader, Collating, ColumnReader, MadeBatch
from headrace.core.dataset import BaseDataset
from headrace.dtypes import ArraySpec
from headrace.formats.text.source import LinesSource
from headrace.formats.tokens.source import BlocksSource
from headrace.order.ranks import BatchRequest
from headrace.tokenizer import CharTokenizer

IGNORED = -100
"""The label of what is not supervised."""


def unmark(ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> None:
    """Makes marked ids the ids, in their place, and writes their labels into another array of
    the same shape.
    """
    np.copyto(labels, ids)
    is_marked = ids < 0
    labels[is_marked] = IGNORED
    np.invert(ids, out=ids, where=is_marked)


class JoinedIds(BatchReader):
    """Reads and tokenises the texts of a batch together, and pads all at once.

    Args:
        dataset: whose values are ids.
        collating: has a `join`.
        is_marked: True if the ids have marks.
    """

    name = "tokenised together, and padded at once"
    writes_in_place = False

    def __init__(self, dataset: BaseDataset, collating: Collating, is_marked: bool) -> None:
        assert collating.join is not None
        self._dataset = dataset
        self._collating = collating
        self._join = collating.join
        self._is_marked = is_marked

    def read(self, request: BatchRequest) -> MadeBatch | None:
        dataset = self._dataset
        if dataset.targets is not None:
            return None
        indices = dataset.whole_indices(request).tolist()
        values = dataset.value_source.read(indices, dataset.access())
        if all(type(value) is np.ndarray for value in values):
            start = time.perf_counter()
            ids = np.concatenate(values)
            lengths = np.fromiter(map(len, values), np.int64, len(values))
            labels = None
            if self._is_marked:
                ids = ids.astype(np.int64)
                labels = np.empty_like(ids)
                unmark(ids, labels)
            batch = self._join(ids, lengths, labels)
            dataset.sample_reader.count_seconds("collate_seconds", start)
            if batch is not None:
                return MadeBatch(batch, len(request))
        samples, made_of = dataset.finish(request, values)
        return self._collating.batch_of(dataset, samples, made_of, request)


class JoinedLines(JoinedIds):
    """Reads lines one behind the other, and maps their bytes to ids at once, where characters
    are tokens and nothing is held.
    """

    name = "lines straight from storage, and padded at once"

    def __init__(
        self,
        dataset: BaseDataset,
        collating: Collating,
        source: LinesSource,
        tokenizer: CharTokenizer,
        max_length: int | None,
    ) -> None:
        super().__init__(dataset, collating, False)
        self._source = source
        self._tokenizer = tokenizer
        self._max_length = max_length

    def read(self, request: BatchRequest) -> MadeBatch | None:
        dataset = self._dataset
        if dataset.targets is not None:
            return None
        whole = dataset.whole_indices(request)
        with dataset.sample_reader.reading_together(len(whole)) as counts:
            joined, sizes = self._source.read_joined(whole)
            counts["bytes_read"] += len(joined)
            start = time.perf_counter()
            ids, lengths = self._tokenizer.encode_bytes(
                joined, sizes, *self._source.codec, self._max_length
            )
            seconds: Any = time.perf_counter() - start
            counts["decode_seconds"] += seconds
            counts["read_seconds"] -= seconds
        batch = self._join(ids, lengths)
        if batch is None:  # the collator must see the samples
            return super().read(request)
        return MadeBatch(batch, len(request))


def reader_of_ids(
    dataset: BaseDataset,
    collating: Collating,
    tokenizer: Any,
    max_length: int | None,
    is_marked: bool,
) -> BatchReader | None:
    """What makes padded batches, where samples are ids and nothing else. None: samples are made one
    by one.

    Args:
        dataset: whose values are ids.
        collating: the collate function.
        tokenizer, max_length: how its texts become ids.
        is_marked: True if the ids have marks.
    """
    if collating.join is None or dataset.targets is not None:
        return None
    source = dataset.sample_source
    if (
        isinstance(source, LinesSource)
        and not source.has_records
        and type(tokenizer) is CharTokenizer
        and dataset.value_source.is_direct
        and not source.files.is_remote
    ):
        return JoinedLines(dataset, collating, source, tokenizer, max_length)
    return JoinedIds(dataset, collating, is_marked)


def reader_of_blocks(
    dataset: BaseDataset, collating: Collating, is_marked: bool
) -> BatchReader | None:
    """What makes batches of blocks, where they are stacked and not held. None: samples are made one
    by one.
    """
    source = dataset.sample_source
    if not collating.stacks or not dataset.value_source.is_direct:
        return None
    if not isinstance(source, BlocksSource):
        return None
    long = ArraySpec((source.length,), np.dtype(np.int64))
    columns = {"input_ids": long}
    if is_marked:
        columns["labels"] = long
    columns["document_ids"] = ArraySpec((source.length,), np.dtype(np.int32))

    def read_blocks(indices: npt.NDArray[np.int64], outs: dict[str, Any]) -> int:
        numbers = indices.tolist()
        source.read_into(numbers, outs["input_ids"])
        source.documents_into(numbers, outs["document_ids"])
        if is_marked:
            unmark(outs["input_ids"], outs["labels"])
        return int(outs["input_ids"].size) * source.dtype.itemsize

    return ColumnReader("blocks straight from storage", dataset, columns, read_blocks)
