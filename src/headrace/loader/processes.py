"""The worker processes of one loader, and the batches that they deliver.

A `WorkerPool` is a ring and a plain torch DataLoader whose dataset, batch sampler and collate
function exchange requests; without workers, a loop that does the same in this process. A `Loader`
has one at a time, and a second one only while two of its iterators are in use.

NOTE [ torch's iterator ]

Torch starts the workers, deals requests to them and puts their batches in order. `WorkerIterator`
stays, since torch's iterator alone

* lets its handler of SIGCHLD raise wherever the main thread happens to be when a worker dies, be it
  in the midst of the user's optimizer or checkpoint. Here a death is told by the `next` that waits
  for a batch; and also where somebody else has asked the system for the worker's exit status;
* ends the workers of its parent, if it was inherited by a forked process and dies there;
* ends workers by SIGTERM, which they leave to the program (see `signals.py`). Here what does not
  end within five seconds, or is left when the program exits, is killed;
* loses a Ctrl-C that comes while workers are forked, or ended by a destructor;
* waits for ever for a worker that never begins;
* gives torch's profiler an event for each batch, in which other threads take the GIL: 4 % of the
  time of small batches.

NOTE [ workers that never begin ]

* A fork copies the locks of all threads of the parent, but only the forking thread. A lock that
  another thread held at that moment stays locked in the child for ever. Torch's worker seeds the
  generators of torch and NumPy before its loop begins: if a thread was drawing from one of them,
  the worker waits for the lock of the generator, and the parent for the worker's batch.
* A worker sets a byte in shared memory when its loop begins (`WorkerInit`). The parent waits for
  that right after the start, before it receives any batch. A worker that sleeps, and whose CPU time
  does not grow, in `LOOKS` consecutive looks will never begin. Looks are counted instead of
  seconds, since a suspended machine does not look.
* Then all workers are killed, and others are started, by forkserver, or by fork if that is not
  possible (see `start.py`); they get the same requests (`WorkerPool`).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import connection, util
from multiprocessing.context import ForkProcess
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, dataloader

from headrace.errors import WorkerError, warn
from headrace.loader.config import DataLoaderConfig
from headrace.loader.fetch import Fetch, WorkerInit, as_delivered
from headrace.loader.signals import OF_THE_JOB
from headrace.loader.start import choose_context
from headrace.memory.anonymous import Flags
from headrace.memory.ring import Delivered, Ring
from headrace.order import BatchRequest

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as TorchIterator
else:
    TorchIterator = dataloader._MultiProcessingDataLoaderIter

WORKER = "DataLoader worker"  # torch's words where one is gone
LOOKS = 6
"""Looks at a worker that stands still, after which it is taken to be deadlocked."""
_LOOK_EVERY = 0.5  # seconds
_PAUSE = 0.002  # seconds
_PATIENCE = 5.0  # seconds that torch waits for a batch before it looks at the workers
_LONGEST_BIRTH = 60.0  # seconds; after that nobody looks any more
_SOON = 0.3  # seconds after which Ctrl-C comes once more: enough for `__del__` to return
_BEFORE_QUEUES = 20  # multiprocessing closes its queues at 10
_BIRTHS = 5  # times that workers are started for one that never begins
_LATE = "DataLoader timed out"  # torch's words where no worker answered in time
_FATE = 0.5  # seconds until the system tells how a worker ended
_REMEDY = (
    "With num_workers=0, and with `python -X faulthandler`, the error shows itself. If memory was "
    "short, use fewer workers or a smaller prefetch_factor. Workers that are not forked import the "
    "program again: begin it with `if __name__ == '__main__':`"
)


def context_of(context: Any, flags: Flags) -> Any:
    """A multiprocessing context whose event, of which torch makes one for its workers, are their
    flags.
    """
    own = copy.copy(context)
    own.Event = lambda: flags
    if context.get_start_method() == "fork":
        own.Process = _Forked
    return own


class _Forked(ForkProcess):
    """A forked process whose start no Ctrl-C can fall into: what a hook of `os.fork` raises, Python
    prints and forgets, and the hook may have left a lock held, such as that of `logging`.

    It has the program's handlers of signals until it has its own: until then signals are held back
    (see `signals.py`).
    """

    def start(self) -> None:
        came: list[int] = []
        is_main = threading.current_thread() is threading.main_thread()
        try:
            with contextlib.ExitStack() as stack:
                if is_main and signal.getsignal(signal.SIGINT) is not None:
                    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
                    stack.callback(signal.signal, signal.SIGINT, before)
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_JOB)
                # calls the handlers of what was held back
                stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
                super().start()
            if came:
                signal.raise_signal(signal.SIGINT)
        except BaseException:
            kill([self])  # of a handler, where it has been started: nobody knows of it yet
            raise


def has_ended(worker: Any) -> bool:
    """By its sentinel: `is_alive` takes a worker that somebody else has waited for to live for
    ever.
    """
    return bool(connection.wait([worker.sentinel], timeout=0))


def kill(workers: list[Any]) -> None:
    """Ends those that are still there by force."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()


