"""Torch's worker processes of one loader: starts them, receives from them, replaces those that
deadlock at their start, and ends them.

NOTE [ workers that never begin ]

* A fork copies the locks of all threads of the parent, but only the forking thread. A lock that
  another thread held at that moment stays locked in the child for ever. Torch's worker seeds the
  generators of torch and NumPy before its loop begins: if a thread was drawing from one of them,
  the worker waits for the lock of the generator, and the parent for the worker's batch.
* A worker sets a byte in shared memory when its loop begins (`WorkerInit`). While the parent waits
  for a batch, it looks at the forked workers that have not done so. A worker that sleeps, and whose
  CPU time does not grow, in `LOOKS` consecutive looks will never begin. Looks are counted instead
  of seconds, since a suspended machine does not look.
* It is killed and replaced by another worker, started by forkserver, or by fork if that is not
  possible (see `start.py`). What was sent to the old worker is still unread in its queue. It is
  sent to the new worker, which makes the same batches from it.
* Queues of a fork context use unnamed semaphores, which only forked processes can reach. The new
  worker has its own queues, which need no locks, since there is one process at each end.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import queue
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing import connection, util
from multiprocessing.context import ForkProcess
from multiprocessing.queues import Queue
from types import SimpleNamespace
from typing import Any

import psutil
from torch.utils.data import DataLoader

from headrace.errors import WorkerError, warn
from headrace.loader import torch_private
from headrace.loader.worker.fetch import WorkerInit
from headrace.loader.worker.signals import OF_THE_JOB
from headrace.loader.worker.start import forkserver_context, listed, obstacle, other_threads
from headrace.memory.anonymous import Flags
from headrace.memory.ring import Delivered

WORKER = "DataLoader worker"  # torch's words where one is gone
LOOKS = 6
"""Looks at a worker that stands still, after which it is taken to be deadlocked."""
_LOOK_EVERY = 0.5  # seconds
_BIRTHS = 5  # processes that are started for one worker at most
_PATIENCE = 5.0  # seconds for what takes none, so that a mistake here is an error and no hang
_SOON = 0.3  # seconds after which Ctrl-C comes once more: enough for `__del__` to return
_END = "end of what was sent"
_BEFORE_QUEUES = 20  # multiprocessing closes its queues at 10
_calls = itertools.count(-1, -1)  # torch's own keys are addresses


def flagged(context: Any, init: WorkerInit, workers: int) -> Any:
    """A multiprocessing context whose event, of which torch makes one for each set of workers,
    is their `Flags`.
    """
    own = copy.copy(context)
    own.Event = functools.partial(_new_flags, init, workers)
    if context.get_start_method() == "fork":
        own.Process = _Forked
    return own


def _new_flags(init: WorkerInit, workers: int) -> Flags:
    init.flags = flags = Flags(workers)
    return flags


class _Forked(ForkProcess):
    """A forked process whose start no Ctrl-C can fall into: what a hook of `os.fork` raises, Python
    prints and forgets, and the hook may have left a lock held, such as that of `logging`.

    It has the program's handlers of signals until it has its own: until then signals are held back
    (see `signals.py`).
    """

    def start(self) -> None:
        try:
            self._start()
        except BaseException:  # of a handler of signals, where the worker has been started
            if self.pid is not None:
                self.kill()  # nobody knows of it yet
                self.join()
            raise

    def _start(self) -> None:
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is None
        ):
            self._start_masked()
            return
        came: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        try:
            self._start_masked()
        finally:
            signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)

    def _start_masked(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_JOB)
        try:
            super().start()
        finally:
            # calls the handlers of what was held back
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Workers(DataLoader[Any]):
    """A plain torch DataLoader whose iterator is a `WorkerIterator`, where this torch has what
    that needs.
    """

    def _get_iterator(self) -> Any:
        if not torch_private.has_worker_internals():
            return super()._get_iterator()
        try:
            return WorkerIterator(self)
        except (AttributeError, TypeError) as error:
            torch_private.note_version(error)
            raise

    def __iter__(self) -> Any:
        iterator: Any = super().__iter__()
        return iterator if isinstance(iterator, WorkerIterator) else PlainIterator(iterator)


class PlainIterator:
    """Torch's own iterator, used by its public methods alone."""

    workers: tuple[Any, ...] = ()

    def __init__(self, iterator: Iterator[Delivered]) -> None:
        self._iterator: Iterator[Delivered] = iterator

    def __next__(self) -> Delivered:
        return next(self._iterator)

    def is_ready(self) -> bool:
        return False  # nobody knows

    def close(self) -> None:
        """Drops torch's iterator, which ends workers that don't live on."""
        self._iterator = iter(())


