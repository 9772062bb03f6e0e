"""Turns batch requests into batches in their ring slots, in a worker or in this process.

Counters travel with the batch. An error travels in place of a batch, and the parent raises it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from headrace.collate.stack import gathered
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import BatchWay, Collating, MadeBatch, named
from headrace.datasets.core.ways import choose_way
from headrace.datasets.unnormalized import PixelBatches, numbers_of
from headrace.datasets.wrapped import answers_batches
from headrace.errors import EmptyBatchError, WorkerError
from headrace.loader import torch_private
from headrace.loader.data import inner_datasets, length_of
from headrace.loader.stateful import asked, give_back, is_stateful
from headrace.loader.worker.signals import leave_to_parent
from headrace.memory.anonymous import Flags
from headrace.memory.per_process import end_with_parent
from headrace.memory.ring import Arena, Delivered, Delivery, Ring, outside_slot
from headrace.order import BatchRequest, RankBatches
from headrace.order.request import working_on
from headrace.order.seeding import SampleSeeder, preserved_rng, warn_off_main_thread

_PLAIN = (list, tuple, range, np.ndarray, torch.Tensor, TensorDataset)
"""Datasets of exactly these types run no code of the user's, and so draw no random numbers."""


class Fetch(Dataset[Any]):
    """Batch requests to finished batches, for a map-style dataset of headrace's or of anybody's.

    Other attributes are those of the dataset, so that a `worker_init_fn` finds what it looks for.

    Args:
        dataset, ring, collating: the user's dataset, the ring of the requests' slots, and the
            collate function.
        batches: those that a streaming dataset is to prefetch.
        stride: batches between two requests of one worker.
        origin: what an error calls the origin of the indices.
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
        origin: str = "the order",
        pixels: PixelBatches | None = None,
    ) -> None:
        self._origin, self._collating, self._pixels = origin, collating, pixels
        self.dataset, self.ring, self._batches, self._stride = dataset, ring, batches, stride
        # None: foreign
        self.way: BatchWay | None = (
            choose_way(dataset, collating) if isinstance(dataset, BaseDataset) else None
        )
        self._inner = inner_datasets(dataset)
        self._answers_batches = answers_batches(dataset)
        self._is_plain = type(dataset) in _PLAIN
        self.init_error: Exception | None = None
        self._seeder: SampleSeeder | None = None
        self._is_stateful = is_stateful(dataset)
        self._sample_seconds = 0.0  # of a foreign dataset
        self._slowest_items: dict[str, tuple[float, int]] = {}

    def __getitems__(self, request: BatchRequest) -> Delivery | Delivered:
        start, cpu = time.perf_counter(), time.process_time()
        arena = open_arena(self.ring, request)
        report: dict[str, Any] = {
            "epoch": request.epoch,
            "step": request.step,
            "pid": os.getpid(),
            "began": start,
        }
        with working_on(request):
            made, error = _attempt(self._made, arena, request, report)
        try:
            if error is None:
                _, error = _attempt(self._report_state, report)
            counts: dict[str, Any] = {"collate_seconds": self._collating.take_seconds()}
            report["slowest"] = self._slowest(request)
            for dataset in self._inner:
                for name, value in dataset.sample_reader.take_report().items():
                    counts[name] = counts[name] + value if name in counts else value
            counts["work_seconds"], counts["work_cpu_seconds"] = (
                time.perf_counter() - start,
                time.process_time() - cpu,
            )
            counts["sample_seconds"], self._sample_seconds = self._sample_seconds, 0.0
            if report.get("pixels"):
                counts["normalized_on_device"] = 1
            report["samples"], report["counts"] = (
                len(request) if made is None else made.samples,
                counts,
            )
            if error is None and get_worker_info() is None:
                return Delivered(made.batch, report, 0 if arena is None else arena.nbytes)
            delivery: Delivery
            if error is None:
                delivery, error = _attempt(_packed, arena, made.batch, report)
            return delivery if error is None else _failed(arena, error, report)
        finally:
            del error  # see `_attempt`

    def _made(
        self, arena: Arena | None, request: BatchRequest, report: dict[str, Any]
    ) -> MadeBatch:
        """The batch; an index that the dataset does not have is an error that says where it came
        from.
        """
        try:
            with arena or contextlib.nullcontext():
                if self.init_error is not None:
                    raise self.init_error
                self._begin(request)
                if request.is_idle:
                    report["idle"] = True
                    return MadeBatch(None, 0)
                self.look_ahead(request.epoch, request.step)
                make = (
                    functools.partial(self._make, report=report)
                    if self.way is None
                    else self.way.make
                )
                if self._pixels is None:
                    return make(request)
                made, pixels = self._pixels.make(request, make)
                report["pixels"] = numbers_of(made.batch, pixels)
                return made
        except IndexError as error:
            n = length_of(self.dataset)
            outside = [
                i for i in request if isinstance(i, int) and n is not None and not -n <= i < n
            ]
            if not outside:
                raise
            raise IndexError(
                f"{self._origin} gave index {outside[0]}, and {type(self.dataset).__name__} has "
                f"{n} samples: indices must lie in "
                f"[0, {n}), or in [{-(n or 0)}, 0) from the end"
            ) from error

    def look_ahead(self, epoch: int, step: int) -> None:
        """Has a streaming dataset prefetch the batch of a step, and what comes after it."""
        if self._batches is not None:
            self._batches = self._batches.with_epoch(epoch)
            steps = range(step, self._batches.steps, self._stride)
            self.dataset.prefetch(epoch, steps, self._batches)

    def begin(self, epoch: int, step: int, worker: int) -> None:
        """The same for the first batch of a worker, when the workers begin at a step."""
        if not self._is_stateful:  # else its first request may bring no batch, but a state
            with contextlib.suppress(Exception):  # raised again where the batch is made
                self.look_ahead(epoch, step + worker)

    def _slowest(self, request: BatchRequest) -> dict[str, tuple[float, int | None]]:
        """By stage, the sample that took longest: its seconds and its index, where that is
        known.
        """
        slowest, self._slowest_items = self._slowest_items, {}
        for dataset in self._inner:
            found = dataset.sample_reader.take_slowest()
            # else it was asked for one sample at a time
            if self.way is not None or self._answers_batches:
                slowest |= found
        return {
            stage: (seconds, request[at] if at < len(request) else None)
            for stage, (seconds, at) in slowest.items()
        }

    def _report_state(self, report: dict[str, Any]) -> None:
        if self._is_stateful:
            report["worker"], report["state"] = worker_number(), asked(self.dataset)

    def _begin(self, request: BatchRequest) -> None:
        if request.given is not None:
            give_back(request.given, self.dataset)

    def _make(self, request: BatchRequest, report: dict[str, Any]) -> MadeBatch:
        """The batch of a foreign dataset."""
        start = time.perf_counter()
        if self._is_plain and self._collating.stacks:
            batch = _gathered(self.dataset, request)
            if batch is not None:
                self._sample_seconds += time.perf_counter() - start
                return MadeBatch(batch, len(request))
        with outside_slot():
            if self._is_plain:
                samples = [self.dataset[index] for index in request]
            else:
                samples = self._foreign(request)
        self._sample_seconds += time.perf_counter() - start
        return self._collated(samples, request, list(request))

    def _collated(
        self, samples: Any, request: BatchRequest, indices: list[Any] | None
    ) -> MadeBatch:
        """The batch of the samples of a foreign dataset, and the index of each, where that is
        known.
        """
        count = len(samples) if isinstance(samples, list) else len(request)
        known = indices if indices is not None and len(indices) == count else None
        return MadeBatch(
            self._collating(samples, request, functools.partial(named, self.dataset, known)), count
        )

    def _foreign(self, request: BatchRequest) -> Any:
        if self._seeder is None:
            self._seeder = SampleSeeder(self.dataset)
        seeder = self._seeder

        def seed(number: int) -> None:
            # a sampler of the user's may give the dataset something else than integers
            index = request[number]
            seeder(
                request.seed,
                request.epoch,
                index if isinstance(index, int) else 0,
                request.draws[number] if request.draws else 0,
            )

        if get_worker_info() is None:
            warn_off_main_thread()
        with preserved_rng(seeder):
            if self._answers_batches:  # one seed for the whole batch
                if request:
                    seed(0)
                try:
                    return self.dataset.__getitems__(list(request))
                except Exception as error:
                    indices = (
                        f"{len(request)} indices from {request[0]!r} on" if request else "no index"
                    )
                    error.add_note(
                        f"headrace: in {type(self.dataset).__name__}.__getitems__ of {indices}"
                    )
                    raise
            items, failure, longest, last = [], None, 0.0, time.perf_counter()
            for number, index in enumerate(request):
                seed(number)
                try:
                    items.append(self.dataset[index])
                # of a headrace dataset inside, which has counted it
                except EmptyBatchError as error:
                    failure = error
                except Exception as error:
                    error.add_note(f"headrace: in {type(self.dataset).__name__}[{index!r}]")
                    raise
                now = time.perf_counter()
                if now - last > longest:
                    longest = now - last
                    self._slowest_items["sample"] = longest, number
                last = now
            if failure is not None and not items:
                raise failure
            return items

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _gathered(dataset: Any, indices: BatchRequest) -> Any:
    """The batch of a TensorDataset, by one gather a tensor; None, where it is made sample by
    sample: another dataset, or indices that are wrong, negative or no integers.
    """
    if type(dataset) is not TensorDataset or any(type(index) is not int for index in indices):
        return None
    if not all(tensor.layout is torch.strided for tensor in dataset.tensors):
        return None
    if not indices or min(indices) < 0 or max(indices) >= len(dataset):
        return None
    rows = torch.tensor(indices, dtype=torch.int64, device="cpu")
    return tuple(gathered(tensor, rows.to(tensor.device)) for tensor in dataset.tensors)


def worker_number() -> int:
    """The number of this worker; 0 in the main process."""
    info = get_worker_info()
    return 0 if info is None else info.id


def open_arena(ring: Ring, request: BatchRequest) -> Arena | None:
    """The slot of a request, to write its batch into; None, without workers, where the user keeps
    too many batches: the slot is given back. There the batch's tensors hold the slot themselves.
    """
    slot = request.slot
    assert slot is not None
    if get_worker_info() is not None:
        return ring.arena(slot)
    if ring.is_crowded:
        ring.copied += 1
        ring.give(slot)
        return None
    return Arena(ring, slot, leased=True)


def _packed(arena: Arena | None, batch: Any, report: dict[str, Any]) -> Delivery:
    assert arena is not None
    with arena:
        return arena.pack(batch, report)


def _failed(
    arena: Arena | None, error: BaseException, report: dict[str, Any]
) -> Delivery | Delivered:
    """The delivery of an error in place of a batch."""
    if arena is not None:
        arena.abandon()
    if get_worker_info() is None:
        return Delivered(None, {**report, "failure": error}, 0 if arena is None else arena.nbytes)
    assert arena is not None
    return arena.pack(None, {**report, "failure": describe(error)})


def as_delivered(delivery: Any) -> Any:
    """The collate function of torch's DataLoader: `Fetch` has made the batch already."""
    return delivery


