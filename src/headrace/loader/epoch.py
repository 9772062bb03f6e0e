"""Iterates over the batches of one epoch."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, WorkerError
from headrace.loader.device import Conversion, Deliveries, transfer_to
from headrace.loader.plan import IterablePlan
from headrace.loader.state import Position
from headrace.loader.stateful import States
from headrace.loader.worker.pool import WorkerPool, death_of, failure_of, is_of_workers
from headrace.memory.ring import Delivered

if TYPE_CHECKING:
    from headrace.loader.loader import Loader

logger: logging.Logger = logging.getLogger("headrace.loader")


class EpochIterator:
    """One epoch, from a step on, with the batches of a pool from `start` on.

    It holds its loader and its pool; the loader refers to it weakly, so that an iterator that is
    dropped frees its pool. An iterator without a pool asks its loader for one with its first batch.
    """

    def __init__(self, loader: Loader, epoch: int, start: int, states: States) -> None:
        self.pool: WorkerPool | None = None
        self._loader = loader
        self._epoch = epoch
        self._step = start
        self._states = states
        self._exhausted = 0  # workers in a row that had nothing left
        self.received: int = 0
        self._samples = 0
        self._wait = 0.0
        self._began = self._clock = time.perf_counter()
        self._transfer = transfer_to(
            loader.config.device,
            Conversion(loader._images.normalization, loader.config.memory_format),
        )
        self._is_closed = False
        self._deliveries: Deliveries | None = None

    def start(self, pool: WorkerPool) -> None:
        """Takes the batches of a pool from now on."""
        self._is_stream = isinstance(pool.dispatch.plan, IterablePlan)
        begin = self._states.step if self._is_stream else self._step
        self._first = begin - self._states.idle  # of torch's tasks
        # batches of a foreign stream that the user has had already
        self._replayed = self._step if self._is_stream and not begin else 0
        self._deliveries = pool.start(self._epoch, begin, self._states)
        self.pool = pool
        pool.used_by(self)

    @property
    def is_done(self) -> bool:
        """True if the epoch has ended, or a worker's death ended it."""
        return self._is_closed or (self.pool is not None and self._deliveries is None)

    def close(self) -> None:
        """Breaks the epoch off, and ends the workers that it has been using."""
        self._deliveries = None
        self._is_closed = True
        if self.pool is not None:
            self.pool.close()
            self._loader._broke(self.pool)

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._step)

    def __next__(self) -> Any:
        self._transfer.await_device()
        asked = time.perf_counter()
        self._loader._stats.is_begun = True
        delivered = self._receive()
        try:
            return self._handed_over(delivered, asked)
        # torch's handler of SIGCHLD raises anywhere, where it can't be kept from it
        except RuntimeError as error:
            self._raise_death(error)
            raise

    def _handed_over(self, delivered: Delivered, asked: float) -> Any:
        """The batch for the user, counted; it was asked for at that time."""
        assert self.pool is not None
        self.pool.dispatch.plan.note(delivered.batch)
        batch = self._transfer.move(delivered)
        if self._deliveries is not None:
            self._transfer.prefetch(self._deliveries)
        now = time.perf_counter()
        report = delivered.report
        stats = self._loader._stats
        self._step = 1 + (self._step if self._is_stream else report["step"])
        self.received += 1
        self._samples += report["samples"]
        if isinstance(self.pool.dispatch.plan, IterablePlan):
            self.pool.dispatch.plan.check_count(self._samples)
        self._wait += now - asked
        self._loader._received(delivered, self._states, Position(self._epoch, self._step))
        stats.add_report(report["counts"])
        stats.add_batch(report["samples"], now - asked, now - self._clock)
        stats.transfer_time += self._transfer.seconds()
        last = self._clock
        self._clock = now
        if self._loader._hooks:
            self._loader._hooks.tell(
                report,
                wait=now - asked,
                step=asked - last,
                received=now,
                recent=stats.recent_batch_time,
            )
        return batch

    def _raise_death(self, error: RuntimeError) -> None:
        """Ends the epoch and raises a WorkerError, if torch says by that error that a worker is
        gone.
        """
        if self._deliveries is None or isinstance(error, HeadraceError) or not is_of_workers(error):
            return
        assert self.pool is not None
        deliveries, self._deliveries = self._deliveries, None
        self._loader._broke(self.pool)
        raise death_of(
            error, deliveries, self._epoch, self._first, self._step, self._loader.config.timeout
        ) from error

    def _receive(self) -> Delivered:
        """The next batch; raises what a worker raised, where it raised it."""
        if self.pool is None and not self._is_closed:
            self._loader._start(self, self._states)
        while self._deliveries is not None:
            try:
                delivered = self._transfer.receive(self._deliveries)
            except StopIteration:
                self._end()
                break
            except RuntimeError as error:
                self._raise_death(error)
                raise  # of the dataset, in this process
            failure = failure_of(delivered)
            if failure is not None:
                self._exhausted = 0
                self._loader._stats.add_report(delivered.report["counts"])
                try:
                    raise failure
                finally:
                    del failure  # the traceback holds this frame
            if delivered.report.get("idle"):
                continue
            self._states.note(delivered.report)
            if delivered.report.get("exhausted"):
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
        deliveries, self._deliveries = self._deliveries, None
        if deliveries is not None:
            deliveries.close()
        self._transfer.finish()
        self._loader._stats.transfer_time += self._transfer.seconds()
        self._loader._ended(Position(self._epoch, self._step))
        if self._loader.config.log_loading_stats and self.received:
            samples, seconds = self._samples, max(self._clock - self._began, 1e-9)
            logger.info(
                "epoch %d: %d batches, %d samples in %.2f s (%.1f samples/s), %.1f %% of it "
                "waiting",
                self._epoch,
                self.received,
                samples,
                seconds,
                samples / seconds,
                100 * self._wait / seconds,
            )