class WorkerIterator(torch_private.TorchIterator):
    """Torch's deliveries, and the news of a worker's death while one is awaited.

    Torch's handler of SIGCHLD would raise wherever the main thread happens to be, be it in the
    midst of the user's optimizer or checkpoint; but it alone can end a read of a message that a
    killed worker has begun to write. So it knows the workers only inside of `next`.
    """

    _worker_init_fn: Any
    _workers_done_event: Any

    def __init__(self, loader: Workers) -> None:
        self._pid = os.getpid()
        self._unborn: dict[int, _Birth] = {}  # forked workers that are not known to have begun
        self._call = 0  # torch's key of the `next` that is under way
        self._workers: list[Any] = []  # of an iterator that can't begin, those that it could start
        self._workers_status = [True] * loader.num_workers
        super().__init__(loader)
        self._forget_pids()
        self._results = _Merged(self._worker_result_queue)
        context: Any = loader.multiprocessing_context
        if context.get_start_method() == "fork":
            self._unborn = {worker: _Birth(process) for worker, process in enumerate(self._workers)}
        self._watch_ends()
        self._end_at_exit = util.Finalize(
            self,
            _end,
            (self._workers, self._workers_done_event, self._index_queues),
            exitpriority=_BEFORE_QUEUES,
        )

    @property
    def workers(self) -> tuple[Any, ...]:
        """The worker processes."""
        return tuple(self._workers)

    def missing_of(self, worker: int) -> int | None:
        """The first of a worker's tasks that has not arrived; None: all have."""
        return min(
            (
                task
                for task, info in self._task_info.items()
                if len(info) == 1 and info[0] == worker
            ),
            default=None,
        )

    def _watch_ends(self) -> None:
        self._pids: tuple[Any, ...] = tuple(worker.pid for worker in self._workers)
        self._ends = select.poll()
        for worker in self._workers:
            self._ends.register(worker.sentinel, select.POLLIN)

    def __next__(self) -> Delivered:
        self._call = next(_calls)
        torch_private.set_worker_pids(self._call, self._pids)
        try:
            # since the last call; of what is reaped already the handler knows nothing
            if self._ends.poll(0):
                raise RuntimeError(f"a {WORKER} has ended")
            # A mark for the profiler, which `next` makes, costs as much as the rest of it.
            take = super().__next__ if torch_private.is_profiling() else self._next_data
            delivered: Delivered = take()
            return delivered
        finally:
            if self._call:
                torch_private.remove_worker_pids(self._call)
                self._call = 0

    def is_ready(self) -> bool:
        """True if the next delivery is here, and pinned, so that `next` does not wait for it."""
        if not self._pin_memory:
            return False
        awaited, ready = self._rcvd_idx, self._data_queue
        # with its data: it came before one that was awaited
        if len(self._task_info.get(awaited, ())) == 2:
            return True
        with ready.mutex:
            return any(number == awaited for number, _ in ready.queue)

    def _try_get_data(self, timeout: float = _PATIENCE) -> tuple[bool, Any]:
        """Torch's, which returns after a while without data so that somebody may look at the
        workers.
        """
        left = timeout
        while self._unborn and left > 0:
            succeeded, data = super()._try_get_data(min(left, _LOOK_EVERY))  # type: ignore[no-untyped-call]
            if succeeded:
                return True, data
            left = timeout if self._look() else left - _LOOK_EVERY
        return super()._try_get_data(left) if left > 0 else (False, None)  # type: ignore[no-untyped-call]

    # -- workers that never begin

    def _look(self) -> bool:
        """Replaces forked workers that stand still and have not begun; see NOTE [ workers that
        never begin ]. True if there was one.
        """
        self._unborn = {
            worker: birth
            for worker, birth in self._unborn.items()
            if not self._workers_done_event.has_begun(worker)
        }
        stuck = [worker for worker, birth in self._unborn.items() if birth.stands_still()]
        for worker in stuck:
            self._start_again(worker)
        return bool(stuck)

    def _start_again(self, worker: int) -> None:
        birth, old = self._unborn.pop(worker), self._workers[worker]
        call = self._forget_pids()
        old.kill()
        old.join(_PATIENCE)
        threads = listed(other_threads()) or "none that is known now"
        why = (
            f"worker {worker} (pid {old.pid}) hung as soon as it was forked, before it did "
            "anything: most likely another thread of this "
            f"process held a lock at that moment (threads now: {threads})"
        )
        if birth.number == _BIRTHS:
            raise WorkerError(
                f"{why}; so did {_BIRTHS - 1} before it. Pass "
                "multiprocessing_context='forkserver', or end those threads"
            )
        new, reason = self._new_worker(worker)
        if reason is not None:
            self._unborn[worker] = _Birth(new, birth.number + 1)
        self._workers[worker] = new
        self._watch_ends()
        if call:
            torch_private.set_worker_pids(call, self._pids)
            self._call = call
        how = (
            "forkserver; to avoid the wait, pass multiprocessing_context='forkserver'"
            if reason is None
            else f"fork, since {reason}"
        )
        warn(f"{why}. It was killed and started again by {how}")

    def _new_worker(self, worker: int) -> tuple[Any, str | None]:
        """A process in the place of a dead one that has read nothing; and why it is forked too,
        or None: it is not.
        """
        old, requests, results = self._index_queues[worker], _queue(), _queue()
        old.put(_END)
        while (sent := old.get(timeout=_PATIENCE)) != _END:
            requests.put(sent)
        old.close()
        self._index_queues[worker] = requests
        self._results.add(results)
        self._workers_done_event.mark(worker, False)
        self._worker_init_fn.flags = self._workers_done_event
        arguments = (
            *(
                self._dataset_kind,
                torch_private.worker_dataset(self._dataset),
                requests,
                results,
                self._workers_done_event,
            ),
            *(self._auto_collation, self._collate_fn),
            *(
                self._drop_last,
                self._base_seed,
                self._worker_init_fn,
                worker,
                self._num_workers,
                self._persistent_workers,
            ),
            self._shared_seed,
        )
        reason, _ = obstacle([self._dataset, self._collate_fn, self._worker_init_fn])
        start: Any = forkserver_context().Process if reason is None else _Forked
        process = start(target=torch_private.worker_loop, args=arguments, daemon=True)
        with self._worker_init_fn.forking():
            process.start()
        return process, reason

    def _shutdown_workers(self) -> None:
        # in a process that was forked meanwhile, they are its parent's
        if not self._workers or self._pid != os.getpid():
            return
        if not getattr(self, "_shutdown", True):
            unborn = [
                process
                for worker, process in enumerate(self._workers)
                if not self._workers_done_event.has_begun(worker)
            ]
            if unborn:  # they have nothing to lose, and may never hear that they are to end
                self._forget_pids()
            for process in unborn:
                process.kill()
        try:
            super()._shutdown_workers()
        finally:
            if getattr(self, "_shutdown", False):
                for process in self._workers:
                    if process.is_alive():  # after 5 s; SIGTERM, which torch sends, does not end it
                        process.kill()
                        process.join()

    def close(self) -> None:
        """Ends the workers now, unless they live on for further epochs."""
        if not self._persistent_workers:
            self._shutdown_workers()

    def __del__(self) -> None:
        try:
            self._shutdown_workers()
        except KeyboardInterrupt:  # what is raised here is printed and forgotten
            again = threading.Timer(
                _SOON, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
            )
            again.daemon = True
            again.start()

    def _forget_pids(self) -> int:
        """Torch is not to tell of the death of a worker now. Gives its key of the `next` that is
        under way, or 0.
        """
        if self._worker_pids_set:  # while the iterator is made
            torch_private.remove_worker_pids(id(self))
            self._worker_pids_set = False
        call, self._call = self._call, 0
        if call:
            torch_private.remove_worker_pids(call)
        return call


