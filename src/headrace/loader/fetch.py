"""Turns batch requests into batches in their ring slots, in a worker or in this process.

Counters travel with the batch. An error travels in place of a batch, with its traceback, and the
parent raises it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from headrace.collate.stack import gathered
from headrace.core.batcher import Batcher, Collating, MadeBatch, named
from headrace.core.dataset import BaseDataset
from headrace.core.views import answers_batches
from headrace.datasets.unnormalized import DevicePixels
from headrace.errors import EmptyBatchError, WorkerError
from headrace.loader.config import inner_datasets
from headrace.loader.plan import take
from headrace.loader.signals import leave_to_parent
from headrace.loader.state import asked, is_stateful, iterator_of, load_state
from headrace.memory.anonymous import Flags
from headrace.memory.processes import end_with_parent
from headrace.memory.ring import Arena, Delivered, Delivery, Ring, outside_slot
from headrace.order import BatchRequest, RankBatches
from headrace.order.ranks import working_on
from headrace.order.seeding import (
    OF_STEP,
    OF_STREAM,
    Draws,
    SampleSeeder,
    preserved_rng,
    warn_off_main_thread,
)

_PLAIN = (list, tuple, range, np.ndarray, torch.Tensor, TensorDataset)
"""Datasets of exactly these types run no code of the user's, and so draw no random numbers."""


