"""Turns batch requests into samples and batches, inside a worker or this process.

`Fetch` is the dataset that torch's workers see: it turns a request into samples, or at once into a batch where the dataset can write
one. `Collate` makes a batch of what is none yet. Both work inside the request's ring slot, and both carry what was counted along, and
an error, if there was one, so that the parent can raise the error itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection, parent_process
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from headrace.collate import list_collate, stack_collate
from headrace.collate.fields import Step
from headrace.collate.stack import stack_tree
from headrace.datasets.core import base
from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.filling import Filled, Join
from headrace.datasets.core.wrapped import answers_batches
from headrace.errors import CollateError, ConfigError, SampleError, WorkerError
from headrace.loader.data import inner_datasets, length_of
from headrace.loader.plan import OF_COLLATE, OrderPlan
from headrace.loader.stateful import asked, give_back, is_stateful
from headrace.loader.worker.samples import Samples
from headrace.memory.anonymous import Flags
from headrace.memory.ring import Arena, Delivered, Delivery, Ring
from headrace.order import BatchRequest
from headrace.order.seeding import SampleSeeder, preserved_rng, warn_off_main_thread


class Fetch(Dataset[Any]):
    """Requests to samples, for a map-style dataset of headrace's or of anybody's.

    Other attributes are those of the dataset, so that a `worker_init_fn` finds what it looks for.

    Args:
        dataset: the user's dataset.
        ring: the ring that the requests' slots belong to.
        plan: where a streaming dataset is to read ahead.
        stride: batches between two requests of one worker.
        stacks: True if samples are stacked, so that a dataset may write the batch itself.
        origin: what an error calls the origin of the indices.
        join: what makes a batch of ids that lie one behind the other, where that is all that becomes of samples.
    """

    _has_indices = True

    def __init__(
        self,
        dataset: Any,
        ring: Ring,
        plan: OrderPlan | None = None,
        stride: int = 1,
        stacks: bool = False,
        origin: str = "the order",
        join: Join | None = None,
    ) -> None:
        self._origin, self._join = origin, join
        self.dataset, self.ring, self._plan, self._stride, self._stacks = dataset, ring, plan, stride, stacks
        self._ours = isinstance(dataset, BaseDataset)
        self._inner = inner_datasets(dataset)
        self._answers_batches = answers_batches(dataset)
        self.init_error: Exception | None = None
        self._seeder: SampleSeeder | None = None
        self._is_stateful = is_stateful(dataset)

    def __getitems__(self, request: BatchRequest) -> Samples:
        start = time.perf_counter()
        base.set_context(request)
        arena = open_arena(self.ring, request)
        report: dict[str, Any] = {"epoch": request.epoch, "step": request.step, "pid": os.getpid()}
        try:
            samples, error = _attempt(lambda: self._tried(request, report, arena))
        finally:
            base.set_context(None)
        if error is None:
            self._report_state(report)
        counts: dict[str, Any] = {"work_seconds": time.perf_counter() - start}
        for dataset in self._inner:
            for name, value in dataset.take_report().items():
                counts[name] = counts[name] + value if name in counts else value
        report["samples"] = samples.samples if isinstance(samples, Filled) else len(samples) if isinstance(samples, list) else len(request)
        report["counts"] = counts
        try:
            return Samples(samples, request, report, error, arena, self.dataset if self._has_indices else None)
        finally:
            del error  # see `_attempt`

    def _tried(self, request: BatchRequest, report: dict[str, Any], arena: Arena | None) -> Any:
        """The samples; an index that the dataset does not have is an error that says where it came from."""
        try:
            return self._samples(request, report, arena)
        except IndexError as error:
            n = length_of(self.dataset)
            outside = [i for i in request if isinstance(i, int) and n is not None and not -n <= i < n]
            if not outside:
                raise
            raise IndexError(
                f"{self._origin} gave index {outside[0]}, and {type(self.dataset).__name__} has {n} samples: indices must lie in "
                f"[0, {n}), or in [{-(n or 0)}, 0) from the end"
            ) from error

    def _report_state(self, report: dict[str, Any]) -> None:
        if self._is_stateful:
            report["worker"], report["state"] = worker_number(), asked(self.dataset)

    def _samples(self, request: BatchRequest, report: dict[str, Any], arena: Arena | None) -> Any:
        if self.init_error is not None:
            raise self.init_error
        if request.given is not None:
            give_back(request.given, self.dataset)
        if request.is_idle:
            report["idle"] = True
            return []
        if not self._ours:
            return self._foreign(request)
        if self._plan is not None:
            self._expect(self._plan, request)
        filled = None
        if self._stacks or self._join is not None:
            with arena or contextlib.nullcontext():
                filled = self.dataset.fill(request) if self._join is None else self.dataset.fill_joined(request, self._join)
        return self.dataset.__getitems__(request) if filled is None else filled

    def _expect(self, plan: OrderPlan, request: BatchRequest) -> None:
        steps = range(request.step, plan.steps(), self._stride)
        self.dataset.expect(request.epoch, steps, plan.batches_of(request.epoch))

    def _foreign(self, request: BatchRequest) -> Any:
        if self._seeder is None:
            self._seeder = SampleSeeder(self.dataset)
        seeder = self._seeder

        def seed(number: int) -> None:
            index = request[number]  # a sampler of the user's may give the dataset something else than integers
            seeder(request.seed, request.epoch, index if isinstance(index, int) else 0, request.draws[number] if request.draws else 0)

        if get_worker_info() is None:
            warn_off_main_thread()
        with preserved_rng(seeder):
            if self._answers_batches:  # one seed for the whole batch
                if request:
                    seed(0)
                return self.dataset.__getitems__(list(request))
            items, failure = [], None
            for number, index in enumerate(request):
                seed(number)
                try:
                    items.append(self.dataset[index])
                except SampleError as error:  # of a headrace dataset inside, which has counted it
                    if not error.may_be_skipped:
                        raise
                    failure = error
            if failure is not None and not items:
                raise failure
            return items

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)


def worker_number() -> int:
    """The number of this worker; 0 in the main process."""
    info = get_worker_info()
    return 0 if info is None else info.id


def open_arena(ring: Ring, request: BatchRequest) -> Arena | None:
    """The slot of a request, to write its batch into; None where the user keeps too many batches, and the slot is given back.

    Without workers the batch's tensors hold the slot themselves, and nothing is pickled.
    """
    slot = request.slot
    assert slot is not None
    if get_worker_info() is not None:
        return ring.arena(slot)
    if ring.is_crowded:
        ring.give_unused(slot)
        return None
    return Arena(ring, slot, leased=True)


class Collate:
    """Samples to a batch in the ring slot of their request.

    Args:
        function: the collate function; None: the one sample is the batch.
        of_one: the dataset yields batches, and the function gets one of them.
    """

    def __init__(self, function: Callable[[Any], Any] | None, of_one: bool = False) -> None:
        self.function, self._of_one = function, of_one
        self._is_random = function not in (None, stack_collate, list_collate)
        self._names_samples = getattr(function, "__module__", "").startswith("headrace.")  # another may have chosen among them
        self._seeder: SampleSeeder | None = None

    def __call__(self, samples: Samples) -> Delivery | Delivered:
        arena, in_worker = samples.arena, get_worker_info() is not None
        made: Any
        made, error = (None, samples.error) if samples.error is not None else _attempt(lambda: self._made(samples, in_worker))
        report = samples.report
        try:
            if error is not None and arena is not None:
                arena.abandon()
            if in_worker:
                assert arena is not None
                delivery: Delivery = made if error is None else arena.pack(None, {**report, "failure": describe(error)})
                return delivery
            if arena is not None and error is None:
                made = arena.lightened(made)
            return Delivered(made, report if error is None else {**report, "failure": error}, 0 if arena is None else arena.nbytes)
        finally:
            samples.error = samples.arena = None
            del error  # see `_attempt`

    def _made(self, samples: Samples, in_worker: bool) -> Any:
        arena = samples.arena
        with arena or contextlib.nullcontext():
            try:
                batch = self._batch(samples)
            except CollateError as error:
                name = samples.name_of if self._names_samples else "sample {} of the batch".format
                raise CollateError(error.naming(name)) from None
            return arena.pack(batch, samples.report) if in_worker and arena is not None else batch

    def _batch(self, samples: Samples) -> Any:
        items = samples.items
        if isinstance(items, Filled):
            return _whole(items)
        if samples.report.get("exhausted") or samples.report.get("idle"):
            return None
        if self.function is None:
            return items[0]
        if self._of_one:
            items = items[0]
        if not self._is_random:
            return self.function(items)
        if self._seeder is None:
            self._seeder = SampleSeeder(self.function)
        request = samples.request
        with preserved_rng(self._seeder):  # a collate function may draw too (MixUp): keyed by the batch's step
            self._seeder(request.seed, request.epoch, OF_COLLATE, request.step)
            batch = self.function(items)
        if callable(batch):
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise ConfigError(
                f"collate_fn: {name} returned a {type(batch).__name__} where a batch should be, so it makes a collate function and is "
                f"none: pass what it returns, collate_fn={name}(...), or register it with factory=True"
            )
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seeder": None}  # found anew: the copy holds copies of the generators


def _whole(filled: Filled) -> Any:
    """The batch as stacking its samples would have made it."""
    if filled.targets is None:
        return filled.inputs
    if not isinstance(filled.targets, list):
        return filled.inputs, filled.targets
    return filled.inputs, stack_tree(filled.targets, path=(Step("[1]", ("1",)),))


def _attempt(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a function returns, or what it raises (but what ends a worker passes).

    The caller must not keep the exception in a local variable: its traceback holds the caller's frame, and in that circle a ring and
    its workers would wait for the garbage collector.
    """
    try:
        return function(), None
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
            pickle.loads(data)
            return data, text, worker
        except Exception as caught:
            trouble = caught
    # An exception class that is not found by its name: its text at least.
    data = pickle.dumps(WorkerError(f"{type(error).__name__}: {error} (its own class can't be pickled: {trouble})"))
    return data, text, worker


