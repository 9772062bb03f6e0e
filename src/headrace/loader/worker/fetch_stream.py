"""Serves batch requests from a foreign IterableDataset."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator
from typing import Any

from headrace.datasets.core.batch import Collating, MadeBatch
from headrace.datasets.unnormalized import PixelBatches
from headrace.loader.stateful import asked, is_stateful, iterator_of
from headrace.loader.worker.fetch import Fetch, worker_number
from headrace.memory.ring import Ring, outside_slot
from headrace.order import BatchRequest
from headrace.order.seeding import OF_STEP, OF_STREAM, Draws, SampleSeeder, preserved_rng


class FetchIterable(Fetch):
    """Requests to samples, for a foreign `IterableDataset`: each request takes the next samples
    of this worker's iterator.
    """

    def __init__(
        self,
        dataset: Any,
        ring: Ring,
        collating: Collating,
        batch_size: int,
        drop_last: bool,
        pixels: PixelBatches | None = None,
    ) -> None:
        super().__init__(dataset, ring, collating, pixels=pixels)
        self._size, self._drop_last = batch_size, drop_last
        self._run = -1
        self._items: Iterator[Any] = iter(())
        self._draws: Draws | None = None
        # this epoch is through; what belongs to the next one's iterator
        self._given: dict[str, Any] | None = None
        self._may_be_at_end = False

    def _make(self, request: BatchRequest, report: dict[str, Any]) -> MadeBatch:
        assert self._draws is not None
        start = time.perf_counter()
        with outside_slot(), self._draws() if not self._is_stateful else self._drawing_of(request):
            items = self._next_items()
            # the state held the position: see NOTE [ states of datasets ]
            if not items and self._may_be_at_end:
                self._items = iter(self.dataset)
                items = self._next_items()
            self._may_be_at_end = False
        self._sample_seconds += time.perf_counter() - start
        report["is_through"] = len(items) < self._size
        if report["is_through"] and self._drop_last:
            items = []
        report["exhausted"] = not items
        return self._collated(items, request, None) if items else MadeBatch(None, 0)

    def _next_items(self) -> list[Any]:
        """One by one: `islice` would call `iter` again, where a dataset that is its own iterator
        may begin anew.
        """
        items = []
        for _ in range(self._size):
            try:
                items.append(next(self._items))
            except StopIteration:
                break
        return items

    def _begin(self, request: BatchRequest) -> None:
        """A new iterator, or one that goes on where the request says. Where that fails, there is
        none: nothing begins anew instead.
        """
        if self._draws is not None and self._run == request[0]:
            return
        self._run, self._items, self._seeder = request[0], iter(()), SampleSeeder(self.dataset)
        self._draws = Draws(self._seeder, request.seed, request.epoch, OF_STREAM, worker_number())
        parts = pickle.loads(request.given) if request.given is not None else self._given or {}
        self._given, self._may_be_at_end = None, False
        if parts.pop("ended", False):
            self._given = parts
        else:
            with self._draws():
                self._items = iterator_of(self.dataset, parts)
            self._may_be_at_end = "at_end" in parts
        self._is_stateful = is_stateful(self.dataset) or is_stateful(self._items)

    @contextlib.contextmanager
    def _drawing_of(self, request: BatchRequest) -> Iterator[None]:
        """Random numbers that follow from the step: what was drawn before it is not in the
        iterator's state.
        """
        assert self._seeder is not None
        with preserved_rng(self._seeder):
            self._seeder(request.seed, request.epoch, OF_STEP, request.step)
            yield

    def _report_state(self, report: dict[str, Any]) -> None:
        report["worker"] = worker_number()
        if self._is_stateful and not report.get("idle") and self._given is None:
            report["state"] = asked(
                self.dataset, self._items, at_end=report.get("is_through", False)
            )
