"""Measures each stage of a dataset by itself, in this process, beside the same work with nothing
around it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.core.batch import Collating
from headrace.core.dataset import BaseDataset
from headrace.errors import SampleError
from headrace.loader.device import move_to_device
from headrace.memory.tree import map_tensors
from headrace.order import BatchRequest
from headrace.order.seeding import preserved_rng
from headrace.profiling.gil import gil_fraction
from headrace.profiling.room import finish_kernels
from headrace.storage.files import FilesSource
from headrace.storage.source import Locatable, Source


@dataclass(slots=True)
class Alone:
    """Seconds of stages, by name, and of the bare work in them.

    Attributes:
        samples: that went through, by stage.
        seconds: of each stage; `bare`: of the same work with nothing around it.
        gil: share of the user's own code that holds the interpreter's lock; None: there is none, or
            it can't be told.
        own_code: what that is.
    """

    samples: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    bare: dict[str, float] = field(default_factory=dict)
    gil: float | None = None
    own_code: str = ""

    def rate(self, stage: str) -> float | None:
        """Samples a second; None: not measured."""
        return (
            self.samples[stage] / max(self.seconds[stage], 1e-9)
            if self.samples.get(stage)
            else None
        )

    def ceiling(self, stage: str) -> float | None:
        """The same of the bare work."""
        return (
            self.samples[stage] / max(self.bare[stage], 1e-9)
            if self.samples.get(stage) and self.bare.get(stage)
            else None
        )

    def timed(self, stage: str, samples: int, function: Callable[[], Any]) -> Any:
        """What a function returns; its time counts for a stage."""
        start = time.perf_counter()
        made = function()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        self.samples[stage] = self.samples.get(stage, 0) + samples
        return made

    def timed_bare(self, stage: str, function: Callable[[], Any]) -> Any:
        """What a function returns; its time counts for a stage's ceiling."""
        start = time.perf_counter()
        made = function()
        self.bare[stage] = self.bare.get(stage, 0.0) + time.perf_counter() - start
        return made


def measure_alone(
    dataset: Any,
    collating: Collating,
    requests: Iterable[BatchRequest],
    device: torch.device | str | int | None,
    seconds: float,
) -> Alone:
    """Takes batches through all stages one by one, for some seconds and two batches at least.

    Args:
        dataset: of headrace's, or with samples by number.
        collating: makes a batch of samples.
        requests: batches of an epoch.
        device: where batches go; None: they stay.
        seconds: for all stages together.
    """
    alone, until = Alone(), time.perf_counter() + 0.8 * seconds
    samples: list[Any] = []
    with preserved_rng():
        for number, request in enumerate(requests):
            if not request or (number >= 2 and time.perf_counter() >= until):
                break
            samples = (_own if isinstance(dataset, BaseDataset) else _foreign)(
                alone, dataset, request
            )
            batch = alone.timed(
                "collate", len(samples), functools.partial(collating, samples, request, str)
            )
            _bare_collate(alone, batch)
            if device is not None:
                _to_device(alone, batch, device, len(samples))
        if samples:
            _look_at_gil(alone, dataset, collating, samples, request, min(0.6, 0.15 * seconds))
    return alone


