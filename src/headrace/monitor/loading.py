"""Statistics of any loop over batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headrace.arguments import check_integer, check_seconds, checks_keywords
from headrace.monitor.stats import LoadingStats, Stats


class LoadingMonitor:
    """Collects the statistics of `Loader.get_stats()` for any loop: over a plain DataLoader, a
    generator, or your own reader.

    ```python
    monitor = LoadingMonitor()
    for images, targets in monitor.watch(loader, samples=lambda batch: len(batch[0])):
        ...
    print(monitor.get_stats())
    ```

    or, without a change to the loop header, with two calls:

    ```python
    monitor.start_iteration()
    for images, targets in loader:
        monitor.update_batch(len(images))
    ```

    Time counts from `start_iteration` to the last batch, so pauses between epochs don't count. Use
    it from one thread only.

    Args:
        enable_monitoring: sample memory and CPU usage of this process and its children, at most
            once a second.
        clock: a callable that returns monotonic seconds.
    """

    @checks_keywords
    def __init__(
        self, *, enable_monitoring: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._enabled = enable_monitoring
        self._clock = clock
        self._stats = LoadingStats()
        self._last: float | None = None
        self._knows_waits = True

    def start_iteration(self) -> None:
        """Marks the start of a loop: the first batch is requested now."""
        self._last = self._clock()

    def update_batch(self, samples: int = 1, *, wait_seconds: float | None = None) -> None:
        """Counts a batch. Without a previous `start_iteration`, time counts from the first batch.

        Args:
            samples: number of samples of the batch.
            wait_seconds: seconds that the loop was blocked for it. None: unknown; statistics have
                no waits from then on.

        Raises:
            ConfigError: an argument is invalid.
        """
        count = check_integer("update_batch: samples", samples, 0)
        if wait_seconds is None:
            self._knows_waits = False
        wait = check_seconds("update_batch: wait_seconds", wait_seconds or 0.0)
        last = self._last
        self._last = self._clock()
        elapsed = 0.0 if last is None else self._last - last
        self._stats.add_batch(count, wait, elapsed)
        if self._enabled:
            self._stats.look(None)

    def watch(
        self, batches: Iterable[Any], samples: Callable[[Any], int] | None = None
    ) -> Iterator[Any]:
        """Iterates over the batches of one epoch, and counts each with the time that the loop was
        blocked for it.

        Args:
            batches: a loader, or any iterable.
            samples: a callable from a batch to its number of samples. None: each batch counts as
                one.
        """
        self.start_iteration()
        iterator = iter(batches)
        while True:
            asked = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            wait = self._clock() - asked
            self.update_batch(1 if samples is None else samples(batch), wait_seconds=wait)
            yield batch

    def get_stats(self) -> Stats:
        """Returns those statistics of `Loader.get_stats()` that can be measured from outside. Times
        are in seconds. It is empty before the first batch.
        """
        stats = Stats()
        if self._stats.batches:
            for name, value in self._stats.outside().items():
                if self._knows_waits or "wait" not in name:
                    stats[name] = value
        return stats