class Fetch(Dataset[Any]):
    """Makes the requested batches of a map-style dataset, headrace's or any other.

    Args:
        dataset, ring, collating: the user's dataset, the ring of the requests' slots, and the
            collate function.
        batches: those that a streaming dataset is to prefetch.
        stride: batches between two requests of one worker.
        pixels: makes batches whose images a device normalises; None: they are made as they are to
            be.
    """

    def __init__(
        self,
        dataset: Any,
        ring: Ring,
        collating: Collating,
        batches: RankBatches | None = None,
        stride: int = 1,
        pixels: DevicePixels | None = None,
    ) -> None:
        self.dataset = dataset
        self.ring = ring
        self._collating = collating
        self._batches = batches
        self._stride = stride
        self._pixels = pixels
        self._inner = inner_datasets(dataset)
        self._batcher: Batcher | None = None  # of a foreign dataset
        if isinstance(dataset, BaseDataset):
            self._batcher = Batcher(dataset, collating)
        self._answers_batches = answers_batches(dataset)
        self._is_plain = type(dataset) in _PLAIN
        self._is_stateful = is_stateful(dataset)
        self._is_stream = False
        self._items: Any = None  # of a stream: its iterator
        # a stream's epoch is through; what belongs to the next one's iterator
        self._given: dict[str, Any] | None = None
        self.init_error: Exception | None = None
        self._seeder: SampleSeeder | None = None

    def __getitems__(self, request: BatchRequest) -> Delivery | Delivered:
        cpu = time.process_time()
        slot = request.slot
        assert slot is not None
        is_worker = get_worker_info() is not None
        arena = Arena(self.ring, slot, leased=not is_worker)
        report: dict[str, Any] = {
            "epoch": request.epoch,
            "step": request.step,
            "pid": os.getpid(),
            "began": time.perf_counter(),
        }
        try:
            with working_on(request), arena:
                made = self._made(request, report)
            report["samples"] = made.samples
            if self._is_stream or self._is_stateful:
                report["worker"] = worker_number()
            # a stream that is through has no state of this epoch any more
            if self._is_stateful and not request.is_idle and self._given is None:
                at_end = report.get("is_through", False)
                report["state"] = asked(self.dataset, self._items, at_end=at_end)
            self._count(report, cpu)
            return _delivery(arena, made.batch, report)
        # it must stay in no local variable: its traceback holds this frame, and in that circle a
        # ring and its workers would wait for the garbage collector
        except BaseException as error:
            arena.abandon()
            if not isinstance(error, Exception):  # Ctrl-C: who catches it may go on
                raise
            if "counts" not in report:
                self._count(report, cpu)
            report["failure"] = pickled(error) if is_worker else error
            return _delivery(arena, None, report)

    def _made(self, request: BatchRequest, report: dict[str, Any]) -> MadeBatch:
        if self.init_error is not None:
            raise self.init_error
        if self._is_stream or request.given is not None:
            self._begin(request)
        if request.is_idle:
            report["idle"] = True
            return MadeBatch(None, 0)
        if self._batches is not None:
            self._prefetch(self._batches, request.epoch, request.step)
        if self._pixels is None:
            return self._make(request, report)
        make = functools.partial(self._make, report=report)
        made, report["pixels"] = self._pixels.make(request, make)
        return made

    def _prefetch(self, batches: RankBatches, epoch: int, step: int) -> None:
        """Makes a streaming dataset prefetch the batch of a step, and those after it."""
        self._batches = batches = batches.with_epoch(epoch)
        self.dataset.prefetch(epoch, range(step, batches.steps, self._stride), batches)

    def begin(self, epoch: int, step: int, worker: int) -> None:
        """Makes a streaming dataset prefetch the first batch of a worker, at the start."""
        # else its first request may bring no batch, but a state
        if self._batches is not None and not self._is_stateful:
            with contextlib.suppress(Exception):  # raised again where the batch is made
                self._prefetch(self._batches, epoch, step + worker)

    def _count(self, report: dict[str, Any], cpu: float) -> None:
        """Adds the counters of a batch to its report; `cpu`: the CPU time at its beginning."""
        counts: dict[str, Any] = {"collate_seconds": self._collating.seconds}
        self._collating.seconds = 0.0
        for dataset in self._inner:
            for name, value in dataset.sample_reader.take_report().items():
                counts[name] = counts[name] + value if name in counts else value
        counts["work_seconds"] = time.perf_counter() - report["began"]
        counts["work_cpu_seconds"] = time.process_time() - cpu
        if self._batcher is None:
            counts["sample_seconds"] = counts["work_seconds"] - counts["collate_seconds"]
        if report.get("pixels"):
            counts["normalized_on_device"] = 1
        report["counts"] = counts

    def _begin(self, request: BatchRequest) -> None:
        """Loads the state of the dataset."""
        parts = pickle.loads(request.given or b"")
        if "dataset" in parts:
            load_state(self.dataset, parts["dataset"], self.dataset)

    def _make(self, request: BatchRequest, report: dict[str, Any]) -> MadeBatch:
        if self._batcher is not None:
            return self._batcher.make(request)
        if self._is_plain and self._collating.stacks:
            batch = _gathered(self.dataset, request)
            if batch is not None:
                return MadeBatch(batch, len(request))
        with outside_slot():
            samples = self._samples(request)
        indices = list(request)
        count = len(samples) if isinstance(samples, list) else len(indices)
        name_of = functools.partial(named, self.dataset, indices if len(indices) == count else None)
        return MadeBatch(self._collating(samples, request, name_of), count)

    def _samples(self, request: BatchRequest) -> Any:
        """The samples of a foreign dataset."""
        if self._is_plain:
            return [self.dataset[index] for index in request]
        if self._seeder is None:
            self._seeder = SampleSeeder(self.dataset)
        if get_worker_info() is None:
            warn_off_main_thread()
        name = type(self.dataset).__name__
        samples = []
        skipped: EmptyBatchError | None = None
        with preserved_rng(self._seeder):
            if self._answers_batches:  # with one seed for the whole batch
                if request:
                    self._seed(request, 0)
                try:
                    return self.dataset.__getitems__(list(request))
                except Exception as error:
                    error.add_note(f"headrace: in {name}.__getitems__({list(request)!r:.80})")
                    raise
            for number, index in enumerate(request):
                self._seed(request, number)
                try:
                    samples.append(self.dataset[index])
                # of a headrace dataset inside, which has counted it
                except EmptyBatchError as error:
                    skipped = error
                except Exception as error:
                    error.add_note(f"headrace: in {name}[{index!r}]")
                    raise
        if skipped is not None and not samples:
            raise skipped
        return samples

    def _seed(self, request: BatchRequest, number: int) -> None:
        """Seeds what the dataset draws from, for a sample of the batch."""
        assert self._seeder is not None
        # a sampler of the user's may give the dataset something else than integers
        index = request[number] if isinstance(request[number], int) else 0
        draw = request.draws[number] if request.draws else 0
        self._seeder(request.seed, request.epoch, index, draw)