def _attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """What a function returns, or what it raises (but what ends a worker passes).

    The caller must not keep the exception in a local variable: its traceback holds the caller's
    frame, and in that circle a ring and its workers would wait for the garbage collector.
    """
    try:
        return function(*arguments), None
    except Exception as caught:
        return None, caught
    except BaseException as caught:
        if get_worker_info() is not None:
            raise
        return None, caught


def describe(error: BaseException) -> tuple[bytes, str, int]:
    """An exception as it travels: pickled, its traceback as text, and the worker's number."""
    worker = worker_number()
    text = "".join(traceback.format_exception(error))
    for travelling in (error, _Rebuilt(error)):
        try:
            data = pickle.dumps(travelling)
            arrived = pickle.loads(data)
            # its class is called with `args`, and may format them again
            if travelling is error and str(arrived) != str(error):
                continue
            return data, text, worker
        except Exception as caught:
            trouble = caught
    # An exception class that is not found by its name: its text at least.
    data = pickle.dumps(
        WorkerError(f"{type(error).__name__}: {error} (its own class can't be pickled: {trouble})")
    )
    return data, text, worker


class _Rebuilt:
    """An exception whose class pickle can't call with its `args`: it is made without its
    ``__init__``.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self._error), self._error.args, self._error.__dict__)


def _rebuild(
    cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of the error that is raised in the parent."""

    def __init__(self, text: str) -> None:
        super().__init__(f'\n"""\n{text}"""')


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


