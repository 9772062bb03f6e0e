"""The worker pool: carries the batches of an epoch from the workers to the parent.

A `WorkerPool` is a ring and a plain torch DataLoader whose dataset, batch sampler and collate
function exchange requests; without workers, a loop that does the same in this process. A `Loader`
has one at a time, and a second one only while two of its iterators are in use.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import weakref
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any

import torch

from headrace.errors import WorkerError
from headrace.loader.config import DataLoaderConfig
from headrace.loader.device import Deliveries
from headrace.loader.torch_private import workers_of
from headrace.loader.worker.fetch import Fetch, RemoteTraceback, WorkerInit, as_delivered
from headrace.loader.worker.processes import WORKER, Workers, flagged
from headrace.memory.ring import Delivered, Ring
from headrace.order import BatchRequest

# seconds until it is taken for granted that the system won't tell how a worker has ended
_PATIENCE = 0.5
_LATE = "DataLoader timed out"  # torch's words where no worker answered in time


class _Dispatch:
    """The batch sampler that torch sees: the requests of an epoch, each with a slot of the ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._requests: Iterator[BatchRequest] = iter(())
        self.handed_out = 0

    def begin(self, requests: Iterator[BatchRequest]) -> None:
        self._requests = requests
        self.handed_out = 0

    def __iter__(self) -> Iterator[BatchRequest]:
        for request in self._requests:
            request.slot = self._ring.take()
            self.handed_out += not request.is_idle
            yield request


class WorkerPool:
    """Workers, their ring, and the torch DataLoader that drives them."""

    def __init__(self, fetch: Fetch, config: DataLoaderConfig) -> None:
        workers = config.num_workers or 0
        self.ring = fetch.ring
        self.dispatch = _Dispatch(self.ring)
        self._fetch, self._pins = fetch, bool(config.pin_memory)
        self._loader: Workers | None = None
        self._init = WorkerInit(config.worker_init_fn)
        if workers:
            self._loader = Workers(
                fetch,
                batch_sampler=self.dispatch,
                collate_fn=as_delivered,
                num_workers=workers,
                pin_memory=self._pins,
                # torch draws the workers' seeds from it, and neither from the global generator nor
                # from the user's
                generator=torch.Generator().manual_seed(config.seed & ((1 << 63) - 1)),
                prefetch_factor=config.prefetch_factor,
                persistent_workers=bool(config.persistent_workers),
                multiprocessing_context=flagged(
                    config.multiprocessing_context, self._init, workers
                ),
                worker_init_fn=self._init,
                timeout=config.timeout,
            )
        self.is_lasting: bool = not workers or bool(config.persistent_workers)
        self._user: weakref.ref[Any] | None = None
        self._pid = os.getpid()

    @property
    def is_free(self) -> bool:
        """True if no running iterator uses this pool."""
        user = None if self._user is None else self._user()
        return user is None or user.is_done

    @property
    def is_sound(self) -> bool:
        """True if all its workers are alive, and it is this process's own: a forked one would
        share ring and workers with its parent.
        """
        return self._pid == os.getpid() and not any(map(_has_ended, workers_of(self._loader)))

    def close(self) -> None:
        """Ends the workers, as soon as nobody asks for their batches any more."""
        self._loader = None

    def used_by(self, iterator: Any) -> None:
        """From now on an iterator takes this pool's batches."""
        self._user = weakref.ref(iterator)

    def start(self, epoch: int, step: int, requests: Iterator[BatchRequest]) -> Deliveries:
        """The deliveries of an epoch from a step on, by its requests. What a lasting pool had
        still on its way is dropped.
        """
        self.dispatch.begin(requests)
        if self._loader is None:
            return _Here(self.dispatch, self._fetch, self._pins)
        self._init.begins = epoch, step
        with self._init.forking():
            deliveries: Deliveries = iter(self._loader)
        return deliveries


class _Here:
    """The deliveries of an epoch, each made when it is asked for."""

    def __init__(self, dispatch: _Dispatch, fetch: Fetch, pins: bool) -> None:
        self._requests, self._fetch, self._pins = iter(dispatch), fetch, pins

    def __iter__(self) -> _Here:
        return self

    def __next__(self) -> Delivered:
        delivered: Any = self._fetch.__getitems__(next(self._requests))
        made: Delivered = delivered.pin_memory() if self._pins else delivered
        return made

    def is_ready(self) -> bool:
        return False  # it is made when it is asked for

    def close(self) -> None:
        return