def _end(workers: list[Any], flags: Flags, requests: list[Any]) -> None:
    """Ends workers that are still there when the program exits: `multiprocessing` would send a
    signal that they leave to their parent, and wait for ever.
    """
    flags.set()
    for each in requests:
        with contextlib.suppress(ValueError):  # it is closed: its worker was told already
            each.put(None)
    until = time.monotonic() + _PATIENCE
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    kill(workers)
    workers.clear()  # nothing is left to be done by `__del__`, when modules are gone


def _seconds_of_sleeper(pid: int) -> float:
    """The CPU time of a process that sleeps; -1: it does not, or is gone."""
    import psutil

    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        if process.status() == psutil.STATUS_SLEEPING:
            return times.user + times.system
    except psutil.Error:
        pass
    return -1.0


class WorkerIterator(TorchIterator):
    """Torch's iterator over the deliveries of workers; see NOTE [ torch's iterator ]."""

    def __init__(self, loader: torch.utils.data.DataLoader[Any]) -> None:
        self._pid = os.getpid()
        # of an iterator that can't begin, those that it could start
        self._workers: list[Any] = []
        self._workers_status = [True] * loader.num_workers
        try:
            super().__init__(loader)
        except BaseException:  # whose frames may be held until the program exits, and waits
            kill(self._workers)
            raise
        torch._C._remove_worker_pids(id(self))  # of which the handler of SIGCHLD tells
        self._worker_pids_set = False
        parts = (self._workers, self._workers_done_event, self._index_queues)
        util.Finalize(self, _end, parts, exitpriority=_BEFORE_QUEUES)

    def __next__(self) -> Any:
        """The next delivery."""
        self._num_yielded += 1
        return self._next_data()  # type: ignore[no-untyped-call]

    @property
    def workers(self) -> list[Any]:
        """The worker processes."""
        return self._workers

    def is_ready(self) -> bool:
        """True if the next delivery is here, and pinned, so that `next` does not wait for it."""
        if not self._pin_memory:
            return False
        # with its data: it came before one that was awaited
        if len(self._task_info.get(self._rcvd_idx, ())) == 2:
            return True
        with self._data_queue.mutex:
            return any(number == self._rcvd_idx for number, _ in self._data_queue.queue)

    def hung_newborn(self) -> Any:
        """Waits until all workers have begun, or one is known never to begin, and gives that; see
        NOTE [ workers that never begin ].
        """
        looks = Counter[tuple[int, float]]()
        next_look = time.monotonic() + _LOOK_EVERY
        until = time.monotonic() + _LONGEST_BIRTH
        while (now := time.monotonic()) < until:
            unborn = self._unborn()
            # one that is dead: `next` tells of it
            if not unborn or connection.wait([worker.sentinel for worker in unborn], _PAUSE):
                break
            if now < next_look:
                continue
            next_look = now + _LOOK_EVERY
            for worker in unborn:
                seconds = _seconds_of_sleeper(worker.pid)
                looks[worker.pid, seconds] += seconds >= 0
                if looks[worker.pid, seconds] > LOOKS:
                    return worker
        return None

    def _unborn(self) -> list[Any]:
        flags: Any = self._workers_done_event
        return [worker for n, worker in enumerate(self._workers) if not flags.has_begun(n)]

    def _try_get_data(self, timeout: float = _PATIENCE) -> tuple[bool, Any]:
        """Torch's, which looks at the workers only after `timeout`, and believes `is_alive`."""
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            seconds = min(left, _LOOK_EVERY)
            succeeded, data = super()._try_get_data(seconds)  # type: ignore[no-untyped-call]
            if succeeded:
                return True, data
            if any(map(has_ended, self._workers)):
                raise RuntimeError(f"a {WORKER} has ended")
        return False, None

    def _shutdown_workers(self) -> None:
        # in a process that was forked meanwhile, they are its parent's
        if not self._workers or self._pid != os.getpid():
            return
        kill(self._unborn())  # they have nothing to lose, and may never hear that they are to end
        try:
            super()._shutdown_workers()
        finally:
            kill(self._workers)

    def close(self) -> None:
        """Ends the workers now, unless they live on for further epochs."""
        if not self._persistent_workers:
            self._shutdown_workers()

    def __del__(self) -> None:
        try:
            self._shutdown_workers()
        except KeyboardInterrupt:  # what is raised here is printed and forgotten
            main = threading.main_thread().ident
            again = threading.Timer(_SOON, signal.pthread_kill, (main, signal.SIGINT))
            again.daemon = True
            again.start()


