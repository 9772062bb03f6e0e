"""Packs a few samples in memory, to know how long all of them take."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.dataset import BaseDataset
from headrace.datasets.text.documents import TokenizedDataset
from headrace.dtypes import IntArray
from headrace.errors import SampleError
from headrace.packing.formats.hdf5 import encoded_blocks
from headrace.packing.jpeg import plan_of_files, reencode_group
from headrace.packing.options import StoreOptions
from headrace.packing.plan import Packing, Rows
from headrace.packing.run import plan_file
from headrace.packing.samples import UNKNOWN_SAMPLES, groups_of, in_order
from headrace.packing.texts import documents_of, is_of_texts

_ENOUGH_S = 1.5
_MOST_GROUPS = 4096
# multiples of it, without their whole part, are evenly spread however many there are
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Measured:
    """How long it took to pack some samples in memory.

    Attributes:
        samples: how many there were.
        seconds: how long it took, by so many threads as asked for.
        ratio: bytes that come of them beside those that went in: of re-encoded or compressed
            samples below 1.
    """

    samples: int
    seconds: float
    ratio: float


def measured(
    dataset: BaseDataset,
    options: StoreOptions,
    rows: Rows | None,
    workers: int,
    enough_s: float = _ENOUGH_S,
) -> Measured | None:
    """Reads, decodes and compresses samples in evenly spread groups, until so many seconds are
    over.

    Args:
        dataset: what is packed.
        options: how; with the number of samples a chunk.
        rows: what the samples have in common; None: the dataset says so.
        workers: threads.
        enough_s: seconds after which no more groups begin.

    Returns:
        None: nothing has to be made of the samples, or there are none.

    Raises:
        SampleError: one of them can't be read, and is not left out.
    """
    if is_of_texts(dataset):
        return _tokenised(dataset, options, enough_s)
    step = options.chunks or UNKNOWN_SAMPLES
    starts = _spread(-(-len(dataset) // step)) * step
    workers = workers if dataset.sample_source.thread_safe else 0
    begin, samples, before, after, at = time.perf_counter(), 0, 0, 0, 0
    while at < len(starts) and (not samples or time.perf_counter() - begin < enough_s):
        chosen = np.sort(starts[at : at + max(1, workers)])
        at += len(chosen)
        view = dataset.subset(
            np.concatenate([np.arange(start, min(start + step, len(dataset))) for start in chosen])
        )
        task, sizes, together = _task(view, options, rows, workers)
        for group, nbytes in in_order(task, groups_of(sizes, together=together), workers):
            samples, before, after = (
                samples + len(group),
                before + int(sizes[group.start : group.stop].sum()),
                after + nbytes,
            )
    return (
        Measured(samples, time.perf_counter() - begin, after / before if before else 1.0)
        if samples
        else None
    )


def _spread(count: int) -> IntArray:
    """Numbers below `count`, each once and `_MOST_GROUPS` at most, so that the first few are
    evenly spread.
    """
    places = np.arange(1, min(count, _MOST_GROUPS) + 1) * _GOLDEN % 1
    numbers = (places * count).astype(np.int64)
    return numbers[np.sort(np.unique(numbers, return_index=True)[1])]


def _task(
    view: BaseDataset, options: StoreOptions, rows: Rows | None, workers: int
) -> tuple[Callable[[range], int], IntArray, int]:
    """What gives the stored bytes of a group of samples of a view; bytes of each before; and how
    many are never parted.
    """
    if options.is_jpeg:
        return functools.partial(_reencoded, view, options), plan_of_files(view).plan.read_sizes, 1
    packing = plan_file(view, options, workers, False, rows)
    return functools.partial(_encoded, packing), packing.plan.sizes, packing.plan.chunks or 1


def _reencoded(view: BaseDataset, options: StoreOptions, group: range) -> int:
    return sum(
        sum(map(len, sample))
        for sample in reencode_group(view, options, group)
        if not isinstance(sample, SampleError)
    )


def _encoded(packing: Packing, group: range) -> int:
    samples: list[Any] = [
        sample for sample, _ in packing.prepare(group) if not isinstance(sample, SampleError)
    ]
    return sum(len(block) for block in encoded_blocks(packing.plan, samples)) if samples else 0


def _tokenised(
    dataset: TokenizedDataset, options: StoreOptions, enough_s: float
) -> Measured | None:
    """The same of texts whose tokens are not there yet: how long it takes to read and tokenise
    them.
    """
    documents = documents_of(dataset, options.end_token)
    if documents.tokens is not None or not len(documents.chosen):
        return None
    begin, samples = time.perf_counter(), 0
    for number in _spread(len(documents.chosen)).tolist():
        documents.dataset.ids_of([int(documents.chosen[number])])
        samples += 1
        if time.perf_counter() - begin >= enough_s:
            break
    return Measured(samples, time.perf_counter() - begin, 1.0)
