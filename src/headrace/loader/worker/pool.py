"""The worker pool: carries the batches of an epoch from the workers to the parent.

A `WorkerPool` is a ring and a plain torch DataLoader whose dataset, batch sampler and collate
function exchange requests; without workers, a loop that does the same in this process. A `Loader`
has one at a time, and a second one only while two of its iterators are in use.
"""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from headrace.errors import WorkerError, warn
from headrace.loader.config import DataLoaderConfig
from headrace.loader.device import Deliveries
from headrace.loader.worker.fetch import Fetch, WorkerInit, as_delivered
from headrace.loader.worker.processes import WorkerIterator, context_of, has_ended
from headrace.loader.worker.start import choose_context
from headrace.memory.anonymous import Flags
from headrace.memory.ring import Delivered, Ring
from headrace.order import BatchRequest

_BIRTHS = 5  # times that workers are started for one that never begins


class _Dispatch:
    """The batch sampler that torch sees: the requests of an epoch, each with a slot of the ring."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.handed_out = 0
        self.requests: Iterator[BatchRequest] = iter(())
        self.last = deque[BatchRequest](maxlen=ring.planned)  # more than torch asks for at first

    def begin(self, requests: Iterator[BatchRequest]) -> None:
        self.requests = requests
        self.last.clear()
        self.handed_out = 0

    def __iter__(self) -> Iterator[BatchRequest]:
        for request in self.requests:
            request.slot = self.ring.take()
            self.last.append(request)
            self.handed_out += not request.is_idle
            yield request


class WorkerPool:
    """Workers, their ring, and the torch iterator that drives them."""

    def __init__(self, fetch: Fetch, config: DataLoaderConfig) -> None:
        self.dispatch = _Dispatch(fetch.ring)
        self.is_lasting: bool = not config.num_workers or bool(config.persistent_workers)
        self._fetch = fetch
        self._config = config
        self._loader: DataLoader[Any] | None = None
        self._iterator: WorkerIterator | None = None
        # the iterator that takes this pool's batches
        self.user: weakref.ref[Any] | None = None
        self._pid = os.getpid()

    @property
    def ring(self) -> Ring:
        """Where the batches are."""
        return self.dispatch.ring

    @property
    def is_free(self) -> bool:
        """True if no running iterator uses this pool."""
        user = None if self.user is None else self.user()
        return user is None or user.is_done

    @property
    def is_sound(self) -> bool:
        """True if all its workers are alive, and it is this process's own: a forked one would
        share ring and workers with its parent.
        """
        workers = [] if self._iterator is None else self._iterator.workers
        return self._pid == os.getpid() and not any(map(has_ended, workers))

    def close(self) -> None:
        """Ends the workers, as soon as nobody asks for their batches any more."""
        self._loader = self._iterator = None

    def start(self, epoch: int, step: int, requests: Iterator[BatchRequest]) -> Deliveries:
        """The deliveries of an epoch from a step on, by its requests. What a lasting pool had
        still on its way is dropped.
        """
        self.dispatch.begin(requests)
        if not self._config.num_workers:
            return _Here(self.dispatch, self._fetch, bool(self._config.pin_memory))
        if self._loader is None or self._iterator is None:
            return self._start_workers(epoch, step)
        with torch.device("cpu"):
            self._iterator._reset(self._loader)
        return self._iterator

    def _start_workers(self, epoch: int, step: int) -> WorkerIterator:
        context: Any = self._config.multiprocessing_context
        for _ in range(_BIRTHS):
            self._loader = self._torch_loader(context, (epoch, step))
            # no garbage collection, here or in a new worker before it is theirs to do; and torch
            # draws their seeds on the CPU, whatever its default device
            collects = gc.isenabled()
            gc.disable()
            try:
                with torch.device("cpu"):
                    iterator = WorkerIterator(self._loader)
            finally:
                if collects:
                    gc.enable()
            hung = None
            if context.get_start_method() == "fork":
                hung = iterator.hung_newborn()
            if hung is None:
                self._iterator = iterator
                return iterator
            del iterator
            parts = [self._config.worker_init_fn]
            context, how = choose_context(None, self._fetch, parts)
            warn(
                f"a worker (pid {hung.pid}) hung as soon as it was forked: most likely another "
                "thread held a lock at that moment. All workers are killed and started again by "
                f"{how}. To avoid this, start such threads later, or pass "
                "multiprocessing_context='forkserver'"
            )
            # the requests go to other workers, which have another ring
            dispatch = self.dispatch
            dispatch.ring = self._fetch.ring = Ring(self.ring.planned)
            dispatch.begin(itertools.chain(list(dispatch.last), dispatch.requests))
        raise WorkerError(
            f"workers hung {_BIRTHS} times as soon as they were forked: end other threads of this "
            "process first, or pass multiprocessing_context='forkserver'"
        )

    def _torch_loader(self, context: Any, begins: tuple[int, int]) -> DataLoader[Any]:
        config = self._config
        workers = config.num_workers or 0
        flags = Flags(workers)
        return DataLoader(
            self._fetch,
            batch_sampler=self.dispatch,
            collate_fn=as_delivered,
            num_workers=workers,
            pin_memory=bool(config.pin_memory),
            # torch draws the workers' seeds from it, and neither from the global generator nor from
            # the user's
            generator=torch.Generator().manual_seed(config.seed & ((1 << 63) - 1)),
            prefetch_factor=config.prefetch_factor,
            persistent_workers=self.is_lasting,
            multiprocessing_context=context_of(context, flags),
            worker_init_fn=WorkerInit(config.worker_init_fn, flags, begins),
            timeout=config.timeout,
        )


class _Here:
    """The deliveries of an epoch, each made when it is asked for."""

    workers = ()

    def __init__(self, dispatch: _Dispatch, fetch: Fetch, pins: bool) -> None:
        self._requests = iter(dispatch)
        self._fetch = fetch
        self._pins = pins

    def __next__(self) -> Delivered:
        delivered: Any = self._fetch.__getitems__(next(self._requests))
        made: Delivered = delivered.pin_memory() if self._pins else delivered
        return made

    def is_ready(self) -> bool:
        return False  # it is made when it is asked for

    def close(self) -> None:
        return