def _own(alone: Alone, dataset: BaseDataset, request: BatchRequest) -> list[Any]:
    """The finished samples of a batch of a dataset of headrace's, without those that it skips."""
    indices, source, decoder = (
        dataset.whole_indices(request).tolist(),
        dataset.sample_source,
        dataset.sample_decoder,
    )
    count, reader = len(indices), dataset.sample_reader
    ranges = _ranges(source, indices)

    def read() -> list[Any]:
        return reader.records(indices, source.read)

    if ranges is not None and hasattr(os, "posix_fadvise"):
        for path in {path for path, *_ in ranges}:
            forget(path)
        alone.timed("read (cold)", count, read)
    elif _is_remote(source):
        alone.timed("read (cold)", count, read)
    pairs = list(zip(indices, alone.timed("read (warm)", count, read), strict=True))
    if ranges is not None:
        _bare_read(alone, ranges)
    if decoder.decodes_batches:
        values = alone.timed("decode", count, lambda: reader.decode_together(pairs, decoder))
    else:
        values = alone.timed(
            "decode", count, lambda: [reader.decoded(*pair, decoder) for pair in pairs]
        )
        sound = [
            record
            for (_, record), value in zip(pairs, values, strict=True)
            if not isinstance(value, SampleError)
        ]
        alone.timed_bare("decode", lambda: [decoder.decode(record) for record in sound])
    own = dataset.transform or dataset.transforms
    are_inputs_known = own is not None and dataset.transforms is None and not decoder.splits_targets
    inputs = (
        [decoder.to_input(value) for value in values if not isinstance(value, SampleError)]
        if are_inputs_known
        else []
    )
    samples: list[Any]
    samples, _ = alone.timed("transform", count, lambda: dataset.finish(request, values))
    if inputs and dataset.transform is not None:
        alone.timed_bare("transform", lambda: [dataset.transform(one) for one in inputs])  # type: ignore[misc]
    return samples


def _foreign(alone: Alone, dataset: Any, request: BatchRequest) -> list[Any]:
    """The samples of a dataset of somebody else's: nothing is known of its stages."""
    samples: list[Any] = alone.timed(
        "sample", len(request), lambda: [dataset[index] for index in request]
    )
    return samples


def _is_remote(source: Source) -> bool:
    return (
        source.listing.is_remote
        if isinstance(source, FilesSource)
        else isinstance(source, Locatable) and source.is_remote
    )


def _ranges(source: Source, indices: list[int]) -> list[tuple[str, int, int]] | None:
    """Local file, first byte and end (-1: that of the file) of records; None: they are not
    known, or remote.
    """
    if _is_remote(source):
        return None
    ranges: list[tuple[str, int, int]] = []
    if isinstance(source, Locatable):
        found = source.byte_ranges(np.asarray(indices, np.int64))
        columns = zip(found.file.tolist(), found.start.tolist(), found.stop.tolist(), strict=True)
        ranges = [
            (os.fspath(found.paths[number]), start, stop)
            for number, start, stop in columns
            if start >= 0
        ]
    elif isinstance(source, FilesSource):
        ranges = [(os.fsdecode(source.listing.path(index)), 0, -1) for index in indices]
    return (
        ranges
        if ranges and all(os.path.isfile(path) for path in {path for path, *_ in ranges})
        else None
    )


