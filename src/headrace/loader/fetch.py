"""What does a worker do with a ticket?

`Fetch` is the dataset that torch's workers see: it turns a ticket into samples. `Collate` turns these into a batch inside the
ticket's ring slot. Both carry what was counted along, and an error, if there was one, so that the parent can raise the error itself.
"""

from __future__ import annotations

import contextlib
import itertools
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
from headrace.datasets import base
from headrace.datasets.base import BaseDataset
from headrace.errors import WorkerError
from headrace.loader.batches import OrderPlan
from headrace.memory.ring import Arena, Delivered, Delivery, Ring
from headrace.order import Ticket
from headrace.order.seeding import SampleSeeder, preserved_rng

_OF_COLLATE = -3  # in place of a sample's index, which is never negative
AHEAD = 2
"""Batches that a streaming worker reads ahead of the one it works on."""


class Samples(list[Any]):
    """The samples of one batch on their way from `Fetch` to `Collate`."""

    def __init__(self, items: list[Any], ticket: Ticket, report: dict[str, Any], error: Exception | None = None) -> None:
        super().__init__(items)
        self.ticket, self.report, self.error = ticket, report, error


class Fetch(Dataset[Any]):
    """Tickets to samples, for a map-style dataset of headrace's or of anybody's.

    Other attributes are those of the dataset, so that a `worker_init_fn` finds what it looks for.

    Args:
        dataset: the user's dataset.
        plan: where a streaming dataset is to read ahead.
        stride: batches between two tickets of one worker.
    """

    def __init__(self, dataset: Any, plan: OrderPlan | None = None, stride: int = 1) -> None:
        self.dataset, self._plan, self._stride = dataset, plan, stride
        self._ours = isinstance(dataset, BaseDataset)
        self._inner = inner_datasets(dataset)
        self._seeder: SampleSeeder | None = None

    def __getitems__(self, ticket: Ticket) -> Samples:
        start = time.perf_counter()
        base.set_context(ticket)
        error, items = None, []
        report: dict[str, Any] = {"epoch": ticket.epoch, "step": ticket.step, "pid": os.getpid()}
        try:
            items = self._samples(ticket, report)
        except Exception as caught:
            error = caught
        finally:
            base.set_context(None)
        counts: dict[str, Any] = {"work_seconds": time.perf_counter() - start}
        for dataset in self._inner:
            for name, value in dataset.take_report().items():
                counts[name] = counts[name] + value if name in counts else value
        report["samples"], report["counts"] = len(items), counts
        return Samples(items, ticket, report, error)

    def _samples(self, ticket: Ticket, report: dict[str, Any]) -> list[Any]:
        if not self._ours:
            return self._foreign(ticket)
        if self._plan is not None:
            last = self._plan.steps()
            coming = range(ticket.step, min(ticket.step + (AHEAD + 1) * self._stride, last), self._stride)
            self.dataset.expect([self._plan.batch(ticket.epoch, step) for step in coming])
        found: list[Any] = self.dataset.__getitems__(ticket)
        return found

    def _foreign(self, ticket: Ticket) -> list[Any]:
        if self._seeder is None:
            self._seeder = SampleSeeder(self.dataset)
        seeder = self._seeder
        with preserved_rng(seeder):
            if hasattr(self.dataset, "__getitems__"):  # it answers a whole batch: one seed for it
                seeder(ticket.seed, ticket.epoch, ticket[0] if ticket else 0, ticket.draws[0] if ticket.draws else 0)
                found: list[Any] = self.dataset.__getitems__(list(ticket))
                return found
            items = []
            for number, index in enumerate(ticket):
                seeder(ticket.seed, ticket.epoch, index, ticket.draws[number] if ticket.draws else 0)
                items.append(self.dataset[index])
            return items

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)