def _end(workers: list[Any], flags: Flags, requests: list[Any]) -> None:
    """Ends workers that are still there when the program exits: `multiprocessing` would send a
    signal that they leave to their parent, and wait for ever.
    """
    alive = [number for number, worker in enumerate(workers) if worker.is_alive()]
    flags.set()
    for number in alive:
        with contextlib.suppress(ValueError):  # the queue is closed: its worker was told already
            requests[number].put(None)
    until = time.monotonic() + _PATIENCE
    for number in alive:
        workers[number].join(max(0.0, until - time.monotonic()))
        if workers[number].is_alive():
            workers[number].kill()
            workers[number].join()


class _Birth:
    """A worker that has not begun, the `number`-th in its place, and how often it was seen to
    stand still.
    """

    def __init__(self, process: Any, number: int = 1) -> None:
        self._pid, self.number = process.pid, number
        self._seen: psutil.Process | None = None
        self._seconds, self._looks = -1.0, 0

    def stands_still(self) -> bool:
        """Looks once more. True if it has slept, without using any CPU time, at all of the last
        looks.
        """
        try:
            if self._seen is None:
                self._seen = psutil.Process(self._pid)
            with self._seen.oneshot():
                sleeps, times = (
                    self._seen.status() == psutil.STATUS_SLEEPING,
                    self._seen.cpu_times(),
                )
        except psutil.Error:  # it is dead: torch will tell
            return False
        seconds = times.user + times.system
        self._looks = self._looks + 1 if sleeps and seconds == self._seconds else 0
        self._seconds = seconds
        return self._looks >= LOOKS


class _NoLock:
    """What a queue needs of a lock, where nobody else is at its end."""

    def __init__(self, value: int = 1) -> None:
        self._value = value

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        return True

    def release(self) -> None:
        return

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        return


def _queue() -> Any:
    """A queue from one process to one other, whichever way that was started."""
    made: Any = Queue(ctx=SimpleNamespace(Lock=_NoLock, BoundedSemaphore=_NoLock))
    made.cancel_join_thread()
    return made


class _Merged:
    """The results of the workers that share a queue, and of those that have one of their own, in
    the place of the former's `get`.
    """

    def __init__(self, shared: Any) -> None:
        self._shared = weakref.ref(shared)
        self._own: list[Any] = []

    def add(self, results: Any) -> None:
        """Another worker has a queue of its own."""
        shared: Any = self._shared()
        self._own.append(results)
        shared.get = self.get

    def get(self, timeout: float) -> Any:
        """The next result of any worker; raises `queue.Empty` where none comes in time."""
        queues: dict[Any, Any] = {
            each._reader: each for each in (self._shared(), *self._own) if each is not None
        }
        for reader in connection.wait(list(queues), timeout):
            return Queue.get(queues[reader], timeout=timeout)
        raise queue.Empty