def is_of_workers(error: RuntimeError) -> bool:
    """True if torch reports that a worker is gone, or that none answered in time."""
    return WORKER in str(error) or _LATE in str(error)


def death_of(
    error: RuntimeError, workers: Sequence[Any], epoch: int, step: int, timeout: float
) -> WorkerError:
    """What to raise where torch says that one of the workers is gone, or that none answered in
    time.
    """
    if _LATE in str(error):
        return WorkerError(
            f"no batch within timeout={timeout:g} s in epoch {epoch}, waiting for batch {step}: a "
            "read hangs or is slow; inspect the workers with `py-spy dump --pid`, or raise timeout"
        )
    fates = []
    for number, worker in enumerate(workers):
        if not has_ended(worker):
            continue
        worker.join(_FATE)  # its sentinel says so a moment before the system does
        code = worker.exitcode
        how = "is gone"  # somebody else has asked the system, which tells it once
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        elif code is not None:
            how = f"exited with status {code}"
        fates.append(f"worker {number} (pid {worker.pid}) {how}")
    return WorkerError(
        f"a worker died in epoch {epoch}, while batch {step} was waited for: "
        f"{'; '.join(fates) or error}. {_REMEDY}. The loader starts new workers with its next "
        "iterator"
    )


class _Dispatch:
    """The batch sampler that torch sees: the requests of an epoch, each with a slot of the ring."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self.handed_out = 0
        self.requests: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        for request in self.requests:
            request.slot = self._fetch.ring.take()
            self.handed_out += not request.is_idle
            yield request


class WorkerPool:
    """Workers, their ring, and the torch iterator that drives them."""

    def __init__(self, fetch: Fetch, config: DataLoaderConfig) -> None:
        self.dispatch: _Dispatch = _Dispatch(fetch)
        self.is_lasting: bool = not config.num_workers or bool(config.persistent_workers)
        self.fetch: Fetch = fetch
        self._config = config
        self._loader: DataLoader[Any] | None = None
        self._iterator: WorkerIterator | None = None
        # the iterator that takes this pool's batches
        self.user: weakref.ref[Any] | None = None
        self._pid = os.getpid()

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

    def start(self, epoch: int, step: int, requests: Iterator[BatchRequest]) -> Iterator[Delivered]:
        """The deliveries of an epoch from a step on, by its requests: a `WorkerIterator`, or
        without workers a `map`. What a lasting pool had still on its way is dropped.
        """
        self.dispatch.requests = requests
        self.dispatch.handed_out = 0
        if not self._config.num_workers:
            # not a generator, which an error would end
            made: Any = map(self.fetch.__getitems__, self.dispatch)
            return map(Delivered.pin_memory, made) if self._config.pin_memory else made
        if self._loader is None or self._iterator is None:
            return self._start_workers(epoch, step)
        with torch.device("cpu"):
            self._iterator._reset(self._loader)
        return self._iterator

    def _start_workers(self, epoch: int, step: int) -> WorkerIterator:
        config = self._config
        context: Any = config.multiprocessing_context
        dispatch = self.dispatch
        for _ in range(_BIRTHS):
            # the same requests once more, for other workers where these hang
            dispatch.requests, again = itertools.tee(dispatch.requests)
            flags = Flags(config.num_workers or 0)
            self._loader = DataLoader(
                self.fetch,
                batch_sampler=dispatch,
                collate_fn=as_delivered,
                num_workers=config.num_workers or 0,
                pin_memory=bool(config.pin_memory),
                # torch draws the workers' seeds from it, and neither from the global generator nor
                # from the user's
                generator=torch.Generator().manual_seed(config.seed & ((1 << 63) - 1)),
                prefetch_factor=config.prefetch_factor,
                persistent_workers=self.is_lasting,
                multiprocessing_context=context_of(context, flags),
                worker_init_fn=WorkerInit(config.worker_init_fn, flags, (epoch, step)),
                timeout=config.timeout,
            )
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
            context, how = choose_context(None, self.fetch, [config.worker_init_fn])
            warn(
                f"a worker (pid {hung.pid}) hung as soon as it was forked: most likely another "
                "thread held a lock at that moment. All workers are killed and started again by "
                f"{how}. To avoid this, start such threads later, or pass "
                "multiprocessing_context='forkserver'"
            )
            self.fetch.ring = Ring(self.fetch.ring.planned)
            dispatch.requests = again
            dispatch.handed_out = 0
        raise WorkerError(
            f"workers hung {_BIRTHS} times as soon as they were forked: end other threads of this "
            "process first, or pass multiprocessing_context='forkserver'"
        )
