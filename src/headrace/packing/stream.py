"""Samples of a dataset in groups: read by threads, given in order, and spooled where their sizes
must be known first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.core.dataset import BaseDataset
from headrace.display import progress_bar
from headrace.dtypes import IntArray
from headrace.errors import SampleError
from headrace.io.ordered import in_order
from headrace.memory.whole import read_full, write_full
from headrace.sorting import distinct

GROUP_SAMPLES, GROUP_BYTES, UNKNOWN_SAMPLES = 64, 4 << 20, 16
"""A task reads so many samples, or fewer where they are large: what is read ahead stays small
whatever the dataset's size. The last is for samples whose sizes are not known.
"""
_ESTIMATED_BY = 32
T = TypeVar("T")
DatasetT = TypeVar("DatasetT", bound=BaseDataset)


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
    if together > 1 and len(sizes):
        units = np.add.reduceat(sizes, np.arange(0, len(sizes), together))
        for group in groups_of(units, max(1, most // together)):
            yield range(group.start * together, min(group.stop * together, len(sizes)))
        return
    start, nbytes = 0, 0
    for i, size in enumerate(sizes.tolist()):
        if i > start and (nbytes + size > GROUP_BYTES or i - start >= most):
            yield range(start, i)
            start = i
            nbytes = 0
        nbytes += size
    if start < len(sizes):
        yield range(start, len(sizes))


def some_of(count: int) -> list[int]:
    """The numbers of samples by which sizes are estimated, evenly spread over all `count`."""
    spread = np.linspace(0, count - 1, min(_ESTIMATED_BY, count)).astype(np.int64)
    numbers: list[int] = distinct(spread).tolist()
    return numbers


def stream(
    task: Callable[[range], T],
    groups: Iterator[range],
    workers: int,
    progress: bool | None,
    total: int,
    desc: str,
) -> Generator[tuple[range, T], None, None]:
    """The results of a task for each group, in order, with a progress bar; threads work at most
    `workers` + 1 groups ahead; 0: this thread. They have ended when the generator is closed.
    """
    with progress_bar(progress, total=total, desc=desc, unit="sample") as bar:
        if not workers:
            for group in groups:
                yield group, task(group)
                bar.update(len(group))
            return
        pool = ThreadPoolExecutor(workers, "headrace-pack")
        try:
            begun = ((group, pool.submit(task, group)) for group in groups)
            for group, made in in_order(begun, workers + 2):
                yield group, made
                bar.update(len(group))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def each_sample(
    dataset: BaseDataset, group: range, make: Callable[[int, int, Any], T | SampleError]
) -> list[T | SampleError]:
    """What is made of each sample of a group: of its number in the dataset, that in its source,
    and its record. A SampleError is of a sample that may be left out.
    """
    whole = dataset.whole_indices(group).tolist()
    records = dataset.sample_reader.records(whole, dataset.sample_source.read)
    samples = []
    for position, index, record in zip(group, whole, records, strict=True):
        made = record
        if not isinstance(record, SampleError):
            made = make(position, index, record)
        # a callable makes up a sample: that is no matter for a file
        if isinstance(made, SampleError) and dataset.on_error != "skip":
            raise made
        samples.append(made)
    return samples


class Spool:
    """Samples in a temporary file without a name, one behind the other: a file is laid out when all
    sizes are known.

    Args:
        folder: of the file, which takes as much room as the samples.
    """

    def __init__(self, folder: str) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._sizes = list[int]()

    def append(self, data: bytes) -> None:
        """Adds the next sample."""
        write_full(self._file.fileno(), data)
        self._sizes.append(len(data))

    @property
    def sizes(self) -> IntArray:
        """Bytes of each sample ([n] int64)."""
        return np.array(self._sizes, np.int64)

    def reader(self) -> Callable[[range], list[npt.NDArray[np.uint8]]]:
        """What gives the bytes of the samples of a group; for any thread."""
        edges = np.concatenate([[0], np.cumsum(self.sizes)])

        def read(group: range) -> list[npt.NDArray[np.uint8]]:
            first = int(edges[group.start])
            data = np.empty(int(edges[group.stop]) - first, np.uint8)
            read_full(self._file.fileno(), [data.data], first)
            return np.split(data, (edges[group.start + 1 : group.stop] - first).tolist())

        return read

    def close(self) -> None:
        """Closes the file, which is gone then."""
        self._file.close()