class _Rebuilt:
    """An exception whose class pickle can't call with its `args`: it is made without its ``__init__``."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self._error), self._error.args, self._error.__dict__)


def _rebuild(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
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
    """By value: torch passes the descriptor of a temporary tensor to a spawned process, which is closed before it gets there."""
    return _generator_from, (str(generator.device), generator.get_state().numpy().tobytes())


ForkingPickler.register(torch.Generator, _reduce_generator)


class WorkerInit:
    """What a worker does first: see to it that it ends with its parent, say that its loop begins, and call the user's `worker_init_fn`.

    Attributes:
        flags: of the workers that are started next.
    """

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self.function = function
        self.flags: Flags | None = None
        self._collects = True

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """While workers are started: no garbage collection, here or in a new worker before it is theirs to do.

        What a fork brought along stays out of it: the parent's loaders and their workers are not the worker's to end.
        """
        self._collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if self._collects:
                gc.enable()

    def __call__(self, worker: int) -> None:
        gc.freeze()
        (gc.enable if self._collects else gc.disable)()
        # Ctrl-C goes to all processes of a terminal: the parent's loop is interrupted, and the parent ends its workers in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent = parent_process()
        if parent is not None:
            watch = threading.Thread(target=_end_with, args=(parent,), name="headrace-watchdog", daemon=True)
            watch.start()
        info = get_worker_info()
        assert info is not None
        fetch: Any = info.dataset
        object.__setattr__(info, "dataset", fetch.dataset)  # where users look for theirs, and may set its attributes
        assert self.flags is not None
        self.flags.mark(worker)
        if self.function is not None:
            try:
                self.function(worker)
            except Exception as error:
                error.add_note("headrace: raised by worker_init_fn")
                fetch.init_error = error  # each batch raises it


def _end_with(parent: Any) -> None:
    """Waits for the parent's end; nothing is left to be tidied up then, for all that is shared is anonymous."""
    inherited = os.getppid()
    while not connection.wait([parent.sentinel], timeout=1.0):
        # A sibling that was forked later holds the sentinel's other end too, so look at the parent itself as well.
        if os.getppid() != inherited:
            break
    os._exit(1)
