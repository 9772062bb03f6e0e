"""Measures used and available memory.

`MemoryMonitor` limits how often it measures, so it can be called with every batch.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.arguments import check_integer, checks_keywords
from headrace.errors import ConfigError
from headrace.memory.budget import parse_size
from headrace.memory.limits import Limit, memory_limits, tightest
from headrace.memory.per_process import renew_after_fork
from headrace.monitor.stats import pss_of

GB = 1e9
"""Bytes of a GB, in all names that end in ``_gb``."""


class MemorySample(NamedTuple):
    """One measurement."""

    time: float
    """Seconds of the monitor's clock, by default `time.monotonic`."""
    used_gb: float
    available_gb: float
    percent: float


class MemoryMonitor:
    """Monitors the tightest memory limit: the machine's, a cgroup's (containers, SLURM) or the
    process's own.

    It uses no thread and measures only when called, so peaks between two measurements are missed. A
    forked or unpickled copy starts anew in its process.

    Args:
        interval: minimum seconds between two measurements, each of which takes about a millisecond.
        history_size: number of recent measurements in `history`.
        limits: a callable that returns the current memory limits.
        clock: a callable that returns monotonic seconds.

    Attributes:
        monitoring: True between `start_monitoring` and `stop_monitoring`.

    Raises:
        ConfigError: `interval` is not a number of at least 0, or `history_size` is not an integer
            of at least 1.
    """

    @checks_keywords
    def __init__(
        self,
        interval: float = 1.0,
        *,
        history_size: int = 3600,
        limits: Callable[[], Sequence[Limit]] = memory_limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (
            isinstance(interval, bool)
            or not isinstance(interval, (int, float))
            or not interval >= 0
        ):
            raise ConfigError(f"interval must be a number of seconds, at least 0, not {interval!r}")
        self.interval: float = float(interval)
        self.history_size: int = check_integer("history_size", history_size, 1)
        self._limits, self._clock = limits, clock
        self._forget()

    def _forget(self) -> None:
        self._measured_at: float | None = None
        self._limit: Limit | None = None
        self._history: deque[MemorySample] = deque(maxlen=self.history_size)
        self.monitoring: bool = False
        self._is_stopped = False
        self._pss = self._peak_used = self._peak_pss = 0
        renew_after_fork(self)

    after_fork = _forget

    def start_monitoring(self) -> None:
        """Clears peaks and history, and measures. `monitoring` is True from then on."""
        self._forget()
        self.monitoring = True
        self._measure()

    def stop_monitoring(self) -> None:
        """Stops measuring until the next `start_monitoring`. Peaks and history are kept."""
        self.monitoring, self._is_stopped = False, True

    def update(self) -> bool:
        """Measures if `interval` seconds have passed since the last measurement. Cheap enough to
        call with every batch.

        Returns:
            True if it measured.
        """
        if self._is_stopped:
            return False
        if self._measured_at is not None and self._clock() - self._measured_at < self.interval:
            return False
        self._measure()
        return True

    def _measure(self) -> Limit:
        self._measured_at = self._clock()
        self._limit = limit = tightest(self._limits())
        self._pss = pss_of(os.getpid())
        self._peak_used, self._peak_pss = (
            max(self._peak_used, limit.used),
            max(self._peak_pss, self._pss),
        )
        self._history.append(
            MemorySample(self._measured_at, limit.used / GB, limit.headroom / GB, _percent(limit))
        )
        return limit

    @property
    def history(self) -> list[MemorySample]:
        """The most recent measurements since the start, oldest first."""
        return list(self._history)

    def get_memory_stats(self) -> dict[str, Any]:
        """Returns the last measurement, which is never older than `interval` unless monitoring was
        stopped. A GB is 1e9 bytes (`GB`).

        Returns:
            ``limit_gb`` and ``limit_source``: the tightest limit and its name. ``used_gb`` and
                ``available_gb``: memory under this limit, over all processes that it covers;
                ``percent``: used share of the limit. ``process_pss_gb``: memory of this process
                alone, with shared pages in proportion. ``peak_used_gb`` and
                ``peak_process_pss_gb``: maxima since the start, the first under whichever limit was
                the tightest at the time.
        """
        self.update()
        limit = self._limit or self._measure()
        return {
            "used_gb": limit.used / GB,
            "available_gb": limit.headroom / GB,
            "percent": _percent(limit),
            "limit_gb": limit.total / GB,
            "limit_source": limit.name,
            "process_pss_gb": self._pss / GB,
            "peak_used_gb": self._peak_used / GB,
            "peak_process_pss_gb": self._peak_pss / GB,
        }

    @checks_keywords
    def check_memory_constraint(self, nbytes: int | str) -> bool:
        """True if `nbytes` more bytes (such as ``500_000_000`` or ``"500MB"``) fit under the
        tightest limit, measured now.

        Raises:
            ConfigError: `nbytes` is not a size.
        """
        return parse_size(nbytes, "nbytes") <= tightest(self._limits()).headroom

    def __repr__(self) -> str:
        size = f", history_size={self.history_size}" if self.history_size != 3600 else ""
        return f"MemoryMonitor(interval={self.interval!r}{size})"

    def __reduce__(self) -> Any:
        own: dict[str, Any] = {
            "history_size": self.history_size,
            "limits": self._limits,
            "clock": self._clock,
        }
        return functools.partial(type(self), self.interval, **own), ()


def _percent(limit: Limit) -> float:
    return 100 * limit.used / limit.total if limit.total else 100.0