def forget(path: str) -> None:
    """The system drops what it holds of a file in memory; of what another process has mapped, or
    not yet written, it keeps it.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _bare_read(alone: Alone, ranges: list[tuple[str, int, int]]) -> None:
    """The same bytes by plain reads, from memory."""

    def read() -> None:
        for path, start, stop in ranges:
            with open(path, "rb", buffering=0) as file:
                if stop < 0:
                    file.readall()
                else:
                    os.pread(file.fileno(), stop - start, start)

    alone.timed_bare("read (warm)", read)


def _bare_collate(alone: Alone, batch: Any) -> None:
    """The bytes of a batch, copied once to where they have been before."""
    tensors = _tensors(batch)
    places = [torch.empty_like(tensor) for tensor in tensors]
    for place in places:
        place.zero_()  # its pages are there

    def copy() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)

    if tensors:
        alone.timed_bare("collate", copy)


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            found.append(tensor)
        return tensor

    map_tensors(batch, look)
    return found


def _to_device(alone: Alone, batch: Any, device: torch.device | str | int, count: int) -> None:
    """A batch to the device; as a ceiling, its bytes in one piece, from page-locked memory where
    there is some.
    """
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda:
        batch = map_tensors(batch, torch.Tensor.pin_memory)

    def move() -> None:
        move_to_device(batch, device)
        finish_kernels()

    if "device" not in alone.samples:
        move()  # what is made once is made
    alone.timed("device", count, move)
    nbytes = sum(tensor.nbytes for tensor in _tensors(batch))
    whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_cuda)

    def move_whole() -> None:
        whole.to(device, non_blocking=is_cuda, copy=True)
        finish_kernels()

    alone.timed_bare("device", move_whole)


def _look_at_gil(
    alone: Alone,
    dataset: Any,
    collating: Collating,
    samples: list[Any],
    request: BatchRequest,
    seconds: float,
) -> None:
    """Looks at the user's own code that takes the most time: a transform, a dataset, a collate
    function.
    """
    codes: dict[str, tuple[float, Callable[[], Any]]] = {}
    if isinstance(dataset, BaseDataset):
        if dataset.is_transformed:
            indices = dataset.checked_indices(request).tolist()
            values = dataset.value_source.read(indices, dataset.access())
            codes["transform"] = (
                alone.seconds.get("transform", 0.0),
                lambda: dataset.finish(request, list(values)),
            )
    else:
        codes["dataset"] = (
            alone.seconds.get("sample", 0.0),
            lambda: [dataset[index] for index in request],
        )
    if collating.is_users:
        codes["collate_fn"] = (
            alone.seconds.get("collate", 0.0),
            lambda: collating(list(samples), request, str),
        )
    if codes:
        alone.own_code = max(codes, key=lambda name: codes[name][0])
        alone.gil = gil_fraction(codes[alone.own_code][1], seconds)


def reading_gain(
    dataset: BaseDataset, requests: Iterator[BatchRequest], readers: tuple[int, int], seconds: float
) -> float | None:
    """By which more threads, each with a source of its own, read faster than fewer; None: the
    source can't be copied.

    Args:
        dataset: whose records are read, and thrown away.
        requests: batches to read.
        readers: how many threads read at first, and then.
        seconds: for both together; opening the sources comes on top.

    Raises:
        Exception: whatever reading raises.
    """
    try:
        sources = [pickle.loads(pickle.dumps(dataset.sample_source)) for _ in range(max(readers))]
    except Exception:  # a source of the user's that stays in its process
        return None
    lock = threading.Lock()

    def read(source: Source) -> int:
        with lock:
            request = next(requests, None)
        indices = [] if request is None else dataset.whole_indices(request).tolist()
        if indices:
            dataset.sample_reader.records(indices, source.read)
        return len(indices)

    def read_until(source: Source, until: float) -> list[tuple[float, int]]:
        """When each batch was there, and of how many samples."""
        done = list[tuple[float, int]]()
        while time.perf_counter() < until and (count := read(source)):
            done.append((time.perf_counter(), count))
        return done

    def rate(number: int) -> float:
        """Samples a second while all of them read: at the end some have nothing left to do."""
        start = time.perf_counter()
        with ThreadPoolExecutor(number, "headrace-reading") as threads:
            until = start + seconds / 2
            done = [
                batch
                for some in threads.map(read_until, sources[:number], itertools.repeat(until))
                for batch in some
            ]
        inside = [batch for batch in done if batch[0] <= until] or done
        return (
            sum(count for _, count in inside) / max(max(at for at, _ in inside) - start, 1e-9)
            if inside
            else 0.0
        )

    with contextlib.ExitStack() as closing:
        for source in sources:
            closing.callback(source.close)
        with ThreadPoolExecutor(len(sources), "headrace-opening") as threads:
            list(threads.map(read, sources))  # what is opened, or asked for, once, is
        before = rate(readers[0])
        return rate(readers[1]) / before if before else None


def first_requests(requests: Iterable[BatchRequest], samples: int) -> list[BatchRequest]:
    """The first batches that have so many samples together; fewer where there are no more."""
    some: list[BatchRequest] = []
    for request in requests:
        some.append(request)
        if sum(map(len, some)) >= samples:
            break
    return some


def repeated(
    requests: Callable[[int], Iterator[BatchRequest]], first: int
) -> Iterator[BatchRequest]:
    """The batches of epochs from one on, without an end."""
    return itertools.chain.from_iterable(requests(epoch) for epoch in itertools.count(first))
