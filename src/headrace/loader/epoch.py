"""Epochs: which one is next, where it goes on, and its batches.

NOTE [ epochs and positions ]

* `set_epoch(e)` sets the epoch of the next iterator. Without it, each iterator uses the epoch after
  the last one.
* The position is the number of batches of the current epoch that the user received. `state_dict()`
  contains both. Between `set_epoch` and the next iterator it contains the new epoch and 0.
* After `load_state_dict` the next iterator continues at the position. `set_epoch` with the loaded
  epoch keeps the position (also at the end of the epoch: nothing is left then); with another epoch
  it drops the position. A state saved at the end of an epoch, without `set_epoch`, continues with
  the next epoch.
* If an iterator can't be made, the next attempt begins at the same position.
* An iterator that is abandoned leaves its position in `state_dict()`. The next iterator starts the
  next epoch.
* An epoch ends when the user has received `StopIteration`. A state saved after the last batch but
  before that continues with what is left, which is nothing: a loop over the rest of the epoch ends
  at once. torchdata behaves the same.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from headrace.arguments import check_integer
from headrace.errors import HeadraceError, WorkerError
from headrace.loader.fetch import failure_of
from headrace.loader.plan import StreamPlan
from headrace.loader.processes import WorkerIterator, WorkerPool, death_of, is_of_workers
from headrace.loader.state import States
from headrace.memory.ring import Delivered
from headrace.monitor.stats import times_of

if TYPE_CHECKING:
    from headrace.loader.device import Transfer
    from headrace.loader.loader import Loader

logger: logging.Logger = logging.getLogger("headrace.loader")


class Position(NamedTuple):
    """The position of one loader."""

    epoch: int
    batches: int = 0


P = TypeVar("P", bound=Any)  # a position, which has an epoch


class LoaderState(Generic[P]):
    """The position of a loader, or of several that make one epoch; see NOTE [ epochs and positions
    ].

    Args:
        begin: makes the position at the beginning of an epoch.

    Attributes:
        at: the position of the current iterator, or of the last one.
        next_epoch: the epoch of the next iterator.
        loaded: the position that the next iterator goes on at, if a state was loaded.
        end: where an epoch has ended.
    """

    def __init__(self, begin: Callable[[int], P]) -> None:
        self._begin = begin
        self.at: P = begin(0)
        self.next_epoch: int = 0
        self.loaded: P | None = None
        self.end: P | None = None
        self._is_named = False
        self._running: weakref.ref[Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iterator."""
        self.next_epoch = check_integer("epoch", epoch)
        self._is_named = True
        if self.loaded is not None and self.loaded.epoch != self.next_epoch:
            self.loaded = None

    def start(self) -> P:
        """Moves to the position of an iterator that begins now, which it returns: the one that was
        loaded, unless another epoch is next.
        """
        loaded = self.loaded
        if loaded is None or loaded.epoch != self.next_epoch:
            loaded = self._begin(self.next_epoch)
        self.at = loaded
        self.loaded = None
        self.next_epoch = self.at.epoch + 1
        self._is_named = False
        return self.at

    def load(self, position: P, has_ended: bool) -> None:
        """Resumes at a saved position; with the next epoch if that one has ended."""
        self.loaded = self.at = position
        self.end = position if has_ended else None
        self.next_epoch = position.epoch + has_ended
        self._is_named = False

    @property
    def is_at_next(self) -> bool:
        """True if the state is that of the next epoch, which was named, and no longer that of
        the last one.
        """
        if self.loaded is not None or not self._is_named:
            return False
        return self.next_epoch != self.at.epoch or self.running is None

    @property
    def position(self) -> P:
        """The position that is saved now."""
        if self.loaded is not None:
            return self.loaded
        return self._begin(self.next_epoch) if self.is_at_next else self.at

    @property
    def running(self) -> Any:
        """The running iterator, or None."""
        running = None if self._running is None else self._running()
        return None if running is None or running.is_done else running

    @running.setter
    def running(self, iterator: Any) -> None:
        self._running = None if iterator is None else weakref.ref(iterator)