def failure_of(delivered: Delivered) -> BaseException:
    """The error that was delivered instead of a batch, with its place and, out of a worker, its
    traceback, ready to be raised.
    """
    failure = delivered.report.pop("failure")
    where = f"epoch {delivered.report['epoch']}, batch {delivered.report['step']}"
    if isinstance(failure, BaseException):
        error = failure
    else:
        data, text, worker = failure
        where = f"worker {worker}, {where}"
        try:
            error = pickle.loads(data)
        except Exception as trouble:  # as where the worker alone finds the module of its class
            error = WorkerError(
                f"an error of a worker can't be unpickled here ({type(trouble).__name__}: "
                f"{trouble}); the traceback above names it"
            )
        error.__cause__ = RemoteTraceback(text)
    if isinstance(error, StopIteration):  # which would end the user's loop
        cause, error = error, RuntimeError(f"a sample's code raised StopIteration: {error}")
        error.__cause__ = cause
    error.add_note(f"headrace: in {where}")
    return error


def is_of_workers(error: RuntimeError) -> bool:
    """True if torch reports that a worker is gone, or that none answered in time."""
    return WORKER in str(error) or _LATE in str(error)


def death_of(
    error: RuntimeError, deliveries: Any, epoch: int, step: int, start: int, timeout: float
) -> WorkerError:
    """What to raise where torch says that a worker is gone, or that none answered in time; the
    iterator began at `start`.
    """
    text = str(error)
    if _LATE in text:
        return WorkerError(
            f"no batch within timeout={timeout:g} s in epoch {epoch}, waiting for batch {step}: a "
            "read hangs or is slow; "
            "inspect the workers with `py-spy dump --pid`, or raise timeout"
        )
    fates = "; ".join(_fates(deliveries, start)) or text.splitlines()[0]
    return WorkerError(
        f"a worker died in epoch {epoch}, while batch {step} was waited for: {fates}. "
        f"{_remedy(deliveries)}; the loader starts new workers "
        "with its next iterator"
    )


def _remedy(deliveries: Any) -> str:
    """What to do about dead workers: by how the first of them has ended."""
    worker = next(filter(_has_ended, deliveries.workers), None)
    code, start = (
        None if worker is None else _exit_code(worker),
        getattr(worker, "_start_method", None),
    )
    if code is not None and code > 0 and start in ("spawn", "forkserver"):
        return (
            f"Its own error stands above this one. Workers started by {start} import the program "
            "again: begin it with "
            "`if __name__ == '__main__':`, and keep what workers need (functions, classes, "
            "transforms) in a module or outside of that "
            "block; or pass multiprocessing_context='fork', or num_workers=0"
        )
    if code is not None and code >= 0:
        return (
            "Its own code ended the process (sys.exit, os._exit): check what it printed, or use "
            "num_workers=0 to see where"
        )
    if code is not None and -code not in (signal.SIGKILL, signal.SIGTERM):
        return (
            "A library that it calls has crashed: `python -X faulthandler` shows where, and so "
            "does num_workers=0"
        )
    return "If it was killed for want of memory, use fewer workers or a smaller prefetch_factor"


def _fates(deliveries: Any, start: int) -> Iterator[str]:
    """Of each dead worker: its number, how it ended, and the first of its batches that has not
    arrived.
    """
    for number, worker in enumerate(deliveries.workers):
        if not _has_ended(worker):
            continue
        code = _exit_code(worker)
        how = (
            "is gone"
            if code is None
            else f"exited with status {code}"
            if code >= 0
            else f"was killed by {_signal_name(-code)}"
        )
        missing = deliveries.missing_of(number)
        yield f"worker {number} (pid {worker.pid}) {how}" + (
            "" if missing is None else f", and its batch {start + missing} has not arrived"
        )


def _has_ended(worker: Any) -> bool:
    """By its sentinel: `is_alive` takes a worker that somebody else has waited for to live for
    ever.
    """
    return bool(connection.wait([worker.sentinel], timeout=0))


def _exit_code(worker: Any) -> int | None:
    """How a worker has ended. Its sentinel says so a moment before the system does. None: somebody
    else has asked the system, which tells it once.
    """
    until = time.monotonic() + _PATIENCE
    while (code := worker.exitcode) is None and time.monotonic() < until:
        time.sleep(0.005)
    return None if code is None else int(code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
