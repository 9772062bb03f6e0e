"""Takes samples of a dataset in groups, by threads, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from headrace.arguments import check_integer
from headrace.core.dataset import BaseDataset
from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import SampleError
from headrace.io import ordered
from headrace.memory.limits import usable_cpus
from headrace.memory.per_process import check_may_start
from headrace.sorting import distinct

GROUP_SAMPLES, GROUP_BYTES, UNKNOWN_SAMPLES = 64, 4 << 20, 16
"""A task reads so many samples, or fewer where they are large: what is read ahead stays small
whatever the dataset's size. The last is for samples whose sizes are not known.
"""
_ESTIMATED_BY = 32
T = TypeVar("T")
DatasetT = TypeVar("DatasetT", bound=BaseDataset)


def threads_for(workers: int | None, processes: int = 1) -> int:
    """Threads of each of some processes; None: one for each usable core, shared out.

    Raises:
        ConfigError: one of both is no integer of at least 1, or this process may not start others.
    """
    workers, processes = (
        check_integer("workers", workers, 1, optional=True),
        check_integer("processes", processes, 1),
    )
    if processes > 1:
        check_may_start(f"processes={processes}")
    return workers or max(1, usable_cpus() // processes)


def without(dataset: DatasetT, unreadable: Mapping[int, object]) -> DatasetT:
    """A view of the samples that can be read; the dataset itself, if these are all.

    Args:
        dataset: of all samples.
        unreadable: what is wrong with each of the others, by number.

    Raises:
        SampleError: none can be read.
    """
    if not unreadable:
        return dataset
    readable = np.setdiff1d(np.arange(len(dataset)), list(unreadable))
    if not len(readable):
        raise SampleError(
            f"none of {len(dataset):,} samples can be read; the first: "
            f"{next(iter(unreadable.values()))}"
        )
    return dataset.subset(readable)


def groups_of(sizes: IntArray, most: int = GROUP_SAMPLES, together: int = 1) -> Iterator[range]:
    """Samples in groups.

    Args:
        sizes: [n] int64, bytes that each takes while it is read.
        most: samples of a group.
        together: so many that lie one after the other are never parted.
    """
    if together > 1:
        units = np.add.reduceat(sizes, np.arange(0, len(sizes), together)) if len(sizes) else sizes
        for group in groups_of(units, max(1, most // together)):
            yield range(group.start * together, min(group.stop * together, len(sizes)))
        return
    start, nbytes = 0, 0
    for i, size in enumerate(sizes.tolist()):
        if i > start and (nbytes + size > GROUP_BYTES or i - start >= most):
            yield range(start, i)
            start, nbytes = i, 0
        nbytes += size
    if start < len(sizes):
        yield range(start, len(sizes))


def some_of(count: int) -> list[int]:
    """The numbers of samples by which sizes are estimated, evenly spread over all `count`."""
    numbers: list[int] = distinct(
        np.linspace(0, count - 1, min(_ESTIMATED_BY, count)).astype(np.int64)
    ).tolist()
    return numbers


def in_order(
    task: Callable[[range], T], groups: Iterator[range], workers: int
) -> Generator[tuple[range, T], None, None]:
    """The results of a task for each group, in order; threads work at most `workers` + 1 groups
    ahead; 0: this thread.
    """
    if not workers:
        yield from ((group, task(group)) for group in groups)
        return
    pool = ThreadPoolExecutor(workers, "headrace-pack")
    try:
        yield from ordered.in_order(
            ((group, pool.submit(task, group)) for group in groups), workers + 2
        )
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def with_progress(
    task: Callable[[range], T],
    groups: Iterator[range],
    workers: int,
    progress: bool | None,
    total: int,
    desc: str,
) -> Iterator[Iterator[tuple[range, T]]]:
    """`in_order` with a progress bar; its threads have ended when the context is left."""
    results = in_order(task, groups, workers)
    with (
        contextlib.closing(results),
        progress_bar(progress, total=total, desc=desc, unit="sample") as bar,
    ):

        def counted() -> Iterator[tuple[range, T]]:
            for group, made in results:
                yield group, made
                bar.update(len(group))

        yield counted()


def each_sample(
    dataset: BaseDataset, group: range, make: Callable[[int, int, Any], T | SampleError]
) -> Iterator[tuple[int, T | SampleError]]:
    """The number in the dataset of each sample of a group, and what is made of it: of its number
    there, in its source, and its record.
    """
    whole = dataset.whole_indices(group).tolist()
    records = dataset.sample_reader.records(whole, dataset.sample_source.read)
    for position, index, record in zip(group, whole, records, strict=True):
        made = record if isinstance(record, SampleError) else make(position, index, record)
        # a callable makes up a sample: that is no matter for a file
        if isinstance(made, SampleError) and dataset.on_error != "skip":
            raise made
        yield position, made