class FetchIterable(Fetch):
    """Tickets to samples, for a foreign `IterableDataset`: each ticket takes the next samples of this worker's iterator."""

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(dataset)
        self._size, self._drop_last = batch_size, drop_last
        self._run = -1
        self._items: Iterator[Any] = iter(())

    def _samples(self, ticket: Ticket, report: dict[str, Any]) -> list[Any]:
        if self._run != ticket[0]:
            self._run = ticket[0]
            info = get_worker_info()
            SampleSeeder()(ticket.seed, ticket.epoch, -2, info.id if info is not None else 0)
            self._items = iter(self.dataset)
        items = list(itertools.islice(self._items, self._size))
        if len(items) < self._size and self._drop_last:
            items = []
        report["exhausted"] = not items
        return items


class Collate:
    """Samples to a batch in the ring slot of their ticket.

    Args:
        ring: the ring that the slots belong to.
        function: the collate function; None: the one sample is the batch.
    """

    def __init__(self, ring: Ring, function: Callable[[list[Any]], Any] | None) -> None:
        self.ring, self.function = ring, function
        self._is_random = function not in (None, stack_collate, list_collate)
        self._seeder: SampleSeeder | None = None

    def __call__(self, samples: Samples) -> Delivery | Delivered:
        slot, report, error = samples.ticket.slot, samples.report, samples.error
        assert slot is not None
        if get_worker_info() is None:
            with contextlib.nullcontext() if self.ring.is_crowded else Arena(self.ring, slot, leased=True) as arena:
                if arena is None:
                    self.ring.give(slot)
                if error is not None:
                    raise error
                batch = None if report.get("exhausted") else self._batch(samples)
            return Delivered(batch, report, 0 if arena is None else arena.nbytes)
        arena = self.ring.arena(slot)
        if error is None:
            try:
                with arena:
                    batch = None if report.get("exhausted") else self._batch(samples)
                    return arena.pack(batch, report)
            except Exception as caught:
                error = caught
        return self.ring.arena(slot).pack(None, {**report, "failure": describe(error)})

    def _batch(self, samples: Samples) -> Any:
        if self.function is None:
            return samples[0]
        if not self._is_random:
            return self.function(list(samples))
        if self._seeder is None:
            self._seeder = SampleSeeder(self.function)
        ticket = samples.ticket
        with preserved_rng(self._seeder):  # a collate function may draw too (MixUp): keyed by the batch's step
            self._seeder(ticket.seed, ticket.epoch, _OF_COLLATE, ticket.step)
            return self.function(list(samples))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seeder": None}  # found anew: the copy holds copies of the generators


def describe(error: Exception) -> tuple[bytes, str, int]:
    """An exception as it travels: pickled, its traceback as text, and the worker's number."""
    info = get_worker_info()
    worker = info.id if info is not None else 0
    text = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception as trouble:  # an exception class that can't be built again: its text at least
        data = pickle.dumps(WorkerError(f"{type(error).__name__}: {error} (its own class can't be pickled: {trouble})"))
    return data, text, worker


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
    """What a worker does first: see to it that it ends with its parent, and call the user's `worker_init_fn`."""

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self.function = function

    def __call__(self, worker: int) -> None:
        # Ctrl-C goes to all processes of a terminal: the parent's loop is interrupted, and the parent ends its workers in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent = parent_process()
        if parent is not None:
            watch = threading.Thread(target=_end_with, args=(parent,), name="headrace-watchdog", daemon=True)
            watch.start()
        if self.function is not None:
            self.function(worker)


def _end_with(parent: Any) -> None:
    """Waits for the parent's end; nothing is left to be tidied up then, for all that is shared is anonymous."""
    inherited = os.getppid()
    while not connection.wait([parent.sentinel], timeout=1.0):
        # A sibling that was forked later holds the sentinel's other end too, so look at the parent itself as well.
        if os.getppid() != inherited:
            break
    os._exit(1)


def inner_datasets(dataset: Any) -> list[BaseDataset]:
    """The headrace datasets that a dataset is, or wraps (`Subset`, `ConcatDataset` and their like)."""
    found: list[BaseDataset] = []
    waiting, seen = [dataset], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, BaseDataset):
            found.append(item)
            continue
        for name in ("dataset", "datasets"):
            value = getattr(item, "__dict__", {}).get(name)
            if value is not None:
                waiting.extend(value if isinstance(value, (list, tuple)) else [value])
    return found
