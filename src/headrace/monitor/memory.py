"""Measures how much memory is used, and how much is left.

`MemoryMonitor` measures by time: it may be asked with every batch, and looks at most once in a while.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.arguments import check_integer
from headrace.errors import ConfigError
from headrace.memory.budget import parse_size
from headrace.memory.limits import Limit, memory_limits, tightest
from headrace.memory.per_process import renew_after_fork
from headrace.monitor.stats import pss_of

GB = 1e9
"""Bytes of a GB, in all that ends with ``_gb``."""


class MemorySample(NamedTuple):
    """One measurement."""

    time: float
    """Of the monitor's clock, by default `time.monotonic`: seconds."""
    used_gb: float
    available_gb: float
    percent: float


class MemoryMonitor:
    """Watches the limit on memory that leaves the least: the machine's, a cgroup's (containers, SLURM) or the process's own.

    No thread runs: it measures when it is asked, and what lies between two measurements no peak knows of. A fork or a pickle begins
    anew in its process.

    Args:
        interval: seconds between two measurements, which take about a millisecond each.
        history_size: measurements that `history` keeps, the last ones.
        limits: lists the limits on memory as they are now.
        clock: seconds that only go forward.

    Attributes:
        monitoring: True between `start_monitoring` and `stop_monitoring`.

    Raises:
        ConfigError: `interval` is no number of at least 0, or `history_size` no integer of at least 1.
    """

    def __init__(
        self,
        interval: float = 1.0,
        *,
        history_size: int = 3600,
        limits: Callable[[], Sequence[Limit]] = memory_limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(interval, bool) or not isinstance(interval, (int, float)) or not interval >= 0:
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
        """Forgets peaks and history, and measures; `monitoring` is True from then on."""
        self._forget()
        self.monitoring = True
        self._measure()

    def stop_monitoring(self) -> None:
        """Peaks and history stay as they are: `update` measures no more, until `start_monitoring`."""
        self.monitoring, self._is_stopped = False, True

    def update(self) -> bool:
        """Measures anew if `interval` seconds have passed since the last time; cheap enough to call with every batch.

        Returns:
            Whether it measured.
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
        self._peak_used, self._peak_pss = max(self._peak_used, limit.used), max(self._peak_pss, self._pss)
        self._history.append(MemorySample(self._measured_at, limit.used / GB, limit.headroom / GB, _percent(limit)))
        return limit

    @property
    def history(self) -> list[MemorySample]:
        """The last measurements, the oldest first, since the start."""
        return list(self._history)

    def get_memory_stats(self) -> dict[str, Any]:
        """The last measurement, never older than `interval` unless monitoring was stopped. A GB is 1e9 bytes (`GB`).

        Returns:
            ``limit_gb`` and ``limit_source``: the tightest limit and its name. ``used_gb`` and ``available_gb``: under it, by all
            processes that it counts; ``percent``: used of the limit. ``process_pss_gb``: of this process alone, shared pages in
            proportion. ``peak_used_gb`` and ``peak_process_pss_gb``: the largest that were measured since the start, the first under
            whichever limit was the tightest at the time.
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

    def check_memory_constraint(self, nbytes: int | str) -> bool:
        """True if so many more bytes (such as ``500_000_000`` or ``"500MB"``) fit under the tightest limit, measured now.

        Raises:
            ConfigError: `nbytes` is no size.
        """
        return parse_size(nbytes, "nbytes") <= tightest(self._limits()).headroom

    def __repr__(self) -> str:
        size = f", history_size={self.history_size}" if self.history_size != 3600 else ""
        return f"MemoryMonitor(interval={self.interval!r}{size})"

    def __reduce__(self) -> Any:
        own: dict[str, Any] = {"history_size": self.history_size, "limits": self._limits, "clock": self._clock}
        return functools.partial(type(self), self.interval, **own), ()


def _percent(limit: Limit) -> float:
    return 100 * limit.used / limit.total if limit.total else 100.0