class WorkerInit:
    """What a worker does first: leave signals to its parent, end with it, say that its loop begins,
    and call the user's `worker_init_fn`.

    Then it has its first batch prefetched, which the parent asks for when all workers have been
    started.

    Attributes:
        begins: epoch and step with which the workers begin.
    """

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self.function = function
        self.flags: Flags | None = None  # of the workers that are started next
        self.begins: tuple[int, int] = 0, 0
        self._collects = True
        self._dtype = torch.get_default_dtype()

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """While workers are started: no garbage collection, here or in a new worker before it is
        theirs to do.

        What a fork brought along stays out of it: the parent's loaders and their workers are not
        the worker's to end.

        Torch's defaults are the same in workers of all start methods: the parent's dtype, and the
        CPU. Torch draws the workers' seeds on the default device too, which no CPU generator can do
        elsewhere.
        """
        self._collects, self._dtype = gc.isenabled(), torch.get_default_dtype()
        gc.disable()
        try:
            with torch.device("cpu"):
                yield
        finally:
            if self._collects:
                gc.enable()

    def __call__(self, worker: int) -> None:
        gc.freeze()
        torch.set_default_dtype(self._dtype)
        (gc.enable if self._collects else gc.disable)()
        if torch_private.has_worker_internals():
            leave_to_parent()
        # nobody but `multiprocessing` ends torch's own workers when the program does: by SIGTERM
        else:
            leave_to_parent((signal.SIGINT,))
        end_with_parent()
        info = get_worker_info()
        assert info is not None
        fetch: Any = info.dataset
        # where users look for theirs, and may set its attributes
        object.__setattr__(info, "dataset", fetch.dataset)
        assert self.flags is not None
        self.flags.mark(worker)
        if self.function is not None:
            try:
                self.function(worker)
            except Exception as error:
                error.add_note("headrace: raised by worker_init_fn")
                fetch.init_error = error  # each batch raises it
                return
        fetch.begin(*self.begins, worker)