class EpochIterator:
    """One epoch, from a position on, with the batches of a pool from `start` on.

    It holds its loader and its pool; the loader refers to it weakly, so that an iterator that is
    dropped frees its pool. An iterator without a pool asks its loader for one with its first batch.

    Attributes:
        at: the position, after the batches that the user has received.
        begin: the batch that it began with.
        states: of the user's dataset at that position, where it has any.
        received: batches that the user has received.
        nbytes: size of the last one.
    """

    def __init__(self, loader: Loader, at: Position, states: States | None) -> None:
        self.pool: WorkerPool | None = None
        self.at: Position = at
        self.begin: int = at.batches
        self.states = states
        self.received: int = 0
        self.nbytes: int = 0
        self._loader = loader
        self._stream = loader._plan if isinstance(loader._plan, StreamPlan) else None
        self._exhausted = 0  # workers in a row that had nothing left
        self._samples = 0
        self._wait = 0.0
        self._began = self._clock = time.perf_counter()
        self._transfer: Transfer | None = None
        config = loader.config
        if config.device is not None:
            from headrace.loader.device import transfer_to  # most loaders have none

            pixels = loader._pixels
            normalization = None if pixels is None else pixels.normalization
            self._transfer = transfer_to(config.device, normalization, config.memory_format)
        self._is_closed = False
        self._deliveries: Iterator[Delivered] | None = None

    def start(self, pool: WorkerPool) -> None:
        """Takes the batches of a pool from now on."""
        begin = self.begin
        self._replayed = 0  # batches of a foreign stream that the user has had already
        if self._stream is not None:
            assert self.states is not None
            begin = self.states.step
            if not begin:
                self._replayed = self.at.batches
        requests = self._loader._plan.requests(self.at.epoch, begin)
        if self.states is not None:
            requests = self.states.onto(requests)
        self._deliveries = pool.start(self.at.epoch, begin, requests)
        self.pool = pool
        pool.user = weakref.ref(self)

    @property
    def is_done(self) -> bool:
        """True if the epoch has ended, or a worker's death ended it."""
        return self._is_closed or (self.pool is not None and self._deliveries is None)

    @property
    def queued(self) -> int:
        """Batches that are being made, or wait for the user."""
        if self.pool is None:
            return 0
        return max(0, self.pool.dispatch.handed_out - self.received)

    def close(self) -> None:
        """Ends the epoch early, and its workers."""
        self._deliveries = None
        self._is_closed = True
        if self.pool is not None:
            self.pool.close()
            self._loader._broke(self.pool)

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        return max(0, len(self._loader) - self.at.batches)

    def __next__(self) -> Any:
        loader = self._loader
        stats = loader._stats
        transfer = self._transfer
        if transfer is not None:
            transfer.await_device()
        asked = time.perf_counter()
        stats.is_begun = True
        delivered = self._receive()
        report = delivered.report
        batch = delivered.batch
        if transfer is not None:
            batch = transfer.move(delivered)
            if isinstance(self._deliveries, WorkerIterator):
                transfer.prefetch(self._deliveries)
            stats.transfer_time += transfer.seconds()
        now = time.perf_counter()
        step = report["step"] if self._stream is None else self.at.batches
        self.at = Position(self.at.epoch, step + 1)
        self.received += 1
        self.nbytes = delivered.nbytes
        self._samples += report["samples"]
        self._wait += now - asked
        loader._received(self, report["pid"])
        stats.add_report(report["counts"])
        stats.add_batch(report["samples"], now - asked, now - self._clock)
        last = self._clock
        self._clock = now
        if loader._hooks:
            times = times_of(report, now - asked, asked - last, now)
            for function in list(loader._hooks.values()):
                function(times)
        return batch

    def _receive(self) -> Delivered:
        """The next batch; raises what a worker raised, where it raised it."""
        if self.pool is None and not self._is_closed:
            self._loader._start(self)
        while self._deliveries is not None:
            try:
                if self._transfer is None:
                    delivered = next(self._deliveries)
                else:
                    delivered = self._transfer.receive(self._deliveries)
            except StopIteration:
                self._end()
                break
            except RuntimeError as error:
                if isinstance(error, HeadraceError) or not is_of_workers(error):
                    raise  # of the dataset, in this process
                assert self.pool is not None
                workers = getattr(self._deliveries, "workers", ())
                self._deliveries = None
                self._loader._broke(self.pool)
                timeout = self._loader.config.timeout
                raise death_of(error, workers, *self.at, timeout) from error
            report = delivered.report
            if "failure" in report:
                self._exhausted = 0
                self._loader._stats.add_report(report["counts"])
                raise failure_of(delivered)
            if "idle" in report:
                continue
            if self.states is not None and "worker" in report:
                self.states.note(report)
            if report.get("exhausted"):
                self._exhausted += 1
                if self._exhausted >= max(1, self._loader.config.num_workers or 0):
                    self._end()
                continue
            self._exhausted = 0
            if not self._replayed:
                return delivered
            self._replayed -= 1
        if self._is_closed:
            raise WorkerError(
                "the loader was closed during this epoch: start another one with iter(loader)"
            )
        raise StopIteration

    def _end(self) -> None:
        loader = self._loader
        if isinstance(self._deliveries, WorkerIterator):
            self._deliveries.close()
        self._deliveries = None
        if self._transfer is not None:
            self._transfer.finish()
            loader._stats.transfer_time += self._transfer.seconds()
        loader._state.end = self.at
        if loader._agreement is not None and self.received < 2:
            loader._agreement.compare(self.at.epoch, self.begin)
        if loader.config.log_loading_stats and self.received:
            seconds = max(self._clock - self._began, 1e-9)
            logger.info(
                "epoch %d: %d batches, %d samples in %.2f s (%.1f samples/s), %.1f %% of it "
                "waiting",
                self.at.epoch,
                self.received,
                self._samples,
                seconds,
                self._samples / seconds,
                100 * self._wait / seconds,
            )