class FetchIterable(Fetch):
    """Makes the batches of a foreign `IterableDataset`: each request takes the next samples of
    this worker's iterator.
    """

    def __init__(
        self,
        dataset: Any,
        ring: Ring,
        collating: Collating,
        batch_size: int,
        drop_last: bool,
        pixels: DevicePixels | None = None,
    ) -> None:
        super().__init__(dataset, ring, collating, pixels=pixels)
        self._is_stream = True
        self._size = batch_size
        self._drop_last = drop_last
        self._run = -1
        self._items = iter(())
        self._draws: Draws | None = None
        self._may_be_at_end = False

    def _make(self, request: BatchRequest, report: dict[str, Any]) -> MadeBatch:
        assert self._draws is not None
        draws = self._draws
        if self._is_stateful:  # what was drawn before is not in its state
            assert self._seeder is not None
            draws = Draws(self._seeder, request.seed, request.epoch, OF_STEP, request.step)
        with outside_slot(), draws():
            items = take(self._items, self._size)
            # the state held the position: see NOTE [ states of datasets ]
            if not items and self._may_be_at_end:
                self._items = iter(self.dataset)
                items = take(self._items, self._size)
            self._may_be_at_end = False
        report["is_through"] = len(items) < self._size
        if report["is_through"] and self._drop_last:
            items = []
        report["exhausted"] = not items
        if not items:
            return MadeBatch(None, 0)
        name_of = functools.partial(named, self.dataset, None)
        return MadeBatch(self._collating(items, request, name_of), len(items))

    def _begin(self, request: BatchRequest) -> None:
        """Makes a new iterator, at the position of the request. If that fails there is none, so
        that nothing begins anew.
        """
        if self._draws is not None and self._run == request[0]:
            return
        self._run = request[0]
        self._items = iter(())
        self._seeder = SampleSeeder(self.dataset)
        self._draws = Draws(self._seeder, request.seed, request.epoch, OF_STREAM, worker_number())
        parts = self._given or {}
        if request.given is not None:
            parts = pickle.loads(request.given)
        self._given = None
        self._may_be_at_end = False
        if parts.pop("ended", False):
            self._given = parts
        else:
            with self._draws():
                self._items = iterator_of(self.dataset, parts)
            self._may_be_at_end = "at_end" in parts
        self._is_stateful = is_stateful(self.dataset) or is_stateful(self._items)


def _gathered(dataset: Any, indices: BatchRequest) -> Any:
    """The batch of a TensorDataset, by one gather a tensor; None, where it is made sample by
    sample: another dataset, or indices that are wrong, negative or no integers.
    """
    if type(dataset) is not TensorDataset or not indices:
        return None
    n = len(dataset)
    if not all(type(index) is int and 0 <= index < n for index in indices):
        return None
    if not all(tensor.layout is torch.strided for tensor in dataset.tensors):
        return None
    rows = torch.tensor(indices, dtype=torch.int64, device="cpu")
    return tuple(gathered(tensor, rows.to(tensor.device)) for tensor in dataset.tensors)


def _delivery(arena: Arena, batch: Any, report: dict[str, Any]) -> Delivery | Delivered:
    if get_worker_info() is None:
        return Delivered(batch, report, arena.nbytes)
    with arena:
        return arena.pack(batch, report)


class RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of the error that is raised in the parent."""

    def __init__(self, text: str) -> None:
        super().__init__(f'\n"""\n{text}"""')


def worker_number() -> int:
    """The number of this worker; 0 in the main process."""
    info = get_worker_info()
    return 0 if info is None else info.id


def pickled(error: Exception) -> tuple[bytes, str, int]:
    """An exception as it travels: pickled, its traceback as text, and the worker's number."""
    text = "".join(traceback.format_exception(error))
    for travelling in (error, (type(error), error.args, error.__dict__)):
        try:
            data = pickle.dumps(travelling)
            # its class is called with `args`, and may format them again
            if str(unpickled(data)) == str(error):
                return data, text, worker_number()
        except Exception:  # whatever its class raises: its text at least
            continue
    lost = WorkerError(f"{type(error).__name__}: {error} (its own class can't be pickled)")
    return pickle.dumps(lost), text, worker_number()


def unpickled(data: bytes) -> Exception:
    """An exception that `pickled` pickled; one whose class pickle can't call with its `args` is
    made without its ``__init__``.
    """
    travelled: Any = pickle.loads(data)
    if isinstance(travelled, Exception):
        return travelled
    cls, args, state = travelled
    error: Exception = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def failure_of(delivered: Delivered) -> Exception:
    """The error that was delivered instead of a batch, with its place and, out of a worker, its
    traceback, ready to be raised.
    """
    failure = delivered.report.pop("failure")
    where = f"epoch {delivered.report['epoch']}, batch {delivered.report['step']}"
    if isinstance(failure, Exception):
        error = failure
    else:
        data, text, worker = failure
        where = f"worker {worker}, {where}"
        try:
            error = unpickled(data)
        except Exception as trouble:  # as where the worker alone finds the module of its class
            error = WorkerError(
                f"an error of a worker can't be unpickled here ({type(trouble).__name__}: "
                f"{trouble}); the traceback above names it"
            )
        error.__cause__ = RemoteTraceback(text)
    if isinstance(error, StopIteration):  # which would end the user's loop
        cause = error
        error = RuntimeError(f"a sample's code raised StopIteration: {cause}")
        error.__cause__ = cause
    error.add_note(f"headrace: in {where}")
    return error


def as_delivered(delivery: Any) -> Any:
    """The collate function of torch's DataLoader: `Fetch` has made the batch already."""
    return delivery


class WorkerInit:
    """What a worker does first: leave signals to its parent, end with it, say that its loop begins,
    and call the user's `worker_init_fn`.

    Then it has its first batch prefetched, which the parent asks for when all workers have been
    started. What a fork brought along stays out of garbage collection: the parent's loaders and
    their workers are not the worker's to end. Torch's default dtype is the parent's.

    Args:
        function: the user's.
        flags: of the workers.
        begins: epoch and step with which the workers begin.
    """

    def __init__(
        self, function: Callable[[int], Any] | None, flags: Flags, begins: tuple[int, int]
    ) -> None:
        self._function = function
        self._flags = flags
        self._begins = begins
        self._collects = gc.isenabled()
        self._dtype = torch.get_default_dtype()

    def __call__(self, worker: int) -> None:
        gc.freeze()
        if self._collects:
            gc.enable()
        torch.set_default_dtype(self._dtype)
        leave_to_parent()
        end_with_parent()
        info = get_worker_info()
        assert info is not None
        fetch: Any = info.dataset
        # where users look for theirs, and may set its attributes
        object.__setattr__(info, "dataset", fetch.dataset)
        self._flags.mark(worker)
        if self._function is not None:
            try:
                self._function(worker)
            except Exception as error:
                error.add_note("headrace: raised by worker_init_fn")
                fetch.init_error = error  # each batch raises it
                return
        fetch.begin(*self._begins, worker)


def _generator_from(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _reduce_generator(generator: torch.Generator) -> tuple[Any, ...]:
    """By value: torch passes the descriptor of a temporary tensor to a spawned process, which is
    closed before it gets there.
    """
    return _generator_from, (str(generator.device), generator.get_state().numpy().tobytes())


ForkingPickler.register(torch.Generator, _reduce_generator)
